"""mtp_reuse on trained tiny models: the answer is plain decoding's, and drafts are accepted.

What every head must hold is asked of it in ``test_eagle2.py`` and ``test_eagle2_trees.py``; here is
what is this method's own, and latent attention.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

from speculators_ext.engines.vllm.mtp_reuse import chain_speculator
from speculators_ext.proposers.mtp_reuse import Chain

MLA = {
    "model": "deepseek-v3-tiny-mtp",
    "attention_config": {"backend": "CPU_MLA"},
    "block_size": 16,
}
CODE = [
    "def read(path):\n    with open(path) as file:\n        return file.",
    "class Stack:\n    def __init__(self):\n        self.",
    "import os\nimport sys\n\n\ndef main():\n    ",
    "for name in names:\n    if name in self.",
]
pytestmark = pytest.mark.engine


def greedy(max_tokens: int = 32, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | options
    )


def tokens(length: int, start: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [3 + (start * 31 + 17 * i) % 500 for i in range(length)]}


@pytest.fixture(scope="module")
def latent(make_mtp_reuse_twins: Any) -> Any:
    """Chains on latent attention with experts."""
    return make_mtp_reuse_twins(alike=MLA)


def counted(twins: Any, prompts: list[Any], params: Any) -> dict[str, int]:
    """Same text; what was drafted and accepted."""
    before = twins.clasp.counters()
    twins.check(prompts, params)
    after = twins.clasp.counters()
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("count", [1, 4])
def test_latent_attention_with_experts(latent: Any, count: int) -> None:
    """Catches short queries split into wrong rows, and a module fed wrong states or positions."""
    found = counted(latent, CODE[:count], greedy(60))
    assert found["num_accepted_tokens"] > 0.3 * found["num_draft_tokens"]
    assert found["num_accepted_tokens"] > 0.8 * found["num_drafts"]


@pytest.mark.parametrize("count", [1, 4])
def test_trees_on_latent_attention(make_mtp_reuse_twins: Any, count: int) -> None:
    """Catches latents of a branch seen by another, or left where their row was and not moved."""
    options = {"num_speculative_tokens": 20, "topk": 4, "depth": 3}
    twins = make_mtp_reuse_twins(options, alike=MLA)
    prompts = [*CODE[:count], tokens(100, 1)]
    found = counted(twins, prompts, greedy(60))
    assert found["num_accepted_tokens"] > 0.8 * found["num_drafts"]


def test_latent_rows_side_by_side(latent: Any) -> None:
    """Catches a prompt, a short prompt and a verification in one batch told apart wrongly."""
    engine, expected = latent.clasp.llm.llm_engine, {}
    prompts = [tokens(120, 1), tokens(9, 2), tokens(60, 3), tokens(2, 4)]
    for index, output in enumerate(latent.plain.remembered(prompts, greedy(24))):
        expected[f"mixed-{index}"] = list(output.outputs[0].token_ids)
    waiting, done = list(enumerate(prompts)), {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            index, prompt = waiting.pop(0)
            engine.add_request(f"mixed-{index}", prompt, greedy(24))
        for _ in range(3):
            done |= {output.request_id: output for output in engine.step() if output.finished}
    assert {name: list(out.outputs[0].token_ids) for name, out in done.items()} == expected


def test_latent_seeds_penalties_and_limits(latent: Any) -> None:
    """Catches acceptance that forgets a request's own sampling."""
    latent.check(
        CODE,
        [
            greedy(24, frequency_penalty=1.5),
            greedy(24, presence_penalty=1.0),
            greedy(24),
            greedy(1),
        ],
    )
    drawn = greedy(24, temperature=1.0, seed=7)
    first, again = (latent.clasp.generate(CODE, drawn) for _ in range(2))
    assert [out.outputs[0].text for out in first] == [out.outputs[0].text for out in again]
    limit = latent.clasp.llm.llm_engine.model_config.max_model_len
    ends = [tokens(n, start=n) for n in range(limit - 5, limit)]
    got = latent.check(ends, greedy(limit))
    assert [len(out.outputs[0].token_ids) for out in got] == [5, 4, 3, 2, 1]


