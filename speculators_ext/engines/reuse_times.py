"""What the clocks of `mtp_reuse` add: the rest of a round, and what one more draft is worth."""

from __future__ import annotations

from speculators_ext.engines.round_times import RoundTimes
from speculators_ext.proposers.adaptive import DepthController
from speculators_ext.proposers.estimates import RunningMedian
from speculators_ext.proposers.mtp_reuse import Worth

__all__ = ["ReuseTimes"]


class ReuseTimes(RoundTimes):
    """Goes beside an engine's clock of rounds."""

    def _use_lines(self, max_depth: int, *, adaptive: bool, fixed_launches: bool = False) -> None:
        """Take costs as lines; the last thing a clock's making does."""
        if adaptive:
            self._controller = DepthController(
                max_depth, 1, fixed_launches=fixed_launches, lines=True
            )
        self._began = 0.0
        self._idle = RunningMedian(9)

    def _book_rest(self) -> None:
        """What drafting took beside its parts is of drafting, if the round drafted.

        A round without drafts is looked at for what every round takes.
        """
        parts = self._draft_seconds + self._search_seconds + self._once_seconds
        around = self._now() - self._began - parts
        if self._draft_steps:
            self._draft_seconds += max(0.0, around - (self._idle.value() or 0.0))
        else:
            self._idle.observe(around)

    def plan(self, num_rows: int) -> tuple[int, Worth]:
        """The longest chain ``num_rows`` decoding rows may draft now, and what drafts are worth."""
        depth = self.depth(num_rows)
        prices = self._controller.prices(num_rows) if self._controller and depth else None
        if prices is None:
            return depth, Worth()
        draft_step, verify_token, gain = prices
        return depth, Worth(draft_step, verify_token, max(1.0, gain))
