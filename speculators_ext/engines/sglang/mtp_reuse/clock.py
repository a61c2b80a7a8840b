"""Times the rounds of chains: what `RoundClock` does, and what one more draft is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculators_ext.engines.reuse_times import ReuseTimes
from speculators_ext.engines.sglang.round_clock import RoundClock

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ReuseClock"]


class ReuseClock(RoundClock, ReuseTimes):
    """A round clock that also says what the stop rule asks.

    Args:
        max_depth: K, the longest chain.
        adaptive: False always plans ``max_depth`` and measures nothing.
    """

    def __init__(self, max_depth: int, *, adaptive: bool) -> None:
        super().__init__(max_depth, 1, adaptive=adaptive)
        self._use_lines(max_depth, adaptive=adaptive)

    def begin(self, names: Sequence[str]) -> None:
        """A round starts."""
        super().begin(names)
        self._began = self._now()

    def end_drafting(self) -> None:
        """Drafting is over."""
        self._book_rest()
        super().end_drafting()
