"""reasoning_step without a small model: the target writes the steps, with layers skipped.

One engine serves exact and lossy requests, as thresholds are their own. Prompts are read in pieces,
over few cache blocks. What judges and steps are is shared with a small model's:
``test_reasoning_step.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

from speculators_ext.settings import SkipConfig

pytestmark = pytest.mark.engine
TARGET, K = "tiny-llama", 12
NEVER, ALWAYS = 1000.0, 0.0
SKIPS = {"num_skip_layers": 3, "refresh_interval": 2}


def config(**options: Any) -> dict[str, Any]:
    own = {"lossy": True, "delimiter": "e", "judge_suffix": "grade", "clasp": SKIPS}
    return {
        "method": "reasoning_step",
        "num_speculative_tokens": K,
        "method_config": own | options,
    }


def params(threshold: float | None = None, **options: Any) -> SamplingParams:
    extra = {} if threshold is None else {"speculators_ext_threshold": threshold}
    given = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
    given["extra_args"] = extra | options.pop("extra", {})
    return SamplingParams(**given | options)


def prompts(*lengths: int, seed: int = 0) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [5 + (seed * 67 + n * 31 + 17 * i) % 480 for i in range(n)]}
        for n in lengths
    ]


def counted(call: Any) -> tuple[Any, dict[str, float]]:
    """What a call returned and what it added to this process's counters."""
    from speculators_ext.engines.vllm.reasoning_step.book import COUNTERS

    before = COUNTERS.as_dict()
    result = call()
    return result, {name: value - before[name] for name, value in COUNTERS.as_dict().items()}


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def search_with(engine: Any, **skips: Any) -> Any:
    """A search of the engine's own layers with other settings."""
    from speculators_ext.engines.vllm.skipping.skip_search import SkipSearch

    speculator = engine.speculator
    chosen = SkipConfig(**skips)
    return SkipSearch(speculator._walk, chosen, speculator.vllm_config, can_pack=True)


@pytest.fixture(scope="module")
def plain(engines: Any) -> Any:
    return engines.get(model=TARGET)


@pytest.fixture(scope="module")
def alone(engines: Any, plain: Any) -> Any:
    small = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 20}
    return engines.get(config(judge="score", threshold=4.5), model=TARGET, **small)


def test_exact_requests_are_plain_and_undisturbed_by_others(plain: Any, alone: Any) -> None:
    """At different points of one batch, over prompts in pieces, cached prefixes and preemption."""
    given = prompts(20, 33, 150, 47, 100, 21, 64, 90)
    lengths = [30 + 9 * index for index in range(len(given))]
    exact = [index for index in range(len(given)) if index % 3]
    mixed = [
        params(NEVER if index in exact else ALWAYS, max_tokens=count)
        for index, count in enumerate(lengths)
    ]
    expected = [
        tokens(plain.remembered([given[index]], params(max_tokens=lengths[index])))[0]
        for index in exact
    ]
    for _ in range(2):
        got, added = counted(lambda: alone.generate(given, mixed))
        assert [tokens(got)[index] for index in exact] == expected
        assert added["refused"] > 0
        assert added["accepted"] > 0
        assert added["judge_forwards"] > 0
    assert alone.counters()["preemptions"] > 0
    assert alone.speculator._search.searches
    for _ in range(2):
        [again] = alone.generate([given[2]], mixed[2])
        assert tokens([again]) == [expected[exact.index(2)]]
    assert again.num_cached_tokens == 128


def test_a_request_can_be_switched_off(plain: Any, alone: Any) -> None:
    """Nothing is drafted for it, so nothing is judged."""
    given = prompts(20, 31, 44, seed=1)
    off = params(ALWAYS, extra={"speculators_ext_enabled": 0})
    before = alone.counters()["num_draft_tokens"]
    got, added = counted(lambda: alone.generate(given, off))
    assert tokens(got) == tokens(plain.remembered(given, params()))
    assert added["drafted"] == 0
    assert alone.counters()["num_draft_tokens"] == before


