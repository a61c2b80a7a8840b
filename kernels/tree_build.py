r"""Growing draft trees on the device, a level of all requests at once, in three launches.

What is computed, and the order of ties, is said in ``tree_build_ref``; how: blocks of ``_BLOCK_V``
logits are reduced to their maximum and the sum of their exponentials, which give the softmax's
norm. The ``k`` largest logits of a row lie in the ``k`` blocks of largest maximum (a block left out
is preceded by ``k`` maxima), so one program a row reads only those again and takes ``k`` maxima.
One program a request then orders the ``F * k`` children of its frontier.

Children are ordered by counting, which needs no sort and no step that waits for another:

    rank(c) = #{d : score(d) > score(c) or (score(d) = score(c) and d < c)}

NaN counts as -inf. Never materialised: log-probabilities of the vocabulary. Nothing is read back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speculators_ext.kernels.checks import check_placement, require
from speculators_ext.kernels.tree_build_ref import (
    Candidates,
    Frontier,
    level_columns,
)

__all__ = ["BLOCK_J", "check_pool", "count_before", "expand_frontier"]

_BLOCK_V = 256  # logits a block
_BLOCKS = 8  # blocks a program reduces
BLOCK_J = 32  # candidates that others are compared with at a time
_LOGIT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_TOPK = 32


@triton.jit
def _load_logits(ptr, token, vocab_size) -> tl.tensor:  # type: ignore[no-untyped-def]
    logits = tl.load(ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def count_before(scores_ptr, score, column, num_columns, BLOCK_J: tl.constexpr) -> tl.tensor:  # type: ignore[no-untyped-def]
    """How many of a request's scores come before each of ``score`` [BLOCK]."""
    before = tl.zeros_like(column)
    for start in range(0, num_columns, BLOCK_J):
        other = start + tl.arange(0, BLOCK_J)
        others = tl.load(scores_ptr + other, mask=other < num_columns, other=float("-inf"))
        larger = others[None, :] > score[:, None]
        tied = (others[None, :] == score[:, None]) & (other[None, :] < column[:, None])
        before += tl.sum((larger | tied).to(tl.int32), axis=1)
    return before


