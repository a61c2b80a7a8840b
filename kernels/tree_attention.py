r"""Attention of draft trees over a paged KV cache, in one launch for all requests and heads.

Query row i of a request attends to its prefix, positions j < p of the cache, and to the tree rows
whose bit is set in its mask words, its ancestors and itself:

    out_i = sum_j exp(a_ij - lse_i) V_j,  lse_i = log sum_j exp(a_ij),  a_ij = cap(scale q_i . K_j)

with cap(a) = c tanh(a / c) where there is a soft cap c. Row i stands at position p + depth_i; a
window of w positions hides what stands at p + depth_i - w or before. ``tree_attention_ref`` is the
definition in torch.

A program owns one request, one KV head and a block of (row, query head of the group) pairs, so a
key is read once for all query heads and rows that want it. The tree rows come first: each row sees
itself, so the softmax, online and in float32, has a finite maximum before the prefix begins. Tree
rows lie in the cache behind the prefix or in tensors of their own (``LocalRows``).

A long prefix of few requests is shared by ``num_splits`` programs, whose parts are merged.
Cascade: ``with_prefix=False`` gives the tree's part with its lse. ``merge_attention`` joins it with
a prefix part from any kernel that returns one.

Never materialised: scores, masks, a gathered prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from speculators_ext.kernels.attention_steps import (
    add_values,
    load_positions,
    load_rows,
    load_scale,
    load_span,
    load_tree_rows,
    score_block,
    see_rows,
    store_lse,
)
from speculators_ext.kernels.checks import require
from speculators_ext.kernels.merge_attention import merge_parts
from speculators_ext.kernels.packed_attention_ref import DequantScales
from speculators_ext.kernels.tree_attention_checks import (
    check_cache,
    check_local,
    check_rows,
    check_trees,
)

if TYPE_CHECKING:
    from speculators_ext.kernels.tree_attention_ref import LocalRows, TreeBatch

__all__ = ["choose_splits", "tree_attention"]

DOT_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def _part_of(begin, stop, split, num_splits, BLOCK_N: tl.constexpr) -> tuple:  # type: ignore[no-untyped-def]
    """(begin, stop) of one of the parts of a span, whole blocks but for the last."""
    size = tl.cdiv(tl.cdiv(stop - begin, num_splits), BLOCK_N) * BLOCK_N
    return begin + split * size, tl.minimum(begin + (split + 1) * size, stop)


@triton.jit
def _tree_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,  # [num_splits, N, num_heads, head_size]
    out_split_stride,
    out_row_stride,
    out_head_stride,
    lse_ptr,  # [num_splits, N, num_heads] float32, or None
    lse_split_stride,
    lse_row_stride,
    query_ptr,  # [N, num_heads, head_size]
    query_row_stride,
    query_head_stride,
    key_ptr,  # [L, num_kv_heads, head_size], or None: tree rows are in the cache
    key_row_stride,
    key_head_stride,
    value_ptr,  # likewise
    value_row_stride,
    value_head_stride,
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    block_table_ptr,  # [R, max_blocks] int32
    block_table_stride,
    prefix_lens_ptr,  # [R] int32 or int64
    cu_nodes_ptr,  # [R + 1] int32
    cu_rows_ptr,  # [R + 1] int32, of the tree rows; cu_nodes where they are the queries'
    mask_ptr,  # [N, W] int32
    mask_row_stride,
    depths_ptr,  # [N] int32, or None: no window
    row_depths_ptr,  # [L] int32, or None
    q_scale_ptr,  # [1] float32, or None: the query is not quantized
    k_scale_ptr,  # [1] float32, or None: the cache is not quantized
    v_scale_ptr,  # [1] float32, or None
    scale,
    num_splits,  # parts of the prefix, a program each
    GROUP: tl.constexpr,  # query heads a KV head
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # positions a cache block holds
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # 0.0: none
    WITH_PREFIX: tl.constexpr,
    DOT_DTYPE: tl.constexpr,  # dtype of the rows
    BLOCK_M: tl.constexpr,  # (row, query head) pairs a program
    BLOCK_N: tl.constexpr,  # prefix positions a step
    BLOCK_L: tl.constexpr,  # tree rows a step
    BLOCK_D: tl.constexpr,  # head_size, padded to a power of two
) -> None:
    request, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, count = load_span(cu_nodes_ptr, request)
    tile, split = tl.program_id(2) // num_splits, tl.program_id(2) % num_splits
    if tile * BLOCK_M >= count * GROUP:
        return
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    own, is_live, dim = pair // GROUP, pair < count * GROUP, tl.arange(0, BLOCK_D)[None, :]
    row, head = (first + own)[:, None], (kv_head * GROUP + pair % GROUP)[:, None]
    live = is_live[:, None] & (dim < HEAD_SIZE)
    query = load_rows(
        query_ptr, row, query_row_stride, head, query_head_stride, dim, live
    ).to(DOT_DTYPE)  # fmt: skip
    scale = scale * load_scale(q_scale_ptr)
    cache_scale, value_scale = scale * load_scale(k_scale_ptr), load_scale(v_scale_ptr)
    row_scale = cache_scale if key_ptr is None else scale

    first_row, num_rows = load_span(cu_rows_ptr, request)
    prefix_len = tl.load(prefix_lens_ptr + request).to(tl.int32)
    mask_ptr += first * mask_row_stride
    block_table_ptr += request * block_table_stride
    key_cache_ptr += kv_head * key_cache_head_stride
    value_cache_ptr += kv_head * value_cache_head_stride
    if WINDOW > 0:
        hidden = tl.load(depths_ptr + first + own, mask=is_live, other=0) - WINDOW

    # Finite, so that rows that have seen nothing yet stay numbers: exp(-inf - largest) is 0.
    largest, total = tl.full([BLOCK_M], -1e30, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key_at, value_at = kv_head * key_head_stride, kv_head * value_head_stride
    for start in tl.range(0, tl.where(split == 0, num_rows, 0), BLOCK_L, num_stages=1):
        local = start + tl.arange(0, BLOCK_L)
        seen = see_rows(mask_ptr, mask_row_stride, own, is_live, start, num_rows, BLOCK_L)
        if WINDOW > 0:
            stands = tl.load(row_depths_ptr + first_row + local, mask=local < num_rows, other=0)
            seen = seen & (stands[None, :] > hidden[:, None])
        keys = load_tree_rows(
            key_ptr, key_row_stride, key_at, first_row, local, num_rows, key_cache_ptr,
            key_block_stride, key_slot_stride, block_table_ptr, prefix_len,
            HEAD_SIZE, BLOCK_SIZE, DOT_DTYPE, BLOCK_D,
        )  # fmt: skip
        weights, shrink, largest, total = score_block(
            query, keys, seen, row_scale, largest, total, SOFT_CAP
        )
        values = load_tree_rows(
            value_ptr, value_row_stride, value_at, first_row, local, num_rows, value_cache_ptr,
            value_block_stride, value_slot_stride, block_table_ptr, prefix_len,
            HEAD_SIZE, BLOCK_SIZE, DOT_DTYPE, BLOCK_D,
        )  # fmt: skip
        attended = add_values(attended, shrink, weights, values, DOT_DTYPE)

    if key_ptr is not None:
        attended = attended / value_scale
    begin = tl.maximum(prefix_len + 1 - WINDOW, 0) if WINDOW > 0 else 0
    begin, stop = _part_of(begin, prefix_len if WITH_PREFIX else 0, split, num_splits, BLOCK_N)
    for start in range(begin, stop, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        seen = (position < stop)[None, :]
        if WINDOW > 0:
            seen = seen & ((position - prefix_len)[None, :] > hidden[:, None])
        keys = load_positions(
            key_cache_ptr, key_block_stride, key_slot_stride, block_table_ptr, position,
            stop, HEAD_SIZE, BLOCK_SIZE, DOT_DTYPE, BLOCK_D,
        )  # fmt: skip
        weights, shrink, largest, total = score_block(
            query, keys, seen, cache_scale, largest, total, SOFT_CAP
        )
        values = load_positions(
            value_cache_ptr, value_block_stride, value_slot_stride, block_table_ptr, position,
            stop, HEAD_SIZE, BLOCK_SIZE, DOT_DTYPE, BLOCK_D,
        )  # fmt: skip
        attended = add_values(attended, shrink, weights, values, DOT_DTYPE)

    attended = attended * (value_scale / tl.where(total > 0, total, 1.0))[:, None]
    out_ptr += split.to(tl.int64) * out_split_stride + row * out_row_stride + head * out_head_stride
    tl.store(out_ptr + dim, attended.to(out_ptr.dtype.element_ty), mask=live)
    lse_at = row * lse_row_stride + head + split.to(tl.int64) * lse_split_stride
    store_lse(lse_ptr, lse_at, largest, total, is_live)


def tree_attention(
    query: torch.Tensor,  # [N, num_heads, head_size]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    trees: TreeBatch,
    *,
    scale: float,
    soft_cap: float = 0.0,
    sliding_window: int = 0,
    local: LocalRows | None = None,
    with_prefix: bool = True,
    num_splits: int = 1,
    dequant: DequantScales = DequantScales(),  # noqa: B008 (immutable)
    out: torch.Tensor | None = None,  # [N, num_heads, head_size]
    lse: torch.Tensor | None = None,  # [N, num_heads]
) -> torch.Tensor:
    """Attend each tree row to its request's prefix and the tree rows it sees; see the module.

    Nothing is read back, so the host does not wait. Every tensor is on one device (a GPU, or the
    CPU under Triton's interpreter) and contiguous in its last dimension; other strides are free.

    Args:
        query: [N, num_heads, head_size], a request's rows together; the rows' dtype (float32,
            float16 or bfloat16) or fp8. ``head_size`` is 32 to 256.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], the rows' dtype or fp8.
        value_cache: likewise.
        trees: whose rows these are and what they see; block tables are not checked.
        scale: multiplies the scores.
        soft_cap: scores become ``cap * tanh(score / cap)``; 0 leaves them.
        sliding_window: positions a row sees, its own included; 0 for all.
        local: tree rows outside the cache; by default they are in it, row j of a request at
            position ``prefix_lens[r] + j``, and number as its query rows.
        with_prefix: whether the prefix is attended to as well as the tree.
        num_splits: programs that share a prefix; ``choose_splits`` gives one that fills a GPU.
        dequant: what fp8 queries and caches are multiplied by.
        out: [N, num_heads, head_size] to write to; by default a new tensor of the rows' dtype.
            A row that sees nothing gives 0.
        lse: [N, num_heads] float32 to write to; -inf for a row that sees nothing.

    Returns:
        [N, num_heads, head_size]: ``out``.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    rows = check_rows(query, key_cache, local)
    if out is None:
        out = torch.empty(query.shape, dtype=rows, device=query.device)
    check_cache(query, key_cache, value_cache, out, lse)
    check_trees(query, trees, dequant)
    check_local(query, trees, sliding_window, local)
    require(num_splits > 0, "num_splits", "at least 1", num_splits)
    # Parts are merged in float32: each is as exact as the whole.
    parts, part_lses = out[None], None if lse is None else lse[None]
    if num_splits > 1:
        shape = (num_splits, *query.shape)
        parts = torch.empty(shape, dtype=torch.float32, device=query.device)
        part_lses = torch.empty(shape[:3], dtype=torch.float32, device=query.device)
    if query.shape[0] > 0:
        _launch(
            parts, part_lses, query, key_cache, value_cache, trees, local, dequant, rows,
            scale, soft_cap, sliding_window, with_prefix,
        )  # fmt: skip
    if part_lses is not None and num_splits > 1:
        merge_parts(parts, part_lses, out, lse)
    return out


