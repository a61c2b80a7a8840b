r"""Chains drafted by one module that is run again and again, each as long as it pays.

DeepSeek-V3's multi-token-prediction module (arXiv 2412.19437, section 2.2) was trained for one
step. Fed its own output it is right less often from step to step (70 / 11 / 2 % on MiMo-7B, arXiv
2509.18362), so a fixed number of steps soon costs more than it gives. Here a row goes on while

    sum over the rows that go on of  P_i p_i  >=  g (c R + v n)

with P_i the chance that all drafts of row i so far are accepted, p_i that of its next one, g the
tokens a row gets in the time of a plain step as things are, c the cost of a draft step and v of one
more verified token a row, both in plain steps, R rows in the batch and n of them going on. A draft
is verified if P_i >= g v. Chances come from the module's own probabilities, corrected by what was
accepted before at that probability.

The module is any object with the two calls of ``ChainHead``; no engine is known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["AcceptanceTable", "Chain", "ChainHead", "Choice", "StopRule", "Worth", "draft_chains"]

# Positions with counts of their own; deeper ones share the last.
_POSITIONS = 4
_BINS = 8
# Observations the prior is worth, and what a count keeps at each round.
_STRENGTH, _DECAY = 3.0, 0.998
_LARGEST = 1e6
# The module's probability says less of the draft after next.
_OUTLOOK = 0.9


class Choice(NamedTuple):
    """What one step drafts.

    Attributes:
        tokens: int64 [n], the target's ids.
        probabilities: float [n], what the module gave each; the same on every rank.
    """

    tokens: Tensor
    probabilities: Tensor


class ChainHead(Protocol):
    """What drafting asks of a module. ``rows`` are places in the list of limits, n of them."""

    def choose(self, hidden: Tensor, rows: Sequence[int], step: int) -> Choice:
        """Draft a token behind each of ``hidden`` [n, H]; ``step`` counts from 0."""
        ...

    def advance(
        self, rows: Sequence[int], tokens: Tensor, features: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Run the module over ``tokens`` [n] with the recycled ``features`` [n, H].

        Returns:
            What `choose` takes, and the features to recycle next, [n, H] each.
        """
        ...


class Worth(NamedTuple):
    """What drafting costs and gives; costs in plain steps.

    Attributes:
        draft_step: one more draft step.
        verify_token: one more verified token a row.
        gain: tokens a row gets in the time of a plain step.
    """

    draft_step: float = 0.0
    verify_token: float = 0.0
    gain: float = 1.0


@dataclass
class Chain:
    """One row's drafts and what the module gave each."""

    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)