def test_probabilistic_drafts_of_a_reduced_vocabulary(make_mtp_reuse_twins: Any) -> None:
    """Catches draft probabilities of ids outside the vocabulary: greedy rows would go astray."""
    options = {"draft_sample_method": "probabilistic", "draft_vocab_size": 256}
    twins = make_mtp_reuse_twins(options)
    found = counted(twins, CODE, greedy(40))
    assert found["num_accepted_tokens"] > 0.2 * found["num_drafts"]
    drawn = SamplingParams(temperature=1.0, max_tokens=40, seed=3, ignore_eos=True)
    outputs = twins.clasp.generate(CODE, drawn)
    assert all(len(output.outputs[0].token_ids) == 40 for output in outputs)


def test_the_reduced_vocabulary_follows_the_traffic(make_mtp_reuse_twins: Any) -> None:
    """Catches a head whose rows are not those of the ids they stand for, after a new choice."""
    import torch

    twins = make_mtp_reuse_twins({"draft_vocab_size": 256})
    reduced = twins.clasp.speculator.module.reduced
    before = set(reduced.vocabulary.ids.tolist())
    for _ in range(3):
        counted(twins, CODE, greedy(60))
    after = set(reduced.vocabulary.ids.tolist())
    assert before != after, "nothing was chosen anew"
    rows = reduced._head.weight[reduced.vocabulary.ids]
    assert torch.equal(reduced._rows, rows)


def test_a_tree_of_a_reduced_vocabulary(make_mtp_reuse_twins: Any) -> None:
    """Catches nodes that carry a slot of the draft vocabulary where a token belongs."""
    options = {"num_speculative_tokens": 8, "topk": 3, "depth": 3, "draft_vocab_size": 256}
    found = counted(make_mtp_reuse_twins(options), CODE, greedy(60))
    assert found["num_accepted_tokens"] > 0.2 * found["num_drafts"]


def test_calibration_takes_the_best_and_harms_nothing(make_mtp_reuse_twins: Any) -> None:
    """Catches a calibration that leaves its traces in the cache, or takes what it did not find."""
    twins = make_mtp_reuse_twins({"calibrate": True})
    assert twins.clasp.speculator.module.norms.first == "pre"  # as the module was trained
    counted(twins, CODE, greedy(40))


def test_the_wrong_state_is_accepted_less(make_mtp_reuse_twins: Any) -> None:
    """Catches norms that are settings only: the state decides what is accepted."""
    found = {}
    for side in ("pre", "post"):
        twins = make_mtp_reuse_twins({"first_hidden": side})
        found[side] = counted(twins, CODE, greedy(60))["num_accepted_tokens"]
    assert found["pre"] > found["post"]


@pytest.mark.parametrize("engine", [{}, MLA], ids=["dense", "latent"])
def test_whatever_is_drafted_the_text_is_plain_decodings(
    make_mtp_reuse_twins: Any, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a verification that trusts a draft: chains of right and wrong tokens, any length."""
    twins, rng = make_mtp_reuse_twins(alike=engine), random.Random(0)
    params, prompts = greedy(60), [*CODE, "serving" * 20, "List three colours:"]
    answers = {
        tuple(out.prompt_token_ids): [*out.prompt_token_ids, *out.outputs[0].token_ids]
        for out in twins.plain.remembered(prompts, params)
    }

    def draft(head: Any, hidden: Any, features: Any, limits: Any, *_: Any, **__: Any) -> Any:
        chains = []
        for index, limit in enumerate(limits):
            slot, states = int(head._idx_mapping[index]), head._of._req_states
            prompt = states.all_token_ids.gpu[slot, : int(states.prompt_len.np[slot])].tolist()
            truth = answers[tuple(prompt)][head._lengths[index] + 1 :]
            count = rng.randint(0, limit)
            right = rng.randint(0, min(count, len(truth)))
            drafts = [*truth[:right], *(rng.randrange(3, 1500) for _ in range(count - right))]
            chains.append(Chain(drafts, [1.0] * count))
        return chains, 1

    monkeypatch.setattr(chain_speculator, "draft_chains", draft)
    found = counted(twins, prompts, params)
    assert 0 < found["num_accepted_tokens"] < found["num_draft_tokens"]
