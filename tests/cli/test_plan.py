"""What a benchmark is asked to compare, and what a wrong request is told."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from speculators_ext.cli.common import CliError
from speculators_ext.cli.demo import demo_variants, mtp_variants, steps_variants
from speculators_ext.cli.plan import (
    BY_VARIANT,
    Variant,
    method_variants,
    parse_concurrency,
    parse_variant,
    split_names,
    with_folder,
)
from speculators_ext.cli.sglang_server import check_variants
from speculators_ext.config import METHODS
from speculators_ext.engines.source_probe import engine_root


def test_names_become_speculative_configs():
    """Catches plain served with a speculative config, or a method without its draft length."""
    assert method_variants(["plain", "clasp"], 5) == [
        Variant("plain", None),
        Variant("clasp", {"method": "clasp", "num_speculative_tokens": 5}),
    ]


def test_a_method_with_a_head_gets_it():
    """Catches a head that never reaches the server, or is given to a method that has none."""
    clasp, eagle2 = method_variants(["clasp", "eagle2"], 5, "some/head")
    assert "model" not in clasp.speculative
    assert eagle2.speculative["model"] == "some/head"
    with pytest.raises(CliError, match="--head"):
        method_variants(["eagle2"], 5)


def test_heads_named_like_assets_become_folders(tmp_path):
    """Catches an asset's name handed to the engine, which would ask a hub for it."""
    head = parse_variant('a={"method":"eagle3","model":"tiny-llama"}', 3)
    given = with_folder(head, lambda line: None).speculative
    assert (Path(given["model"]) / "config.json").is_file()
    assert given["num_speculative_tokens"] == 3
    folder = Variant("a", {"method": "eagle3", "model": str(tmp_path)})
    assert with_folder(folder, lambda line: None) == folder
    assert with_folder(Variant("plain", None), lambda line: None).speculative is None


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
        ('a={"method":"eagle2"}', 'give it as "model"'),
        ('a={"method":"reasoning_step"}', "lossy=false"),
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


def engine_methods():
    """What vLLM calls a method, from its sources: importing it takes seconds."""
    root = engine_root("vllm")
    if root is None:
        pytest.skip("needs vLLM's sources")
    tree = ast.parse((root / "vllm/config/speculative.py").read_text())
    return {
        literal.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and (node.targets[0].id.endswith("Types") or node.targets[0].id == "SpeculativeMethod")
        for literal in ast.walk(node.value)
        if isinstance(literal, ast.Constant)
    }


def test_methods_of_the_engines_own_go_through_variants():
    """Catches `eagle3` answered with "did you mean 'eagle2'?", and an example that is refused."""
    names = engine_methods()
    assert {"eagle3", "ngram", "deepseek_mtp"} <= names
    for name in names - {"mtp"}:
        with pytest.raises(CliError, match="through --variant") as caught:
            method_variants([name], 5)
        assert "did you mean" not in str(caught.value)
        [text] = re.findall(r"--variant '([^']*)'", str(caught.value))
        assert parse_variant(text, 1).speculative["num_speculative_tokens"] == 5
    assert set(BY_VARIANT) <= names


def test_a_lossy_method_is_refused_with_the_variant_that_works():
    """Catches a server started without the consent that its method asks for."""
    for head in (None, "some/small"):
        with pytest.raises(CliError, match="lossy") as caught:
            method_variants(["reasoning_step"], 6, head)
        assert "\n" not in str(caught.value)
        [text] = re.findall(r"--variant '([^']*)'", str(caught.value))
        variant = parse_variant(text, 1)
        assert variant.speculative["method_config"] == {"lossy": True}


def test_sglang_refuses_before_plain_is_served():
    """Catches minutes of measuring plain before a variant turns out to be unknown there."""
    variants = [Variant("plain", None), parse_variant('a={"method":"suffix"}', 2)]
    with pytest.raises(CliError, match=r"'suffix'.*accepted: clasp, .*, eagle3, mtp"):
        check_variants(variants)
    check_variants(method_variants(["plain", "clasp", "mtp"], 2))


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
    variants = demo_variants("head")
    assert variants[0].speculative is None
    assert variants[1].speculative["method"] == "eagle3"
    for name in ("clasp", "eagle2"):
        mine = [v.speculative for v in variants if (v.speculative or {}).get("method") == name]
        assert len(mine) == 2
        assert mine[1]["method_config"] == {"adaptive": False}


def test_demo_races_every_method_of_the_package():
    """Catches a new method that the demo does not show; what is lossy says so in its name."""
    shown = {
        v.speculative["method"]
        for v in demo_variants("head") + mtp_variants() + steps_variants("small")
        if v.speculative
    }
    assert shown >= set(METHODS)
    lossy = [v.name for v in steps_variants("small") if "lossy" in str(v.speculative)]
    assert lossy
    assert all("LOSSY" in name for name in lossy)
