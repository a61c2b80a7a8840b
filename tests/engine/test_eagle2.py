"""Heads that guess right now and then: the answer is plain decoding's, chains and trees."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

BLOCK = 32
PROMPTS = [
    "The capital of France is",
    "def fib(n):\n    return",
    "List three colours: red, green",
    "serving" * 20,
]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["red", "green", "blue"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
pytestmark = pytest.mark.engine


def greedy(max_tokens: int = 32, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | options
    )


def as_json(max_tokens: int = 48) -> SamplingParams:
    grammar = StructuredOutputsParams(json=SCHEMA)
    return greedy(max_tokens, structured_outputs=grammar, ignore_eos=False)


def tokens(length: int, start: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [3 + (start * 31 + 17 * i) % 500 for i in range(length)]}


@pytest.fixture(scope="module")
def twins(make_head_twins: Any) -> Any:
    return make_head_twins()


def accepted(twins: Any, prompts: list[Any], params: Any) -> int:
    before = twins.clasp.counters()["num_accepted_tokens"]
    twins.check(prompts, params)
    return twins.clasp.counters()["num_accepted_tokens"] - before


@pytest.mark.parametrize("count", [1, 4])
def test_greedy_text(twins: Any, count: int) -> None:
    """Catches a head fed the wrong tokens, states or positions: it would guess nothing."""
    assert accepted(twins, PROMPTS[:count], greedy(60)) >= 3 * count


def test_eagle_1_head(make_eagle2_twins: Any) -> None:
    """Catches the older format: last hidden states, no norm, the target's whole vocabulary."""
    twins = make_eagle2_twins({"head": "tiny-llama-eagle"})
    assert accepted(twins, PROMPTS, greedy(40)) >= 8


@pytest.mark.parametrize(
    ("target", "head"),
    [
        ("tiny-mistral", "tiny-llama-eagle3"),
        ("tiny-qwen3", "tiny-llama-eagle3"),
        ("tiny-gemma2", "tiny-llama-eagle"),
    ],
)
def test_other_targets(make_eagle2_twins: Any, target: str, head: str) -> None:
    """Catches windows that count rows and not positions, soft caps, several cache groups."""
    twins = make_eagle2_twins({"head": head}, alike={"model": target})
    twins.check([*PROMPTS, tokens(100, start=3)], greedy(40))


def test_best_chains_beside_trees(twins: Any) -> None:
    """Catches a request with penalties, bad words or a grammar verified as a tree."""
    words = twins.plain.remembered(PROMPTS[:1], greedy())[0].outputs[0].text.split()
    options: list[dict[str, Any]] = [
        {"frequency_penalty": 2.0},
        {"presence_penalty": -1.5},
        {"repetition_penalty": 1.1},
        {"bad_words": [words[0][:2], words[-1][:2]]},
        {"allowed_token_ids": list(range(40, 90))},
        {},
    ]
    params = [*(greedy(**kind) for kind in options), as_json(), as_json()]
    got = twins.check([PROMPTS[0]] * len(params), params)
    assert set(json.loads(got[-1].outputs[0].text)) == {"ok", "kind"}
    assert len({output.outputs[0].text for output in got}) >= 5


def test_seeds_and_several_completions(make_tree_twins: Any) -> None:
    """Catches noise that depends on the tree, on the neighbours or on the completion's number."""
    params = greedy(24, n=3, temperature=1.0, seed=7)
    got = make_tree_twins().check(PROMPTS[:2], params)
    assert all(len({c.text for c in output.outputs}) == 3 for output in got)


def test_preemption_with_few_blocks(make_head_twins: Any) -> None:
    """Catches a tree, or a copy of the prefix, that outlives a preemption."""
    twins = make_head_twins(num_gpu_blocks_override=16, max_num_seqs=8)
    prompts = [tokens(40 + n, start=n) for n in range(8)]
    before = twins.clasp.counters()["preemptions"]
    twins.check(prompts, [as_json(40) if n % 4 == 3 else greedy(40) for n in range(8)])
    assert twins.clasp.counters()["preemptions"] > before, "no request was preempted"


def test_chunked_prefill_cuts_trees(make_head_twins: Any) -> None:
    """Catches a tree the scheduler cut to a prefix of its rows verified in its full shape."""
    twins = make_head_twins(max_num_batched_tokens=48, max_num_seqs=6)
    prompts = [tokens(n, start=n) for n in (130, 7, 95, 49, 48, 47)]
    twins.check(prompts, greedy(24))


def test_up_to_the_model_length(make_head_twins: Any) -> None:
    """Catches a node past max_model_len: a crash, a token too many, or one too few."""
    limit = 64
    twins = make_head_twins(alike={"max_model_len": limit})
    prompts = [tokens(1, 1), *(tokens(n, start=n) for n in range(limit - 6, limit))]
    got = twins.check(prompts, greedy(limit))
    for prompt, output in zip(prompts, got, strict=True):
        assert len(output.outputs[0].token_ids) == limit - len(prompt["prompt_token_ids"])


def test_block_edges_and_the_prefix_cache(twins: Any) -> None:
    """Catches nodes written to a block that is full, missing, or shared with another request."""
    prompts = [tokens(n * BLOCK + d, start=n) for n in (1, 3) for d in (-1, 0, 1)]
    twins.check([*prompts, *prompts], greedy(12))
    twins.check(prompts, greedy(12))


def test_one_node_and_one_level(make_head_twins: Any) -> None:
    """Catches buffers sized for more than one request, one node or one level."""
    one = {"num_speculative_tokens": 1, "depth": 1, "topk": 1}
    make_head_twins(one, max_num_seqs=1).check(PROMPTS, greedy(12))


def test_many_nodes(make_head_twins: Any) -> None:
    """Catches masks and offsets that hold a word of nodes only."""
    many = {"num_speculative_tokens": 100, "depth": 3, "topk": 8}
    make_head_twins(many).check(PROMPTS, greedy(24))


def test_switched_off_and_capped(twins: Any) -> None:
    """Catches a request's own options left unread."""
    off = greedy(16, extra_args={"speculators_ext_enabled": False})
    assert accepted_none(twins, off)
    capped = greedy(16, extra_args={"speculators_ext_max_drafts": 2})
    before = twins.clasp.counters()
    twins.check(PROMPTS, capped)
    after = twins.clasp.counters()
    steps = after["num_drafts"] - before["num_drafts"]
    assert 0 < after["num_draft_tokens"] - before["num_draft_tokens"] <= 2 * steps


def accepted_none(twins: Any, params: SamplingParams) -> bool:
    before = twins.clasp.counters()["num_draft_tokens"]
    twins.check(PROMPTS, params, drafts=False)
    return twins.clasp.counters()["num_draft_tokens"] == before


def test_an_abort_leaves_the_others_exact(twins: Any) -> None:
    """Catches a tree of an aborted request that a later owner of its slot inherits."""
    engine = twins.clasp.llm.llm_engine
    expected = twins.plain.remembered(PROMPTS, greedy())
    for index, prompt in enumerate(PROMPTS[:3]):
        engine.add_request(f"abort-{index}", prompt, greedy())
    done: dict[str, Any] = {}
    steps = 0
    while engine.has_unfinished_requests():
        steps += 1
        done |= {output.request_id: output for output in engine.step() if output.finished}
        if steps == 3:
            engine.abort_request(["abort-1"])
            engine.add_request("late", PROMPTS[1], greedy())
    for name, index in (("abort-0", 0), ("late", 1), ("abort-2", 2)):
        assert list(done[name].outputs[0].token_ids) == list(expected[index].outputs[0].token_ids)