@triton.jit
def _reduce_blocks_kernel(  # type: ignore[no-untyped-def]
    maxima_ptr,  # [R * F, num_blocks]
    sums_ptr,  # [R * F, num_blocks]: sum of exp(logit - maximum)
    logits_ptr,  # [R * F, V]
    logits_row_stride,
    vocab_size,
    num_blocks,
    BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    logits = _load_logits(logits_ptr + row * logits_row_stride, token, vocab_size)
    maxima = tl.max(logits, axis=1)
    # A block of nothing but -inf sums to 0, not to NaN.
    base = tl.where(maxima > float("-inf"), maxima, 0.0)
    sums = tl.sum(tl.exp(logits - base[:, None]), axis=1)
    tl.store(maxima_ptr + row * num_blocks + block, maxima, mask=block < num_blocks)
    tl.store(sums_ptr + row * num_blocks + block, sums, mask=block < num_blocks)


@triton.jit
def _expand_rows_kernel(  # type: ignore[no-untyped-def]
    tokens_ptr,  # [R, C] int64
    scores_ptr,  # [R, C] float32
    parents_ptr,  # [R, C] int32
    pool_stride,
    frontier_scores_ptr,  # [R, F] float32, or None: the root
    frontier_columns_ptr,  # [R, F] int32, or None
    logits_ptr,  # [R * F, V]
    logits_row_stride,
    maxima_ptr,  # [R * F, num_blocks]
    sums_ptr,  # [R * F, num_blocks]
    draft_to_target_ptr,  # [V] int64, or None
    vocab_size,
    num_blocks,
    start,  # first candidate of the level
    F: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,  # TOPK, padded to a power of two
    BLOCK_S: tl.constexpr,  # num_blocks, padded to a power of two
    BLOCK_V: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    lane, block = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_S)
    at = row * num_blocks + block
    maxima = tl.load(maxima_ptr + at, mask=block < num_blocks, other=float("-inf"))
    sums = tl.load(sums_ptr + at, mask=block < num_blocks, other=0.0)
    largest = tl.max(maxima, axis=0)
    norm = largest + tl.log(tl.sum(sums * tl.exp(maxima - largest), axis=0))

    chosen = tl.full([BLOCK_K], 0, tl.int32) + num_blocks  # past the end: reads nothing
    for turn in range(TOPK):
        largest = tl.max(maxima, axis=0)
        first = tl.min(tl.where(maxima == largest, block, num_blocks), axis=0)
        first = tl.where(largest > float("-inf"), first, num_blocks)
        chosen = tl.where(lane == turn, first, chosen)
        maxima = tl.where(block == first, float("-inf"), maxima)

    token = chosen[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    logits = _load_logits(logits_ptr + row * logits_row_stride, token, vocab_size)
    values = tl.full([BLOCK_K], float("-inf"), tl.float32)
    children = tl.full([BLOCK_K], 0, tl.int32)
    for turn in range(TOPK):
        largest = tl.max(tl.max(logits, axis=1), axis=0)
        first = tl.min(tl.min(tl.where(logits == largest, token, vocab_size), axis=1), axis=0)
        first = tl.where(largest > float("-inf"), first, 0)
        values = tl.where(lane == turn, largest, values)
        children = tl.where(lane == turn, first, children)
        logits = tl.where(token == first, float("-inf"), logits)

    scores = tl.minimum(values - norm, 0.0)
    scores = tl.where((values > float("-inf")) & (scores == scores), scores, float("-inf"))
    if frontier_scores_ptr is not None:
        scores += tl.load(frontier_scores_ptr + row)
    parent = -1 if frontier_columns_ptr is None else tl.load(frontier_columns_ptr + row)
    tokens = children.to(tl.int64)
    if draft_to_target_ptr is not None:
        tokens += tl.load(draft_to_target_ptr + children)
    out = (row // F) * pool_stride + start + (row % F) * TOPK + lane
    tl.store(tokens_ptr + out, tokens, mask=lane < TOPK)
    tl.store(scores_ptr + out, scores, mask=lane < TOPK)
    tl.store(parents_ptr + out, tl.zeros_like(children) + parent, mask=lane < TOPK)


@triton.jit
def _select_frontier_kernel(  # type: ignore[no-untyped-def]
    out_tokens_ptr,  # [R, TOPK] int64
    out_scores_ptr,  # [R, TOPK] float32
    out_columns_ptr,  # [R, TOPK] int32
    out_origin_ptr,  # [R, TOPK] int64
    tokens_ptr,  # [R, C] int64
    scores_ptr,  # [R, C] float32
    pool_stride,
    start,  # first candidate of the level
    WIDTH: tl.constexpr,  # candidates of the level
    TOPK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_J: tl.constexpr,
) -> None:
    request, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_C)
    pool = request * pool_stride + start
    scores = tl.load(scores_ptr + pool + column, mask=column < WIDTH, other=float("-inf"))
    exists = scores > float("-inf")
    rank = count_before(scores_ptr + pool, scores, column, WIDTH, BLOCK_J)
    # Ranks of what exists are 0, 1, ...; the rest of the frontier is missing: column 0, -inf.
    missing = column >= tl.sum(exists.to(tl.int32), axis=0)
    for part in tl.static_range(2):
        at = request * TOPK + (column if part else rank)
        mask = (column < TOPK) & missing if part else exists & (rank < TOPK)
        source = tl.zeros_like(column) if part else column
        token = tl.load(tokens_ptr + pool + source, mask=mask, other=0)
        tl.store(out_tokens_ptr + at, token, mask=mask)
        score = tl.full([BLOCK_C], float("-inf"), tl.float32) if part else scores
        tl.store(out_scores_ptr + at, score, mask=mask)
        tl.store(out_columns_ptr + at, source + start, mask=mask)
        tl.store(out_origin_ptr + at, (source // TOPK).to(tl.int64), mask=mask)


def expand_frontier(
    logits: torch.Tensor,  # [R * F, V]
    candidates: Candidates,
    frontier: Frontier | None,
    *,
    topk: int,
    level: int,
    draft_to_target: torch.Tensor | None = None,  # [V]
) -> Frontier:
    """Grow one level: children of the frontier into the pool, the best of them are returned.

    Args:
        logits: [R * F, V] float32, float16 or bfloat16, of the nodes of ``frontier``; F is 1 for
            the root and ``topk`` after. -inf and NaN are never chosen.
        candidates: the pool, [R, C]; the level's columns are written.
        frontier: the nodes the logits are of; None: the root.
        topk: 1 to 32, children a node and nodes a frontier.
        level: 0 for the root's children; says which columns.
        draft_to_target: [V] int64, what is added to a token of a reduced draft vocabulary to make
            it the target's; the pool holds the target's.

    Returns:
        The level's ``topk`` best nodes.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    _check_expand(logits, candidates, frontier, topk, level, draft_to_target)
    num_reqs, num_rows, vocab_size = candidates.scores.shape[0], *logits.shape
    device = logits.device
    shape = (num_reqs, topk)
    grown = Frontier(
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
    )
    if num_reqs == 0:
        return grown
    num_blocks = triton.cdiv(vocab_size, _BLOCK_V)
    maxima, sums = torch.empty(2, num_rows, num_blocks, device=device).unbind()
    row_stride, pool_stride = logits.stride(0), candidates.tokens.stride(0)
    start, stop = level_columns(level, topk)
    _reduce_blocks_kernel[(num_rows, triton.cdiv(num_blocks, _BLOCKS))](
        maxima, sums, logits, row_stride, vocab_size, num_blocks,
        BLOCK_V=_BLOCK_V, BLOCKS=_BLOCKS, num_warps=4,
    )  # fmt: skip
    _expand_rows_kernel[(num_rows,)](
        *candidates, pool_stride,
        None if frontier is None else frontier.scores,
        None if frontier is None else frontier.columns,
        logits, row_stride, maxima, sums, draft_to_target, vocab_size, num_blocks, start,
        F=num_rows // num_reqs, TOPK=topk, BLOCK_K=triton.next_power_of_2(topk),
        BLOCK_S=triton.next_power_of_2(num_blocks), BLOCK_V=_BLOCK_V, num_warps=8,
    )  # fmt: skip
    _select_frontier_kernel[(num_reqs,)](
        *grown, candidates.tokens, candidates.scores, pool_stride, start,
        WIDTH=stop - start, TOPK=topk, **_choose_tiles(stop - start), num_warps=4,
    )  # fmt: skip
    return grown


def _choose_tiles(width: int) -> dict[str, int]:
    """A level's candidates against as many of them at a time as stay in registers."""
    block_c = triton.next_power_of_2(width)
    return {"BLOCK_C": block_c, "BLOCK_J": min(BLOCK_J, 4096 // block_c)}


def check_pool(candidates: Candidates, topk: int) -> None:
    """The pool's dtypes, shapes and strides, and ``topk``.

    Raises:
        ValueError: one does not fit; says what was expected.
    """
    require(1 <= topk <= _MAX_TOPK, "topk", f"1 to {_MAX_TOPK}", topk)
    dtypes = (torch.int64, torch.float32, torch.int32)
    for (name, tensor), dtype in zip(candidates._asdict().items(), dtypes, strict=True):
        require(tensor.dtype == dtype, f"candidates.{name} dtype", dtype, tensor.dtype)
        shape, got = tuple(candidates.scores.shape), tuple(tensor.shape)
        require(got == shape, f"candidates.{name} shape", shape, got)
        require(tensor.is_contiguous(), f"candidates.{name}", "contiguous", tensor.stride())


def _check_expand(
    logits: torch.Tensor,
    candidates: Candidates,
    frontier: Frontier | None,
    topk: int,
    level: int,
    draft_to_target: torch.Tensor | None,
) -> None:
    check_pool(candidates, topk)
    num_reqs, num_columns = candidates.scores.shape
    width = 1 if frontier is None else topk
    require(logits.dim() == 2, "dims of logits", 2, logits.dim())
    rows = logits.shape[0]
    require(rows == num_reqs * width, "rows of logits", num_reqs * width, rows)
    require(logits.dtype in _LOGIT_DTYPES, "logits dtype", _LOGIT_DTYPES, logits.dtype)
    if logits.device.type == "cpu":
        # Triton's interpreter gets bfloat16 wrong.
        expected = _LOGIT_DTYPES[:2]
        require(logits.dtype in expected, "logits dtype on a CPU", expected, logits.dtype)
    require((frontier is None) == (level == 0), "level without a frontier", 0, level)
    stop = level_columns(level, topk)[1]
    require(stop <= num_columns, f"candidates at level {level}", f"at least {stop}", num_columns)
    given: dict[str, torch.Tensor | None] = {"logits": logits, "draft_to_target": draft_to_target}
    if frontier is not None:
        for name, tensor in frontier._asdict().items():
            shape, got = (num_reqs, topk), tuple(tensor.shape)
            require(got == shape, f"frontier.{name} shape", shape, got)
            require(tensor.is_contiguous(), f"frontier.{name}", "contiguous", tensor.stride())
        given |= frontier._asdict()
    if draft_to_target is not None:
        length, got = (logits.shape[1],), tuple(draft_to_target.shape)
        require(got == length, "draft_to_target shape", length, got)
        dtype = draft_to_target.dtype
        require(dtype == torch.int64, "draft_to_target dtype", torch.int64, dtype)
    check_placement(given, candidates.scores.device)
