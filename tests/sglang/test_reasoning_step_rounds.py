"""What of REASONING_STEP needs no engine: arguments, and what passes in a verification."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from transformers import AutoTokenizer

from speculators_ext import method_configs
from speculators_ext.assets import build
from speculators_ext.config import ConfigError, parse_method_config
from speculators_ext.engines.sglang import requested
from speculators_ext.engines.sglang.reasoning_step.judging import Candidate, StepJudging
from speculators_ext.engines.sglang.reasoning_step.worker import ReasoningStepWorker, _Entry
from speculators_ext.engines.sglang.request_rows import KnownRequests
from speculators_ext.proposers.reasoning_step import (
    DelimiterWatch,
    StepRules,
    StepSplitter,
    StepTracker,
)
from speculators_ext.proposers.step_tokens import find_suffix

load_plugins()

from sglang.srt.server_args import ServerArgs  # noqa: E402 - as SGLang does: plugins come first

LOSSY = {"lossy": True, "judge": "logprob"}
TARGET, SMALL, OTHER = "steps-target-tiny", "steps-draft-tiny", "tiny-llama"


STEPS = ("--speculative-num-steps", "24")
SUFFIX = method_configs.JUDGE_SUFFIX


def resolve(monkeypatch, *words, settings=LOSSY, draft=SMALL, target=TARGET):
    monkeypatch.setenv(requested.ENVIRONMENT, json.dumps(settings))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    shared = ["--model-path", str(build(target)), "--device", "cpu"]
    shared += ["--attention-backend", "torch_native", "--speculative-algorithm", "reasoning_step"]
    if draft is not None:
        shared += ["--speculative-draft-model-path", str(build(draft))]
    args = ServerArgs.from_cli_args(parser.parse_args([*shared, *words]))
    args.resolve_once()
    return resolving_view(args)


def test_a_step_is_as_long_as_asked(monkeypatch):
    """Catches a verification narrower than a step, or SGLang's own chain of five."""
    found = resolve(monkeypatch, *STEPS)
    assert (found.speculative_num_steps, found.speculative_num_draft_tokens) == (24, 25)
    assert found.speculative_eagle_topk == 1


@pytest.mark.parametrize("judge", ["score", "logprob"])
def test_slots_are_reserved_for_the_suffix(monkeypatch, judge):
    """Catches a judge that writes where another request's slots may be."""
    found = resolve(monkeypatch, *STEPS, settings={"lossy": True, "judge": judge})
    suffix = find_suffix(AutoTokenizer.from_pretrained(build(TARGET)), SUFFIX)
    needed = 25 + (len(suffix.ids) if judge == "score" else 0)
    algorithm = SpeculativeAlgorithm.from_string(found.speculative_algorithm)
    assert algorithm.resolve_max_speculative_num_draft_tokens(found) == needed
    assert found.speculative_num_draft_tokens == 25


