"""What a benchmark is asked to compare, and what a wrong request is told."""

from __future__ import annotations

import pytest

from speculators_ext.cli.common import CliError
from speculators_ext.cli.demo import demo_variants
from speculators_ext.cli.plan import (
    Variant,
    known_methods,
    method_variants,
    parse_concurrency,
    parse_variant,
    split_names,
)
from speculators_ext.config import METHODS


def test_names_become_speculative_configs():
    """Catches plain served with a speculative config, or a method without its draft length."""
    assert method_variants(["plain", "clasp"], 5) == [
        Variant("plain", None),
        Variant("clasp", {"method": "clasp", "num_speculative_tokens": 5}),
    ]


def test_variant_keeps_what_the_user_wrote():
    """Catches --spec-tokens put over a number the JSON gives, and other methods refused."""
    text = 'ng=x={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}'
    with pytest.raises(CliError, match="not JSON"):
        parse_variant(text, 6)
    variant = parse_variant(text.replace("=x", ""), 6)
    assert variant.name == "ng"
    assert variant.speculative == {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4,
    }  # fmt: skip
    assert parse_variant('a={"method":"ngram"}', 6).speculative["num_speculative_tokens"] == 6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("clasp", "NAME=JSON expected"),
        ('={"method": "clasp"}', "NAME=JSON expected"),
        ("a={", "not JSON"),
        ("a=[1]", '"method" expected'),
        ('a={"num_speculative_tokens": 2}', '"method" expected'),
        ('a={"method":"clasp","method_config":{"adaptiv":true}}', "adaptive"),
        ('a={"method":"clasp","method_config":{"refresh_interval":0}}', "refresh_interval"),
    ],
)
def test_wrong_variant_is_told_before_a_server_starts(text, says):
    """Catches a mistake that shows only after a server's start, as a page of log."""
    with pytest.raises(CliError, match=says) as caught:
        parse_variant(text, 6)
    assert "\n" not in str(caught.value)


def test_misspelt_method_gets_a_suggestion():
    """Catches an error that leaves the user to guess the accepted names."""
    with pytest.raises(CliError, match=r"did you mean 'clasp'.*known are plain, clasp"):
        method_variants(["claps"], 6)


@pytest.mark.parametrize("text", ["", "0", "1,-2", "1,x", "4,4"])
def test_wrong_concurrency_is_refused(text):
    """Catches a run that would wait for ever (0 workers) or measure the same thing twice."""
    with pytest.raises(CliError, match="--concurrency"):
        parse_concurrency(text)


def test_spaces_around_names_are_ignored():
    """Catches `plain, clasp` taken for a method called ' clasp'."""
    assert split_names("plain, clasp,", "--methods") == ["plain", "clasp"]


def test_demo_shows_every_method_and_its_acceptance():
    """Catches a method the demo leaves out, and adaptive rows alone, which may not draft."""
    variants = demo_variants()
    assert variants[0].speculative is None
    for name in (name for name in known_methods() if METHODS[name].drafts_alone):
        mine = [v.speculative for v in variants if (v.speculative or {}).get("method") == name]
        assert len(mine) == 2
        assert mine[1]["method_config"] == {"adaptive": False}