def test_steps_of_all_layers_are_the_targets_own(
    plain: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a draft at a wrong position, over a wrong prefix, or that feeds on another row."""
    everything = search_with(alone, num_skip_layers=0)
    monkeypatch.setattr(alone.speculator, "_search", everything)
    given = prompts(20, 37, 70, 23, seed=2)
    got, added = counted(lambda: alone.generate(given, params(ALWAYS)))
    assert tokens(got) == tokens(plain.remembered(given, params()))
    assert added["drafted"] == added["agreed"] > 0


def test_each_request_is_drafted_with_its_own_skip_set(
    plain: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other request skips nothing, so only its neighbours' steps are judged, and differ."""
    search = search_with(alone, grouping="per_request", num_skip_layers=3)
    whole: set[str] = set()

    def set_of(req_id: str) -> tuple[int, ...]:
        if int(req_id.split("-")[0]) % 2:
            return (1, 2, 6)
        whole.add(req_id)
        return ()

    monkeypatch.setattr(search, "due", lambda _: False)
    monkeypatch.setattr(search, "_set_of", set_of)
    monkeypatch.setattr(alone.speculator, "_search", search)
    given = prompts(20, 37, 70, 23, seed=3)
    got, added = counted(lambda: alone.generate(given, params(ALWAYS)))
    expected = tokens(plain.remembered(given, params()))
    own = [int(output.request_id.split("-")[0]) % 2 == 0 for output in got]
    assert len(whole) == sum(own) == 2
    same = [found == text for found, text in zip(tokens(got), expected, strict=True)]
    assert same == own
    assert added["agreed"] > 0
    assert added["accepted"] == added["judged"] > 0


def test_an_accepted_step_leaves_the_cache_of_every_layer_right(plain: Any, alone: Any) -> None:
    """Catches keys of a step's draft left in the cache where layers were skipped or run short.

    What the target gave each token, and what it writes over the cached prefix, is what plain
    decoding reads off the same text.
    """
    [given] = prompts(40, seed=4)
    [got], added = counted(
        lambda: alone.generate([given], params(ALWAYS, max_tokens=80, logprobs=1))
    )
    assert added["accepted"] == added["judged"] > 0
    assert added["tokens_against"] >= added["accepted"]
    shown = got.outputs[0]
    text = given["prompt_token_ids"] + list(shown.token_ids)
    read = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [known] = plain.generate([{"prompt_token_ids": text}], read)
    for offset, token in enumerate(shown.token_ids):
        own = shown.logprobs[offset][token].logprob
        theirs = known.prompt_logprobs[40 + offset][token].logprob
        assert own == pytest.approx(theirs, abs=1e-3)
    again = [{"prompt_token_ids": text}]
    off = params(extra={"speculators_ext_enabled": 0})
    [over] = alone.generate(again, off)
    assert over.num_cached_tokens > 40
    assert tokens([over]) == tokens(plain.generate(again, params()))


def test_fixed_skips_write_the_same_steps_alone_and_together(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a request that is drafted or judged by another's cache, position or threshold."""
    fixed = search_with(alone, skip_layers=(1, 2, 6))
    monkeypatch.setattr(alone.speculator, "_search", fixed)
    given = prompts(20, 26, 35, 80, 29, seed=5)
    asked = [params(NEVER if i == 2 else None, max_tokens=20 + 7 * i) for i in range(5)]
    together, added = counted(lambda: tokens(alone.generate(given, asked)))
    assert added["accepted"] > 0
    assert added["refused"] > 0
    single = [tokens(alone.generate([t], p))[0] for t, p in zip(given, asked, strict=True)]
    assert together == single


@pytest.mark.full
@pytest.mark.parametrize("judge", ["logprob", "score"])
def test_a_real_model_passes_some_of_its_own_steps(engines: Any, judge: str) -> None:
    """Catches steps of a trained model, by its preset's skips, that no judge ever lets pass."""
    alike = {"model": "smollm2-135m-instruct", "num_gpu_blocks_override": 64}
    plain = engines.get(**alike)
    text = "List the planets and one fact about each:\n- Mercury is the closest to the Sun.\n-"
    made = {"judge": judge, "delimiter": "\n", "clasp": {}, "judge_suffix": "Grade:"}
    made |= {"threshold": -6.0 if judge == "logprob" else 3.0}
    engine = engines.get(config(**made) | {"num_speculative_tokens": 24}, **alike)
    assert engine.speculator._search._plan.num_skip == 6
    asked = params(max_tokens=96, ignore_eos=False)
    _, added = counted(lambda: engine.generate([text], asked))
    assert added["drafted"] > added["agreed"]
    assert added["accepted"] > 0
    got, added = counted(
        lambda: engine.generate([text], params(NEVER, max_tokens=96, ignore_eos=False))
    )
    assert tokens(got) == tokens(plain.remembered([text], asked))
    assert added["accepted"] == 0
