"""Acceptance, from the counters on an engine's /metrics page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from speculators_ext.cli.common import need

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class SpecCounters:
    """vLLM's speculative counters, summed over engines.

    Attributes:
        drafts: verifications that had at least one draft (vLLM counts no others).
        drafted: draft tokens proposed.
        accepted: draft tokens accepted.
        accepted_at: draft tokens accepted, by position in the draft.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()

    def __sub__(self, before: SpecCounters) -> SpecCounters:
        """What happened between `before` and this reading."""
        old = before.accepted_at + (0,) * (len(self.accepted_at) - len(before.accepted_at))
        return SpecCounters(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.accepted_at, old, strict=True)),
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
    for family in parser.text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == ACCEPTED_AT:
                positions[int(sample.labels["position"])] += int(sample.value)
            elif sample.name in (DRAFTS, DRAFTED, ACCEPTED):
                totals[sample.name] += int(sample.value)
    width = max(positions, default=-1) + 1
    return SpecCounters(
        totals[DRAFTS],
        totals[DRAFTED],
        totals[ACCEPTED],
        tuple(positions[index] for index in range(width)),
    )
