"""A head's round that grows draft trees, one forward of the head a level."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.sglang.heads.level_head import LevelHead
from speculators_ext.engines.sglang.heads.tree_clock import TreeClock
from speculators_ext.engines.sglang.heads.worker import HeadWorker
from speculators_ext.proposers.head_rounds import grow_planned

if TYPE_CHECKING:
    from speculators_ext.proposers.head_rounds import Plan, Roots
    from speculators_ext.tree import DraftTree

__all__ = ["TreeWorker"]


class TreeWorker(HeadWorker[TreeClock]):
    """Drafts trees; the settings are those of `grow_trees`.

    Args:
        options: the method's settings.
        args: SGLang's arguments of a speculative worker.
    """

    def __init__(self, options: Any, *args: Any) -> None:
        super().__init__(options, TreeClock(options.depth, adaptive=options.adaptive), *args)

    @property
    def full_depth(self) -> int:
        """Levels of a tree that holds all drafts."""
        return self._options.depth

    def plan(self, num_rows: int) -> Plan:
        """What ``num_rows`` decoding rows may draft in this round."""
        return self._clock.plan(num_rows)

    def node_floor(self, num_rows: int) -> float:
        """What one more verified row costs a request, in tokens."""
        return self._clock.node_floor(num_rows)

    def grow(self, batch: Any, roots: Roots, plan: Plan) -> list[DraftTree]:
        """A tree from each root."""
        places = self._options.topk * max(1, self._options.depth - 1)
        head = LevelHead(self, batch, roots, places)
        trees = grow_planned(
            head, roots, plan, self._options,
            chains=[False] * len(roots.rows), num_rows=self._most + 1, prune=True,
        )  # fmt: skip
        self._clock.ran(1 + head.num_steps)
        return trees

    def note_outcome(
        self, batch: Any, caps: list[int], trees: list[DraftTree], paths: list[list[int]]
    ) -> None:
        """Tell the clock."""
        self._clock.verified_trees(caps, trees, paths)
