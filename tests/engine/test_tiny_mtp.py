"""The tiny MTP models in stock vLLM: the same numbers as in training, and drafts that are taken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from speculators_ext.assets import build, tiny_mtp
from speculators_ext.cli.prompts import load_prompts

pytestmark = pytest.mark.engine

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "training"
PROMPTS, TOKENS = 12, 64


@pytest.fixture(scope="module", params=[tiny_mtp.DEEPSEEK, tiny_mtp.MIMO])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def prompts(name):
    texts = [prompt.text for prompt in load_prompts(build(name) / "prompts.jsonl")]
    return [text for text in texts if len(text) < 600][:PROMPTS]


@pytest.fixture(scope="module")
def engines_of(engines, name):
    """Plain, and with the built-in `mtp` at one draft a round."""
    built_in = {"method": "mtp", "num_speculative_tokens": 1}
    args = {"model": name}
    if name == tiny_mtp.DEEPSEEK and not torch.cuda.is_available():
        # What vLLM chooses for latent attention on a CPU with AMX takes no fp32.
        args |= {"attention_config": {"backend": "CPU_MLA"}, "block_size": 16}
    return engines.get(**args), engines.get(built_in, **args)


@pytest.fixture(scope="module")
def trained(name):
    """The shipped weights in the form they were trained in."""
    sys.path.insert(0, str(SCRIPTS))
    from mtp_export import load

    sys.path.pop(0)
    return load(build(name))


def greedy(tokens, **options):
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, **options)


def test_vllm_computes_what_was_trained(engines_of, prompts, trained):
    """Catches a tensor in another's place, transposed halves, another rotation or routing."""
    plain, _ = engines_of
    for output in plain.generate(prompts[:3], greedy(1, prompt_logprobs=1)):
        tokens = torch.tensor(output.prompt_token_ids)
        rows = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        got = torch.tensor([row[token].logprob for row, token in rows])
        with torch.inference_mode():
            logits, _ = trained.logits(tokens[None])
        expected = logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(got, expected, atol=2e-3, rtol=0)


def test_the_built_in_mtp_takes_most_first_drafts(engines_of, prompts, trained):
    """Catches an MTP module fed by the wrong state, or in the wrong order of its two halves: far
    fewer drafts would be taken than the training form foresees on the same text.
    """
    plain, mtp = engines_of
    expected = plain.remembered(prompts, greedy(TOKENS))
    before = mtp.counters()
    got = mtp.generate(prompts, greedy(TOKENS))
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in expected]
    counts = {key: value - before[key] for key, value in mtp.counters().items()}
    taken = counts["num_accepted_tokens"] / counts["num_drafts"]
    assert taken > 0.5
    # Not equal: vLLM blanks the module's embedding at position 0, training did not.
    assert taken == pytest.approx(foreseen(trained, expected), abs=0.1)


def foreseen(trained, outputs):
    """What share of rounds of one draft the module would win on these texts."""
    rounds = won = 0
    for output in outputs:
        begin = len(output.prompt_token_ids)
        tokens = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])
        with torch.inference_mode():
            _, ahead = trained.logits(tokens[None])
        hits = (ahead[0, begin - 1 : -1].argmax(-1) == tokens[begin + 1 :]).tolist()
        place = 0
        while place < len(hits):
            rounds, won = rounds + 1, won + hits[place]
            place += 1 + hits[place]
    return won / rounds
