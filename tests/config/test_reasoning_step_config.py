"""The settings of reasoning_step: lossy only by consent, and thresholds that fit their judge."""

from __future__ import annotations

import pytest

from speculators_ext.config import (
    METHODS,
    ConfigError,
    RequestOptions,
    TargetInfo,
    parse_method_config,
)
from speculators_ext.model_configs import load

SMOLLM = TargetInfo("HuggingFaceTB/SmolLM2-135M-Instruct", ("LlamaForCausalLM",), 30)


def parse(target=None, draft_model=None, **given):
    return parse_method_config("reasoning_step", given, target=target, draft_model=draft_model)


BAD = [
    ({}, "lossy=false", "choose a lossless method"),
    ({"lossy": False, "judge": "exact"}, "lossy=false", "accepted: true"),
    ({"lossy": 1}, "lossy=1", "accepted: true;"),
    ({"lossy": "yes"}, "lossy='yes'", "accepted: true; set it"),
    ({"lossy": None}, "lossy=null", "accepted: true;"),
    ({"lossy": True, "judge": "vote"}, "judge='vote'", "'score' or 'logprob' or 'exact'"),
    ({"lossy": True, "threshhold": 7}, "'threshhold'", "did you mean 'threshold'?"),
    ({"lossy": True, "mean_logprob": -1.0}, "mean_logprob=-1.0", "accepted: judge='logprob'"),
    ({"lossy": True, "judge": "logprob", "mean_logprob": 0.5}, "mean_logprob=0.5", "accepted"),
    ({"lossy": True, "delimiter": ""}, "delimiter=''", "a string of 1 to 32 characters"),
    ({"lossy": True, "judge_suffix": ""}, "judge_suffix=''", "of 1 or more characters"),
    ({"lossy": True, "threshold": -2.5}, "threshold=-2.5", "accepted: a number from 0 to 10;"),
    ({"lossy": True, "threshold": 10.5}, "judge='score'", "leave it out for 7"),
    (
        {"lossy": True, "judge": "logprob", "threshold": 7},
        "threshold=7 is not on the scale of judge='logprob'",
        "accepted: a number from -1000 to 0; correct it or leave it out for -4",
    ),
    ({"lossy": True, "judge": "exact", "threshold": 7}, "judge='exact'", "accepted: no threshold"),
    ({"lossy": True, "threshold": "7"}, "threshold='7'", "accepted: null, or a number;"),
    ({"lossy": True, "first_exact": -1}, "first_exact=-1", "an integer >= 0"),
    ({"lossy": True, "min_step_tokens": 0}, "min_step_tokens=0", "an integer >= 1"),
]


@pytest.mark.parametrize(("given", "problem", "remedy"), BAD, ids=[str(case[0]) for case in BAD])
def test_a_bad_setting_is_one_line(given, problem, remedy):
    """Consent must be explicit, and no setting may be silently without effect."""
    with pytest.raises(ConfigError) as caught:
        parse(**given)
    text = str(caught.value)
    assert problem in text
    assert remedy in text
    assert "\n" not in text


def test_the_threshold_is_the_judges_own_unless_given():
    """One default for both judges would let everything pass, or nothing."""
    assert parse(lossy=True).passes_from == 7.0
    assert parse(lossy=True, judge="logprob").passes_from == -4.0
    assert parse(lossy=True, threshold=5).passes_from == 5.0


@pytest.mark.parametrize(
    ("judge", "ends"), [("score", (0, 10)), ("logprob", (-1000, 0)), ("exact", (None,))]
)
def test_the_ends_of_a_judges_scale_are_accepted(judge, ends):
    """Both are of use: one takes every step, and one none (above a digit's mean, or nearly so)."""
    for end in ends:
        assert parse(lossy=True, judge=judge, threshold=end).threshold == end


def test_a_key_of_the_skips_is_sent_to_its_place():
    """Catches "remove it" for a setting that the method has, one object deeper."""
    with pytest.raises(ConfigError) as caught:
        parse(lossy=True, num_skip_layers=6)
    assert 'it is a key of \'clasp\': write "clasp": {"num_skip_layers": 6}' in str(caught.value)
    with pytest.raises(ConfigError, match="'clasp', which does not go with a model; remove it"):
        parse(draft_model="small", lossy=True, num_skip_layers=6)


def test_it_says_that_it_is_lossy():
    """`doctor`, the log and the README take it from here."""
    assert not METHODS["reasoning_step"].lossless
    assert all(METHODS[name].lossless for name in METHODS if name != "reasoning_step")


@pytest.mark.parametrize("value", [7, 7.0, "7", "7.0"])
def test_a_request_has_its_own_threshold(value):
    """Over HTTP it may come as text."""
    assert RequestOptions.parse({"speculators_ext_threshold": value}).threshold == 7.0
    assert RequestOptions.parse({}).threshold is None


@pytest.mark.parametrize("value", [True, None, "high", "nan", float("inf"), [7]])
def test_a_bad_threshold_of_a_request_is_one_line(value):
    """A threshold that compares false with everything would let nothing, or all, pass unseen."""
    with pytest.raises(ConfigError, match=r"speculators_ext_threshold=.*a finite number"):
        RequestOptions.parse({"speculators_ext_threshold": value})


def test_settings_are_one_line_of_a_log() -> None:
    """Catches a delimiter that breaks the line in two, and one that is shown as nothing."""
    shown = parse(lossy=True, judge="logprob", delimiter="\n").describe()
    assert "\n" not in shown
    assert "delimiter='\\n'" in shown
    assert shown.startswith("lossy=True, judge=logprob, ")


def test_without_a_model_the_targets_preset_of_clasp_is_taken():
    """Catches a target that drafts with untuned skips, or with keys that steps know nothing of."""
    preset = load("smollm2-135m-instruct.clasp").config
    skips = parse(SMOLLM, lossy=True).clasp
    assert skips.num_skip_layers == preset["num_skip_layers"]
    assert not hasattr(skips, "exit_threshold")
    given = parse(SMOLLM, lossy=True, clasp={"skip_layers": [3, 5]}).clasp
    assert (given.skip_layers, given.num_skip_layers) == ((3, 5), None)
    assert given.search_window == preset["search_window"]


def test_a_small_model_writes_the_steps_alone():
    """Catches skips beside a model: the adapters tell by them who writes."""
    assert parse(SMOLLM, "small", lossy=True).clasp is None
    with pytest.raises(ConfigError, match=r"model='small' writes them.*remove one"):
        parse(SMOLLM, "small", lossy=True, clasp={"num_skip_layers": 6})


@pytest.mark.parametrize(
    ("skips", "says"),
    [
        ({"num_skip_layers": 30}, ("num_skip_layers=30", "accepted: 0 to 29")),
        ({"num_skip_layers": "6"}, ("num_skip_layers='6'", "an integer >= 0")),
        ({"exit_threshold": 0.5}, ("unknown key 'exit_threshold'", "accepted: num_skip_layers")),
        ({"adaptive": True}, ("unknown key 'adaptive'", "accepted")),
        ([6], ("[6] is not an object", "accepted")),
    ],
    ids=str,
)
def test_a_bad_skip_setting_is_one_line_that_says_where(skips, says):
    """Catches a key of the chains of clasp without effect, and one sought among the outer keys."""
    with pytest.raises(ConfigError) as caught:
        parse(SMOLLM, lossy=True, clasp=skips)
    text = str(caught.value)
    assert text.startswith("speculative method_config['clasp']: ")
    assert "\n" not in text
    assert [part for part in says if part not in text] == []
