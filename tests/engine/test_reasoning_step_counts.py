"""The counters of reasoning_step on their way from an engine's process to the metrics page."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")
from prometheus_client import REGISTRY, generate_latest

from speculators_ext.cli.metrics import parse_metrics
from speculators_ext.engines.vllm.reasoning_step import counts_page
from speculators_ext.engines.vllm.reasoning_step.counts_page import CountsWriter, make_counts_file
from speculators_ext.proposers.reasoning_step import (
    COUNTER_MEANINGS,
    StepCounters,
    describe_counts,
)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of two engines, and no other file."""
    monkeypatch.setattr(counts_page._PAGE, "paths", [])
    monkeypatch.setattr(counts_page.REGISTRY, "register", lambda _: None)
    return make_counts_file(engines=2)


def shown() -> dict[str, float]:
    return {
        family.name.rpartition("reasoning_step_")[2]: family.samples[0].value
        for family in counts_page._PAGE.collect()
    }


def test_engines_are_summed_as_they_write(path: str) -> None:
    """Catches rows that overwrite each other, totals added twice, and a page of stale numbers."""
    writers = [CountsWriter(path, rank) for rank in range(2)]
    assert set(shown().values()) == {0.0}
    writers[0].write(StepCounters(judged=3, accepted=1))
    writers[1].write(StepCounters(judged=5, accepted=4, judge_seconds=0.25))
    writers[0].write(StepCounters(judged=4, accepted=2))
    found = shown()
    assert (found["judged"], found["accepted"], found["refused"]) == (9.0, 6.0, 3.0)
    assert found["judge_seconds"] == 0.25


def test_a_file_that_was_swept_away_spoils_no_page(path: str) -> None:
    """Catches a cleaner of temporary files that takes the whole metrics page down."""
    Path(path).unlink()
    assert set(shown().values()) == {0.0}


def test_the_page_is_what_bench_reads() -> None:
    """Catches a counter without a meaning, and names that writer and reader spell differently."""
    path = make_counts_file(engines=1)
    before = parse_metrics(generate_latest(REGISTRY).decode()).steps
    CountsWriter(path, 0).write(StepCounters(drafted=7, judged=2, accepted=1, tokens_against=4))
    after = parse_metrics(generate_latest(REGISTRY).decode()).steps
    assert after.keys() == StepCounters().as_dict().keys() == COUNTER_MEANINGS.keys()
    added = {name: after[name] - before[name] for name in after}
    assert "7 steps drafted" in describe_counts(added)
    assert "2 judged: 1 accepted (4 tokens" in describe_counts(added)
