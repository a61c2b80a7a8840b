"""Settings a user writes: what is taken, and one line for what is not."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from speculators_ext.config import (
    METHODS,
    ClaspConfig,
    ConfigError,
    TargetInfo,
    describe_schema,
    parse_method_config,
    suggest_method,
    validate_num_speculative_tokens,
)
from speculators_ext.registry import Registry

TARGET = TargetInfo("someone/model", ("SomeForCausalLM",), num_layers=12, max_model_len=128)


def _error(raw, target=TARGET):
    with pytest.raises(ConfigError) as caught:
        parse_method_config("clasp", raw, target=target)
    return str(caught.value)


BAD = [
    ({"num_skip_layer": 3}, "unknown key 'num_skip_layer'", "did you mean 'num_skip_layers'?"),
    ({"zzz": 1}, "unknown key 'zzz'", "remove it"),
    ({7: 1}, "unknown key '7'", "num_skip_layers"),
    ({"num_skip_layers": "3"}, "num_skip_layers='3'", "an integer >= 0"),
    ({"num_skip_layers": True}, "num_skip_layers=True", "an integer >= 0"),
    ({"num_skip_layers": 3.0}, "num_skip_layers=3.0", "an integer >= 0"),
    ({"num_skip_layers": -1}, "num_skip_layers=-1", "an integer >= 0"),
    ({"num_skip_layers": 12}, "num_skip_layers=12", "0 to 11"),
    ({"num_skip_layers": 11, "pinned_first": 2}, "2 are pinned by pinned_first=2;", "0 to 10"),
    ({"num_skip_layers": 24, "skip_unit": "sublayer"}, "24 sublayers", "0 to 23"),
    ({"refresh_interval": 0}, "refresh_interval=0", "an integer >= 1"),
    ({"refresh_interval": None}, "refresh_interval=None", "an integer >= 1"),
    ({"exit_threshold": 1.5}, "exit_threshold=1.5", "a number from 0 to 1"),
    ({"exit_threshold": -0.1}, "exit_threshold=-0.1", "default (0.7)"),
    ({"exit_threshold": float("nan")}, "exit_threshold=nan", "a number from 0 to 1"),
    ({"exit_threshold": True}, "exit_threshold=True", "a number from 0 to 1"),
    ({"exit_threshold": "0.7"}, "exit_threshold='0.7'", "a number from 0 to 1"),
    ({"pinned_first": -1}, "pinned_first=-1", "an integer >= 0"),
    ({"pinned_first": 7, "pinned_last": 6}, "pinned_last=6", "at most 12"),
    ({"skip_unit": "lyer"}, "skip_unit='lyer'", "'layer' or 'sublayer'"),
    ({"policy": "DP"}, "policy='DP'", "'dp' or 'even'"),
    ({"grouping": 1}, "grouping=1", "'batch' or 'per_request'"),
    ({"adaptive": 1}, "adaptive=1", "true or false"),
    ({"adaptive": "false"}, "adaptive='false'", "default (true)"),
    ({"skip_layers": 3}, "skip_layers=3", "null, or a list of integers >= 0;"),
    ({"skip_layers": [1, "2"]}, "skip_layers[1]='2'", "null, or a list of integers >= 0;"),
    ({"skip_layers": [True]}, "skip_layers[0]=True", "null, or a list of integers >= 0;"),
    ({"skip_layers": [-1]}, "skip_layers[0]=-1", "null, or a list of integers >= 0;"),
    ({"skip_layers": [4, 4]}, "skip_layers=[4, 4]", "for example [4]"),
    ({"skip_layers": [5, 4]}, "skip_layers=[5, 4]", "for example [4, 5]"),
    ({"skip_layers": [12]}, "names unit 12", "0 to 11"),
    ({"skip_layers": list(range(12))}, "skips every unit", "at most 11"),
    ({"skip_layers": [2], "num_skip_layers": 1}, "exclude each other", "remove one"),
    ({"skip_layers": [11], "pinned_last": 1}, "names unit 11", "not pinned"),
    ([1], "[1] is not an object", "num_skip_layers"),
    ("clasp", "'clasp' is not an object", "num_skip_layers"),
]


@pytest.mark.parametrize(("raw", "given", "remedy"), BAD, ids=[str(case[0]) for case in BAD])
def test_a_bad_setting_is_one_line_with_what_was_given_and_what_to_do(raw, given, remedy):
    """Catches a setting taken silently, and pydantic's own many-line error reaching a user."""
    message = _error(raw)
    assert message.startswith("speculative method_config: ")
    assert "\n" not in message
    assert given in message
    assert "accepted" in message
    assert remedy in message


