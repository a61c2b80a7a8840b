"""Block verification of draft chains, in torch.

A chain is a tree whose row i has row i - 1 as its parent; x_i is the token of row i, drawn from
q(. | x_1 .. x_{i-1}), i = 1 .. n. With p the target's laws, all coins u_i are read, none alone ends
the search:

    w_0 = 1,  w_i = min(1, w_{i-1} p(x_i) / q(x_i))
    Z_i = sum_x (w_i p(x | x_1 .. x_i) - q(x | x_1 .. x_i))+
    h_i = Z_i / (Z_i + 1 - w_i)  for i < n,   h_n = w_n
    accepted = the largest i with u_i < h_i, 0 where there is none
    bonus ~ (w_i p - q)+ normalised for i = accepted < n,   p for i = n

It accepts at least as many drafts on average as token-wise rejection, the law of what is emitted
being the target's in both. Sun et al., arXiv 2403.10444, Algorithm 2.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from speculators_ext.kernels.accept_tree_ref import TreeAcceptance, collect, draw_index

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["accept_block_ref"]


def accept_block_ref(
    tokens: Tensor,  # [N]
    cu_nodes: Tensor,  # [R + 1]
    target_probs: Tensor,  # [N, V]
    draft_probs: Tensor,  # [N, V]
    accept_uniform: Tensor,  # [N]
    token_uniform: Tensor,  # [R]
    *,
    max_depth: int,
) -> TreeAcceptance:
    """Accept a prefix of each request's chain; see the module.

    Args:
        tokens: int64 [N], row 0 of a chain being the last token without KV; the others drawn each
            from the draft's law in the row before.
        cu_nodes: int32 [R + 1], request r owns rows ``cu_nodes[r]`` to ``cu_nodes[r + 1]``; it may
            own none.
        target_probs: float [N, V], the target's law behind each row; rows sum to 1.
        draft_probs: float [N, V], the draft's law behind each row; the last row of a chain is not
            read.
        accept_uniform: float [N] in [0, 1), the coin of each row.
        token_uniform: float [R] in [0, 1), for the bonus.
        max_depth: the most drafts judged; those beyond count as not drafted.
    """
    paths: list[list[int]] = []
    bonus: list[int] = []
    for request, (first, stop) in enumerate(itertools.pairwise(cu_nodes.tolist())):
        if stop == first:
            paths.append([])
            bonus.append(-1)
            continue
        num_drafts = min(stop - first - 1, max_depth)
        laws = target_probs[first : first + num_drafts + 1]
        drafts = draft_probs[first : first + num_drafts]
        weight, accepted, rest = 1.0, 0, laws[0]
        if num_drafts > 0:
            rest = (laws[0] - drafts[0]).clamp(min=0)
        for i in range(1, num_drafts + 1):
            chosen = tokens[first + i]
            weight = min(1.0, float(weight * laws[i - 1, chosen] / drafts[i - 1, chosen]))
            rest_here = laws[i]
            chance = weight
            if i < num_drafts:
                rest_here = (weight * laws[i] - drafts[i]).clamp(min=0)
                left = float(rest_here.sum())
                # Nothing left and nothing lost: whatever follows will be accepted.
                chance = left / (left + 1 - weight) if left + 1 - weight > 0 else 1.0
            if accept_uniform[first + i] < chance:
                accepted, rest = i, rest_here
        paths.append(list(range(accepted + 1)))
        law = rest if rest.sum() > 0 else laws[accepted]
        bonus.append(draw_index(law, token_uniform[request]))
    return collect(paths, bonus, max_depth, tokens.device)