class AcceptanceTable:
    """Chance that a draft is accepted given those before it were, by position and a probability.

    chance = (accepted + s scale sqrt(p)) / (tried + s), from decayed counts in bins of p. Where
    little was seen the root of the probability speaks, which is hopeful: a chance too good is soon
    corrected, while of one too bad nothing would be verified and so nothing learned.

    Args:
        scale: of the prior.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._tried = [0.0] * (_POSITIONS * _BINS)
        self._accepted = [0.0] * (_POSITIONS * _BINS)
        self._unit = 1.0  # what an observation counts now, so that all before it count less

    def chance(self, position: int, probability: float) -> float:
        """The chance at ``position`` (from 0) for a ``probability`` in [0, 1]."""
        cell, strength = _cell(position, probability), _STRENGTH * self._unit
        hoped = strength * self._scale * probability**0.5
        return (self._accepted[cell] + hoped) / (self._tried[cell] + strength)

    def observe(self, position: int, probability: float, accepted: bool) -> None:
        """Count one verified draft, all drafts before it having been accepted."""
        cell = _cell(position, probability)
        self._tried[cell] += self._unit
        if accepted:
            self._accepted[cell] += self._unit

    def forget(self) -> None:
        """Let old counts fade; what was long not tried is tried again."""
        self._unit /= _DECAY
        if self._unit > _LARGEST:
            self._tried = [count / self._unit for count in self._tried]
            self._accepted = [count / self._unit for count in self._accepted]
            self._unit = 1.0


def _cell(position: int, probability: float) -> int:
    share = min(int(probability * _BINS), _BINS - 1) if probability > 0 else 0
    return min(position, _POSITIONS - 1) * _BINS + share


class StopRule:
    """Says which rows draft on and which drafts are verified; see the module's docstring.

    Args:
        floor: least chance of a whole path, whatever it is worth.
    """

    def __init__(self, floor: float = 0.0) -> None:
        self.worth = Worth()
        self._floor = floor
        self._sure = AcceptanceTable()
        self._next = AcceptanceTable(_OUTLOOK)

    def path(self, before: float, step: int, probability: float) -> float:
        """The chance of a path of chance ``before`` and the draft of ``step`` behind it."""
        return before * self._sure.chance(step, probability)

    def verifies(self, path: float) -> bool:
        """Whether the last draft of a path of this chance is worth verifying."""
        return path >= max(self._floor, self.worth.gain * self.worth.verify_token)

    def going_on(
        self, paths: Sequence[float], probabilities: Sequence[float], step: int, num_rows: int
    ) -> list[int]:
        """Which rows draft a token behind that of ``step``.

        Args:
            paths: chances of the rows' paths so far.
            probabilities: what the module gave the last draft of each.
            step: the step that drafted it.
            num_rows: rows of the batch, those that draft nothing included.

        Returns:
            Places in ``paths``, ascending; empty where the step would not pay.
        """
        draft_step, token, gain = self.worth
        going, value = [], -gain * draft_step * num_rows
        for place, (path, probability) in enumerate(zip(paths, probabilities, strict=True)):
            chance = path * self._next.chance(step + 1, probability)
            if self.verifies(path) and chance >= max(self._floor, gain * token):
                going.append(place)
                value += chance - gain * token
        return going if value >= 0 else []

    def observe(self, verified: Sequence[tuple[Sequence[float], int]]) -> None:
        """Learn from one step's rows, each (probabilities of the drafts verified, accepted)."""
        for probabilities, accepted in verified:
            for step, probability in enumerate(probabilities[: accepted + 1]):
                self._sure.observe(step, probability, step < accepted)
                if step:
                    self._next.observe(step, probabilities[step - 1], step < accepted)
        self._sure.forget()
        self._next.forget()


def draft_chains(
    head: ChainHead,
    hidden: Tensor,
    features: Tensor,
    limits: Sequence[int],
    rule: StopRule,
    *,
    num_rows: int,
    stepwise: bool = True,
) -> tuple[list[Chain], int]:
    """Draft one chain a row.

    Args:
        head: runs the module.
        hidden: [R, H], what `ChainHead.choose` takes, at each row's last token.
        features: [R, H], the hidden states to recycle from there.
        limits: [R], the most drafts of each row.
        rule: which rows go on.
        num_rows: rows of the batch these R are from.
        stepwise: ask the rule after every step, which reads values back to the host. Else all rows
            run to their limits, and the rule cuts what came out.

    Returns:
        The chains, and how many steps were run.
    """
    chains = [Chain() for _ in limits]
    paths = [1.0] * len(limits)
    rows = [row for row, limit in enumerate(limits) if limit > 0]
    if len(rows) < len(limits):
        hidden, features = hidden[rows], features[rows]
    steps: list[tuple[list[int], Choice]] = []
    while rows:
        step = len(steps)
        choice = head.choose(hidden, rows, step)
        steps.append((rows, choice))
        going = [place for place, row in enumerate(rows) if limits[row] > step + 1]
        if stepwise:
            _append(chains, paths, rows, choice, step, rule)
            own = [paths[rows[place]] for place in going]
            last = [chains[rows[place]].probabilities[-1:] or [0.0] for place in going]
            asked = rule.going_on(own, [value for [value] in last], step, num_rows)
            going = [going[index] for index in asked]
        tokens = choice.tokens
        if going and len(going) < len(rows):
            tokens, features = tokens[going], features[going]
        rows = [rows[place] for place in going]
        if rows:
            hidden, features = head.advance(rows, tokens, features, step)
    if not stepwise:
        for step, (rows, choice) in enumerate(steps):
            _append(chains, paths, rows, choice, step, rule)
    return chains, len(steps)


def _append(
    chains: list[Chain],
    paths: list[float],
    rows: Sequence[int],
    choice: Choice,
    step: int,
    rule: StopRule,
) -> None:
    """Add the drafts of a step to the chains they are worth verifying in."""
    drafted = zip(rows, choice.tokens.tolist(), choice.probabilities.tolist(), strict=True)
    for row, token, probability in drafted:
        paths[row] = rule.path(paths[row], step, probability)
        if len(chains[row].tokens) == step and rule.verifies(paths[row]):
            chains[row].tokens.append(token)
            chains[row].probabilities.append(probability)
