"""From measurements to the rows that are printed: speed-up, acceptance, identity."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculators_ext.cli.load import Answer
    from speculators_ext.cli.metrics import SpecCounters

PLAIN = "plain"


@dataclass(frozen=True)
class Measurement:
    """One pass over the prompts: who answered, how many at once, what came back, how long."""

    engine: str
    method: str
    concurrency: int
    answers: Sequence[Answer]
    seconds: float
    counters: SpecCounters

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers together."""
        return sum(answer.tokens for answer in self.answers)


@dataclass(frozen=True)
class Row:
    """One line of the result; the keys of the JSON are these names.

    Attributes:
        engine: `vllm` or `sglang`.
        method: the variant's name; in a table of several engines, the engine's before it.
        concurrency: requests in flight.
        output_tok_s: answer tokens of all requests over the wall time, prefill included.
        speedup: against `plain` at the same concurrency; None without such a row.
        mean_acceptance_length: tokens a drafted step yields; None where nothing was drafted.
        acceptance_per_position: share of drafts accepted, by position in the draft.
        identical_to_plain: answers equal to plain's, as `24/24`; None without such a row.
        num_drafts: steps that were drafted for (0: the method decided that it does not pay).
        num_draft_tokens: tokens drafted in these steps.
        output_tokens: tokens of all answers.
        seconds: wall time of the pass.
        steps: what `reasoning_step` counted in it, None with other methods.
    """

    engine: str
    method: str
    concurrency: int
    output_tok_s: float
    speedup: float | None
    mean_acceptance_length: float | None
    acceptance_per_position: list[float] | None
    identical_to_plain: str | None
    num_drafts: int
    num_draft_tokens: int
    output_tokens: int
    seconds: float
    steps: dict[str, float] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing drafts."""
        return self.method.rpartition(": ")[2] == PLAIN

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return asdict(self)


def compute_rows(measurements: Sequence[Measurement]) -> list[Row]:
    """One row a measurement, in order, compared with plain at the same concurrency."""
    plain = {m.concurrency: m for m in measurements if m.method == PLAIN}
    return [_row(m, plain.get(m.concurrency)) for m in measurements]


def _row(measured: Measurement, plain: Measurement | None) -> Row:
    speed = measured.output_tokens / measured.seconds
    speedup = identical = None
    if plain is not None:
        speedup = speed / (plain.output_tokens / plain.seconds)
        pairs = zip(measured.answers, plain.answers, strict=True)
        equal = sum(mine.text == base.text for mine, base in pairs)
        identical = f"{equal}/{len(plain.answers)}"
    return Row(
        engine=measured.engine,
        method=measured.method,
        concurrency=measured.concurrency,
        output_tok_s=speed,
        speedup=speedup,
        mean_acceptance_length=measured.counters.mean_acceptance_length,
        acceptance_per_position=measured.counters.acceptance_per_position,
        identical_to_plain=identical,
        num_drafts=measured.counters.drafts,
        num_draft_tokens=measured.counters.drafted,
        output_tokens=measured.output_tokens,
        seconds=measured.seconds,
        steps=dict(measured.counters.steps) or None,
    )
