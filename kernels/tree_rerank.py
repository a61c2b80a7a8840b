r"""Choosing the draft trees to verify from all candidates grown, in one launch for all requests.

What is computed, and the order of ties, is said in ``tree_build_ref``. Candidate c is row
``1 + rank(c)`` of its request's tree if that is below the request's count, and its parent is row
``1 + rank(parent(c))``, where

    rank(c) = #{d : score(d) > score(c) or (score(d) = score(c) and d < c)}

is counted, not sorted: no step waits for another. A parent ranks before its children, so it is in
the tree where they are. Candidates under the floor rank behind all others and are cut off by the
count. Nothing is read back.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from speculators_ext.kernels.checks import check_placement, require
from speculators_ext.kernels.tree_build import BLOCK_J, check_pool, count_before
from speculators_ext.kernels.tree_build_ref import Candidates, PaddedTree

__all__ = ["rerank_candidates"]

_BLOCK_C = 64  # candidates a program ranks


@triton.jit
def _rerank_kernel(  # type: ignore[no-untyped-def]
    out_tokens_ptr,  # [R, M] int64
    out_parents_ptr,  # [R, M] int32
    out_depths_ptr,  # [R, M] int32
    out_scores_ptr,  # [R, M] float32
    out_counts_ptr,  # [R] int32
    tokens_ptr,  # [R, C] int64
    scores_ptr,  # [R, C] float32
    parents_ptr,  # [R, C] int32
    pool_stride,
    root_tokens_ptr,  # [R] int64
    max_rows_ptr,  # [R] int32
    floor,
    num_columns,  # C
    num_rows,  # M
    TOPK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_M: tl.constexpr,  # num_rows, padded to a power of two
) -> None:
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    scores_ptr += request * pool_stride
    pool = request * pool_stride + column
    alive = 0
    for begin in range(0, num_columns, BLOCK_J):
        other = begin + tl.arange(0, BLOCK_J)
        others = tl.load(scores_ptr + other, mask=other < num_columns, other=float("-inf"))
        alive += tl.sum(((others >= floor) & (others > float("-inf"))).to(tl.int32), axis=0)
    most = tl.minimum(tl.load(max_rows_ptr + request).to(tl.int32), num_rows)
    count = tl.minimum(alive + 1, most)

    out = request * num_rows
    if tl.program_id(1) == 0:
        row = tl.arange(0, BLOCK_M)
        missing = (row < num_rows) & (row >= count)
        bare = missing | ((row == 0) & (row < num_rows))
        token = tl.where(missing, -1, tl.load(root_tokens_ptr + request))
        tl.store(out_tokens_ptr + out + row, token, mask=bare)
        tl.store(out_parents_ptr + out + row, tl.full([BLOCK_M], -1, tl.int32), mask=bare)
        tl.store(out_depths_ptr + out + row, tl.full([BLOCK_M], 0, tl.int32), mask=bare)
        tl.store(out_scores_ptr + out + row, tl.where(missing, float("-inf"), 0.0), mask=bare)
        tl.store(out_counts_ptr + request, count)

    inside = column < num_columns
    scores = tl.load(scores_ptr + column, mask=inside, other=float("-inf"))
    row = 1 + count_before(scores_ptr, scores, column, num_columns, BLOCK_J)
    live = (scores > float("-inf")) & (row < count)
    parent = tl.load(parents_ptr + pool, mask=live, other=-1)
    parent_score = tl.load(scores_ptr + parent, mask=live & (parent >= 0), other=0.0)
    parent_row = 1 + count_before(scores_ptr, parent_score, parent, num_columns, BLOCK_J)
    parent_row = tl.where(parent >= 0, parent_row, 0)
    depth = tl.where(column < TOPK, 1, (column - TOPK) // (TOPK * TOPK) + 2)
    tl.store(out_tokens_ptr + out + row, tl.load(tokens_ptr + pool, mask=live, other=0), mask=live)
    tl.store(out_parents_ptr + out + row, parent_row, mask=live)
    tl.store(out_depths_ptr + out + row, depth, mask=live)
    tl.store(out_scores_ptr + out + row, scores, mask=live)


def rerank_candidates(
    candidates: Candidates,
    root_tokens: torch.Tensor,  # [R]
    max_rows: torch.Tensor,  # [R]
    *,
    topk: int,
    num_rows: int,
    floor: float = -math.inf,
) -> PaddedTree:
    """Choose each request's tree to verify from all it has grown.

    Args:
        candidates: the pool, [R, C]; levels that were not run hold -inf.
        root_tokens: [R] int64, the last sampled token of each request.
        max_rows: [R] int32, rows a request may have at most, root included; 0: none, not even the
            root.
        topk: the one the candidates were grown with.
        num_rows: M, rows a request has in the output, at least 1.
        floor: candidates of a lower score, a log-probability, are left out.

    Returns:
        [R, M], best first; see the type.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    _check_rerank(candidates, root_tokens, max_rows, topk, num_rows)
    (num_reqs, num_columns), device = candidates.scores.shape, candidates.scores.device
    shape = (num_reqs, num_rows)
    tree = PaddedTree(
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(num_reqs, dtype=torch.int32, device=device),
    )
    if num_reqs > 0:
        _rerank_kernel[(num_reqs, triton.cdiv(num_columns, _BLOCK_C))](
            *tree, *candidates, candidates.tokens.stride(0), root_tokens, max_rows,
            floor, num_columns, num_rows, TOPK=topk, BLOCK_C=_BLOCK_C, BLOCK_J=BLOCK_J,
            BLOCK_M=triton.next_power_of_2(num_rows), num_warps=4,
        )  # fmt: skip
    return tree


def _check_rerank(
    candidates: Candidates,
    root_tokens: torch.Tensor,
    max_rows: torch.Tensor,
    topk: int,
    num_rows: int,
) -> None:
    check_pool(candidates, topk)
    require(num_rows >= 1, "num_rows", "at least 1", num_rows)
    num_reqs = candidates.scores.shape[0]
    for name, tensor, dtype in (
        ("root_tokens", root_tokens, torch.int64),
        ("max_rows", max_rows, torch.int32),
    ):
        expected, got = ((num_reqs,), dtype), (tuple(tensor.shape), tensor.dtype)
        require(got == expected, f"{name} shape and dtype", expected, got)
    given = {**candidates._asdict(), "root_tokens": root_tokens, "max_rows": max_rows}
    check_placement(given, candidates.scores.device)
