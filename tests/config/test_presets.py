"""Presets: each one valid, found by the right targets, and never stronger than the user."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from speculators_ext.config import ConfigError, TargetInfo, parse_method_config
from speculators_ext.model_configs import Preset, load, lookup, names

SMOLLM = TargetInfo("HuggingFaceTB/SmolLM2-135M-Instruct", ("LlamaForCausalLM",), 30)


@pytest.mark.parametrize("name", names())
def test_a_preset_is_valid_for_a_target_it_matches(name):
    """Catches a typo in the data, a count too big for the depth, and a file with a wrong name."""
    preset = load(name)
    match = preset.match
    target = TargetInfo(
        (match.names or ["none"])[0], tuple(match.architectures), match.num_layers, None
    )
    assert lookup(target, preset.method) is preset
    parse_method_config(preset.method, None, target=target)
    assert name.endswith(f".{preset.method}")


def test_there_are_presets_in_the_installed_package():
    """An empty folder (data left out of the wheel) would make the test above vacuous."""
    assert "smollm2-135m-instruct.clasp" in names()


@pytest.mark.parametrize(
    "name", ["smollm2-135m-instruct", "/data/x/SmolLM2-135M-Instruct/", "o/SMOLLM2-135m-INSTRUCT"]
)
def test_a_target_is_known_by_the_end_of_its_name(name):
    """Users serve from local folders as often as by the hub's name."""
    target = TargetInfo(name, (), 30)
    assert lookup(target, "clasp") is load("smollm2-135m-instruct.clasp")


def test_a_name_wins_over_an_architecture():
    """Meta-Llama-3-8B by name and by architecture are different files once one is measured."""
    target = TargetInfo("x/Qwen3-8B", ("LlamaForCausalLM", "Qwen3ForCausalLM"), 36)
    assert lookup(target, "clasp") is load("qwen3-36-layers.clasp")


@pytest.mark.parametrize(
    "target",
    [
        TargetInfo("unknown", ("SomeForCausalLM",), 30),
        TargetInfo("SmolLM2-135M-Instruct", ("LlamaForCausalLM",), 4),
        TargetInfo("unknown", ("LlamaForCausalLM",), 33),
    ],
    ids=["nothing", "cut-down copy", "other depth"],
)
def test_no_preset_for_what_does_not_match(target):
    """A skip count for another depth would be refused or absurd."""
    assert lookup(target, "clasp") is None
    assert parse_method_config("clasp", None, target=target).num_skip_layers is None


def test_a_user_key_wins_and_the_others_stay():
    """A preset is a default, key by key."""
    config = parse_method_config("clasp", {"refresh_interval": 3}, target=SMOLLM)
    preset = load("smollm2-135m-instruct.clasp").config["num_skip_layers"]
    assert (config.refresh_interval, config.num_skip_layers) == (3, preset)
    assert parse_method_config("clasp", {"num_skip_layers": 9}, target=SMOLLM).num_skip_layers == 9


def test_a_fixed_set_replaces_the_presets_count():
    """The two keys exclude each other; the user wrote only one of them."""
    config = parse_method_config("clasp", {"skip_layers": [3, 5]}, target=SMOLLM)
    assert (config.skip_layers, config.num_skip_layers) == ((3, 5), None)


def test_another_unit_drops_the_preset():
    """Six layers are not six half layers."""
    config = parse_method_config("clasp", {"skip_unit": "sublayer"}, target=SMOLLM)
    assert config.num_skip_layers is None


def test_an_error_about_a_presets_number_says_where_it_comes_from():
    """The user never wrote num_skip_layers and must not be left to guess."""
    with pytest.raises(ConfigError, match="preset gives num_skip_layers=") as caught:
        parse_method_config("clasp", {"pinned_first": 29}, target=SMOLLM)
    assert "\n" not in str(caught.value)


def test_an_error_names_no_key_of_the_preset_that_it_is_not_about():
    """Catches a user sent to a key that has nothing to do with his own wrong number."""
    with pytest.raises(ConfigError, match="num_skip_layers=40") as caught:
        parse_method_config("clasp", {"num_skip_layers": 40}, target=SMOLLM)
    assert "search_window" in load("smollm2-135m-instruct.clasp").config
    assert "preset" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"num_skip_layer": 6}},
        {"extra": 1},
        {"reason": None},
        {"measured": {"acceptance": 0.8}},
    ],
    ids=["unknown setting", "unknown field", "null without a reason", "both"],
)
def test_a_wrong_preset_is_refused(change):
    """A number without a source or a reason is how unmeasured claims get in."""
    data = load("smollm2-135m-instruct.clasp").model_dump()
    data.update(measured=None, reason="a reason")
    Preset.model_validate(data)
    with pytest.raises(ValidationError):
        Preset.model_validate(data | change)
