"""REASONING_STEP on SGLang, on two models that solve sums: exact when asked, else judged."""

from __future__ import annotations

from typing import Any

import pytest

from speculators_ext.assets import build
from speculators_ext.assets.steps_world import check
from speculators_ext.assets.tiny_steps import DRAFT, TARGET, load_problems

pytestmark = pytest.mark.engine
GREEDY = {"temperature": 0, "max_new_tokens": 120}
ALWAYS, NEVER = -1000.0, 1000.0


def params(threshold: float | None = None, **options: Any) -> dict[str, Any]:
    own = {} if threshold is None else {"speculators_ext_threshold": threshold}
    return GREEDY | {"custom_params": own} | options


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [problem.text for problem in load_problems(build(TARGET))[:12]]


@pytest.fixture(scope="module")
def plain(engines: Any, prompts: list[str]) -> list[str]:
    return [answer["text"] for answer in engines.get(TARGET).generate(prompts, GREEDY)]


def ours(engines: Any) -> Any:
    return engines.get(
        TARGET,
        method_config={"lossy": True, "judge": "logprob", "delimiter": "\n"},
        speculative_algorithm="REASONING_STEP",
        speculative_draft_model_path=str(build(DRAFT)),
        speculative_num_steps=24,
    )


def right(texts: list[str]) -> int:
    problems = load_problems(build(TARGET))
    return sum(check(p, text).right for p, text in zip(problems, texts, strict=False))


@pytest.mark.smoke
def test_exact_judged_and_lenient(engines: Any, prompts: list[str], plain: list[str]) -> None:
    """One engine: plain's text where nothing passes, sound steps of the small model where some do,
    and fewer right answers where all do.
    """
    engine = ours(engines)
    for group in (prompts, prompts[:1]):
        exact = engine.generate(group, params(NEVER))
        assert [answer["text"] for answer in exact] == plain[: len(group)]
    off = engine.generate(prompts, GREEDY | {"custom_params": {"speculators_ext_enabled": 0}})
    assert [answer["text"] for answer in off] == plain
    judged = engine.generate(prompts, params())
    texts = [answer["text"] for answer in judged]
    assert texts != plain
    assert right(texts) >= right(plain) - 1
    lenient = engine.generate(prompts, params(ALWAYS))
    assert right([answer["text"] for answer in lenient]) < right(texts) - 2
    rounds = [sum(a["meta_info"]["spec_verify_ct"] for a in some) for some in (exact, lenient)]
    assert rounds[1] < sum(a["meta_info"]["completion_tokens"] for a in lenient) / 4
    assert engine.do("used_tokens") == 0


def test_alone_and_together_are_the_same(engines: Any, prompts: list[str]) -> None:
    """Catches a step judged by another request's threshold or rows."""
    engine = ours(engines)
    mixed = [params(NEVER if index % 2 else None) for index in range(6)]
    together = [answer["text"] for answer in engine.generate(prompts[:6], mixed)]
    alone = [
        engine.generate([prompt], own)[0]["text"]
        for prompt, own in zip(prompts, mixed, strict=False)
    ]
    assert together == alone


def test_a_logprob_is_the_targets(engines: Any, prompts: list[str]) -> None:
    """An accepted token's log-probability is what the target gives it."""
    engine = ours(engines)
    [got] = engine.generate(prompts[:1], params(ALWAYS), return_logprob=True, logprob_start_len=-1)
    shown = got["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in shown] == got["output_ids"]
    [read] = engines.get(TARGET).generate(
        [build_ids(got, prompts[0])],
        {"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
    )
    theirs = read["meta_info"]["input_token_logprobs"][-len(shown) :]
    assert [entry[0] for entry in shown] == pytest.approx([e[0] for e in theirs], abs=2e-3)


def build_ids(answer: dict[str, Any], prompt: str) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build(TARGET))
    return [*tokenizer.encode(prompt), *answer["output_ids"]]
