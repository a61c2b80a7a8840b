r"""Attention of packed rows over a paged KV cache, in one launch for all requests and heads.

The W rows of request r are alternatives for one position p_r = prefix_lens[r]. Row w attends to
the request's prefix, positions s_r <= j < p_r of the cache, and to itself, never to a sibling:

    s_r   = max(0, p_r + 1 - window), 0 without a window
    a_wj  = cap(scale * q_w . K_j)  for the prefix,   a_ww = cap(scale * q_w . k_w)  for itself
    out_w = (sum_j exp(a_wj) V_j + exp(a_ww) v_w) / (sum_j exp(a_wj) + exp(a_ww))

with cap(a) = c tanh(a / c) where there is a soft cap c. This is the layer search of CLaSp (arXiv
2505.24196, section 3.4, "sequence parallelism": a diagonal mask among the states of a layer).

A program owns one request, one KV head and a block of (row, query head of the group) pairs, so a
key is read once for all query heads and rows that want it. The softmax is online, in float32, and
*starts from the row itself* (maximum a_ww, sum 1, value v_w), so that an empty prefix needs no
special case and no infinity is ever subtracted from another. Products are those of the rows' own
dtype (exact in a float32 accumulator); the weights are rounded to it before they meet V.

Never materialised: scores, masks, a gathered prefix. Nothing is written but the output. The
definition in torch is ``packed_attention_ref.packed_attention_paged_ref``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speculators_ext.kernels.attention_steps import (
    cap_scores,
    load_positions,
    load_rows,
    step_softmax,
)
from speculators_ext.kernels.checks import check_placement, require
from speculators_ext.kernels.packed_attention_ref import DequantScales

__all__ = ["packed_attention"]

_ROW_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
_MIN_HEAD_SIZE, _MAX_HEAD_SIZE = 32, 256


@triton.jit
def _packed_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,  # [R * W, num_heads, head_size]
    out_row_stride,
    out_head_stride,
    query_ptr,  # [R * W, num_heads, head_size]
    query_row_stride,
    query_head_stride,
    key_ptr,  # [R * W, num_kv_heads, head_size]
    key_row_stride,
    key_head_stride,
    value_ptr,  # [R * W, num_kv_heads, head_size]
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
    q_scale_ptr,  # [1] float32, or None: the query is not quantized
    k_scale_ptr,  # [1] float32, or None: the cache is not quantized
    v_scale_ptr,  # [1] float32, or None
    scale,
    width,  # W, rows a request
    GROUP: tl.constexpr,  # query heads a KV head
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # positions a cache block holds
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # 0.0: none
    DOT_DTYPE: tl.constexpr,  # dtype of the rows
    BLOCK_M: tl.constexpr,  # (row, query head) pairs a program
    BLOCK_N: tl.constexpr,  # prefix positions a step
    BLOCK_D: tl.constexpr,  # head_size, padded to a power of two
) -> None:
    request, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    pair = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (request * width + pair // GROUP)[:, None]
    head = (kv_head * GROUP + pair % GROUP)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    live = (pair < width * GROUP)[:, None] & (dim < HEAD_SIZE)
    own_scale = scale if q_scale_ptr is None else scale * tl.load(q_scale_ptr)
    prefix_scale = own_scale if k_scale_ptr is None else own_scale * tl.load(k_scale_ptr)
    value_scale = 1.0 if v_scale_ptr is None else tl.load(v_scale_ptr)
    query = load_rows(query_ptr, row, query_row_stride, head, query_head_stride, dim, live)
    own_key = load_rows(key_ptr, row, key_row_stride, kv_head, key_head_stride, dim, live)
    attended = load_rows(value_ptr, row, value_row_stride, kv_head, value_head_stride, dim, live)
    attended = attended / value_scale
    largest = cap_scores(tl.sum(query * own_key, axis=1) * own_scale, SOFT_CAP)
    total = tl.full([BLOCK_M], 1.0, tl.float32)

    prefix_len = tl.load(prefix_lens_ptr + request).to(tl.int32)
    first = tl.maximum(prefix_len + 1 - WINDOW, 0) if WINDOW > 0 else 0
    block_table_ptr += request * block_table_stride
    key_cache_ptr += kv_head * key_cache_head_stride
    value_cache_ptr += kv_head * value_cache_head_stride
    for start in range(first, prefix_len, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        keys = load_positions(
            key_cache_ptr, key_block_stride, key_slot_stride, block_table_ptr, position,
            prefix_len, HEAD_SIZE, BLOCK_SIZE, DOT_DTYPE, BLOCK_D,
        )  # fmt: skip
        scores = tl.dot(query.to(DOT_DTYPE), tl.trans(keys), input_precision="ieee") * prefix_scale
        exists = (position < prefix_len)[None, :]
        scores = tl.where(exists, cap_scores(scores, SOFT_CAP), float("-inf"))
        weights, shrink, largest, total = step_softmax(scores, largest, total)
        values = load_positions(
            value_cache_ptr, value_block_stride, value_slot_stride, block_table_ptr, position,
            prefix_len, HEAD_SIZE, BLOCK_SIZE, DOT_DTYPE, BLOCK_D,
        )  # fmt: skip
        attended = attended * shrink[:, None]
        attended = tl.dot(weights.to(DOT_DTYPE), values, acc=attended, input_precision="ieee")

    attended = attended * (value_scale / total)[:, None]
    out_at = row * out_row_stride + head * out_head_stride + dim
    tl.store(out_ptr + out_at, attended.to(out_ptr.dtype.element_ty), mask=live)


def packed_attention(
    query: torch.Tensor,  # [R * W, num_heads, head_size]
    key: torch.Tensor,  # [R * W, num_kv_heads, head_size]
    value: torch.Tensor,  # [R * W, num_kv_heads, head_size]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    block_table: torch.Tensor,  # [R, max_blocks]
    prefix_lens: torch.Tensor,  # [R]
    *,
    scale: float,
    soft_cap: float = 0.0,
    sliding_window: int = 0,
    dequant: DequantScales = DequantScales(),  # noqa: B008 (immutable)
    out: torch.Tensor | None = None,  # [R * W, num_heads, head_size]
) -> torch.Tensor:
    """Attend each packed row to its request's cached prefix and itself; see the module.

    Nothing is read back, so the host does not wait. Every tensor is on one device (a GPU, or the
    CPU under Triton's interpreter) and contiguous in its last dimension; other strides are free.

    Args:
        query: [R * W, num_heads, head_size], a request's rows together; key's dtype or fp8.
        key: [R * W, num_kv_heads, head_size] float32, float16 or bfloat16, the rows' own keys.
            ``head_size`` is 32 to 256.
        value: likewise, the rows' own values.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], key's dtype or fp8.
        value_cache: likewise.
        block_table: [R, max_blocks] int32; request r reads its first
            ``ceil(prefix_lens[r] / block_size)`` entries, unchecked.
        prefix_lens: [R] int32 or int64, positions each request has in the cache; may be 0.
        scale: multiplies the scores.
        soft_cap: scores become ``cap * tanh(score / cap)``; 0 leaves them.
        sliding_window: positions a row sees, its own included; 0 for all.
        dequant: what fp8 queries and caches are multiplied by.
        out: [R * W, num_heads, head_size] to write to; by default a new tensor of key's dtype.

    Returns:
        [R * W, num_heads, head_size]: ``out``.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    if out is None:
        out = torch.empty(query.shape, dtype=key.dtype, device=query.device)
    _check_rows(query, key, value, out)
    _check_cache(key, key_cache, value_cache)
    _check_requests(query, block_table, prefix_lens, dequant)
    given = {"query": query, "key": key, "value": value, "out": out, "prefix_lens": prefix_lens}
    cached = {"key_cache": key_cache, "value_cache": value_cache, "block_table": block_table}
    factors = {f"{name} scale": factor for name, factor in dequant._asdict().items()}
    check_placement({**given, **cached, **factors}, query.device)
    if query.shape[0] > 0:
        _launch(
            out, query, key, value, key_cache, value_cache, block_table, prefix_lens,
            dequant, scale, soft_cap, sliding_window,
        )  # fmt: skip
    return out


def _launch(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    dequant: DequantScales,
    scale: float,
    soft_cap: float,
    sliding_window: int,
) -> None:
    num_reqs, num_kv_heads = prefix_lens.shape[0], key.shape[1]
    num_rows, num_heads, head_size = query.shape
    width, group = num_rows // num_reqs, num_heads // num_kv_heads
    block_m, block_n = _choose_tiles(width * group, head_size, key.dtype)
    _packed_attention_kernel[(num_reqs, num_kv_heads, triton.cdiv(width * group, block_m))](
        out,
        *out.stride()[:2],
        query,
        *query.stride()[:2],
        key,
        *key.stride()[:2],
        value,
        *value.stride()[:2],
        key_cache,
        *key_cache.stride()[:3],
        value_cache,
        *value_cache.stride()[:3],
        block_table,
        block_table.stride(0),
        prefix_lens,
        *dequant,
        scale,
        width,
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=key_cache.shape[1],
        WINDOW=sliding_window,
        SOFT_CAP=soft_cap,
        DOT_DTYPE=_ROW_DTYPES[key.dtype],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(head_size),
        num_warps=4,
        num_stages=2,
    )


def _choose_tiles(num_pairs: int, head_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N): the largest that stay in registers on sm_80, sm_90, sm_100 and gfx942.

    float32 products are exact ("ieee"), which costs registers where others use tensor cores.
    """
    if dtype == torch.float32:
        return (16 if num_pairs <= 16 or head_size > 128 else 32), 16
    return (16 if num_pairs <= 16 else 32), (64 if head_size <= 64 else 32)


def _check_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor
) -> None:
    require(query.dim() == key.dim() == 3, "dims of query, key", 3, (query.dim(), key.dim()))
    (num_rows, num_heads, head_size), num_kv_heads = query.shape, key.shape[1]
    low, high = _MIN_HEAD_SIZE, _MAX_HEAD_SIZE
    require(low <= head_size <= high, "head_size", f"{low} to {high}", head_size)
    grouped = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    require(grouped, "query heads", f"a multiple of {num_kv_heads} KV heads", num_heads)
    own = (num_rows, num_kv_heads, head_size)
    require(key.shape == own, "key shape", own, tuple(key.shape))
    require(value.shape == own, "value shape", own, tuple(value.shape))
    require(out.shape == query.shape, "out shape", tuple(query.shape), tuple(out.shape))
    rows = list(_ROW_DTYPES)
    require(key.dtype in rows, "key dtype", rows, key.dtype)
    if key.device.type == "cpu":
        # Triton's interpreter gets bfloat16 wrong.
        require(key.dtype != torch.bfloat16, "key dtype on a CPU", rows[:2], key.dtype)
    require(value.dtype == key.dtype, "value dtype", key.dtype, value.dtype)
    require(out.dtype in rows, "out dtype", rows, out.dtype)
    require(query.dtype in (key.dtype, *_FP8_DTYPES), "query dtype", key.dtype, query.dtype)


def _check_cache(key: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    require(key_cache.dim() == 4, "dims of key_cache", 4, key_cache.dim())
    heads, got = tuple(key.shape[1:]), tuple(key_cache.shape[2:])
    require(got == heads, "heads and head_size of key_cache", heads, got)
    readable = (key.dtype, *_FP8_DTYPES)
    require(key_cache.dtype in readable, "key_cache dtype", readable, key_cache.dtype)
    shape, got = tuple(key_cache.shape), tuple(value_cache.shape)
    require(got == shape, "value_cache shape", shape, got)
    require(
        value_cache.dtype == key_cache.dtype,
        "value_cache dtype",
        key_cache.dtype,
        value_cache.dtype,
    )


def _check_requests(
    query: torch.Tensor,
    block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    dequant: DequantScales,
) -> None:
    integers = (torch.int32, torch.int64)
    require(prefix_lens.dim() == 1, "dims of prefix_lens", 1, prefix_lens.dim())
    require(prefix_lens.dtype in integers, "prefix_lens dtype", integers, prefix_lens.dtype)
    num_reqs = prefix_lens.shape[0]
    require(num_reqs > 0, "requests", "at least 1", num_reqs)
    require(query.shape[0] % num_reqs == 0, "rows", f"a multiple of {num_reqs}", query.shape[0])
    require(block_table.dim() == 2, "dims of block_table", 2, block_table.dim())
    require(block_table.shape[0] == num_reqs, "block_table rows", num_reqs, block_table.shape[0])
    require(block_table.dtype == torch.int32, "block_table dtype", torch.int32, block_table.dtype)
    for name, factor in dequant._asdict().items():
        if factor is not None:
            expected, got = (1, torch.float32), (factor.numel(), factor.dtype)
            require(got == expected, f"{name} scale elements and dtype", expected, got)
