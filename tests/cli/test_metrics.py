"""Speculative counters, read from a page that vLLM 0.32 wrote while it drafted."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculators_ext.cli.metrics import SpecCounters, parse_metrics

PAGE = (Path(__file__).parent / "data" / "vllm_metrics.txt").read_text(encoding="utf-8")


def test_recorded_page_gives_the_counters_it_shows():
    """Catches names that changed, `_created` samples counted, and positions out of order."""
    assert parse_metrics(PAGE) == SpecCounters(147, 184, 93, (69, 12, 7, 5))


def test_page_without_speculation_is_all_zero():
    """Catches a plain server's page, which has no such counters, treated as an error."""
    lines = [line for line in PAGE.splitlines() if "spec_decode" not in line]
    assert parse_metrics("\n".join(lines) + "\n") == SpecCounters()


def test_engines_are_summed():
    """Catches data-parallel engines where only the last one's counters would be kept."""
    twice = []
    for line in PAGE.splitlines():
        twice.append(line)
        if 'engine="0"' in line:
            twice.append(line.replace('engine="0"', 'engine="1"'))
    one, two = parse_metrics(PAGE), parse_metrics("\n".join(twice) + "\n")
    assert two == SpecCounters(
        2 * one.drafts, 2 * one.drafted, 2 * one.accepted, tuple(2 * n for n in one.accepted_at)
    )


def test_difference_is_what_happened_between():
    """Catches a warm-up that is counted, also when the first reading had no positions yet."""
    after = SpecCounters(10, 30, 15, (8, 5, 2))
    assert after - SpecCounters(4, 12, 6, (3, 2, 1)) == SpecCounters(6, 18, 9, (5, 3, 1))
    assert after - SpecCounters() == after


def test_acceptance_counts_the_targets_own_token():
    """Catches a mean that leaves out the bonus token, or divides by tokens instead of drafts."""
    counters = SpecCounters(10, 30, 15, (8, 5, 2))
    assert counters.mean_acceptance_length == pytest.approx(2.5)
    assert counters.acceptance_per_position == pytest.approx([0.8, 0.5, 0.2])


def test_no_drafts_is_no_acceptance():
    """Catches a division by zero, or 0 % where nothing was tried."""
    assert SpecCounters(0, 0, 0, (0, 0)).mean_acceptance_length is None
    assert SpecCounters(0, 0, 0, (0, 0)).acceptance_per_position is None


def test_judged_steps_are_read_and_subtracted():
    """Catches a prefix or suffix that has moved on without its reader, and the warm-up counted."""
    page = PAGE + (
        "# HELP speculators_ext:reasoning_step_judged_total Steps judged.\n"
        "# TYPE speculators_ext:reasoning_step_judged_total counter\n"
        "speculators_ext:reasoning_step_judged_total 12.0\n"
    )
    after = parse_metrics(page)
    assert after.steps == {"judged": 12.0}
    assert (after.drafts, parse_metrics(PAGE).steps) == (147, {})
    assert (after - SpecCounters(steps={"judged": 5.0})).steps == {"judged": 7.0}
    assert (after + after).steps == {"judged": 24.0}
