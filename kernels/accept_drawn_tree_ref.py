"""Acceptance of trees whose children were drawn without replacement, in torch.

Node c has children x_1 .. x_k (its rows in order), drawn one after another from the draft's law
q, each struck out of q before the next. Judged in that order against the target's law p:

    accept x_j  with probability  min(1, p(x_j) / q(x_j))
    otherwise   p <- (p - q)+ / sum (p - q)+,   q(x_j) <- 0,   q <- q / sum q

An accepted child is the next node, with fresh p and q; behind the last rejected one the bonus is
drawn from what is left of p. Recursive rejection sampling without replacement (RRSw, Jeon et al.,
arXiv 2402.14160); Sequoia, arXiv 2402.12374, Algorithm 2. What is emitted follows the target's law
exactly, if *which* children exist does not depend on the tokens drawn at that node or below: a tree
cut by the probability of its drawn tokens must be judged by ``accept_tree`` instead.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from speculators_ext.kernels.accept_tree_ref import TreeAcceptance, collect, draw_index

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["accept_drawn_tree_ref"]


def accept_drawn_tree_ref(
    tokens: Tensor,  # [N]
    parents: Tensor,  # [N]
    cu_nodes: Tensor,  # [R + 1]
    target_probs: Tensor,  # [N, V]
    draft_probs: Tensor,  # [N, V]
    accept_uniform: Tensor,  # [N]
    token_uniform: Tensor,  # [R]
    *,
    max_nodes: int,
    max_depth: int,
) -> TreeAcceptance:
    """Walk each request's tree by RRSw; see the module.

    Args:
        tokens: int64 [N], siblings differ. A child to which its law gives no chance was not drawn
            from it and is passed over.
        parents: int32 [N], local row of the parent, before its children; -1 for the root.
        cu_nodes: int32 [R + 1], request r owns rows ``cu_nodes[r]`` to ``cu_nodes[r + 1]``; it may
            own none.
        target_probs: float [N, V], p at each node; rows sum to 1.
        draft_probs: float [N, V], the law each node's children were drawn from; rows sum to 1.
            Rows of nodes without children are not read.
        accept_uniform: float [N] in [0, 1), the coin of each node.
        token_uniform: float [R] in [0, 1), for the bonus.
        max_nodes: the most rows of a request; unused here.
        max_depth: the most drafts accepted; a walk that stops there is as lossless.
    """
    token, parent = tokens.tolist(), parents.tolist()
    paths: list[list[int]] = []
    bonus: list[int] = []
    for request, (first, stop) in enumerate(itertools.pairwise(cu_nodes.tolist())):
        if stop == first:
            paths.append([])
            bonus.append(-1)
            continue
        path, law, draft = [0], target_probs[first], draft_probs[first]
        for row in range(first + 1, stop):
            chosen = token[row]
            if len(path) > max_depth or parent[row] != path[-1] or draft[chosen] == 0:
                continue
            if accept_uniform[row] * draft[chosen] < law[chosen]:
                path.append(row - first)
                law, draft = target_probs[row], draft_probs[row]
            else:
                law, draft = _reject(law, draft, chosen)
        paths.append(path)
        bonus.append(draw_index(law, token_uniform[request]))
    return collect(paths, bonus, max_depth, tokens.device)


def _reject(law: Tensor, draft: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """(law, draft) behind a rejected child. Where nothing is left but for rounding, both stay."""
    rest = (law - draft).clamp(min=0)
    left = draft.clone()
    left[chosen] = 0
    total, left_total = rest.sum(), left.sum()
    return (
        rest / total if total > 0 else law,
        left / left_total if left_total > 0 else torch.zeros_like(draft),
    )
