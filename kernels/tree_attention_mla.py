r"""Attention of draft trees over a paged latent cache (multi-head latent attention), in one launch.

A cached position holds a latent c_j (512 numbers in DeepSeek's models) and a rotated key r_j (64),
shared by all heads. Queries come absorbed: [q_i || q^r_i] per head, q_i = W_UK^T of the head's own.

    a_ij = scale (q_i . c_j + q^r_i . r_j),  out_i = sum_j softmax(a_i)_j c_j

over the prefix and the tree rows whose bit is set in row i's mask words. The output is in latent
space; the head's W_UV comes behind. DeepSeek-V2, arXiv 2405.04434, section 2.1. The definition in
torch is ``tree_attention_mla_ref``.

A program owns one request and a block of (row, head) pairs. A latent is read once a block, as key
and as value. As in ``tree_attention`` the tree rows come first, lie in the cache behind the prefix
or in a tensor of their own, and ``with_prefix=False`` with ``lse`` gives the tree's part of a
cascade.
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
    see_rows,
    step_softmax,
    store_lse,
)
from speculators_ext.kernels.checks import require
from speculators_ext.kernels.packed_attention_ref import DequantScales
from speculators_ext.kernels.tree_attention import DOT_DTYPES
from speculators_ext.kernels.tree_attention_checks import (
    check_latents,
    check_outputs,
    check_trees,
)

if TYPE_CHECKING:
    from speculators_ext.kernels.tree_attention_mla_ref import LocalLatents
    from speculators_ext.kernels.tree_attention_ref import TreeBatch

__all__ = ["BLOCK_M", "BLOCK_N", "tree_attention_mla"]

BLOCK_M, BLOCK_N = 16, 16


@triton.jit
def _attend_latents(  # type: ignore[no-untyped-def]
    query,  # [BLOCK_M, LATENT]
    query_rope,  # [BLOCK_M, ROPE]
    latents,  # [BLOCK_N, LATENT]
    ropes,  # [BLOCK_N, ROPE]
    seen,  # broadcasts to [BLOCK_M, BLOCK_N]
    scale,
    largest,
    total,
    attended,
    DOT_DTYPE: tl.constexpr,
) -> tuple:
    """(largest, total, attended) with a block of positions more."""
    scores = tl.dot(query_rope, tl.trans(ropes), input_precision="ieee")
    scores = tl.dot(query, tl.trans(latents), acc=scores, input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    weights, shrink, largest, total = step_softmax(scores, largest, total)
    return largest, total, add_values(attended, shrink, weights, latents, DOT_DTYPE)


@triton.jit
def _tree_attention_mla_kernel(  # type: ignore[no-untyped-def]
    out_ptr,  # [N, num_heads, LATENT]
    out_row_stride,
    out_head_stride,
    lse_ptr,  # [N, num_heads] float32, or None
    lse_row_stride,
    query_ptr,  # [N, num_heads, LATENT + ROPE]
    query_row_stride,
    query_head_stride,
    rows_ptr,  # [L, LATENT + ROPE], or None: tree rows are in the cache
    rows_stride,
    cache_ptr,  # [num_blocks, block_size, LATENT + ROPE]
    block_stride,
    slot_stride,
    block_table_ptr,  # [R, max_blocks] int32
    block_table_stride,
    prefix_lens_ptr,  # [R] int32 or int64
    cu_nodes_ptr,  # [R + 1] int32
    cu_rows_ptr,  # [R + 1] int32, of the tree rows; cu_nodes where they are the queries'
    mask_ptr,  # [N, W] int32
    mask_row_stride,
    q_scale_ptr,  # [1] float32, or None: the query is not quantized
    cache_scale_ptr,  # [1] float32, or None: the cache is not quantized
    scale,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # positions a cache block holds
    WITH_PREFIX: tl.constexpr,
    DOT_DTYPE: tl.constexpr,  # dtype of the rows
    BLOCK_M: tl.constexpr,  # (row, head) pairs a program
    BLOCK_N: tl.constexpr,  # positions a step; divides 32
) -> None:
    request = tl.program_id(0).to(tl.int64)
    first, count = load_span(cu_nodes_ptr, request)
    if tl.program_id(1) * BLOCK_M >= count * NUM_HEADS:
        return
    pair = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    own, is_live = pair // NUM_HEADS, pair < count * NUM_HEADS
    row, head, live = (first + own)[:, None], (pair % NUM_HEADS)[:, None], is_live[:, None]
    dim, rope_dim = tl.arange(0, LATENT)[None, :], LATENT + tl.arange(0, ROPE)[None, :]
    query = load_rows(
        query_ptr, row, query_row_stride, head, query_head_stride, dim, live
    ).to(DOT_DTYPE)  # fmt: skip
    query_rope = load_rows(
        query_ptr, row, query_row_stride, head, query_head_stride, rope_dim, live
    ).to(DOT_DTYPE)  # fmt: skip
    scale, cache_scale = scale * load_scale(q_scale_ptr), load_scale(cache_scale_ptr)
    first_row, num_rows = load_span(cu_rows_ptr, request)
    prefix_len = tl.load(prefix_lens_ptr + request).to(tl.int32)
    mask_ptr += first * mask_row_stride
    block_table_ptr += request * block_table_stride

    # Finite, so that rows that have seen nothing yet stay numbers: exp(-inf - largest) is 0.
    largest, total = tl.full([BLOCK_M], -1e30, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, LATENT], tl.float32)
    row_scale = scale * cache_scale if rows_ptr is None else scale
    for start in tl.range(0, num_rows, BLOCK_N, num_stages=1):
        local = start + tl.arange(0, BLOCK_N)
        ropes = load_tree_rows(
            rows_ptr, rows_stride, LATENT, first_row, local, num_rows, cache_ptr + LATENT,
            block_stride, slot_stride, block_table_ptr, prefix_len,
            ROPE, BLOCK_SIZE, DOT_DTYPE, ROPE,
        )  # fmt: skip
        latents = load_tree_rows(
            rows_ptr, rows_stride, 0, first_row, local, num_rows, cache_ptr,
            block_stride, slot_stride, block_table_ptr, prefix_len,
            LATENT, BLOCK_SIZE, DOT_DTYPE, LATENT,
        )  # fmt: skip
        seen = see_rows(mask_ptr, mask_row_stride, own, is_live, start, num_rows, BLOCK_N)
        largest, total, attended = _attend_latents(
            query, query_rope, latents, ropes, seen, row_scale, largest, total, attended, DOT_DTYPE
        )
    if rows_ptr is not None:
        attended = attended / cache_scale
    for start in range(0, prefix_len if WITH_PREFIX else 0, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        ropes = load_positions(
            cache_ptr + LATENT, block_stride, slot_stride, block_table_ptr, position, prefix_len,
            ROPE, BLOCK_SIZE, DOT_DTYPE, ROPE,
        )  # fmt: skip
        latents = load_positions(
            cache_ptr, block_stride, slot_stride, block_table_ptr, position, prefix_len,
            LATENT, BLOCK_SIZE, DOT_DTYPE, LATENT,
        )  # fmt: skip
        seen = (position < prefix_len)[None, :]
        largest, total, attended = _attend_latents(
            query, query_rope, latents, ropes, seen, scale * cache_scale, largest, total, attended,
            DOT_DTYPE,
        )  # fmt: skip

    attended = attended * (cache_scale / tl.where(total > 0, total, 1.0))[:, None]
    out_ptr += row * out_row_stride + head * out_head_stride
    tl.store(out_ptr + dim, attended.to(out_ptr.dtype.element_ty), mask=live)
    store_lse(lse_ptr, row * lse_row_stride + head, largest, total, is_live)


def tree_attention_mla(
    query: torch.Tensor,  # [N, num_heads, latent + rope]
    cache: torch.Tensor,  # [num_blocks, block_size, latent + rope]
    trees: TreeBatch,
    *,
    scale: float,
    latent: int = 512,
    local: LocalLatents | None = None,
    with_prefix: bool = True,
    dequant: DequantScales = DequantScales(),  # noqa: B008 (immutable)
    out: torch.Tensor | None = None,  # [N, num_heads, latent]
    lse: torch.Tensor | None = None,  # [N, num_heads]
) -> torch.Tensor:
    """Attend each tree row to its request's cached latents and the tree rows it sees.

    Nothing is read back, so the host does not wait. Every tensor is on one device (a GPU, or the
    CPU under Triton's interpreter) and contiguous in its last dimension; other strides are free.

    Args:
        query: [N, num_heads, latent + rope], absorbed, a request's rows together; the rows' dtype
            (float32, float16 or bfloat16) or fp8.
        cache: [num_blocks, block_size, latent + rope], the rows' dtype or fp8 of one scale.
        trees: whose rows these are and what they see; block tables are not checked.
        scale: multiplies the scores.
        latent: numbers of the latent, a power of two from 16 on as are those of the rotated key.
        local: tree rows outside the cache; by default they are in it, row j of a request at
            position ``prefix_lens[r] + j``, and number as its query rows.
        with_prefix: whether the prefix is attended to as well as the tree.
        dequant: what an fp8 query and an fp8 cache (``key``) are multiplied by.
        out: [N, num_heads, latent] to write to; by default a new tensor of the rows' dtype.
            A row that sees nothing gives 0.
        lse: [N, num_heads] float32 to write to; -inf for a row that sees nothing.

    Returns:
        [N, num_heads, latent]: ``out``.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    rows = check_latents(query, cache, latent, trees, local)
    if out is None:
        out = torch.empty((*query.shape[:2], latent), dtype=rows, device=query.device)
    check_outputs(query, out, lse, latent)
    require(dequant.value is None, "value scale", "none: values are keys", dequant.value)
    check_trees(query, trees, dequant)
    if query.shape[0] > 0:
        _launch(out, lse, query, cache, trees, local, dequant, DOT_DTYPES[rows], scale, with_prefix)
    return out


def _launch(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    query: torch.Tensor,
    cache: torch.Tensor,
    trees: TreeBatch,
    local: LocalLatents | None,
    dequant: DequantScales,
    dot_dtype: tl.dtype,
    scale: float,
    with_prefix: bool,
) -> None:
    (num_heads, width), latent = query.shape[1:], out.shape[2]
    rows, cu_rows = (None, trees.cu_nodes) if local is None else local
    tiles = triton.cdiv(trees.max_nodes * num_heads, BLOCK_M)
    _tree_attention_mla_kernel[(trees.prefix_lens.shape[0], tiles)](
        out, *out.stride()[:2],
        lse, 0 if lse is None else lse.stride(0),
        query, *query.stride()[:2],
        rows, 0 if rows is None else rows.stride(0),
        cache, *cache.stride()[:2],
        trees.block_table, trees.block_table.stride(0), trees.prefix_lens, trees.cu_nodes, cu_rows,
        trees.mask_words, trees.mask_words.stride(0),
        dequant.query, dequant.key, scale,
        NUM_HEADS=num_heads, LATENT=latent, ROPE=width - latent, BLOCK_SIZE=cache.shape[1],
        WITH_PREFIX=with_prefix, DOT_DTYPE=dot_dtype, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        num_warps=4, num_stages=2,
    )  # fmt: skip
