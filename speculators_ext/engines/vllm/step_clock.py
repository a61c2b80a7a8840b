"""Times a round and feeds the depth controller, so that drafting stays worth its cost."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from speculators_ext.engines.vllm.log import logger
from speculators_ext.proposers.adaptive import DepthController, RowOutcome
from speculators_ext.proposers.estimates import RunningMedian

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from speculators_ext.proposers.adaptive import Transition

__all__ = ["StepClock"]


class StepClock:
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
        self._max_depth = max_depth
        self._controller = (
            DepthController(max_depth, refresh_interval, fixed_launches=fixed_launches)
            if adaptive
            else None
        )
        self._ended: float | None = None
        self._batch: set[str] = set()
        self._caps: dict[str, int] = {}
        self._steady_extend = RunningMedian(9)
        self._clear()

    def _clear(self) -> None:
        self._verify_seconds: float | None = None
        self._draft_seconds = self._search_seconds = self._once_seconds = 0.0
        self._draft_steps = 0

    def depth(self, num_rows: int) -> int:
        """How many tokens to draft at most in this round, for ``num_rows`` rows that could."""
        if self._controller is None:
            return self._max_depth
        return self._controller.depth(num_rows) if num_rows else 0

    def begin(self, input_batch: InputBatch) -> None:
        """A round starts: what has passed since the last one was the target's."""
        if self._controller is None:
            return
        # In any order: vLLM sorts a batch by scheduled tokens, which ragged drafts change.
        batch = set(input_batch.req_ids)
        steady = not input_batch.has_prefill and batch == self._batch
        if steady and self._ended is not None:
            self._verify_seconds = time.perf_counter() - self._ended
        self._batch = batch

    @contextmanager
    def drafting(self, step: int) -> Iterator[None]:
        """Around draft forward ``step`` (0..K-1) of a group of rows."""
        started = time.perf_counter()
        yield
        self._draft_seconds += time.perf_counter() - started
        self._draft_steps = max(self._draft_steps, step + 1)

    @contextmanager
    def extending(self, new_rows: int, all_rows: int) -> Iterator[None]:
        """Around a head's forward over what the target kept.

        Rows beyond this step's own are a prompt, or what was written while nothing was drafted:
        they are run once, and what they take is no price of the rounds to come.

        Args:
            new_rows: rows this step's decoding requests kept, of those that draft now.
            all_rows: rows run.
        """
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        usual = self._steady_extend.value()
        if new_rows == all_rows:
            self._steady_extend.observe(seconds)
            usual = seconds
        elif new_rows == 0:
            usual = 0.0
        elif usual is None:
            usual = seconds * new_rows / all_rows
        self._draft_seconds += min(seconds, usual)
        self._once_seconds += max(0.0, seconds - usual)

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Around one search for a skip set."""
        started = time.perf_counter()
        yield
        self._search_seconds += time.perf_counter() - started

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
        self._ended = time.perf_counter()

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
