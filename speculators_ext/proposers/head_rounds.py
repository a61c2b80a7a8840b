"""A round of drafting with a head that reads the target's hidden states, whatever the engine.

The target keeps rows -> they wait for the head (`Backlog`) -> it runs over them -> trees grow from
each request's `Roots` as far as a `Plan` lets them (`grow_planned`) -> what became of them
(`outcome_of`) goes to the controller of the next plans (`plan_round`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from speculators_ext.proposers.adaptive_trees import TreeCut, TreeOutcome, floor_of
from speculators_ext.proposers.eagle2 import GrowthLimits, grow_trees
from speculators_ext.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from speculators_ext.method_configs import TreeConfig
    from speculators_ext.proposers.adaptive_trees import TreeController
    from speculators_ext.proposers.eagle2 import Head

__all__ = [
    "MAX_BACKLOG",
    "NOTHING",
    "Backlog",
    "HeadRows",
    "Plan",
    "Roots",
    "grow_planned",
    "outcome_of",
    "plan_round",
]

MAX_BACKLOG = 256
"""Rows the head may lag behind before it catches up: bounds what is kept, and one catching up."""

NOTHING = TreeOutcome(
    TreeCut(0, 0), 0, *(np.empty(0, dtype=kind) for kind in (int, float, bool, bool))
)
"""What became of a request that drafted nothing."""

_Owner = TypeVar("_Owner")


class HeadRows(NamedTuple):
    """Consecutive rows of one request's head cache.

    Attributes:
        start: position of the first.
        tokens: int64 [n], the token *behind* each row, as EAGLE heads are fed.
        hidden: [n, H or layers * H], the target's hidden states at each row.
    """

    start: int
    tokens: Tensor
    hidden: Tensor


class Backlog(Generic[_Owner]):
    """Rows the target has kept and the head has not yet run over, by owner.

    While drafting does not pay the head need not run at all; what it will need to catch up is
    noted here, and costs little when it runs over many rows at once.
    """

    def __init__(self) -> None:
        self._pieces: dict[_Owner, list[HeadRows]] = {}
        self._sizes: dict[_Owner, int] = {}

    def add(self, owner: _Owner, rows: HeadRows) -> None:
        """Note rows that follow those noted before."""
        pieces = self._pieces.setdefault(owner, [])
        if pieces and pieces[0].start + self._sizes[owner] != rows.start:
            pieces.clear()  # the owner began anew
        self._sizes[owner] = len(rows.tokens) + (self._sizes[owner] if pieces else 0)
        pieces.append(rows)

    def size(self, owner: _Owner) -> int:
        """Rows noted for an owner."""
        return self._sizes.get(owner, 0)

    def owners(self) -> list[_Owner]:
        """Those that have rows noted."""
        return list(self._pieces)

    def drop(self, owner: _Owner) -> None:
        """Forget an owner that has left."""
        self._pieces.pop(owner, None)
        self._sizes.pop(owner, None)

    def take(self, owner: _Owner) -> HeadRows:
        """All rows of an owner, which are then no longer noted."""
        del self._sizes[owner]
        pieces = self._pieces.pop(owner)
        if len(pieces) == 1:
            return pieces[0]
        return HeadRows(
            pieces[0].start,
            torch.cat([piece.tokens for piece in pieces]),
            torch.cat([piece.hidden for piece in pieces]),
        )


class Roots(NamedTuple):
    """Where drafts grow from: the bonus token of each request that drafts, R of them.

    Attributes:
        rows: [R] of the batch.
        lengths: [R], tokens with KV, which is the root's position.
        tokens: int64 [R].
        hidden: [R, H], what the head's output layer takes.
        features: [R, H], what the head gives the nodes behind.
        max_drafts: [R].
        max_levels: [R], drafts on one path.
    """

    rows: list[int]
    lengths: list[int]
    tokens: Tensor
    hidden: Tensor
    features: Tensor
    max_drafts: list[int]
    max_levels: list[int]


class Plan(NamedTuple):
    """What a round may draft.

    Attributes:
        levels: of the trees; 0: none.
        level_floor: probability that must reach a level for it to pay.
        node_floor: probability of a path for verifying its last node to pay.
        chains: only the best child of each node.
    """

    levels: int
    level_floor: float
    node_floor: float
    chains: bool = False


def grow_planned(
    head: Head,
    roots: Roots,
    plan: Plan,
    options: TreeConfig,
    *,
    chains: Sequence[bool],
    num_rows: int,
    prune: bool,
) -> list[DraftTree]:
    """Grow a tree from each root, within the round's plan and the settings.

    Args:
        head: runs the levels.
        roots: R of them.
        plan: of the round.
        options: the method's settings.
        chains: [R], requests that draft chains whatever the plan says.
        num_rows: most rows of a tree, the root included.
        prune: as `grow_trees` has it.
    """
    device = roots.hidden.device
    limits = GrowthLimits(
        torch.tensor([n + 1 for n in roots.max_drafts], dtype=torch.int32, device=device),
        torch.tensor(roots.max_levels, device=device),
        torch.tensor([plan.chains or own for own in chains], device=device),
    )
    floors = {
        "min_path_probability": max(options.min_path_probability, plan.node_floor),
        "min_level_probability": max(options.min_level_probability, plan.level_floor),
    }
    grown = grow_trees(
        head, roots.hidden, roots.features, roots.tokens, limits,
        options.model_copy(update=floors), num_rows=num_rows,
        depth=max(roots.max_levels), prune=prune,
    )  # fmt: skip
    sides = [side.cpu().numpy() for side in (grown.tokens, grown.parents, grown.scores)]
    return [
        DraftTree(*(side[i, :n] for side in sides)) for i, n in enumerate(grown.counts.tolist())
    ]


def plan_round(sizes: TreeController, num_rows: int) -> tuple[TreeCut, Plan]:
    """What ``num_rows`` decoding rows may draft in the next round."""
    cut = sizes.cut(num_rows) if num_rows else TreeCut(0, 0)
    levels, last, chains = cut
    if not levels:
        return cut, Plan(0, 0.0, 0.0, chains)
    known = sizes.estimates(num_rows)
    if known.draft_step is None:
        return cut, Plan(levels, 0.0, floor_of(last), chains)
    # Of what reaches a level so much is accepted in it, for each token of which
    # the round could take that much longer.
    accepted = known.acceptance[min(1, len(known.acceptance) - 1)]
    level_floor = known.draft_step * max(1.0, known.gain) / max(accepted, 0.1)
    return cut, Plan(levels, min(level_floor, 1.0), floor_of(last), chains)


def outcome_of(tree: DraftTree, path: Sequence[int], cut: TreeCut, run: int) -> TreeOutcome:
    """What became of a tree that was verified.

    Args:
        tree: as it was verified, the root first.
        path: its accepted rows, the root among them.
        cut: what it was allowed.
        run: levels that were run for it.
    """
    accepted = np.zeros(len(tree), dtype=bool)
    accepted[np.asarray(path, dtype=np.int64)] = True
    scores = np.zeros(len(tree)) if tree.scores is None else tree.scores
    best, last = np.zeros(len(tree), dtype=bool), 0
    for node, parent in enumerate(tree.parents.tolist()):  # a node's best child is its first
        if parent == last and node:
            best[node], last = True, node
    return TreeOutcome(cut, run, tree.depths()[1:], np.exp(scores[1:]), accepted[1:], best[1:])
