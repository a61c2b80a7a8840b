"""Times rounds and feeds the depth controller, so that drafting stays worth its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from speculators_ext.engines.round_times import RoundTimes
from speculators_ext.engines.sglang.log import logger
from speculators_ext.proposers.adaptive import DepthController, RowOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from speculators_ext.proposers.regimes import Transition

__all__ = ["RoundClock"]


class RoundClock(RoundTimes):
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
        super().__init__(own_time=True)
        self._wait: Callable[[], None] | None = None
        self._max_depth = max_depth
        self._controller = DepthController(max_depth, refresh_interval) if adaptive else None
        self._drafting_ended: tuple[float, float] | None = None
        self._names: list[str] = []
        self._outcomes: list[RowOutcome] = []

    def time_on(self, device: str) -> None:
        """Time work on ``device``, SGLang's name of it. The default is the CPU.

        Elsewhere launching is soon over, so the clock waits for what has been launched.
        """
        self._own_time = device == "cpu"
        module = torch.get_device_module(device)
        self._wait = None if self._own_time else lambda: module.current_stream().synchronize()

    def _settle(self) -> None:
        if self._wait is not None and self._controller is not None:
            self._wait()

    def _now(self) -> float:
        self._settle()
        return super()._now()

    def _moment(self) -> tuple[float, float]:
        self._settle()  # before the time that passes is read too
        return super()._moment()

    def _since(self, then: tuple[float, float]) -> float:
        self._settle()
        return super()._since(then)

    def interrupt(self) -> None:
        """Something else ran in between, such as a prefill: the next round's wait says nothing."""
        self._drafting_ended = None

    def begin(self, names: Sequence[str]) -> None:
        """A round of these requests starts: what has passed since drafting was the target's."""
        if self._drafting_ended is not None and list(names) == self._names:
            self._verify_seconds = self._since(self._drafting_ended)
        self._names = list(names)

    def end_drafting(self) -> None:
        """Book the round before this one, and this one's drafting."""
        if self._controller is not None:
            transition, num_rows = self._observe(self._controller)
            if transition is not None:
                known = self._controller.estimates(num_rows)
                logger.info("%s", known.describe(transition, num_rows))
        self._clear()
        self._drafting_ended = self._moment()

    def _observe(self, controller: DepthController) -> tuple[Transition | None, int]:
        """Tell the controller what the rounds were like; and how many rows the last one had."""
        if not self._outcomes:
            return None, 0
        transition = controller.observe(
            self._outcomes,
            verify_seconds=self._verify_seconds,
            draft_steps=self._draft_steps,
            draft_seconds=self._draft_seconds,
            search_seconds=self._search_seconds,
            once_seconds=self._once_seconds,
        )
        return transition, len(self._outcomes)

    def verified(
        self, caps: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """What became of this round: drafts allowed, made and accepted, row by row."""
        rows = zip(caps, drafted, accepted, strict=True)
        self._outcomes = [RowOutcome(max(cap, count), count, hits) for cap, count, hits in rows]
