"""Times the rounds of chains: what `StepClock` does, and what one more draft is worth."""

from __future__ import annotations

from speculators_ext.engines.vllm.step_clock import StepClock
from speculators_ext.proposers.mtp_reuse import Worth

__all__ = ["ReuseClock"]


class ReuseClock(StepClock):
    """A step clock that also says what the stop rule asks.

    Args:
        max_depth: K, the longest chain.
        adaptive: False always plans ``max_depth`` and measures nothing.
        fixed_launches: rows cannot leave a draft batch early (GPUs).
    """

    def __init__(self, max_depth: int, *, adaptive: bool, fixed_launches: bool) -> None:
        super().__init__(max_depth, 1, adaptive=adaptive, fixed_launches=fixed_launches)

    def plan(self, num_rows: int) -> tuple[int, Worth]:
        """The longest chain ``num_rows`` decoding rows may draft now, and what drafts are worth."""
        depth = self.depth(num_rows)
        known = self._controller.estimates(num_rows) if self._controller and depth else None
        if known is None or known.draft_step is None or known.verify_per_token is None:
            return depth, Worth()
        return depth, Worth(known.draft_step, known.verify_per_token, max(1.0, known.gain))

    def ran(self, steps: int) -> None:
        """How many steps the drafting that is being timed has run."""
        self._draft_steps = max(self._draft_steps, steps)
