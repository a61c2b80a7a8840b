"""What the parts of a drafting round take, on the host's clock, for either engine's clock."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from speculators_ext.proposers.estimates import RunningMedian

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RoundTimes"]


class RoundTimes:
    """Seconds of one round: drafting, searching, and what is paid once; ``_clear`` starts anew."""

    def __init__(self) -> None:
        self._steady_extend = RunningMedian(9)
        self._clear()

    def _clear(self) -> None:
        self._verify_seconds: float | None = None
        self._draft_seconds = self._search_seconds = self._once_seconds = 0.0
        self._draft_steps = 0

    def _now(self) -> float:
        """Seconds on the clock that the parts of a round are timed with."""
        return time.perf_counter()

    @contextmanager
    def drafting(self, step: int) -> Iterator[None]:
        """Around draft forward ``step`` (0..K-1) of a group of rows."""
        started = self._now()
        yield
        self._draft_seconds += self._now() - started
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
        started = self._now()
        yield
        seconds = self._now() - started
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
        started = self._now()
        yield
        self._search_seconds += self._now() - started

    def ran(self, steps: int) -> None:
        """How many steps the drafting that is being timed has run."""
        self._draft_steps = max(self._draft_steps, steps)
