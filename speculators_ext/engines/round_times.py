"""What the parts of a drafting round take, for either engine's clock.

On CPUs that is the thread's own time: it stands still while another program has the core, else
drafting would stop where no more than the neighbour changed. What a step waits for other parts of
the engine is in no thread's time; the least of the last waits is added for it.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from speculators_ext.proposers.estimates import RunningMedian

if TYPE_CHECKING:
    from collections.abc import Iterator

    from speculators_ext.proposers.adaptive import DepthController

__all__ = ["RoundTimes"]


class RoundTimes:
    """Seconds of one round: drafting, searching, and what is paid once; ``_clear`` starts anew.

    Args:
        own_time: the thread's own time instead of what passes.
    """

    _max_depth: int
    _controller: DepthController | None

    def __init__(self, *, own_time: bool = False) -> None:
        self._own_time = own_time
        self._waits: deque[float] = deque(maxlen=32)
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

    def _now(self) -> float:
        """Seconds on the clock that the parts of a round are timed with."""
        return time.thread_time() if self._own_time else time.perf_counter()

    def _moment(self) -> tuple[float, float]:
        """Now, in the time that passes and in that of the clock."""
        return time.perf_counter(), self._now()

    def _since(self, then: tuple[float, float]) -> float:
        """Seconds since a moment, the thread's waiting as a steady machine has it."""
        passed, own = time.perf_counter() - then[0], self._now() - then[1]
        self._waits.append(max(0.0, passed - own))
        return own + min(self._waits)

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