def test_what_needs_the_depth_is_not_refused_without_it():
    """The same keys are legal for a deeper target, so they cannot be wrong before it is known."""
    raw = {"num_skip_layers": 40, "pinned_first": 30}
    assert parse_method_config("clasp", raw, target=None).num_skip_layers == 40


def test_settings_cannot_change_after_they_were_checked():
    """A frozen model is what lets both engines and all ranks share one object."""
    config = parse_method_config("clasp", {"skip_layers": [1, 3]}, target=TARGET)
    with pytest.raises(ValidationError):
        config.num_skip_layers = 3
    assert isinstance(config.skip_layers, tuple)
    assert hash(config) == hash(parse_method_config("clasp", {"skip_layers": [1, 3]}, target=None))


def test_every_setting_is_described_and_says_what_it_accepts():
    """A field without a description or with an unreadable bound makes a useless error."""
    for method in METHODS.values():
        for key, schema in method.config_model.model_json_schema()["properties"].items():
            assert schema.get("description"), key
            assert "None" not in describe_schema(schema), key


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"minLength": 1, "maxLength": 32}, "a string of 1 to 32 characters"),
        ({"minLength": 1}, "a string of 1 or more characters"),
        ({"maxLength": 8}, "a string of 0 to 8 characters"),
        ({}, "a string"),
    ],
    ids=str,
)
def test_bounds_of_a_string_are_named(bounds, words):
    """Catches an empty string that is refused because a string is what is accepted."""
    assert describe_schema({"type": "string"} | bounds) == words


def test_pinned_layers_are_both_their_sublayers():
    """Pins count layers whatever the unit; pinning half a layer would be a surprise."""
    config = ClaspConfig(pinned_first=1, pinned_last=2, skip_unit="sublayer")
    assert config.pinned_units(5) == {0, 1, 6, 7, 8, 9}
    assert ClaspConfig(pinned_first=1, pinned_last=2).pinned_units(5) == {0, 3, 4}


def test_an_unknown_method_names_the_near_miss_and_the_others():
    """A typo must not fall through to the engine's own, longer complaint."""
    with pytest.raises(ConfigError, match=r"unknown 'claps'; accepted: clasp.*mean 'clasp'"):
        parse_method_config("claps", None, target=None)
    assert suggest_method("CLASP") == "clasp"
    assert suggest_method("ngram") is None


TOKENS = [
    (None, "missing"),
    (0, "too small"),
    (-1, "too small"),
    (True, "not an integer"),
    ("6", "not an integer"),
    (6.0, "not an integer"),
    (128, "max_model_len=128"),
    (4096, "max_model_len=128"),
]


@pytest.mark.parametrize(("value", "problem"), TOKENS, ids=[repr(case[0]) for case in TOKENS])
def test_a_bad_number_of_drafts_is_one_line_with_its_key(value, problem):
    """Catches a depth that the engine would only trip over at the first request."""
    with pytest.raises(ConfigError) as caught:
        validate_num_speculative_tokens(value, 128)
    message = str(caught.value)
    assert "\n" not in message
    assert "num_speculative_tokens" in message
    assert problem in message
    assert "from 1 to 127" in message


def test_a_good_number_of_drafts_is_returned():
    """The bound is the last length that leaves room for the token drafts follow."""
    assert validate_num_speculative_tokens(127, 128) == 127
    assert validate_num_speculative_tokens(4096, None) == 4096


def test_a_name_cannot_be_registered_twice():
    """A later method must not silently take an earlier one's name."""
    registry = Registry("method")
    registry.add("a", 1)
    with pytest.raises(ValueError, match="method 'a' is registered twice"):
        registry.add("a", 2)


def test_settings_load_without_torch_and_without_an_engine():
    """The command line must answer in a moment, and on machines without either."""
    code = (
        "import sys, speculators_ext.config as c;"
        "t = c.TargetInfo('Qwen3-8B', ('Qwen3ForCausalLM',), 36);"
        "c.parse_method_config('clasp', None, target=t);"
        "print([m for m in ('torch', 'vllm', 'sglang', 'triton') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
