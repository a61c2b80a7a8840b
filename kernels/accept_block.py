"""Block verification of draft chains, one program a request.

    w_0 = 1,  w_i = min(1, w_{i-1} p(x_i) / q(x_i))
    Z_i = sum_x (w_i p(x | x_1 .. x_i) - q(x | x_1 .. x_i))+
    h_i = Z_i / (Z_i + 1 - w_i)  for i < n,   h_n = w_n
    accepted = the largest i with u_i < h_i,   bonus ~ (w_i p - q)+, p for i = n

``accept_block_ref`` has the source. A program reads each of its rows of p and q once for Z, and
those behind the accepted draft once more for the bonus. Nothing is read back to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from speculators_ext.kernels.accept_drawn_tree import draw_rest, sum_rest
from speculators_ext.kernels.accept_tree import new_acceptance
from speculators_ext.kernels.tree_checks import check_chain, checked_laws

if TYPE_CHECKING:
    import torch

    from speculators_ext.kernels.accept_tree_ref import TreeAcceptance

__all__ = ["accept_block"]

_BLOCK_V = 2048


@triton.jit
def _accept_block_kernel(  # type: ignore[no-untyped-def]
    path_ptr,  # [R, max_depth + 1] int32
    num_accepted_ptr,  # [R] int32
    bonus_ptr,  # [R] int64
    tokens_ptr,  # [N] int64
    cu_nodes_ptr,  # [R + 1] int32
    target_ptr,  # [N, V]
    target_row_stride,
    draft_ptr,  # [N, V]
    draft_row_stride,
    accept_uniform_ptr,  # [N] float32
    token_uniform_ptr,  # [R] float32
    vocab_size,
    max_depth,
    BLOCK_P: tl.constexpr,  # max_depth + 1, padded to a power of two
    BLOCK_V: tl.constexpr,  # ids a step
) -> None:
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_nodes_ptr + request).to(tl.int64)
    count = (tl.load(cu_nodes_ptr + request + 1) - first).to(tl.int32)
    num_drafts = tl.minimum(count - 1, max_depth)
    accepted, kept, weight = tl.minimum(num_drafts, 0), 1.0, 1.0
    for i in range(1, num_drafts + 1):
        row = first + i
        law_ptr = target_ptr + row * target_row_stride
        drawn_ptr = draft_ptr + row * draft_row_stride
        chosen = tl.load(tokens_ptr + row)
        p = tl.load(law_ptr - target_row_stride + chosen).to(tl.float32)
        q = tl.load(drawn_ptr - draft_row_stride + chosen).to(tl.float32)
        weight = tl.minimum(weight * p / q, 1.0)
        chance = weight
        if i < num_drafts:
            left = sum_rest(law_ptr, drawn_ptr, weight, 1.0, vocab_size, BLOCK_V)
            # Nothing left and nothing lost: whatever follows will be accepted.
            lost = left + 1 - weight
            chance = tl.where(lost > 0, left / tl.maximum(lost, 1e-30), 1.0)
        if tl.load(accept_uniform_ptr + row) < chance:
            accepted, kept = i, weight
    bonus = tl.full([], -1, tl.int64)
    if accepted >= 0:
        row = first + accepted
        strike = tl.where(accepted < num_drafts, 1.0, 0.0)
        kept = tl.where(accepted < num_drafts, kept, 1.0)
        bonus = draw_rest(
            target_ptr + row * target_row_stride, draft_ptr + row * draft_row_stride, kept, strike,
            tl.load(token_uniform_ptr + request), vocab_size, BLOCK_V,
        )  # fmt: skip
    step = tl.arange(0, BLOCK_P)
    path = tl.where(step <= accepted, step, -1)
    tl.store(path_ptr + request * (max_depth + 1) + step, path, mask=step <= max_depth)
    tl.store(num_accepted_ptr + request, tl.maximum(accepted, 0))
    tl.store(bonus_ptr + request, bonus)


def accept_block(
    tokens: torch.Tensor,  # [N]
    cu_nodes: torch.Tensor,  # [R + 1]
    target_probs: torch.Tensor,  # [N, V]
    draft_probs: torch.Tensor,  # [N, V]
    accept_uniform: torch.Tensor,  # [N]
    token_uniform: torch.Tensor,  # [R]
    *,
    max_depth: int,
) -> TreeAcceptance:
    """Accept a prefix of each request's chain; see ``accept_block_ref``.

    Args:
        tokens: int64 [N]; those of drafts drawn each from the draft's law in the row before.
        cu_nodes: int32 [R + 1]; a request may own no row.
        target_probs: float32, float16 or bfloat16 [N, V]; rows sum to 1.
        draft_probs: likewise; the last row of a chain is not read.
        accept_uniform: float32 [N] in [0, 1).
        token_uniform: float32 [R] in [0, 1).
        max_depth: the most drafts judged; those beyond count as not drafted.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    check_chain(tokens, cu_nodes, max_depth)
    laws = checked_laws(tokens, cu_nodes, target_probs, draft_probs, accept_uniform, token_uniform)
    out = new_acceptance(cu_nodes, max_depth)
    if out.bonus.shape[0] > 0:
        _accept_block_kernel[(out.bonus.shape[0],)](
            *out, tokens, cu_nodes, *laws, max_depth,
            BLOCK_P=triton.next_power_of_2(max_depth + 1),
            BLOCK_V=_BLOCK_V, num_warps=8,
        )  # fmt: skip
    return out
