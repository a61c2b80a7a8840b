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
from typing import TYPE_CHECKING, NamedTuple

from speculators_ext.proposers.estimates import LineWindow, Survival
from speculators_ext.proposers.regimes import (
    BACKOFF_FIRST,
    LOSS_WINDOW,
    Estimates,
    Regime,
    bucket,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculators_ext.proposers.estimates import SlopeWindow
    from speculators_ext.proposers.regimes import Transition

# Share of the time that trying may lose.
BUDGET = 0.01
# Plain steps measured before drafting is tried at a batch size.
PLAIN_SAMPLES = 5
# Drafted steps of one try, and their depth: just deep enough to see acceptance fall.
PROBE_STEPS = 8
PROBE_DEPTH = 2
# A try ends early, after so many steps, where the gain is below that.
HOPELESS_STEPS, HOPELESS_GAIN = 3, 0.9
# The most steps to wait after a failed try; doubles with each failure up to that.
BACKOFF_LAST = 4096
# While drafting, the last few of so many steps go plain, to see whether that cost has changed.
PLAIN_PERIOD, PLAIN_STEPS = 256, 3
# Drafting that looks like a loss is no loss where plain steps have become so much slower too.
SLOWER = 1.05
# Steps in a row that must look unprofitable before drafting stops, and how often that is looked at.
PATIENCE, REVIEW = 8, 4
# Drafting stops at once where the last steps lost so much each, in plain steps, whatever the
# estimates say: acceptance fell faster than they follow.
LOSS_LIMIT = 0.3
# A time counts at most so many times its estimate in the account of what was lost.
CLIP = 3.0


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


class DepthController:
    """Chooses the draft depth of the next step.

    Args:
        max_depth: K, the deepest it may choose.
        refresh_interval: drafting steps between two runs of the skip search.
        margin: gain over plain needed to switch on (0.02 is 2 %).
        fixed_launches: every row is drafted and verified to the full depth, as where a host cannot
            wait for the device; else a row that stops early saves its steps and its width.
        lines: draft steps, and verified tokens, cost something once a round beside what each does:
            where rows stop as it pays, what one more costs must not contain that.
    """

    def __init__(
        self,
        max_depth: int,
        refresh_interval: int = 16,
        *,
        margin: float = 0.02,
        fixed_launches: bool = False,
        lines: bool = False,
    ) -> None:
        self._max_depth = max_depth
        self._lines = lines
        self._refresh_interval = refresh_interval
        self._margin = margin
        self._fixed_launches = fixed_launches
        self._regimes: dict[int, Regime] = {}
        self._accepted = Survival(max_depth, prior=0.7, strength=4.0, decay=0.99)
        self._drafted = Survival(max_depth, prior=0.95, strength=4.0, decay=0.99)

    def depth(self, num_rows: int) -> int:
        """Return how deep to draft for `num_rows` decoding rows: 0 .. max_depth. A pure read."""
        regime = self._regimes.get(bucket(num_rows))
        if regime is None or regime.mode in ("measure", "off", "check"):
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

    def prices(self, num_rows: int) -> tuple[float, float, float] | None:
        """Cost of a draft step and of a verified token a row, and the gain as last looked at.

        The costs in plain steps; None where they are not measured.
        """
        regime = self._regimes.get(bucket(num_rows))
        if regime is None:
            return None
        draft, verify = regime.draft.value(), regime.verify.value()
        return None if draft is None or verify is None else (draft, verify, regime.gain)

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
        return Regime(verify=LineWindow(48), draft=LineWindow(48)) if self._lines else Regime()

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
            extra += min(draft_seconds / plain, CLIP * regime.draft.at(draft_steps))
        if search_seconds > 0:
            extra += min(search_seconds / plain, CLIP * (regime.search.value() or 0.0))
        regime.lost += extra
        regime.recent.append(extra)

    def _best(self, regime: Regime, num_rows: int, limit: int) -> tuple[int, float]:
        """Return the depth in 1 .. limit with the greatest gain, and that gain."""
        if regime.verify.value() is None or regime.draft.value() is None:
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
            gain = tokens / (1 + regime.verify.at(width) + regime.draft.at(steps) + search)
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
        if regime.mode == "check":
            regime.left -= 1
            return self._check(regime, num_rows)
        if regime.mode == "probe":
            regime.left -= drafted
            _, gain = self._best(regime, num_rows, self._max_depth)
            hopeless = gain < HOPELESS_GAIN and PROBE_STEPS - regime.left >= HOPELESS_STEPS
            if regime.left > 0 and not hopeless:
                return None
            return self._start(regime, num_rows) if gain > 1 + self._margin else self._stop(regime)
        regime.drafting_steps += 1
        if regime.drafting_steps % REVIEW == 0:
            regime.depth, regime.gain = self._best(regime, num_rows, self._max_depth)
            regime.unprofitable = regime.unprofitable + REVIEW if regime.gain < 1 else 0
        losing = len(regime.recent) == LOSS_WINDOW and sum(regime.recent) > LOSS_WINDOW * LOSS_LIMIT
        if losing or regime.unprofitable >= PATIENCE:
            regime.mode, regime.left = "check", PLAIN_SAMPLES + 1
        return None

    def _check(self, regime: Regime, num_rows: int) -> Transition | None:
        """Drafting looks like a loss: is it, or has all become slower than when plain was measured?

        The first step still verifies drafts. Costs are in plain steps, so they change with it.
        """
        if regime.left == PLAIN_SAMPLES:
            regime.before = regime.plain.value() or 0.0
            regime.plain.clear()
        if regime.left > 0:
            return None
        now = regime.plain.value()
        if now and regime.before:
            regime.in_other_steps(regime.before / now)
        _, gain = self._best(regime, num_rows, self._max_depth)
        if gain <= 1 or (now or 0.0) < SLOWER * regime.before:
            return self._stop(regime)
        regime.lost = 0.0
        return self._start(regime, num_rows)

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
        regime.depth, regime.gain = self._best(regime, num_rows, min(PROBE_DEPTH, self._max_depth))

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
        regime.depth, regime.gain = self._best(regime, num_rows, self._max_depth)
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
