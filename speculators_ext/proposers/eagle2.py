r"""Growth of EAGLE-2's context-dependent draft trees (arXiv 2406.16858, sections 4.1 and 4.2).

A node's value is the head's probability of its whole path, V = p_1 p_2 ... p_d, which is close to
the chance that it is accepted. Growth runs level by level: the ``topk`` best nodes of a level go
through the head together, each gets ``topk`` children, and the best children make the next level.
Then the best nodes of all levels, by V, are the tree. As V never grows along a path, that choice is
a tree, and a level whose best node is not among the best so far cannot add to it.

The head is any object with the two calls of ``Head``; no engine is known here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from speculators_ext.kernels.growth_ops import growth_ops
from speculators_ext.kernels.tree_build_ref import make_candidates

if TYPE_CHECKING:
    from torch import Tensor

    from speculators_ext.kernels.growth_ops import GrowthOps
    from speculators_ext.kernels.tree_build_ref import Candidates, Frontier, PaddedTree
    from speculators_ext.method_configs import TreeConfig

__all__ = ["GrowthLimits", "Head", "Level", "grow_trees"]


class Level(NamedTuple):
    """Nodes that go through the head together.

    Attributes:
        depth: of all these nodes in their trees; the root's is 0.
        requests: int64 [n], whose node each is.
        places: int64 [n], the node's place among all nodes its request may run: level after level.
        tokens: int64 [n].
        features: [n, H], what the head gave for each node's parent.
        sees: bool [n, depth * topk], which places a node attends to: ancestors and itself.
        each: nodes of every request, request after request; None where they differ.
    """

    depth: int
    requests: Tensor
    places: Tensor
    tokens: Tensor
    features: Tensor
    sees: Tensor
    each: int | None = None


class Head(Protocol):
    """What growth asks of a draft head."""

    draft_to_target: Tensor | None
    """int64 [V_draft], what to add to a draft id to get the target's; None: one vocabulary."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V_draft], the law of the token behind each row."""
        ...

    def step(self, level: Level) -> tuple[Tensor, Tensor]:
        """Run a level: what `logits` takes, and the features of the level's nodes, both [n, H]."""
        ...


class GrowthLimits(NamedTuple):
    """What each request may grow.

    Attributes:
        max_rows: int32 [R], rows of its tree, the root included.
        depths: int64 [R], levels.
        chains: bool [R], True keeps the best child of each node only.
    """

    max_rows: Tensor
    depths: Tensor
    chains: Tensor


