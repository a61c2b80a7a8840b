"""Speed-up, identity and acceptance as computed from measurements."""

from __future__ import annotations

import pytest

from speculators_ext.cli.load import Answer
from speculators_ext.cli.metrics import SpecCounters
from speculators_ext.cli.rows import Measurement, compute_rows


def measured(method, concurrency, texts, tokens, seconds, counters=None):
    answers = [Answer(text, tokens) for text in texts]
    return Measurement("vllm", method, concurrency, answers, seconds, counters or SpecCounters())


def test_speedup_compares_tokens_a_second_at_the_same_concurrency():
    """Catches a base row of another concurrency, and times compared instead of speeds."""
    rows = compute_rows(
        [
            measured("plain", 1, ["a", "b"], 10, 2.0),
            measured("plain", 4, ["a", "b"], 10, 1.0),
            measured("m", 4, ["a", "b"], 5, 0.25),
        ]
    )
    assert [r.output_tok_s for r in rows] == [10.0, 20.0, 40.0]
    assert [r.speedup for r in rows] == [1.0, 1.0, 2.0]


def test_identity_is_counted_prompt_by_prompt():
    """Catches answers compared as sets: the same texts in another order are not identical."""
    plain = measured("plain", 1, ["a", "b", "c"], 1, 1.0)
    swapped = measured("m", 1, ["b", "a", "c"], 1, 1.0)
    assert compute_rows([plain, swapped])[1].identical_to_plain == "1/3"


def test_without_plain_nothing_is_claimed():
    """Catches a speed-up against the wrong base or a crash where plain was not measured."""
    [row] = compute_rows([measured("m", 1, ["a"], 1, 1.0)])
    assert row.speedup is None
    assert row.identical_to_plain is None


def test_plain_measured_last_still_is_the_base():
    """Catches rows computed while plain's measurement is not known yet."""
    rows = compute_rows([measured("m", 1, ["a"], 4, 1.0), measured("plain", 1, ["a"], 2, 1.0)])
    assert rows[0].speedup == 2.0


def test_json_has_the_promised_keys():
    """Catches a renamed key: other programs read these."""
    [row] = compute_rows([measured("m", 1, ["a"], 1, 1.0, SpecCounters(2, 6, 3, (2, 1, 0)))])
    page = row.as_json()
    assert page.keys() >= {
        "engine", "method", "concurrency", "output_tok_s", "speedup", "mean_acceptance_length",
        "acceptance_per_position", "identical_to_plain",
    }  # fmt: skip
    assert page["mean_acceptance_length"] == pytest.approx(2.5)
    assert page["acceptance_per_position"] == [1.0, 0.5, 0.0]
