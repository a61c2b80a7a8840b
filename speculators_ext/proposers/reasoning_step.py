"""Reasoning-step speculation: where a step ends, which steps may be judged, and what was counted.

A small model drafts one step of a text, to its delimiter; the target reads it in one forward. What
the target would have written itself is kept as in any lossless method. Where a step differs from
that, a judge (`step_judges`) may let the whole of it pass. That is lossy, and on purpose: see
SpecReason (arXiv 2504.07891) and Lookahead Reasoning (arXiv 2506.19830). Steps that do not end
within the drafts, that hold the end of the reasoning or of the text, or that lie outside the
reasoning or among its first steps are never judged.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "COUNTER_MEANINGS",
    "METRIC_PREFIX",
    "DelimiterWatch",
    "DraftedStep",
    "Span",
    "StepCounters",
    "StepRules",
    "StepSplitter",
    "StepTracker",
    "describe_counts",
]

METRIC_PREFIX = "speculators_ext:reasoning_step_"
COUNTER_MEANINGS = {
    "drafted": "Complete steps that were verified.",
    "agreed": "Complete steps that were the target's own choice to the last token.",
    "judged": "Steps that differed from the target's choice and were shown to the judge.",
    "accepted": "Judged steps that passed.",
    "refused": "Judged steps that did not pass.",
    "tokens_against": "Tokens of accepted steps that were not the target's own choice.",
    "judge_seconds": "Seconds spent in judging.",
    "judge_forwards": "Forwards of the target that were run for judging.",
    "verify_forwards": "Forwards of the target over at least one draft.",
}
"""What an engine's metrics page says of each of `StepCounters.as_dict`."""


class StepSplitter:
    """Finds the delimiter in a stream of tokens, also where it spans several of them or ends
    inside one.

    A state is the number of the delimiter's characters just seen (0 to its length - 1).

    Args:
        delimiter: text that ends a step, not empty.
        token_texts: the text of each token id.
    """

    def __init__(self, delimiter: str, token_texts: Sequence[str]) -> None:
        if not delimiter:
            raise ValueError("delimiter='' splits nothing; accepted: text of at least one letter")
        self.delimiter = delimiter
        self._fallback = _prefix_function(delimiter)
        wanted = set(delimiter)
        # Tokens without a letter of the delimiter lead to state 0 from everywhere.
        self._moves = {
            token: tuple(self._run(state, text) for state in range(len(delimiter)))
            for token, text in enumerate(token_texts)
            if not wanted.isdisjoint(text) or not text
        }
        self._nowhere = tuple((0, False) for _ in delimiter)

    def advance(self, state: int, token: int) -> tuple[int, bool]:
        """The state after a token, and whether the delimiter was completed in it."""
        return self._moves.get(token, self._nowhere)[state]

    def _run(self, state: int, text: str) -> tuple[int, bool]:
        ended = False
        for letter in text:
            while state and letter != self.delimiter[state]:
                state = self._fallback[state - 1]
            state += letter == self.delimiter[state]
            if state == len(self.delimiter):
                state, ended = 0, True
        return state, ended


def _prefix_function(text: str) -> list[int]:
    """Knuth-Morris-Pratt: length of the longest proper prefix that ends at each letter."""
    lengths = [0] * len(text)
    for index in range(1, len(text)):
        length = lengths[index - 1]
        while length and text[index] != text[length]:
            length = lengths[length - 1]
        lengths[index] = length + (text[index] == text[length])
    return lengths


class Span(NamedTuple):
    """Token ids that open and close the reasoning; without ``start`` it begins with the output."""

    start: int | None = None
    end: int | None = None


_WHOLE_OUTPUT = Span()


@dataclass(frozen=True)
class StepRules:
    """What decides whether a step may be judged.

    Attributes:
        splitter: finds the ends of steps.
        span: outside it every token is the target's own.
        first_exact: so many first steps of a reasoning are the target's own.
        min_tokens: a delimiter ends a step only after so many tokens of it.
        stops: token ids that end a text.
    """

    splitter: StepSplitter
    span: Span = _WHOLE_OUTPUT
    first_exact: int = 0
    min_tokens: int = 1
    stops: frozenset[int] = frozenset()


