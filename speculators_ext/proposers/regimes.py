"""What is known at one batch size, and in which state drafting is there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from speculators_ext.proposers.estimates import LineWindow, RunningMedian, SlopeWindow

__all__ = ["BACKOFF_FIRST", "LOSS_WINDOW", "Estimates", "Regime", "Transition", "bucket"]

# Steps to wait after the first failed try.
BACKOFF_FIRST = 64
# Drafted steps whose losses are looked at together.
LOSS_WINDOW = 24
# What is paid once a request is spread over the last hundred drafted steps or so, and over no
# fewer than these: one start would else look like a price of every step.
ONCE_DECAY, ONCE_STEPS = 0.99, 64.0

Transition = Literal["stopped", "resumed"]
_Mode = Literal["measure", "probe", "on", "check", "off"]


class Estimates(NamedTuple):
    """What is known at one batch size; costs in plain steps, None where not measured.

    Attributes:
        depth: the depth that pays most.
        gain: its speed relative to plain.
        plain_seconds: one plain step.
        verify_per_token: one more verified token a row.
        draft_step: one draft step.
        search: one run of the skip search.
        acceptance: chance of each draft, given all before it were accepted.
    """

    depth: int
    gain: float
    plain_seconds: float | None
    verify_per_token: float | None
    draft_step: float | None
    search: float | None
    acceptance: tuple[float, ...]

    def describe(self, transition: Transition, num_rows: int) -> str:
        """One log line: drafting of ``num_rows`` requests has stopped or resumed, and why."""
        costs = (
            f"draft step {self.draft_step or 0.0:.2f}, verified token "
            f"{self.verify_per_token or 0.0:.2f}, search {self.search or 0.0:.2f} of a plain step "
            f"of {1000 * (self.plain_seconds or 0.0):.1f} ms"
        )
        acceptance = " ".join(f"{chance:.2f}" for chance in self.acceptance[:4])
        later = "; plain decoding meanwhile, tried again later" if transition == "stopped" else ""
        return (
            f"Drafting {transition} at {num_rows} running request(s): best depth {self.depth} "
            f"would give {self.gain:.2f}x plain speed ({costs}; acceptance {acceptance}){later}"
        )


@dataclass
class Regime:
    """Costs and state of one bucket of batch sizes; a controller's own."""

    plain: RunningMedian = field(default_factory=lambda: RunningMedian(9))
    verify: SlopeWindow | LineWindow = field(default_factory=lambda: SlopeWindow(48))
    chain: LineWindow = field(default_factory=lambda: LineWindow(48))  # `verify` without branches
    draft: SlopeWindow | LineWindow = field(default_factory=lambda: SlopeWindow(48))
    search: SlopeWindow = field(default_factory=lambda: SlopeWindow(8))
    mode: _Mode = "measure"
    depth: int = 0
    gain: float = 1.0  # of that depth, as last looked at
    left: int = 0  # steps until the mode is reconsidered
    backoff: int = BACKOFF_FIRST
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_WINDOW))
    lost: float = 0.0  # plain steps lost by drafting since it last stopped; < 0 is a profit
    once: float = 0.0  # plain steps paid once a request, in the steps below; both decay
    once_steps: float = 0.0
    drafting_steps: int = 0
    unprofitable: int = 0
    said_stopped: bool = False
    before: float = 0.0  # seconds of a plain step when a check began

    def in_other_steps(self, factor: float) -> None:
        """Give all costs in plain steps that are ``1 / factor`` as long."""
        for costs in (self.verify, self.chain):
            costs.rescale(factor, base=1.0)
        for costs in (self.draft, self.search):
            costs.rescale(factor)

    def pay_once(self, cost: float) -> None:
        """Book a drafted step's share of what is paid once a request, in plain steps."""
        self.once = ONCE_DECAY * self.once + cost
        self.once_steps = ONCE_DECAY * self.once_steps + 1

    def once_share(self) -> float:
        """What of it falls on a drafted step."""
        return self.once / max(self.once_steps, ONCE_STEPS)


def bucket(num_rows: int) -> int:
    """Return the batch size that stands for `num_rows`: 1 2 3 4 6 8 12 16 24 32 ..."""
    if num_rows <= 4:
        return num_rows
    power = 1 << (num_rows - 1).bit_length()
    return power * 3 // 4 if num_rows <= power * 3 // 4 else power
