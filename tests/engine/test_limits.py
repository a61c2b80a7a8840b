"""Engines at their limits: few blocks, few tokens a step, one sequence, K of 1 and 32, grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

PROMPTS = [
    "The capital of France is",
    "def fib(n):\n    return",
    "List three colours: red, green",
]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["red", "green", "blue"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
pytestmark = pytest.mark.engine


def greedy(max_tokens: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | options
    )


def as_json(max_tokens: int = 48) -> SamplingParams:
    grammar = StructuredOutputsParams(json=SCHEMA)
    return greedy(max_tokens, structured_outputs=grammar, ignore_eos=False)


def tokens(length: int, start: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [3 + (start * 31 + 17 * i) % 500 for i in range(length)]}


def test_json_and_plain_rows_in_one_batch(twins: Any) -> None:
    """Catches drafts that skip the grammar, or that the grammar of a neighbour judges."""
    prompts = [*PROMPTS, *PROMPTS, *PROMPTS]
    params = [as_json() if i % 3 != 2 else greedy(20) for i in range(len(prompts))]
    got = twins.check(prompts, params)
    for output, param in zip(got, params, strict=True):
        if param.structured_outputs is not None:
            answer = json.loads(output.outputs[0].text)
            assert set(answer) == {"ok", "kind"}


def test_choice_and_regex(twins: Any) -> None:
    """Catches a grammar that ends inside an accepted block."""
    grammars = [{"choice": ["positive", "negative"]}, {"regex": r"[a-c]{3}-[0-9]{2}"}]
    params = [
        greedy(20, structured_outputs=StructuredOutputsParams(**kind), ignore_eos=False)
        for kind in grammars
    ]
    got = twins.check(PROMPTS[:2], params, drafts=False)
    assert got[0].outputs[0].text in grammars[0]["choice"]
    assert len(got[1].outputs[0].text) == 6


def test_preemption_with_few_blocks(make_twins: Any) -> None:
    """Catches drafting state that outlives a preemption, and a grammar moved on by lost drafts."""
    twins = make_twins(num_gpu_blocks_override=14, max_num_seqs=8)
    prompts = [tokens(40 + n, start=n) for n in range(8)]
    params = [as_json(40) if n % 4 == 3 else greedy(40) for n in range(8)]
    before = twins.clasp.counters()["preemptions"]
    twins.check(prompts, params)
    assert twins.clasp.counters()["preemptions"] > before, "no request was preempted"


def test_chunked_prefill(make_twins: Any) -> None:
    """Catches drafting for a prompt that is only partly read."""
    twins = make_twins(max_num_batched_tokens=48, max_num_seqs=4)
    prompts = [tokens(n, start=n) for n in (130, 7, 95, 49, 48, 47)]
    twins.check(prompts, greedy(12))


def test_one_sequence_and_one_draft(make_twins: Any) -> None:
    """Catches buffers sized for more than one request or one draft."""
    twins = make_twins({"num_speculative_tokens": 1}, max_num_seqs=1)
    twins.check(PROMPTS, greedy(12))


def test_many_drafts(make_twins: Any) -> None:
    """Catches a K beyond what a batch, a block or a sliding bound expects."""
    twins = make_twins({"num_speculative_tokens": 32}, max_num_seqs=4)
    twins.check(PROMPTS, greedy(40))
    twins.check([tokens(350, start=5)], greedy(40))


def test_draft_probabilities_leave_greedy_text_alone(make_twins: Any) -> None:
    """Catches sampled drafts, or padded slots of the draft distribution, changing greedy rows."""
    twins = make_twins({"draft_sample_method": "probabilistic", "exit_threshold": 0.3})
    twins.check(PROMPTS, greedy())
    mixed = [greedy(), greedy(temperature=1.0, seed=3), greedy(temperature=0.7, seed=4)]
    got = [twins.clasp.generate(PROMPTS, mixed) for _ in range(2)]
    (expected,) = twins.plain.remembered(PROMPTS[:1], greedy())
    for outputs in got:
        assert list(outputs[0].outputs[0].token_ids) == list(expected.outputs[0].token_ids)
    first, second = ([list(o.outputs[0].token_ids) for o in outputs] for outputs in got)
    assert first == second


def test_an_early_exit_shortens_drafts(make_twins: Any) -> None:
    """Catches an exit threshold that is ignored, and ragged rows that spoil their neighbours."""
    twins = make_twins({"exit_threshold": 0.6})
    before = twins.clasp.counters()
    twins.check(PROMPTS, greedy())
    after = twins.clasp.counters()
    drafts = after["num_drafts"] - before["num_drafts"]
    drafted = after["num_draft_tokens"] - before["num_draft_tokens"]
    assert drafts < drafted < 4 * drafts


def test_adaptive_drafting_is_exact(make_twins: Any) -> None:
    """Catches a depth that changes from step to step getting into the text."""
    twins = make_twins({"adaptive": True, "exit_threshold": 0.7})
    twins.check([*PROMPTS, *PROMPTS], greedy(40), drafts=False)


def test_a_thinking_budget_inside_drafts(make_twins: Any) -> None:
    """Catches a budget that is spent only step by step: a block of drafts would run past it."""
    from vllm.config.reasoning import ReasoningConfig

    thinking = ReasoningConfig(reasoning_start_str="<<", reasoning_end_str=">>")
    twins = make_twins(alike={"reasoning_config": thinking})
    prompts = [f"{prompt} <<" for prompt in PROMPTS]
    budgets = [2, 5, 7]
    got = twins.check(prompts, [greedy(20, thinking_token_budget=n) for n in budgets])
    tokenizer = twins.clasp.llm.get_tokenizer()
    end = tokenizer.encode(">>", add_special_tokens=False)
    for output, budget in zip(got, budgets, strict=True):
        made = list(output.outputs[0].token_ids)
        assert made[budget : budget + len(end)] == end


def test_reasoning_that_ends_inside_drafts(make_twins: Any, twins: Any) -> None:
    """Catches a grammar that starts late, or judges thoughts, where drafts cross their end."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

    (free,) = twins.plain.remembered(PROMPTS[:1], greedy())
    thoughts = list(free.outputs[0].token_ids)
    end = next(i for i in range(4, 20) if thoughts.index(thoughts[i]) == i)
    names = twins.plain.llm.get_tokenizer().convert_ids_to_tokens([thoughts[end], 5])

    class Parser(BaseThinkingReasoningParser):
        end_token, start_token = names

    ReasoningParserManager._register_module(Parser, "ends-inside-drafts", force=True)
    structured = {"backend": "xgrammar", "disable_any_whitespace": True}
    twins = make_twins(
        alike={"structured_outputs_config": structured | {"reasoning_parser": "ends-inside-drafts"}}
    )
    (got,) = twins.check(PROMPTS[:1], as_json(end + 48))
    made = list(got.outputs[0].token_ids)
    assert made[: end + 1] == thoughts[: end + 1]
    text = twins.clasp.llm.get_tokenizer().decode(made[end + 1 :], skip_special_tokens=True)
    assert set(json.loads(text)) == {"ok", "kind"}


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 caches need AVX-512 on CPUs"
)
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_a_quantised_cache(make_twins: Any, kind: str) -> None:
    """Catches a layer search that reads fp8 bytes as they stand, or ends the engine over them."""
    twins = make_twins({"search_window": 4}, alike={"kv_cache_dtype": kind})
    prompts = [tokens(length, start=length) for length in (3, 31, 70)]
    twins.check(prompts, greedy(32))
    assert twins.clasp.speculator._search.searches