class StepTracker:
    """Where one request stands.

    Args:
        rules: of the method.
        prompt: its tokens may open or close the reasoning, but are no step of it.
        output: tokens already written (a request that was preempted).
    """

    def __init__(
        self, rules: StepRules, prompt: Iterable[int] = (), output: Iterable[int] = ()
    ) -> None:
        self.rules = rules
        self.inside = rules.span.start is None
        self.state = self.length = self.steps = 0
        for token in prompt:
            self._enter_or_leave(token)
        self.feed(output)

    @property
    def may_judge(self) -> bool:
        """Whether the step that is being written may be judged."""
        return self.inside and self.steps >= self.rules.first_exact

    def feed(self, tokens: Iterable[int]) -> None:
        """Tokens that were written for good."""
        for token in tokens:
            if not self._enter_or_leave(token):
                self._step_on(token)

    def _enter_or_leave(self, token: int) -> bool:
        span = self.rules.span
        if token not in span:
            return False
        self.inside = token == span.start
        self.state = self.length = self.steps = 0
        return True

    def _step_on(self, token: int) -> bool:
        self.state, ended = self.rules.splitter.advance(self.state, token)
        self.length += 1
        ended = ended and self.length >= self.rules.min_tokens
        if ended:
            self.length = 0
            self.steps += 1
        return ended


class DraftedStep:
    """A step while it is drafted: says when to stop, and whether it came to its end.

    Args:
        tracker: where the request stands; it is not changed.
    """

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = StepTracker(tracker.rules)
        for name in ("inside", "state", "length", "steps"):
            setattr(self._tracker, name, getattr(tracker, name))
        self._may_judge = tracker.may_judge
        self.inside = tracker.inside
        """Whether it began inside the reasoning."""
        self.complete = self.stopped = False
        """Whether it came to the delimiter; whether the text or the reasoning ends with it."""

    @property
    def judgeable(self) -> bool:
        """Whether the step is complete and a judge may see it."""
        return self.complete and self._may_judge

    def push(self, token: int) -> bool:
        """Take a drafted token; False when drafting stops with it."""
        rules = self._tracker.rules
        self.stopped = token in rules.stops or token in rules.span
        if self.stopped:
            return False
        self.complete = self._tracker._step_on(token)
        return not self.complete


class DelimiterWatch:
    """Notices a delimiter that no step of the model ever reaches, so that nothing is judged.

    Args:
        rules: of the method.
        most: drafts that a step may hold.
    """

    PATIENCE = 20

    def __init__(self, rules: StepRules, most: int) -> None:
        self._rules, self._most = rules, most
        self._in_vain = 0
        self._over = False

    def note(self, step: DraftedStep, drafts: int) -> str | None:
        """A step of ``drafts`` tokens was drafted: a line for the log, at most once.

        A step outside the reasoning, or cut short by a limit of its own request, says nothing.
        """
        if self._over or not step.inside:
            return None
        if not step.complete:
            self._in_vain += step.stopped or drafts >= self._most
            if self._in_vain < self.PATIENCE:
                return None
        self._over = True
        if step.complete:
            return None
        rules = self._rules
        least = f" after {rules.min_tokens} tokens or more" if rules.min_tokens > 1 else ""
        return (
            f"reasoning_step: {self._in_vain} steps were drafted to their limit of {self._most} "
            f"tokens or to the end of the text, and none reached the delimiter "
            f"{rules.splitter.delimiter!r}{least}, so nothing is judged; set delimiter in "
            "method_config to what ends a step of this model"
        )


@dataclass
class StepCounters:
    """Totals since the start.

    Attributes:
        drafted: complete steps that were verified.
        agreed: of these, steps that were the target's own choice to the last token.
        judged: steps that differed and were shown to the judge.
        accepted: of these, steps that passed.
        tokens_against: tokens of accepted steps that were not the target's own choice.
        judge_seconds: spent in judging (host clock; on a GPU what the host waited).
        judge_forwards: target forwards run for judging.
        verify_forwards: target forwards over at least one draft.
    """

    drafted: int = 0
    agreed: int = 0
    judged: int = 0
    accepted: int = 0
    tokens_against: int = 0
    judge_seconds: float = 0.0
    judge_forwards: int = 0
    verify_forwards: int = 0

    @property
    def refused(self) -> int:
        """Steps that the judge did not let pass."""
        return self.judged - self.accepted

    def as_dict(self) -> dict[str, float]:
        """All of it by name."""
        return dataclasses.asdict(self) | {"refused": self.refused}

    def line(self) -> str:
        """One line for a log."""
        return describe_counts(self.as_dict())


def describe_counts(counts: Mapping[str, float]) -> str:
    """One line of what `StepCounters.as_dict` gives, or of its difference."""
    whole = {name: round(count) for name, count in counts.items()}
    return (
        f"{whole['drafted']} steps drafted, {whole['agreed']} as the target's own, "
        f"{whole['judged']} judged: {whole['accepted']} accepted ({whole['tokens_against']} tokens "
        f"against the target's choice), {whole['refused']} refused; "
        f"{counts['judge_seconds']:.2f} s in {whole['judge_forwards']} judge forwards, "
        f"{whole['verify_forwards']} verify forwards"
    )
