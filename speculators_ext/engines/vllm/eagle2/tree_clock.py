"""Times the rounds of draft trees: what `StepClock` does for chains, with levels for drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculators_ext.engines.vllm.step_clock import StepClock
from speculators_ext.proposers.adaptive import RowOutcome

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

__all__ = ["TreeClock"]


class TreeClock(StepClock):
    """A step clock whose unit of drafting is a level of the tree.

    Give a tree of d levels a share of the nodes of a full one that grows with d, so that what
    verifying costs grows with d too, as the controller's model has it.

    Args:
        depth: levels of a full tree.
        adaptive: False always answers ``depth`` and measures nothing.
    """

    def __init__(self, depth: int, *, adaptive: bool) -> None:
        super().__init__(depth, 1, adaptive=adaptive, fixed_launches=False)
        self._levels: dict[str, int] = {}

    def drafted(self, levels: dict[str, int]) -> None:
        """How deep each request's new tree is, by id; call it when the round has ended."""
        self._levels = levels

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
