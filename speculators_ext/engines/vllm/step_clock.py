"""Times a round and feeds the depth controller, so that drafting stays worth its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from speculators_ext.engines.round_times import RoundTimes
from speculators_ext.engines.vllm.log import logger
from speculators_ext.proposers.adaptive import DepthController, RowOutcome

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from speculators_ext.proposers.regimes import Transition

__all__ = ["StepClock"]


class StepClock(RoundTimes):
    """Measures target steps, draft steps and searches; answers how deep to draft next.

    A round is ``begin`` (at the start of propose), drafting inside ``drafting`` / ``searching``,
    ``end``. The target's step is what passes between one round's end and the next one's begin.

    Args:
        max_depth: K, the deepest a round may draft.
        refresh_interval: rounds between two searches.
        adaptive: False always answers ``max_depth`` and measures nothing.
        fixed_launches: rows cannot leave a draft batch early (GPUs).
    """

    def __init__(
        self, max_depth: int, refresh_interval: int, *, adaptive: bool, fixed_launches: bool
    ) -> None:
        super().__init__(own_time=current_platform.is_cpu())
        self._max_depth = max_depth
        self._controller = (
            DepthController(max_depth, refresh_interval, fixed_launches=fixed_launches)
            if adaptive
            else None
        )
        self._ended: tuple[float, float] | None = None
        self._batch: set[str] = set()
        self._caps: dict[str, int] = {}

    def begin(self, input_batch: InputBatch) -> None:
        """A round starts: what has passed since the last one was the target's."""
        if self._controller is None:
            return
        # In any order: vLLM sorts a batch by scheduled tokens, which ragged drafts change.
        batch = set(input_batch.req_ids)
        steady = not input_batch.has_prefill and batch == self._batch
        if steady and self._ended is not None:
            self._verify_seconds = self._since(self._ended)
        self._batch = batch

    def end(self, input_batch: InputBatch, num_sampled: torch.Tensor, caps: list[int]) -> None:
        """A round is over.

        Args:
            input_batch: the batch that was verified.
            num_sampled: [num_reqs], accepted drafts + 1 of each row, 0 for unfinished prompts.
            caps: [num_reqs], drafts each row was allowed in the drafting that just ended.
        """
        if self._controller is None:
            return
        sampled = num_sampled.tolist()
        transition = self._observe(self._controller, input_batch, sampled)
        if transition is not None:
            num_rows = sum(count > 0 for count in sampled)
            known = self._controller.estimates(num_rows)
            logger.info("%s", known.describe(transition, num_rows))
        self._caps = dict(zip(input_batch.req_ids, caps, strict=False))
        self._clear()
        self._ended = self._moment()

    def _observe(
        self, controller: DepthController, input_batch: InputBatch, sampled: list[int]
    ) -> Transition | None:
        """Tell the controller what the round was like."""
        return controller.observe(
            self._outcomes(input_batch, sampled),
            verify_seconds=self._verify_seconds,
            draft_steps=self._draft_steps,
            draft_seconds=self._draft_seconds,
            search_seconds=self._search_seconds,
            once_seconds=self._once_seconds,
        )

    def _outcomes(self, input_batch: InputBatch, sampled: list[int]) -> list[RowOutcome]:
        drafted = input_batch.num_draft_tokens_per_req
        outcomes = []
        for row, req_id in enumerate(input_batch.req_ids):
            if sampled[row] == 0:
                continue
            count = 0 if drafted is None else int(drafted[row])
            cap = max(count, self._caps.get(req_id, 0))
            outcomes.append(RowOutcome(cap, count, min(sampled[row] - 1, count)))
        return outcomes