@pytest.mark.parametrize(
    ("words", "changes", "says"),
    [
        ((), {"settings": {}}, "lossy=false"),
        (("--context-length", "95", *STEPS), {"settings": {"lossy": True}}, "do not fit"),
        (("--reasoning-parser", "deepseek-r1"), {}, "reasoning_start='<think>' is"),
        ((), {"draft": None, "target": "tiny-phi3"}, "layers of this target cannot be skipped"),
        ((), {"settings": {"lossy": True, "clasp": {}}}, "accepted: one of the two"),
        (
            (),
            {"draft": None, "settings": {"lossy": True, "clasp": {"skip_unit": "sublayer"}}},
            "skip_unit='sublayer' is not supported on SGLang",
        ),
        ((), {"draft": OTHER}, "another tokenizer than the target"),
    ],
    ids=["consent", "room", "parser", "layers", "both", "unit", "tokenizer"],
)
def test_what_cannot_be_is_refused_in_one_line(monkeypatch, words, changes, says):
    """Catches a lossy method that starts unasked, and a mistake found only after loading."""
    with pytest.raises(ConfigError) as refusal:
        resolve(monkeypatch, *words, **changes)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_only_whole_steps_pass_and_only_their_own_rows_change():
    """Catches a neighbour's threshold or rows, padding read as drafts, half a step taken."""
    judging = StepJudging(parse_method_config("reasoning_step", LOSSY, target=None))
    width, vocabulary = 4, 8
    logits = torch.zeros(5 * width, vocabulary)  # each token has the log-probability -2.08
    candidates = torch.tensor(
        [[0, 1, 2, 3], [0, 1, 2, 0], [0, 4, 5, 0], [0, 1, 0, 0], [0, 6, 7, 5]]
    )
    chosen = torch.tensor([[1, 2, 3, 7], [1, 6, 7, 7], [6, 6, 6, 6], [5, 5, 5, 5], [5, 5, 5, 5]])
    rows = [
        Candidate(3, -3.0, 9),  # the target's own words
        Candidate(2, -3.0, 9),  # passes
        Candidate(2, -2.0, 9),  # does not
        Candidate(1, None, 9),  # no whole step
        Candidate(3, -2.1, 9),  # passes
    ]
    found = judging.choose(None, rows, logits, candidates, chosen)
    expected = chosen.clone()
    expected[1, :2] = torch.tensor([1, 2])
    expected[4, :3] = torch.tensor([6, 7, 5])
    assert found.tolist() == expected.tolist()
    counts = judging.counters
    assert (counts.drafted, counts.agreed, counts.judged) == (4, 1, 3)
    assert (counts.accepted, counts.refused, counts.tokens_against) == (2, 1, 3)


def test_requests_of_one_token_are_forgotten():
    """Catches a server that keeps every prompt it was asked one token of: they have no rounds."""
    worker = object.__new__(ReasoningStepWorker)
    worker._known = KnownRequests(tail=1)
    worker._entries = {}
    for name, ended in (("a", True), ("b", False)):
        req = SimpleNamespace(
            rid=name, origin_input_ids=[1], output_ids=[], finished=lambda ended=ended: ended
        )
        worker._known.start(req, 5)
        worker._entries[name] = _Entry(req, [1, 5], None, exact=False)
    worker._forget_ended()
    assert list(worker._entries) == ["b"]
    assert worker._known.newest("a", 1) == []
    assert worker._known.newest("b", 1) == [5]


@pytest.mark.parametrize(
    ("asked", "threshold"),
    [
        (None, -4.0),
        ({"speculators_ext_threshold": -3}, -3.0),
        ({"speculators_ext_threshhold": -3}, None),
        ({"speculators_ext_threshold": "low"}, None),
        ({"speculators_ext_threshold": -2000}, None),
    ],
    ids=str,
)
def test_what_a_request_asks_for_in_vain_makes_it_exact(asked, threshold, caplog):
    """Catches a mistyped request that is served lossily, by the server's threshold."""
    worker = object.__new__(ReasoningStepWorker)
    worker._options = parse_method_config("reasoning_step", LOSSY, target=None)
    worker._known = KnownRequests(1, worker._options.least_threshold)
    worker._end = 100
    req = SimpleNamespace(rid="a", sampling_params=SimpleNamespace(custom_params=asked))
    worker._entries = {"a": _Entry(req, [1, 5], None, exact=False, judgeable=True)}
    assert worker._candidate(req, 2, 9) == Candidate(2, threshold, 9)
    assert ("served exactly" in caplog.text) is (threshold is None)


def test_a_delimiter_that_is_never_reached_is_said_once(caplog):
    """Catches a server that judges nothing and never says why."""
    rules = StepRules(StepSplitter("\n\n", ["a", "\n\n"]))
    worker = object.__new__(ReasoningStepWorker)
    worker._both, worker._watch = 2, DelimiterWatch(rules, 3)
    always_a = torch.tensor([[1.0, 0.0]])
    worker.writer = SimpleNamespace(feed=lambda *given: always_a)
    for _ in range(50):
        entry = _Entry(None, [0], StepTracker(rules), exact=False)
        worker._write_steps(None, {0: 3}, {0: entry})
        assert entry.drafts == [0, 0, 0]
    assert caplog.text.count("none reached the delimiter '\\n\\n'") == 1
