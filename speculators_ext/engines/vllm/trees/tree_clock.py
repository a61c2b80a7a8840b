"""Times the rounds of draft trees: what `StepClock` does for chains, with levels for drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from speculators_ext.engines.vllm.step_clock import StepClock
from speculators_ext.proposers.adaptive import RowOutcome

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from speculators_ext.tree import DraftTree

__all__ = ["Plan", "TreeClock"]

# Chance that one of a node's children is accepted when the node is: what a level adds, at most.
_ACCEPTANCE = 0.7
# Weight that the mean tree keeps from round to round.
_DECAY = 0.98


class Plan(NamedTuple):
    """What a round may draft.

    Attributes:
        levels: of the trees; 0: none.
        level_floor: probability that must reach a level for it to pay.
        node_floor: probability of a path for verifying its last node to pay.
    """

    levels: int
    level_floor: float
    node_floor: float


class TreeClock(StepClock):
    """A step clock whose unit of drafting is a level of the tree.

    The controller says how deep trees may be; within that, each tree grows where the head is sure
    enough for the measured cost of another level and of another verified node.

    Args:
        depth: levels of a full tree.
        adaptive: False always plans ``depth`` levels and no floors, and measures nothing.
    """

    def __init__(self, depth: int, *, adaptive: bool) -> None:
        super().__init__(depth, 1, adaptive=adaptive, fixed_launches=False)
        self._levels: dict[str, int] = {}
        self._mean_levels = self._mean_nodes = 1.0

    def plan(self, num_rows: int) -> Plan:
        """What ``num_rows`` decoding rows may draft in this round."""
        levels = self.depth(num_rows)
        known = self._controller.estimates(num_rows) if self._controller and levels else None
        if known is None or known.draft_step is None or known.verify_per_token is None:
            return Plan(levels, 0.0, 0.0)
        node = known.verify_per_token * self._mean_levels / self._mean_nodes
        return Plan(levels, min(known.draft_step / _ACCEPTANCE, 1.0), min(node, 1.0))

    def ran(self, levels: int) -> None:
        """How many levels the drafting that is being timed has run."""
        self._draft_steps = max(self._draft_steps, levels)

    def drafted(self, trees: dict[str, DraftTree]) -> None:
        """Each request's new tree, by id; call it when the round has ended."""
        self._levels = {req_id: int(tree.depths().max()) for req_id, tree in trees.items()}
        for tree, levels in zip(trees.values(), self._levels.values(), strict=True):
            self._mean_levels += (1 - _DECAY) * (levels - self._mean_levels)
            self._mean_nodes += (1 - _DECAY) * (len(tree) - 1 - self._mean_nodes)

    def _outcomes(self, input_batch: InputBatch, sampled: list[int]) -> list[RowOutcome]:
        scheduled = input_batch.num_draft_tokens_per_req
        outcomes = []
        for row, req_id in enumerate(input_batch.req_ids):
            if sampled[row] == 0:
                continue
            verified = scheduled is not None and scheduled[row] > 0
            levels = self._levels.get(req_id, 0) if verified else 0
            cap = max(levels, self._caps.get(req_id, 0))
            outcomes.append(RowOutcome(cap, levels, min(sampled[row] - 1, levels)))
        return outcomes
