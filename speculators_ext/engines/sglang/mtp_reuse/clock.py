"""Times the rounds of chains: what `RoundClock` does, and what one more draft is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculators_ext.engines.sglang.round_clock import RoundClock
from speculators_ext.proposers.adaptive import DepthController
from speculators_ext.proposers.estimates import RunningMedian
from speculators_ext.proposers.mtp_reuse import Worth

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ReuseClock"]


class ReuseClock(RoundClock):
    """A round clock that also says what the stop rule asks.

    Args:
        max_depth: K, the longest chain.
        adaptive: False always plans ``max_depth`` and measures nothing.
    """

    def __init__(self, max_depth: int, *, adaptive: bool) -> None:
        super().__init__(max_depth, 1, adaptive=adaptive)
        if adaptive:
            self._controller = DepthController(max_depth, 1, lines=True)
        self._began = 0.0
        self._idle = RunningMedian(9)

    def begin(self, names: Sequence[str]) -> None:
        """A round starts."""
        super().begin(names)
        self._began = self._now()

    def end_drafting(self) -> None:
        """Drafting is over: what it took beside its parts is of drafting, if it drafted.

        A round without drafts is looked at for what every round takes.
        """
        parts = self._draft_seconds + self._search_seconds + self._once_seconds
        around = self._now() - self._began - parts
        if self._draft_steps:
            self._draft_seconds += max(0.0, around - (self._idle.value() or 0.0))
        else:
            self._idle.observe(around)
        super().end_drafting()

    def plan(self, num_rows: int) -> tuple[int, Worth]:
        """The longest chain ``num_rows`` decoding rows may draft now, and what drafts are worth."""
        depth = self.depth(num_rows)
        prices = self._controller.prices(num_rows) if self._controller and depth else None
        if prices is None:
            return depth, Worth()
        draft_step, verify_token, gain = prices
        return depth, Worth(draft_step, verify_token, max(1.0, gain))
