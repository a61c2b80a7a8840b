"""What is known of each request: where it stands, what was drafted for it, and how it is judged."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from speculators_ext.engines.vllm.log import logger
from speculators_ext.engines.vllm.trees.model_state import needs_chain
from speculators_ext.proposers.reasoning_step import (
    DelimiterWatch,
    DraftedStep,
    StepCounters,
    StepTracker,
)
from speculators_ext.proposers.step_judges import JUDGES

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from vllm.v1.core.sched.output import NewRequestData

    from speculators_ext.config import ReasoningStepConfig
    from speculators_ext.engines.vllm.reasoning_step.counts_page import CountsWriter
    from speculators_ext.proposers.reasoning_step import StepRules
    from speculators_ext.request_options import RequestOptions

__all__ = ["COUNTERS", "StepBook"]

COUNTERS = StepCounters()
"""Of this process."""

_LOG_SECONDS, _IDLE_SECONDS = 10.0, 1.0
"""Least time between two lines of the log, with requests running and when the last has gone."""


@dataclass
class _Entry:
    tracker: StepTracker
    exact: bool
    written: int
    """Tokens, prompt included, that the tracker has seen or need not see."""
    drafts: int = 0
    judgeable: bool = False


class StepBook:
    """The method's state between drafting and verification, by request slot.

    Args:
        rules: of every request.
        options: the method's settings.
        always_exact: no step of any request is ever judged.
        most: drafts that a step may hold.
    """

    def __init__(
        self, rules: StepRules, options: ReasoningStepConfig, always_exact: bool, most: int
    ) -> None:
        self._rules = rules
        self._watch = DelimiterWatch(rules, most)
        self._always_exact = always_exact
        self.judge = JUDGES[options.judge](options.mean_logprob)
        self.threshold, self.least_threshold = options.passes_from, options.least_threshold
        self._entries: dict[int, _Entry] = {}
        self._running: set[str] = set()
        self._logged = (time.monotonic(), 0)
        self.page: CountsWriter | None = None
        """Where the metrics page is on this machine, and this is the rank that writes it."""
        self.digit_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """Set by the speculator: request slots and last positions -> logits of the digits."""
        self.suffix_room = 0
        """Positions a judge needs behind a step; set by the speculator."""
        self.max_model_len = 0

    def admit(self, slot: int, new: NewRequestData, *, exact: bool = False) -> None:
        """A request now owns the slot; ``exact`` when no step of it is to be judged."""
        prompt = new.prompt_token_ids or []
        known = new.prefill_token_ids or prompt
        params = new.sampling_params
        rules = self._rules
        if params is not None:
            stops = frozenset(params.all_stop_token_ids)
            rules = replace(rules, stops=rules.stops | stops)
        tracker = StepTracker(rules, prompt, known[len(prompt) :])
        exact = exact or self._always_exact or needs_chain(params)
        self._entries[slot] = _Entry(tracker, exact, len(known))
        self._running.add(new.req_id)

    def dismiss(self, req_id: str) -> None:
        """A request has gone; behind the last one the log gets its totals."""
        self._running.discard(req_id)
        if not self._running:
            self.log(_IDLE_SECONDS)

    def missing(self, slot: int, total: int) -> int:
        """How many of a request's ``total`` tokens are to be fed."""
        return max(0, total - self._entries[slot].written)

    def feed(self, slot: int, tokens: list[int]) -> None:
        """The next tokens of a request."""
        entry = self._entries[slot]
        entry.tracker.feed(tokens)
        entry.written += len(tokens)

    def begin_step(self, slot: int) -> DraftedStep:
        """A walk along the step about to be drafted."""
        return DraftedStep(self._entries[slot].tracker)

    def note_drafts(self, slot: int, drafts: int, step: DraftedStep | None) -> None:
        """What goes to the scheduler for a request; no step where nothing was drafted."""
        entry = self._entries[slot]
        entry.drafts = drafts
        entry.judgeable = step is not None and step.judgeable and not entry.exact
        warning = None if step is None else self._watch.note(step, drafts)
        if warning is not None:
            logger.warning(warning)

    def may_judge(self, slot: int, drafts: int, last_position: int) -> bool:
        """Whether the ``drafts`` that were scheduled are a whole step that a judge may see.

        Args:
            slot: of the request.
            drafts: may be fewer than were drafted.
            last_position: of the last of them.
        """
        entry = self._entries.get(slot)
        return (
            entry is not None
            and entry.judgeable
            and entry.drafts == drafts
            and last_position + self.suffix_room < self.max_model_len
        )

    def threshold_of(self, options: RequestOptions) -> float:
        """The request's own threshold, or the server's."""
        return self.threshold if options.threshold is None else options.threshold

    def report(self) -> None:
        """After a verification: the metrics page at once, the log now and then."""
        if self.page is not None:
            self.page.write(COUNTERS)
        self.log()

    def log(self, pause: float = _LOG_SECONDS) -> None:
        """Say what was judged, unless that was said less than ``pause`` seconds ago."""
        then, seen = self._logged
        now = time.monotonic()
        if now - then >= pause and COUNTERS.drafted > seen:
            self._logged = now, COUNTERS.drafted
            logger.info("reasoning_step: %s", COUNTERS.line())
