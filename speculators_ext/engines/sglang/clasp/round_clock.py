"""Times rounds and feeds the depth controller, so that drafting stays worth its cost."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from speculators_ext.engines.sglang.log import logger
from speculators_ext.proposers.adaptive import DepthController, RowOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["RoundClock"]


class RoundClock:
    """Measures target steps, draft steps and searches; answers how deep to draft next.

    A round is ``begin``, drafting inside ``drafting`` / ``searching``, ``end_drafting``,
    verification, ``verified``. The target's step is what passes between the end of drafting and
    the next round's beginning.

    Args:
        max_depth: K, the deepest a round may draft.
        refresh_interval: rounds between two searches.
        adaptive: False always answers ``max_depth`` and measures nothing.
    """

    def __init__(self, max_depth: int, refresh_interval: int, *, adaptive: bool) -> None:
        self._max_depth = max_depth
        self._controller = DepthController(max_depth, refresh_interval) if adaptive else None
        self._drafting_ended: float | None = None
        self._names: list[str] = []
        self._outcomes: list[RowOutcome] = []
        self._clear()

    def _clear(self) -> None:
        self._verify_seconds: float | None = None
        self._draft_seconds = self._search_seconds = 0.0
        self._draft_steps = 0

    def interrupt(self) -> None:
        """Something else ran in between, such as a prefill: the next round's wait says nothing."""
        self._drafting_ended = None

    def begin(self, names: Sequence[str]) -> None:
        """A round of these requests starts: what has passed since drafting was the target's."""
        if self._drafting_ended is not None and list(names) == self._names:
            self._verify_seconds = time.perf_counter() - self._drafting_ended
        self._names = list(names)

    def depth(self, num_rows: int) -> int:
        """How many tokens to draft at most in this round, for ``num_rows`` rows that could."""
        if self._controller is None:
            return self._max_depth
        return self._controller.depth(num_rows) if num_rows else 0

    @contextmanager
    def drafting(self, step: int) -> Iterator[None]:
        """Around draft forward ``step`` (0..K-1) of a group of rows."""
        started = time.perf_counter()
        yield
        self._draft_seconds += time.perf_counter() - started
        self._draft_steps = max(self._draft_steps, step + 1)

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Around one search for a skip set."""
        started = time.perf_counter()
        yield
        self._search_seconds += time.perf_counter() - started

    def end_drafting(self) -> None:
        """Book the round before this one, and this one's drafting."""
        if self._controller is not None and self._outcomes:
            transition = self._controller.observe(
                self._outcomes,
                verify_seconds=self._verify_seconds,
                draft_steps=self._draft_steps,
                draft_seconds=self._draft_seconds,
                search_seconds=self._search_seconds,
            )
            if transition is not None:
                known = self._controller.estimates(len(self._outcomes))
                logger.info("%s", known.describe(transition, len(self._outcomes)))
        self._clear()
        self._drafting_ended = time.perf_counter()

    def verified(
        self, caps: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """What became of this round: drafts allowed, made and accepted, row by row."""
        rows = zip(caps, drafted, accepted, strict=True)
        self._outcomes = [RowOutcome(max(cap, count), count, hits) for cap, count, hits in rows]
