"""How deep to draft, down to not at all, from what this machine has been measured to do.

All costs are in plain steps, that is in multiples of the target's forward with one token a row at
the same batch size: drafting then has the speed, relative to none,

    gain(d) = E[tokens](d) / (1 + v * E[drafts a row] + c * E[draft steps] + s)

with v the cost of one more verified token a row, c that of a draft step, s the share of what is not
paid in every step (a skip search, a head's catching up over a prompt), and the expectations from
the acceptance by position. The deepest gain wins, if it is
worth it. While it is not, drafting stays off and is tried again for a few steps now and then; the
time this loses is counted and bought back by waiting, so it stays within `BUDGET` of the total.

Plain Python floats, no clock: times are passed in, so equal inputs give equal decisions. Under
tensor parallelism one controller lives on rank 0, which alone observes; `depth` changes nothing
and its value is broadcast.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from speculators_ext.proposers.estimates import LineWindow, RunningMedian, SlopeWindow, Survival

if TYPE_CHECKING:
    from collections.abc import Sequence

# Share of the time that trying may lose.
BUDGET = 0.01
# Plain steps measured before drafting is tried at a batch size.
PLAIN_SAMPLES = 5
# Drafted steps of one try, and their depth: just deep enough to see acceptance fall.
PROBE_STEPS = 8
PROBE_DEPTH = 2
# A try ends early, after so many steps, where the gain is below that.
HOPELESS_STEPS, HOPELESS_GAIN = 3, 0.9
# Steps to wait after a failed try; doubles with each failure.
BACKOFF_FIRST, BACKOFF_LAST = 64, 4096
# While drafting, the last few of so many steps go plain, to see whether that cost has changed.
PLAIN_PERIOD, PLAIN_STEPS = 256, 3
# Steps in a row that must look unprofitable before drafting stops.
PATIENCE = 8
# Drafting stops at once where the last steps lost so much each, in plain steps, whatever the
# estimates say: acceptance fell faster than they follow.
LOSS_WINDOW, LOSS_LIMIT = 24, 0.3
# A time counts at most so many times its estimate in the account of what was lost.
CLIP = 3.0
# What is paid once a request is spread over the last hundred drafted steps or so, and over no
# fewer than these: one start would else look like a price of every step.
ONCE_DECAY, ONCE_STEPS = 0.99, 64.0


class RowOutcome(NamedTuple):
    """One row of a verified step.

    Attributes:
        cap: drafts the row was allowed: the depth asked for, or less by its own options.
        drafted: drafts that were verified, at most `cap`.
        accepted: drafts accepted, at most `drafted`.
    """

    cap: int
    drafted: int
    accepted: int


Transition = Literal["stopped", "resumed"]
_Mode = Literal["measure", "probe", "on", "off"]


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
    draft: SlopeWindow = field(default_factory=lambda: SlopeWindow(48))
    search: SlopeWindow = field(default_factory=lambda: SlopeWindow(8))
    mode: _Mode = "measure"
    depth: int = 0
    left: int = 0  # steps until the mode is reconsidered
    backoff: int = BACKOFF_FIRST
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_WINDOW))
    lost: float = 0.0  # plain steps lost by drafting since it last stopped; < 0 is a profit
    once: float = 0.0  # plain steps paid once a request, in the steps below; both decay
    once_steps: float = 0.0
    drafting_steps: int = 0
    unprofitable: int = 0
    said_stopped: bool = False

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


class DepthController:
    """Chooses the draft depth of the next step.

    Args:
        max_depth: K, the deepest it may choose.
        refresh_interval: drafting steps between two runs of the skip search.
        margin: gain over plain needed to switch on (0.02 is 2 %).
        fixed_launches: every row is drafted and verified to the full depth, as where a host cannot
            wait for the device; else a row that stops early saves its steps and its width.
    """

    def __init__(
        self,
        max_depth: int,
        refresh_interval: int = 16,
        *,
        margin: float = 0.02,
        fixed_launches: bool = False,
    ) -> None:
        self._max_depth = max_depth
        self._refresh_interval = refresh_interval
        self._margin = margin
        self._fixed_launches = fixed_launches
        self._regimes: dict[int, Regime] = {}
        self._accepted = Survival(max_depth, prior=0.7, strength=4.0, decay=0.99)
        self._drafted = Survival(max_depth, prior=0.95, strength=4.0, decay=0.99)

    def depth(self, num_rows: int) -> int:
        """Return how deep to draft for `num_rows` decoding rows: 0 .. max_depth. A pure read."""
        regime = self._regimes.get(bucket(num_rows))
        if regime is None or regime.mode in ("measure", "off"):
            return 0
        if regime.mode == "on" and regime.drafting_steps % PLAIN_PERIOD >= (
            PLAIN_PERIOD - PLAIN_STEPS
        ):
            return 0
        return regime.depth

    def observe(
        self,
        rows: Sequence[RowOutcome],
        *,
        verify_seconds: float | None,
        draft_steps: int = 0,
        draft_seconds: float = 0.0,
        search_seconds: float = 0.0,
        once_seconds: float = 0.0,
    ) -> Transition | None:
        """Take in one step: the verification of earlier drafts, then the drafting of new ones.

        Args:
            rows: every decoding row of the step, drafted or not.
            verify_seconds: the target's forward with everything around it (sampling, scheduling),
                None for a step that says nothing about it (prefill mixed in, an idle wait).
            draft_steps: draft forwards run after it.
            draft_seconds: what they took together.
            search_seconds: what the skip search took where it ran in this step, else 0.
            once_seconds: what drafting took beyond that and will not take in the next step, as for
                a prompt that a draft head had to read.

        Returns:
            "stopped" or "resumed" where drafting does, for the log.
        """
        if not rows or self._max_depth == 0:
            return None
        regime = self._regime(len(rows))
        if any(row.cap for row in rows):
            self._accepted.observe([(row.cap, row.accepted) for row in rows])
            self._drafted.observe([(row.cap, row.drafted) for row in rows])
        width = sum(row.drafted for row in rows) / len(rows)
        self._measure(regime, width, verify_seconds, draft_steps, draft_seconds, search_seconds)
        self._account(regime, rows, verify_seconds, draft_steps, draft_seconds, search_seconds)
        plain = regime.plain.value()
        if plain and (draft_steps or once_seconds):
            regime.pay_once(once_seconds / plain)
            regime.lost += once_seconds / plain
        return self._advance(regime, len(rows), any(row.cap for row in rows))

    def estimates(self, num_rows: int) -> Estimates:
        """Return what is known for `num_rows` rows, for a log line or a report."""
        regime = self._regimes.get(bucket(num_rows)) or self._new_regime()
        depth, gain = self._best(regime, num_rows, self._max_depth)
        return Estimates(
            depth,
            gain,
            regime.plain.value(),
            regime.verify.value(),
            regime.draft.value(),
            regime.search.value(),
            tuple(self._accepted.conditional()),
        )

    def _regime(self, num_rows: int) -> Regime:
        key = bucket(num_rows)
        if key not in self._regimes:
            self._regimes[key] = self._new_regime()
        return self._regimes[key]

    def _new_regime(self) -> Regime:
        return Regime()

    def _verify_of(self, regime: Regime) -> SlopeWindow | LineWindow:
        """What drafts like those of the step observed cost to verify."""
        return regime.verify

    def _measure(
        self,
        regime: Regime,
        width: float,
        verify_seconds: float | None,
        draft_steps: int,
        draft_seconds: float,
        search_seconds: float,
    ) -> None:
        """Add the step's times to the estimates; `width` is in drafts a row."""
        if width == 0 and verify_seconds is not None:
            regime.plain.observe(verify_seconds)
        plain = regime.plain.value()
        if not plain:
            return
        if width > 0 and verify_seconds is not None:
            self._verify_of(regime).observe(width, verify_seconds / plain - 1)
        if draft_steps:
            regime.draft.observe(draft_steps, draft_seconds / plain)
        if search_seconds > 0:
            regime.search.observe(1, search_seconds / plain)

    def _account(
        self,
        regime: Regime,
        rows: Sequence[RowOutcome],
        verify_seconds: float | None,
        draft_steps: int,
        draft_seconds: float,
        search_seconds: float,
    ) -> None:
        """Book what the step lost against plain decoding of the same tokens."""
        plain = regime.plain.value()
        if not plain:
            return
        extra = 0.0
        drafts = sum(row.drafted for row in rows) / len(rows)
        if drafts:
            expected = 1 + self._verify_of(regime).at(drafts)
            spent = expected if verify_seconds is None else verify_seconds / plain
            tokens = 1 + sum(row.accepted for row in rows) / len(rows)
            extra += min(spent, CLIP * expected) - tokens
        if draft_steps:
            extra += min(draft_seconds / plain, CLIP * draft_steps * (regime.draft.value() or 0.0))
        if search_seconds > 0:
            extra += min(search_seconds / plain, CLIP * (regime.search.value() or 0.0))
        regime.lost += extra
        regime.recent.append(extra)

    def _best(self, regime: Regime, num_rows: int, limit: int) -> tuple[int, float]:
        """Return the depth in 1 .. limit with the greatest gain, and that gain."""
        verify, draft = regime.verify.value(), regime.draft.value()
        if verify is None or draft is None:
            return min(limit, PROBE_DEPTH), 1.0
        tokens, width, steps = 1.0, 0.0, 0.0
        search = (regime.search.value() or 0.0) / self._refresh_interval + regime.once_share()
        best = (1, 0.0)
        survivals = zip(self._accepted.survival(), self._drafted.survival(), strict=True)
        for depth, (accepted, drafted) in enumerate(survivals, start=1):
            if depth > limit:
                break
            tokens += accepted
            width += 1.0 if self._fixed_launches else drafted
            steps += 1.0 if self._fixed_launches else 1 - (1 - drafted) ** num_rows
            gain = tokens / (1 + verify * width + draft * steps + search)
            if gain > best[1]:
                best = (depth, gain)
        return best

    def _advance(self, regime: Regime, num_rows: int, drafted: bool) -> Transition | None:
        """Move between measuring, trying, drafting and waiting."""
        if regime.mode == "measure":
            if len(regime.plain) >= PLAIN_SAMPLES:
                self._leave_measuring(regime, num_rows)
            return None
        if regime.mode == "off":
            regime.left -= 1
            if regime.left <= 0:
                self._try_again(regime, num_rows)
            return None
        if regime.mode == "probe":
            regime.left -= drafted
            _, gain = self._best(regime, num_rows, self._max_depth)
            hopeless = gain < HOPELESS_GAIN and PROBE_STEPS - regime.left >= HOPELESS_STEPS
            if regime.left > 0 and not hopeless:
                return None
            return self._start(regime, num_rows) if gain > 1 + self._margin else self._stop(regime)
        regime.drafting_steps += 1
        regime.depth, gain = self._best(regime, num_rows, self._max_depth)
        regime.unprofitable = regime.unprofitable + 1 if gain < 1 else 0
        losing = len(regime.recent) == LOSS_WINDOW and sum(regime.recent) > LOSS_WINDOW * LOSS_LIMIT
        return self._stop(regime) if losing or regime.unprofitable >= PATIENCE else None

    def _leave_measuring(self, regime: Regime, num_rows: int) -> None:
        """Try drafting, unless it does not pay at the nearest batch size that was tried."""
        others = [key for key, other in self._regimes.items() if other.mode != "measure"]
        if others:
            nearest = min(others, key=lambda key: abs(math.log(key / num_rows)))
            if self._regimes[nearest].mode == "off":
                regime.mode, regime.left, regime.said_stopped = "off", regime.backoff, True
                return
        self._probe(regime, num_rows)

    def _probe(self, regime: Regime, num_rows: int) -> None:
        regime.mode, regime.left = "probe", PROBE_STEPS
        regime.depth, _ = self._best(regime, num_rows, min(PROBE_DEPTH, self._max_depth))

    def _try_again(self, regime: Regime, num_rows: int) -> None:
        """Start a try that mostly counts for itself: what was known may no longer hold."""
        self._forget(0.1)
        for costs in (regime.verify, regime.chain, regime.draft):
            costs.keep_last(PROBE_STEPS // 2)
        self._probe(regime, num_rows)

    def _forget(self, share: float) -> None:
        """Let what was learned about acceptance weigh so much less."""
        self._accepted.forget(share)
        self._drafted.forget(share)

    def _start(self, regime: Regime, num_rows: int) -> Transition | None:
        regime.mode, regime.drafting_steps, regime.unprofitable = "on", 0, 0
        regime.recent.clear()
        regime.depth, _ = self._best(regime, num_rows, self._max_depth)
        said, regime.said_stopped = regime.said_stopped, False
        return "resumed" if said else None

    def _stop(self, regime: Regime) -> Transition | None:
        """Wait long enough that the time just lost is within the budget."""
        repay = math.ceil(max(0.0, regime.lost) / BUDGET)
        regime.left = min(max(regime.backoff, repay), BACKOFF_LAST)
        profitable = regime.lost < 0
        regime.backoff = BACKOFF_FIRST if profitable else min(2 * regime.backoff, BACKOFF_LAST)
        regime.mode, regime.depth, regime.lost = "off", 0, 0.0
        said, regime.said_stopped = regime.said_stopped, True
        return None if said else "stopped"
