"""Acceptance of draft trees against the target's own tokens, in torch: definition and CPU path.

The target names one token at every node of the tree. From the root, the walk goes to the child that
holds the token named at the current node; where there is none it stops, and that token is emitted
behind the path as the bonus:

    row = 0;  while some child c of row has tokens[c] == chosen[row]: row = c;  bonus = chosen[row]

With chosen = argmax this is the longest greedy path (EAGLE, arXiv 2401.15077). With chosen drawn
from the target's law at each node it is the "target-only" rule for children that were chosen and
not drawn (EAGLE-2, arXiv 2406.16858, whose q is one-hot: accept x with p(x), else strike it out and
renormalise). What is emitted follows the target's law exactly, whatever the tree holds: the token
behind a path is the draw made there, and which node is visited depends on draws of shallower nodes
only. So noise may even be shared by all nodes of one depth. Keyed by (seed, position) it makes a
seeded request say what it says without speculation.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["TreeAcceptance", "accept_tree_lazily_ref", "accept_tree_ref", "draw_index"]


class TreeAcceptance(NamedTuple):
    """What a verification emits: the tokens of the path behind the root, then the bonus.

    Attributes:
        path: int32 [R, max_depth + 1], local rows of the accepted nodes, the root (0) first; -1
            behind the last. All -1 for a request without rows.
        num_accepted: int32 [R], accepted drafts, the root not counted.
        bonus: int64 [R], the target's own token behind the path; -1 for a request without rows.
    """

    path: Tensor
    num_accepted: Tensor
    bonus: Tensor


def accept_tree_ref(
    tokens: Tensor,  # [N]
    parents: Tensor,  # [N]
    cu_nodes: Tensor,  # [R + 1]
    chosen: Tensor,  # [N]
    *,
    max_nodes: int,
    max_depth: int,
) -> TreeAcceptance:
    """Walk each request's tree along the target's tokens; see the module.

    Args:
        tokens: int64 [N], row 0 of a tree being its root, the last token without KV.
        parents: int32 [N], local row of the parent, before its children; -1 for the root.
        cu_nodes: int32 [R + 1], request r owns rows ``cu_nodes[r]`` to ``cu_nodes[r + 1]``; it may
            own none.
        chosen: int64 [N], the target's token at each node, valid ids.
        max_nodes: the most rows of a request; unused here.
        max_depth: the most drafts accepted; a walk that stops there is as lossless.
    """
    named = chosen.tolist()
    return _walk(tokens, parents, cu_nodes, max_depth, named.__getitem__)


def accept_tree_lazily_ref(
    tokens: Tensor,  # [N]
    parents: Tensor,  # [N]
    cu_nodes: Tensor,  # [R + 1]
    logits: Tensor,  # [N, V]
    uniform: Tensor,  # [N]
    greedy: Tensor,  # [R]
    *,
    max_nodes: int,
    max_depth: int,
) -> TreeAcceptance:
    """The same, the target's token being found at the nodes visited only.

    Args:
        tokens: int64 [N].
        parents: int32 [N].
        cu_nodes: int32 [R + 1].
        logits: float [N, V], processed: their softmax is the law to follow.
        uniform: float [N] in [0, 1), the noise at each node; equal noise at one depth is as well.
        greedy: bool [R], requests that take the largest logit (the first of several).
        max_nodes: the most rows of a request; unused here.
        max_depth: the most drafts accepted.
    """
    owner = torch.repeat_interleave(greedy, cu_nodes.diff().long()).tolist()

    def name_token(row: int) -> int:
        if owner[row]:
            return int(logits[row].argmax())
        law = torch.softmax(logits[row], -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        return draw_index(law, uniform[row])

    return _walk(tokens, parents, cu_nodes, max_depth, name_token)


def draw_index(weights: Tensor, uniform: Tensor) -> int:
    """Draw an index by inverting the cumulative sum; one of weight zero is never drawn.

    Args:
        weights: float [V], not negative, some positive; they need not sum to 1.
        uniform: float scalar in [0, 1).
    """
    cumulative = weights.cumsum(-1)
    possible = weights > 0
    beyond = (cumulative > uniform * cumulative[-1]) & possible
    # Rounding may lift the threshold to the total, beyond which there is nothing.
    if beyond.any():
        return int(beyond.int().argmax())
    return int(possible.nonzero()[-1])


def _walk(
    tokens: Tensor,
    parents: Tensor,
    cu_nodes: Tensor,
    max_depth: int,
    name_token: Callable[[int], int],  # of a global row
) -> TreeAcceptance:
    token, parent, cu = tokens.tolist(), parents.tolist(), cu_nodes.tolist()
    paths, bonus = [], []
    for first, stop in itertools.pairwise(cu):
        path, wanted = ([0], name_token(first)) if stop > first else ([], -1)
        # Parents come first, so one look at each row finds the path.
        for row in range(first + 1, stop):
            if len(path) > max_depth:
                break
            if token[row] == wanted and parent[row] == path[-1]:
                path.append(row - first)
                wanted = name_token(row)
        paths.append(path)
        bonus.append(wanted)
    return collect(paths, bonus, max_depth, tokens.device)


def collect(
    paths: list[list[int]], bonus: list[int], max_depth: int, device: torch.device
) -> TreeAcceptance:
    """Tensors of the paths (local rows, the root first) and bonus tokens of all requests."""
    padded = [path + [-1] * (max_depth + 1 - len(path)) for path in paths]
    return TreeAcceptance(
        torch.tensor(padded, dtype=torch.int32, device=device).view(-1, max_depth + 1),
        torch.tensor([max(len(path) - 1, 0) for path in paths], dtype=torch.int32, device=device),
        torch.tensor(bonus, dtype=torch.int64, device=device),
    )
