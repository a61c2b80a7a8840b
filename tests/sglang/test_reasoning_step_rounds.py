"""What of REASONING_STEP needs no engine: arguments, and what passes in a verification."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins

from speculators_ext.assets import build
from speculators_ext.config import ConfigError, parse_method_config
from speculators_ext.engines.sglang import requested
from speculators_ext.engines.sglang.reasoning_step.judging import Candidate, StepJudging

load_plugins()

from sglang.srt.server_args import ServerArgs  # noqa: E402 - as SGLang does: plugins come first

LOSSY = {"lossy": True, "judge": "logprob"}
TARGET, SMALL, OTHER = "steps-target-tiny", "steps-draft-tiny", "tiny-llama"


def resolve(monkeypatch, *words, settings=LOSSY, draft=SMALL):
    monkeypatch.setenv(requested.ENVIRONMENT, json.dumps(settings))
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    shared = ["--model-path", str(build(TARGET)), "--device", "cpu"]
    shared += ["--attention-backend", "torch_native", "--speculative-algorithm", "reasoning_step"]
    if draft is not None:
        shared += ["--speculative-draft-model-path", str(build(draft))]
    args = ServerArgs.from_cli_args(parser.parse_args([*shared, *words]))
    args.resolve_once()
    return resolving_view(args)


def test_a_step_is_as_long_as_asked(monkeypatch):
    """Catches a verification narrower than a step, or SGLang's own chain of five."""
    found = resolve(monkeypatch, "--speculative-num-steps", "24")
    assert (found.speculative_num_steps, found.speculative_num_draft_tokens) == (24, 25)
    assert found.speculative_eagle_topk == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"settings": {}}, "lossy=false"),
        ({"settings": {"lossy": True}}, "judge='score' is not supported on SGLang"),
        ({"draft": None}, "--speculative-draft-model-path is missing"),
        ({"draft": OTHER}, "another tokenizer than the target"),
    ],
    ids=["consent", "score", "model", "tokenizer"],
)
def test_what_cannot_be_is_refused_in_one_line(monkeypatch, changes, says):
    """Catches a lossy method that starts unasked, and a mistake found only after loading."""
    with pytest.raises(ConfigError) as refusal:
        resolve(monkeypatch, **changes)
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
        Candidate(3, -3.0),  # the target's own words
        Candidate(2, -3.0),  # passes
        Candidate(2, -2.0),  # does not
        Candidate(1, None),  # no whole step
        Candidate(3, -2.1),  # passes
    ]
    found = judging.choose(rows, logits, candidates, chosen)
    expected = chosen.clone()
    expected[1, :2] = torch.tensor([1, 2])
    expected[4, :3] = torch.tensor([6, 7, 5])
    assert found.tolist() == expected.tolist()
    counts = judging.counters
    assert (counts.drafted, counts.agreed, counts.judged) == (4, 1, 3)
    assert (counts.accepted, counts.refused, counts.tokens_against) == (2, 1, 3)