def grow_trees(
    head: Head,
    hidden: Tensor,  # [R, H]
    features: Tensor,  # [R, H]
    root_tokens: Tensor,  # [R]
    limits: GrowthLimits,
    options: TreeConfig,
    *,
    num_rows: int,
    depth: int | None = None,
    prune: bool = False,
    ops: GrowthOps | None = None,
) -> PaddedTree:
    """Grow one tree a request.

    Without ``prune`` shapes depend on no value and nothing is read back to the host, so that a GPU
    is never waited for and a round can be captured: nodes that do not exist run like others, and
    count nothing.

    Args:
        head: runs the levels.
        hidden: [R, H], what `Head.logits` takes, at each root.
        features: [R, H], the head's features of each root.
        root_tokens: int64 [R], the tokens the trees hang from.
        limits: of each request.
        options: ``topk``, ``depth`` and the floors.
        num_rows: rows of the result.
        depth: levels of this round, at most ``options.depth``; None takes that.
        prune: skip nodes and levels that cannot enter a tree. Reads values back to the host, so
            only for CPUs.
        ops: the steps of growth; None takes those of the device of ``hidden``.

    Returns:
        Trees of at most ``num_rows`` rows, best rows first.
    """
    topk, floor = options.topk, _log(options.min_path_probability)
    ops = ops or growth_ops(hidden.device)
    candidates = make_candidates(len(root_tokens), options.depth, topk, hidden.device)
    frontier = ops.expand(
        head.logits(hidden), candidates, None,
        topk=topk, level=0, draft_to_target=head.draft_to_target,
    )  # fmt: skip
    _restrict(candidates, frontier, limits, topk, 0)
    own = torch.eye(topk, dtype=torch.bool, device=hidden.device).expand(len(root_tokens), -1, -1)
    sees, parents = own, features.unsqueeze(1).expand(-1, topk, -1)
    for level in range(1, depth or options.depth):
        live = None
        if prune:
            live = _can_enter(candidates, frontier, limits.max_rows, floor)
            reach = torch.where(live, frontier.scores.exp(), 0.0).sum() / len(root_tokens)
            if not live.any() or reach < options.min_level_probability:
                break
        logits, grown = _run_level(head, frontier, live, parents, sees, level)
        frontier = ops.expand(
            logits, candidates, frontier,
            topk=topk, level=level, draft_to_target=head.draft_to_target,
        )  # fmt: skip
        _restrict(candidates, frontier, limits, topk, level)
        origin = frontier.origin.unsqueeze(-1)
        sees = torch.cat([sees.gather(1, origin.expand(-1, -1, sees.shape[-1])), own], dim=-1)
        parents = grown.gather(1, origin.expand(-1, -1, grown.shape[-1]))
    return ops.rerank(
        candidates, root_tokens, limits.max_rows, topk=topk, num_rows=num_rows, floor=floor
    )


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def _run_level(
    head: Head, frontier: Frontier, live: Tensor | None, parents: Tensor, sees: Tensor, level: int
) -> tuple[Tensor, Tensor]:
    """The head over the live nodes of a frontier: logits [R * topk, V], features [R, topk, H]."""
    num_requests, topk = frontier.tokens.shape
    if live is None:
        places = torch.arange(num_requests * topk, device=parents.device)
        requests, columns = places // topk, places % topk
    else:
        requests, columns = live.nonzero(as_tuple=True)
    hidden, features = head.step(
        Level(
            level,
            requests,
            (level - 1) * topk + columns,
            frontier.tokens[requests, columns],
            parents[requests, columns],
            sees[requests, columns],
            topk if live is None else None,
        )
    )
    logits = head.logits(hidden)
    rows = num_requests * topk
    if len(requests) < rows:
        at = requests * topk + columns
        logits = logits.new_full((rows, logits.shape[-1]), float("-inf")).index_copy(0, at, logits)
        features = features.new_zeros(rows, features.shape[-1]).index_copy(0, at, features)
    return logits, features.view(num_requests, topk, -1)


def _restrict(
    candidates: Candidates, frontier: Frontier, limits: GrowthLimits, topk: int, level: int
) -> None:
    """Strike out, in place, what a request may not grow: levels too deep, a chain's siblings."""
    start = topk + (level - 1) * topk**2 if level else 0
    scores = candidates.scores[:, start : start + topk ** (2 if level else 1)]
    too_deep = (limits.depths <= level).unsqueeze(1)
    scores.masked_fill_(too_deep, float("-inf"))
    frontier.scores.masked_fill_(too_deep, float("-inf"))
    # The first child is the likeliest, and a chain's frontier holds nothing but its first row.
    chains = limits.chains.unsqueeze(1)
    scores[:, 1:].masked_fill_(chains, float("-inf"))
    frontier.scores[:, 1:].masked_fill_(chains, float("-inf"))


def _can_enter(
    candidates: Candidates, frontier: Frontier, max_rows: Tensor, floor: float
) -> Tensor:
    """bool [R, topk]: whether a child of this node could still be among its request's best."""
    drafts = max(1, min(int(max_rows.max()) - 1, candidates.scores.shape[1]))
    best = candidates.scores.topk(drafts, dim=-1).values
    worst = best.gather(1, (max_rows.long() - 2).clamp(0, drafts - 1).unsqueeze(1))
    return (frontier.scores > worst) & (frontier.scores >= floor)
