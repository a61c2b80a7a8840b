"""reasoning_step on the two tiny trained models: what judges are worth where steps mean something.

The problems are held out; steps are lines, and the target has learned to grade them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

from speculators_ext.assets import build
from speculators_ext.assets.steps_world import JUDGE_SUFFIX, check, draw_problem, is_sound
from speculators_ext.assets.tiny_steps import DRAFT, TARGET

pytestmark = pytest.mark.engine
K = 24
ALIKE = {"model": TARGET}
NEVER, ALWAYS = 1000.0, -1000.0


def config(**options: Any) -> dict[str, Any]:
    stock = {"num_speculative_tokens": options.pop("num_speculative_tokens", K)}
    own = {"lossy": True, "delimiter": "\n"}
    model = str(build(options.pop("draft", DRAFT)))
    return {"method": "reasoning_step", "model": model, "method_config": own | options, **stock}


def params(threshold: float | None = None, **options: Any) -> SamplingParams:
    extra = {} if threshold is None else {"speculators_ext_threshold": threshold}
    given = {"temperature": 0, "max_tokens": 160, "extra_args": extra | options.pop("extra", {})}
    return SamplingParams(**given | options)


def problems(count: int, seed: int = 3) -> list[Any]:
    rng = random.Random(seed)
    return [draw_problem(rng, 4 + index % 3, held_out=True) for index in range(count)]


def counted(call: Any) -> tuple[Any, dict[str, float]]:
    """What a call returned and what it added to this process's counters."""
    from speculators_ext.engines.vllm.reasoning_step.book import COUNTERS

    before = COUNTERS.as_dict()
    result = call()
    return result, {name: value - before[name] for name, value in COUNTERS.as_dict().items()}


@pytest.fixture(scope="module")
def plain(engines: Any) -> Any:
    return engines.get(**ALIKE)


@pytest.fixture(scope="module")
def logprob(engines: Any, plain: Any) -> Any:
    """One engine serves exact and lossy requests: thresholds are their own."""
    return engines.get(config(judge="logprob", judge_suffix=JUDGE_SUFFIX), **ALIKE)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def turned(outputs: list[Any]) -> int:
    """Steps that name the digit first."""
    texts = [output.outputs[0].text for output in outputs]
    return sum(text.count(" : add ") + text.count(" : take ") for text in texts)


def test_exact_is_the_plain_text(engines: Any, plain: Any) -> None:
    """The control: a judge that lets nothing pass leaves greedy text token for token."""
    engine = engines.get(config(judge="exact"), **ALIKE)
    texts = [p.text for p in problems(12)]
    got, added = counted(lambda: engine.generate(texts, params()))
    assert tokens(got) == tokens(plain.remembered(texts, params()))
    assert added["drafted"] > added["agreed"] > 0
    assert added["accepted"] == 0


def test_what_passes_is_the_small_models_own_step(logprob: Any) -> None:
    """A lenient judge changes whole steps only, to lines in the small model's wording: it turns
    the numbers round ("add 4 to 71"), which the target does less often.
    """
    given = problems(8, seed=6)
    texts = [p.text for p in given]
    got, added = counted(lambda: logprob.generate(texts, params(ALWAYS)))
    assert added["accepted"] == added["judged"] > 0
    assert added["tokens_against"] >= added["accepted"]
    exact, _ = counted(lambda: logprob.generate(texts, params(NEVER)))
    assert tokens(got) != tokens(exact)
    assert turned(got) > 2 * turned(exact)


@pytest.mark.parametrize("judge", ["logprob", "score"])
def test_the_judge_refuses_what_is_wrong(engines: Any, plain: Any, judge: str) -> None:
    """Answers stay about as right as the target's own; with a judge that takes all they do not."""
    engine = engines.get(config(judge=judge, judge_suffix=JUDGE_SUFFIX), **ALIKE)
    given = problems(24, seed=7)
    texts = [p.text for p in given]

    def right(engine: Any, threshold: float | None = None) -> int:
        outputs = engine.generate(texts, params(threshold))
        return sum(check(p, o.outputs[0].text).right for p, o in zip(given, outputs, strict=True))

    own = right(plain)
    assert own >= 22
    judged, added = counted(lambda: right(engine))
    assert added["accepted"] > added["judged"] / 4
    assert added["refused"] > 0
    assert judged >= own - 1
    assert right(engine, ALWAYS if judge == "logprob" else 0.0) < judged - 5


def test_sound_steps_of_a_judged_text_are_sound(logprob: Any) -> None:
    """With the default threshold at least 19 lines in 20 are sound."""
    given = problems(16, seed=16)
    lines = sound = 0
    for problem, output in zip(
        given, logprob.generate([p.text for p in given], params()), strict=True
    ):
        before = ""
        for line in output.outputs[0].text.strip().split("\n")[:-1]:
            lines += 1
            sound += is_sound(problem, before, line)
            before += line + "\n"
    assert sound >= 0.95 * lines > 0
