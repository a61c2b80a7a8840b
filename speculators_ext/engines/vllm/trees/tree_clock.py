"""Times the rounds of draft trees: what `StepClock` does for chains, with levels for drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculators_ext.engines.vllm.step_clock import StepClock
from speculators_ext.proposers.adaptive_trees import TreeController, TreeCut, TreeOutcome
from speculators_ext.proposers.head_rounds import NOTHING, Plan, outcome_of, plan_round

if TYPE_CHECKING:
    import numpy as np
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from speculators_ext.proposers.adaptive import DepthController
    from speculators_ext.proposers.regimes import Transition
    from speculators_ext.tree import DraftTree

__all__ = ["TreeClock"]


class TreeClock(StepClock):
    """A step clock whose unit of drafting is a level of the tree, of verifying a node.

    Args:
        depth: levels of a full tree.
        adaptive: False always plans ``depth`` levels and no floors, and measures nothing.
    """

    def __init__(self, depth: int, *, adaptive: bool) -> None:
        super().__init__(depth, 1, adaptive=adaptive, fixed_launches=False)
        self._sizes = TreeController(depth) if adaptive else None
        self._controller = self._sizes
        self._paths: torch.Tensor | None = None
        self._cut = self._next_cut = TreeCut(0, 0)
        self._levels_run = 0
        self._trees: dict[str, DraftTree] = {}

    def verified(self, paths: torch.Tensor | None) -> None:
        """What the round's step accepted, int32 [num_reqs, depth + 1]: local rows, -1 behind."""
        self._paths = paths

    def plan(self, num_rows: int) -> Plan:
        """What ``num_rows`` decoding rows may draft in this round."""
        if self._sizes is None:
            return Plan(self._max_depth, 0.0, 0.0)
        self._next_cut, plan = plan_round(self._sizes, num_rows)
        return plan

    def drafted(self, trees: dict[str, DraftTree]) -> None:
        """Each request's new tree, by id; call it when the round has ended."""
        self._trees = trees

    def _observe(
        self, controller: DepthController, input_batch: InputBatch, sampled: list[int]
    ) -> Transition | None:
        assert isinstance(controller, TreeController)
        paths = None if self._paths is None else self._paths.cpu().numpy()
        transition = controller.observe_trees(
            [
                self._outcome(input_batch, row, count, paths)
                for row, count in enumerate(sampled)
                if count
            ],
            verify_seconds=self._verify_seconds,
            draft_asked=self._next_cut.levels if self._draft_steps else 0,
            draft_steps=self._draft_steps,
            draft_seconds=self._draft_seconds,
            once_seconds=self._once_seconds,
        )
        self._cut, self._levels_run = self._next_cut, self._draft_steps
        return transition

    def _outcome(
        self, input_batch: InputBatch, row: int, sampled: int, paths: np.ndarray | None
    ) -> TreeOutcome:
        """What became of a request's drafts."""
        req_id = input_batch.req_ids[row]
        cap, scheduled = self._caps.get(req_id, 0), input_batch.num_draft_tokens_per_req
        if not cap:
            return NOTHING
        cut = self._cut._replace(levels=min(cap, self._cut.levels))
        run = min(cut.levels, self._levels_run)
        tree = self._trees.get(req_id)
        if tree is None:
            return NOTHING._replace(cut=cut, run=run)
        if scheduled is None or paths is None or not scheduled[row]:
            return NOTHING
        tree = tree.cut(int(scheduled[row]) + 1)
        return outcome_of(tree, paths[row, :sampled].tolist(), cut, run)
