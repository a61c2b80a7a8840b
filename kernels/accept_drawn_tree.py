"""Acceptance of trees whose children were drawn without replacement, one program a request.

The rule is that of ``accept_drawn_tree_ref``. What is left of the target's law p behind j rejected
children of a node needs no copy of p or q. Each rejection subtracts a multiple of q and cuts at
zero, and nested cuts are one cut of the sum:

    r_j = (p - A_j q)+,  S_j = sum r_j,  L_j = 1 - sum_{i<=j} q(x_i),  A_{j+1} = A_j + S_j / L_j

with A_0 = 0, S_0 = L_0 = 1. Child x_{j+1} is accepted if u q(x) / L_j < r_j(x) / S_j; a rejection
costs one pass over p and q for the new sum, and the bonus is drawn from r. (A rejected x has
p(x) <= A q(x) from then on: that q(x) is struck out shows in L alone.)

Nothing is read back to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from speculators_ext.kernels.accept_tree import (
    find_beyond,
    first_row,
    load_tree,
    new_acceptance,
)
from speculators_ext.kernels.tree_checks import check_tree, checked_laws

if TYPE_CHECKING:
    import torch

    from speculators_ext.kernels.accept_tree_ref import TreeAcceptance

__all__ = ["accept_drawn_tree"]

_BLOCK_V = 2048


@triton.jit
def load_rest(  # type: ignore[no-untyped-def]
    target_ptr,  # of one row: [V]
    draft_ptr,  # of one row: [V]
    keep,  # what p counts
    strike,  # what q counts; q is not read where this is 0
    index,  # [BLOCK_V]
    vocab_size,
) -> tl.tensor:
    """(keep p - strike q)+ of some ids, 0 beyond the vocabulary."""
    num_read = tl.where(strike > 0, vocab_size, 0)
    target = tl.load(target_ptr + index, mask=index < vocab_size, other=0.0).to(tl.float32)
    draft = tl.load(draft_ptr + index, mask=index < num_read, other=0.0).to(tl.float32)
    return tl.maximum(keep * target - strike * draft, 0.0)


@triton.jit
def sum_rest(target_ptr, draft_ptr, keep, strike, vocab_size, BLOCK_V: tl.constexpr) -> tl.tensor:  # type: ignore[no-untyped-def]
    """The sum of ``load_rest`` over the vocabulary."""
    total = 0.0
    for start in range(0, vocab_size, BLOCK_V):
        index = start + tl.arange(0, BLOCK_V)
        total += tl.sum(load_rest(target_ptr, draft_ptr, keep, strike, index, vocab_size))
    return total


@triton.jit
def draw_rest(  # type: ignore[no-untyped-def]
    target_ptr, draft_ptr, keep, strike, uniform, vocab_size, BLOCK_V: tl.constexpr
) -> tl.tensor:
    """Draw an id from ``load_rest``, from p where nothing is left but for rounding."""
    total = sum_rest(target_ptr, draft_ptr, keep, strike, vocab_size, BLOCK_V)
    nothing = total <= 0
    keep, strike = tl.where(nothing, 1.0, keep), tl.where(nothing, 0.0, strike)
    if nothing:
        total = sum_rest(target_ptr, draft_ptr, keep, strike, vocab_size, BLOCK_V)
    threshold, below, chosen, last, start = uniform * total, 0.0, -1, -1, 0
    while (start < vocab_size) & (chosen < 0):
        index = start + tl.arange(0, BLOCK_V)
        weights = load_rest(target_ptr, draft_ptr, keep, strike, index, vocab_size)
        below, chosen, last = find_beyond(weights, index, threshold, below, chosen, last)
        start += BLOCK_V
    return tl.where(chosen < 0, last, chosen).to(tl.int64)


@triton.jit
def _accept_drawn_tree_kernel(  # type: ignore[no-untyped-def]
    path_ptr,  # [R, max_depth + 1] int32
    num_accepted_ptr,  # [R] int32
    bonus_ptr,  # [R] int64
    tokens_ptr,  # [N] int64
    parents_ptr,  # [N] int32
    cu_nodes_ptr,  # [R + 1] int32
    target_ptr,  # [N, V]
    target_row_stride,
    draft_ptr,  # [N, V]
    draft_row_stride,
    accept_uniform_ptr,  # [N] float32
    token_uniform_ptr,  # [R] float32
    vocab_size,
    max_depth,
    BLOCK_N: tl.constexpr,  # the most nodes of a request, padded to a power of two
    BLOCK_P: tl.constexpr,  # max_depth + 1, likewise
    BLOCK_V: tl.constexpr,  # ids a step
) -> None:
    request = tl.program_id(0).to(tl.int64)
    first, count, token, parent = load_tree(tokens_ptr, parents_ptr, cu_nodes_ptr, request, BLOCK_N)
    step, local = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    row = tl.where(count > 0, 0, -1)
    path = tl.where(step == 0, row, -1)
    depth, bonus = 0, tl.full([], -1, tl.int64)
    if count > 0:
        target_ptr += first * target_row_stride
        draft_ptr += first * draft_row_stride
        law_ptr, drawn_ptr = target_ptr, draft_ptr
        struck, total, left = 0.0, 1.0, 1.0
        child = first_row((parent == row) & (depth < max_depth), BLOCK_N)
        while child >= 0:
            chosen = tl.sum(tl.where(local == child, token, 0))
            p = tl.load(law_ptr + chosen).to(tl.float32)
            q = tl.load(drawn_ptr + chosen).to(tl.float32)
            coin = tl.load(accept_uniform_ptr + first + child)
            if (q > 0) & (coin * q * total < tl.maximum(p - struck * q, 0.0) * left):
                depth += 1
                row = child
                path = tl.where(step == depth, row, path)
                law_ptr = target_ptr + row.to(tl.int64) * target_row_stride
                drawn_ptr = draft_ptr + row.to(tl.int64) * draft_row_stride
                struck, total, left = 0.0, 1.0, 1.0
            elif q > 0:
                struck += total / left
                left = tl.maximum(left - q, 1e-20)
                total = sum_rest(law_ptr, drawn_ptr, 1.0, struck, vocab_size, BLOCK_V)
                if total <= 0:
                    struck, total = 0.0, 1.0
            more = (parent == row) & (local > child) & (depth < max_depth)
            child = first_row(more, BLOCK_N)
        uniform = tl.load(token_uniform_ptr + request)
        bonus = draw_rest(law_ptr, drawn_ptr, 1.0, struck, uniform, vocab_size, BLOCK_V)
    tl.store(path_ptr + request * (max_depth + 1) + step, path, mask=step <= max_depth)
    tl.store(num_accepted_ptr + request, depth)
    tl.store(bonus_ptr + request, bonus)


def accept_drawn_tree(
    tokens: torch.Tensor,  # [N]
    parents: torch.Tensor,  # [N]
    cu_nodes: torch.Tensor,  # [R + 1]
    target_probs: torch.Tensor,  # [N, V]
    draft_probs: torch.Tensor,  # [N, V]
    accept_uniform: torch.Tensor,  # [N]
    token_uniform: torch.Tensor,  # [R]
    *,
    max_nodes: int,
    max_depth: int,
) -> TreeAcceptance:
    """Walk each request's tree by RRSw; see ``accept_drawn_tree_ref``.

    Args:
        tokens: int64 [N]; those of drafts are ids of the vocabulary, siblings differ.
        parents: int32 [N], local rows, parents before children.
        cu_nodes: int32 [R + 1]; a request may own no row.
        target_probs: float32, float16 or bfloat16 [N, V]; rows sum to 1.
        draft_probs: likewise; rows of nodes without children are not read.
        accept_uniform: float32 [N] in [0, 1).
        token_uniform: float32 [R] in [0, 1).
        max_nodes: the most rows of a request, known to the host; rows beyond are not accepted.
        max_depth: the most drafts accepted.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    check_tree(tokens, parents, cu_nodes, max_nodes, max_depth)
    laws = checked_laws(tokens, cu_nodes, target_probs, draft_probs, accept_uniform, token_uniform)
    out = new_acceptance(cu_nodes, max_depth)
    if out.bonus.shape[0] > 0:
        _accept_drawn_tree_kernel[(out.bonus.shape[0],)](
            *out, tokens, parents, cu_nodes, *laws, max_depth,
            BLOCK_N=triton.next_power_of_2(max_nodes),
            BLOCK_P=triton.next_power_of_2(max_depth + 1), BLOCK_V=_BLOCK_V, num_warps=8,
        )  # fmt: skip
    return out
