"""Times the rounds of draft trees: what `RoundClock` does for chains, with levels for drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculators_ext.engines.sglang.round_clock import RoundClock
from speculators_ext.proposers.adaptive_trees import TreeController, TreeCut, TreeOutcome
from speculators_ext.proposers.head_rounds import NOTHING, Plan, outcome_of, plan_round

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculators_ext.proposers.adaptive import DepthController
    from speculators_ext.proposers.regimes import Transition
    from speculators_ext.tree import DraftTree

__all__ = ["TreeClock"]


class TreeClock(RoundClock):
    """A round clock whose unit of drafting is a level of the tree, of verifying a node.

    Args:
        depth: levels of a full tree.
        adaptive: False always plans ``depth`` levels and no floors, and measures nothing.
    """

    def __init__(self, depth: int, *, adaptive: bool) -> None:
        super().__init__(depth, 1, adaptive=adaptive)
        self._sizes = TreeController(depth) if adaptive else None
        self._controller = self._sizes
        self._cut = TreeCut(0, 0)
        self._levels_run = 0
        self._trees: list[TreeOutcome] = []

    def plan(self, num_rows: int) -> Plan:
        """What ``num_rows`` decoding rows may draft in this round."""
        if self._sizes is None:
            return Plan(self._max_depth, 0.0, 0.0)
        self._cut, plan = plan_round(self._sizes, num_rows)
        return plan

    def node_floor(self, num_rows: int) -> float:
        """The probability of a path for which one more row of every tree pays."""
        known = self._sizes.estimates(num_rows) if self._sizes is not None else None
        if known is None or known.verify_per_token is None:
            return 0.0
        return known.verify_per_token * max(1.0, known.gain)

    def _observe(self, controller: DepthController) -> tuple[Transition | None, int]:
        assert isinstance(controller, TreeController)
        transition = controller.observe_trees(
            self._trees,
            verify_seconds=self._verify_seconds,
            draft_asked=self._cut.levels if self._draft_steps else 0,
            draft_steps=self._draft_steps,
            draft_seconds=self._draft_seconds,
            once_seconds=self._once_seconds,
        )
        self._levels_run = self._draft_steps
        return transition, len(self._trees)

    def verified_trees(
        self, caps: Sequence[int], trees: Sequence[DraftTree], paths: Sequence[Sequence[int]]
    ) -> None:
        """What became of this round, request by request.

        Args:
            caps: levels each was allowed.
            trees: as they were verified; the root alone where nothing was drafted.
            paths: accepted rows of each, the root among them.
        """
        if self._sizes is not None:
            rows = zip(caps, trees, paths, strict=True)
            self._trees = [self._outcome(cap, tree, path) for cap, tree, path in rows]

    def _outcome(self, cap: int, tree: DraftTree, path: Sequence[int]) -> TreeOutcome:
        if not cap:
            return NOTHING
        cut = self._cut._replace(levels=min(cap, self._cut.levels))
        run = min(cut.levels, self._levels_run)
        if len(tree) == 1:
            return NOTHING._replace(cut=cut, run=run)
        return outcome_of(tree, path, cut, run)