def _launch(
    parts: torch.Tensor,  # [num_splits, N, num_heads, head_size]
    part_lses: torch.Tensor | None,  # [num_splits, N, num_heads]
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    trees: TreeBatch,
    local: LocalRows | None,
    dequant: DequantScales,
    rows: torch.dtype,
    scale: float,
    soft_cap: float,
    sliding_window: int,
    with_prefix: bool,
) -> None:
    (num_heads, head_size), num_kv_heads = query.shape[1:], key_cache.shape[2]
    num_splits, group = parts.shape[0], num_heads // num_kv_heads
    block_m, block_n = choose_tiles(
        trees.max_nodes * group, head_size, rows, hidden_and_capped=sliding_window > 0 < soft_cap
    )
    key, value = (None, None) if local is None else (local.key, local.value)
    tiles = triton.cdiv(trees.max_nodes * group, block_m)
    _tree_attention_kernel[(trees.prefix_lens.shape[0], num_kv_heads, tiles * num_splits)](
        parts, *parts.stride()[:3],
        part_lses, *((0, 0) if part_lses is None else part_lses.stride()[:2]),
        query, *query.stride()[:2],
        key, *((0, 0) if key is None else key.stride()[:2]),
        value, *((0, 0) if value is None else value.stride()[:2]),
        key_cache, *key_cache.stride()[:3],
        value_cache, *value_cache.stride()[:3],
        trees.block_table, trees.block_table.stride(0), trees.prefix_lens,
        trees.cu_nodes, trees.cu_nodes if local is None else local.cu_rows,
        trees.mask_words, trees.mask_words.stride(0),
        trees.depths, trees.depths if local is None else local.depths,
        *dequant, scale, num_splits,
        GROUP=group, HEAD_SIZE=head_size, BLOCK_SIZE=key_cache.shape[1],
        WINDOW=sliding_window, SOFT_CAP=soft_cap, WITH_PREFIX=with_prefix,
        DOT_DTYPE=DOT_DTYPES[rows], BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_L=min(block_n, 32),
        BLOCK_D=triton.next_power_of_2(head_size), num_warps=4, num_stages=2,
    )  # fmt: skip


def choose_splits(num_reqs: int, num_kv_heads: int, max_prefix_len: int, num_cores: int) -> int:
    """Programs that share a prefix, so that each core of a GPU has two, of 512 positions or more.

    Args:
        num_reqs: requests of the batch.
        num_kv_heads: of the cache.
        max_prefix_len: a bound known to the host.
        num_cores: multiprocessors of the GPU.
    """
    wanted = triton.cdiv(2 * num_cores, max(num_reqs * num_kv_heads, 1))
    return max(1, min(wanted, max_prefix_len // 512, 32))


def choose_tiles(
    num_pairs: int, head_size: int, dtype: torch.dtype, *, hidden_and_capped: bool = False
) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N): the largest that stay in registers on sm_80, sm_90, sm_100 and gfx942.

    float32 products are exact ("ieee"), which costs registers where others use tensor cores.
    """
    if dtype == torch.float32:
        return (16 if num_pairs <= 16 or head_size > 64 else 32), 16
    block_m, is_padded = 16 if num_pairs <= 16 else 32, head_size & (head_size - 1) > 0
    if hidden_and_capped and is_padded:  # a window, a cap and masked loads: a word spills of 32
        return block_m, 16
    return block_m, (64 if head_size <= 64 else 32)
