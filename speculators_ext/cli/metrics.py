"""Acceptance, from the counters on an engine's /metrics page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from speculators_ext.cli.common import need
from speculators_ext.proposers.reasoning_step import METRIC_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class SpecCounters:
    """An engine's speculative counters.

    Attributes:
        drafts: verifications that had at least one draft (vLLM counts no others; SGLang counts
            all).
        drafted: draft tokens proposed; SGLang does not know how many they were where that differs
            from round to round, and 0 stands for it.
        accepted: draft tokens accepted.
        accepted_at: draft tokens accepted, by position in the draft.
        steps: what `reasoning_step` counted, by the names of `StepCounters`; empty without it.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    steps: Mapping[str, float] = field(default_factory=dict)

    def __sub__(self, before: SpecCounters) -> SpecCounters:
        """What happened between `before` and this reading."""
        old = before.accepted_at + (0,) * (len(self.accepted_at) - len(before.accepted_at))
        return SpecCounters(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.accepted_at, old, strict=True)),
            {name: now - before.steps.get(name, 0.0) for name, now in self.steps.items()},
        )

    def __add__(self, other: SpecCounters) -> SpecCounters:
        """Of two sets of answers together."""
        pairs = zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)
        return SpecCounters(
            self.drafts + other.drafts,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            tuple(map(sum, pairs)),
            {
                name: self.steps.get(name, 0.0) + other.steps.get(name, 0.0)
                for name in (*self.steps, *other.steps)
            },
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a drafted step yields, the target's own token included; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance_per_position(self) -> list[float] | None:
        """Share of drafts whose token at each position was accepted; None without drafts."""
        if not self.drafts:
            return None
        return [count / self.drafts for count in self.accepted_at]


def parse_metrics(page: str) -> SpecCounters:
    """Read the counters from Prometheus text; a server without speculation has none (all 0)."""
    parser = need("prometheus_client.parser", "bench")
    totals: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    steps: dict[str, float] = {}
    for family in parser.text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == ACCEPTED_AT:
                positions[int(sample.labels["position"])] += int(sample.value)
            elif sample.name in (DRAFTS, DRAFTED, ACCEPTED):
                totals[sample.name] += int(sample.value)
            elif sample.name.startswith(METRIC_PREFIX):
                name = sample.name.removeprefix(METRIC_PREFIX).removesuffix("_total")
                steps[name] = sample.value
    width = max(positions, default=-1) + 1
    return SpecCounters(
        totals[DRAFTS],
        totals[DRAFTED],
        totals[ACCEPTED],
        tuple(positions[index] for index in range(width)),
        steps,
    )


def sglang_counters(details: Mapping[str, Any]) -> SpecCounters:
    """The counters of one answer of SGLang's, from its `spec_tokens_details`."""
    rounds = details["spec_correct_drafts_histogram"]  # with so many drafts accepted
    at_least = [sum(rounds[index:]) for index in range(1, len(rounds))]
    return SpecCounters(
        details["spec_verify_ct"], 0, details["spec_num_correct_drafts"], tuple(at_least)
    )
