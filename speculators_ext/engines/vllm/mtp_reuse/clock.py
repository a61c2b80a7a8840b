"""Times the rounds of chains: what `StepClock` does, and what one more draft is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.reuse_times import ReuseTimes
from speculators_ext.engines.vllm.step_clock import StepClock

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

__all__ = ["ReuseClock"]


class ReuseClock(StepClock, ReuseTimes):
    """A step clock that also says what the stop rule asks.

    Args:
        max_depth: K, the longest chain.
        adaptive: False always plans ``max_depth`` and measures nothing.
        fixed_launches: rows cannot leave a draft batch early (GPUs).
    """

    def __init__(self, max_depth: int, *, adaptive: bool, fixed_launches: bool) -> None:
        super().__init__(max_depth, 1, adaptive=adaptive, fixed_launches=fixed_launches)
        self._use_lines(max_depth, adaptive=adaptive, fixed_launches=fixed_launches)

    def begin(self, input_batch: InputBatch) -> None:
        """A round starts."""
        super().begin(input_batch)
        self._began = self._now()

    def end(self, input_batch: InputBatch, *args: Any) -> None:
        """A round is over."""
        self._book_rest()
        super().end(input_batch, *args)
