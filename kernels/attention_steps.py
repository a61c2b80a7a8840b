"""Steps that attention kernels share: rows in, scores capped, an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "add_values",
    "cap_scores",
    "load_positions",
    "load_rows",
    "load_scale",
    "load_span",
    "load_tree_rows",
    "score_block",
    "see_rows",
    "step_softmax",
    "store_lse",
]


@triton.jit
def cap_scores(scores, SOFT_CAP: tl.constexpr) -> tl.tensor:  # type: ignore[no-untyped-def]
    """``cap * tanh(scores / cap)``, or the scores where the cap is 0."""
    if SOFT_CAP > 0:
        # tanh |x| = (1 - e) / (1 + e) with e = exp(-2 |x|), which cannot overflow.
        decay = tl.exp(tl.abs(scores) * (-2 / SOFT_CAP))
        capped = SOFT_CAP * (1 - decay) / (1 + decay)
        scores = tl.where(scores < 0, -capped, capped)
    return scores


@triton.jit
def load_positions(  # type: ignore[no-untyped-def]
    cache_ptr,  # of one KV head: [num_blocks, block_size, head_size]
    block_stride,
    slot_stride,
    block_table_ptr,  # of one request: [max_blocks]
    position,  # [BLOCK_N]
    stop,  # positions from here on do not exist
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:  # [BLOCK_N, BLOCK_D]
    """Rows of a paged cache, zero where no position is."""
    exists = position < stop
    block = tl.load(block_table_ptr + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    slot = (position % BLOCK_SIZE).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    at = (block * block_stride + slot * slot_stride)[:, None] + dim[None, :]
    mask = exists[:, None] & (dim < HEAD_SIZE)[None, :]
    return tl.load(cache_ptr + at, mask=mask, other=0.0).to(DOT_DTYPE)


@triton.jit
def load_rows(ptr, row, row_stride, head, head_stride, dim, live) -> tl.tensor:  # type: ignore[no-untyped-def]
    """Rows of a flat tensor in float32, zero where they are not live."""
    at = row * row_stride + head * head_stride + dim
    return tl.load(ptr + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def load_tree_rows(  # type: ignore[no-untyped-def]
    rows_ptr,  # [L, ...], or None: in the cache
    row_stride,
    offset,  # where in a row the numbers begin
    first_row,
    local,  # [BLOCK_N]
    num_rows,
    cache_ptr,  # of one KV head: [num_blocks, block_size, head_size]
    block_stride,
    slot_stride,
    block_table_ptr,
    prefix_len,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:  # [BLOCK_N, BLOCK_D]
    """Keys or values of a request's tree rows, zero where none is."""
    if rows_ptr is None:
        return load_positions(
            cache_ptr, block_stride, slot_stride, block_table_ptr, prefix_len + local,
            prefix_len + num_rows, HEAD_SIZE, BLOCK_SIZE, DOT_DTYPE, BLOCK_D,
        )  # fmt: skip
    else:
        dim = tl.arange(0, BLOCK_D)[None, :]
        live = (local < num_rows)[:, None] & (dim < HEAD_SIZE)
        at = (first_row + local)[:, None]
        return load_rows(rows_ptr, at, row_stride, offset, 1, dim, live).to(DOT_DTYPE)


@triton.jit
def load_span(cu_ptr, request) -> tuple:  # type: ignore[no-untyped-def]
    """(first row, number of rows) of a request, from cumulative offsets."""
    first = tl.load(cu_ptr + request).to(tl.int64)
    return first, (tl.load(cu_ptr + request + 1) - first).to(tl.int32)


@triton.jit
def load_scale(ptr) -> tl.tensor:  # type: ignore[no-untyped-def]
    """What quantized numbers are multiplied by: 1 where they are not."""
    if ptr is None:
        return 1.0
    else:
        return tl.load(ptr)


@triton.jit
def step_softmax(scores, largest, total) -> tuple:  # type: ignore[no-untyped-def]
    """(weights of these scores, factor of what was summed before, new largest, new total)."""
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    shrink = tl.exp(largest - new_largest)
    weights = tl.exp(scores - new_largest[:, None])
    return weights, shrink, new_largest, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def add_values(attended, shrink, weights, values, DOT_DTYPE: tl.constexpr) -> tl.tensor:  # type: ignore[no-untyped-def]
    """What was attended, shrunk to the new maximum, and the weighted values of a block."""
    attended = attended * shrink[:, None]
    return tl.dot(weights.to(DOT_DTYPE), values, acc=attended, input_precision="ieee")


@triton.jit
def see_rows(  # type: ignore[no-untyped-def]
    mask_ptr,  # of the request's rows: [n, W] int32
    mask_row_stride,
    row,  # [BLOCK_M]
    live,  # [BLOCK_M]
    start,  # the first tree row asked for, a multiple of the block
    num_rows,
    BLOCK_L: tl.constexpr,  # tree rows asked for; divides 32, so that one word holds them
) -> tl.tensor:  # [BLOCK_M, BLOCK_L] bool
    """Which tree rows each query row sees, by the bits of its words."""
    local = start + tl.arange(0, BLOCK_L)
    word = tl.load(mask_ptr + row.to(tl.int64) * mask_row_stride + start // 32, mask=live, other=0)
    return (((word[:, None] >> (local % 32)[None, :]) & 1) != 0) & (local < num_rows)[None, :]


@triton.jit
def score_block(  # type: ignore[no-untyped-def]
    query,  # [BLOCK_M, BLOCK_D]
    keys,  # [BLOCK_N, BLOCK_D]
    seen,  # broadcasts to [BLOCK_M, BLOCK_N]
    scale,
    largest,
    total,
    SOFT_CAP: tl.constexpr,
) -> tuple:
    """``step_softmax`` of a block of keys."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(seen, cap_scores(scores, SOFT_CAP), float("-inf"))
    return step_softmax(scores, largest, total)


@triton.jit
def store_lse(lse_ptr, at, largest, total, live) -> None:  # type: ignore[no-untyped-def]
    """Write the log of each row's sum at [BLOCK_M, 1], -inf where it is empty, if asked for."""
    if lse_ptr is not None:
        log_sum = largest + tl.log(tl.where(total > 0, total, 1.0))
        log_sum = tl.where(total > 0, log_sum, float("-inf"))
        tl.store(lse_ptr + at, log_sum[:, None], mask=live[:, None])
