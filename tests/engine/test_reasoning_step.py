"""reasoning_step's mechanics on two random models of one tokenizer: lossless with `exact`, and only
as lossy as said.

Steps end in any token that holds the letter e. How good judges are is a matter of trained models:
see ``test_reasoning_step_trained.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from speculators_ext.assets import build

pytestmark = pytest.mark.engine
TARGET, DRAFT = "tiny-llama", "tiny-mistral"
DELIMITER = "e"
K = 12
NEVER, ALWAYS = 1000.0, -1000.0


def config(**options: Any) -> dict[str, Any]:
    stock = {"num_speculative_tokens": options.pop("num_speculative_tokens", K)}
    own = {"lossy": True, "delimiter": DELIMITER, "judge_suffix": "grade"}
    model = str(build(options.pop("draft", DRAFT)))
    return {"method": "reasoning_step", "model": model, "method_config": own | options, **stock}


def params(threshold: float | None = None, **options: Any) -> SamplingParams:
    extra = {} if threshold is None else {"speculators_ext_threshold": threshold}
    given = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
    given["extra_args"] = extra | options.pop("extra", {})
    return SamplingParams(**given | options)


def prompts(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Of 20 tokens and more, none of them special."""
    lengths = range(20, 20 + count)
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


@pytest.fixture(scope="module")
def plain(engines: Any) -> Any:
    return engines.get(model=TARGET)


@pytest.fixture(scope="module")
def small(engines: Any, plain: Any) -> Any:
    return engines.get(model=DRAFT)


@pytest.fixture(scope="module")
def logprob(engines: Any, plain: Any) -> Any:
    """One engine serves exact and lossy requests: thresholds are their own."""
    return engines.get(config(judge="logprob"), model=TARGET)


@pytest.fixture(scope="module")
def score(engines: Any, plain: Any) -> Any:
    return engines.get(config(judge="score", threshold=4.5), model=TARGET)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def greedy(engine: Any, ids: list[int], count: int) -> list[int]:
    """The engine's next tokens after ``ids``."""
    [found] = tokens(engine.generate([{"prompt_token_ids": ids}], params(max_tokens=count)))
    return found


def by_hand(plain: Any, small: Any, prompt: list[int], count: int, first_exact: int) -> list[int]:
    """What must come out where every judged step passes, from the two models alone."""
    ends = [DELIMITER in text for text in texts_of(plain)]
    stop = plain.llm.get_tokenizer().eos_token_id
    made = greedy(plain, prompt, 1)
    while len(made) < count:
        drafts = []
        room = min(K, count - len(made) - 1)  # a step must leave room for the target's next token
        for token in greedy(small, prompt + made, K)[:room]:
            drafts.append(token)
            if ends[token] or token == stop:
                break
        whole = bool(drafts) and ends[drafts[-1]] and stop not in drafts
        own = greedy(plain, prompt + made, len(drafts) + 1)
        matched = next((i for i, d in enumerate(drafts) if d != own[i]), len(drafts))
        if whole and sum(ends[t] for t in made) >= first_exact:
            made += drafts
            made += greedy(plain, prompt + made, 1)
        else:
            made += own[: matched + 1]
    return made[:count]


def texts_of(engine: Any) -> list[str]:
    from speculators_ext.proposers.step_tokens import token_texts

    return token_texts(engine.llm.get_tokenizer())


def test_exact_is_the_plain_text(engines: Any, plain: Any) -> None:
    """The control: a judge that lets nothing pass leaves greedy text token for token."""
    engine = engines.get(config(judge="exact"), model=TARGET)
    got, added = counted(lambda: engine.generate(prompts(8), params()))
    assert tokens(got) == tokens(plain.remembered(prompts(8), params()))
    assert added["judged"] > 0
    assert added["accepted"] == 0


def test_steps_of_the_targets_own_words_are_not_judged(engines: Any, plain: Any) -> None:
    """The target as its own small model: every step agrees, and the text is plain's."""
    engine = engines.get(config(judge="logprob", threshold=ALWAYS, draft=TARGET), model=TARGET)
    got, added = counted(lambda: engine.generate(prompts(6, 1), params()))
    assert tokens(got) == tokens(plain.remembered(prompts(6, 1), params()))
    assert added["drafted"] == added["agreed"] > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_can_ask_for_exactness(plain: Any, score: Any, temperature: float) -> None:
    """A threshold no step reaches; with a seed, sampled text is plain decoding's too."""
    options = {"temperature": temperature, "seed": 11}
    got, added = counted(lambda: score.generate(prompts(6, 2), params(NEVER, **options)))
    assert tokens(got) == tokens(plain.generate(prompts(6, 2), params(**options)))
    assert added["judged"] == added["refused"] > 0
    assert added["judge_forwards"] > 0  # which left nothing behind


@pytest.mark.parametrize("first_exact", [0, 2])
def test_what_passes_is_the_small_models_own_step(
    engines: Any, plain: Any, small: Any, logprob: Any, first_exact: int
) -> None:
    """Catches half a step taken, a judged step cut off, and a wrong next token behind a step."""
    engine = logprob
    if first_exact:
        made = config(judge="logprob", first_exact=first_exact)
        engine = engines.get(made, model=TARGET)
    given = prompts(3, 3)
    count = 40  # vLLM gives a draft model the target's window, so texts stay within its own of 64
    got, added = counted(lambda: engine.generate(given, params(ALWAYS, max_tokens=count)))
    assert added["accepted"] == added["judged"] > 0
    assert added["tokens_against"] >= added["accepted"]
    for prompt, found in zip(given, tokens(got), strict=True):
        assert found == by_hand(plain, small, prompt["prompt_token_ids"], count, first_exact)


def test_some_steps_pass_and_some_do_not(plain: Any, score: Any) -> None:
    """The judge's number decides, step by step, and the same one at every batch size."""
    given = prompts(6, 4)
    got, added = counted(lambda: score.generate(given, params()))
    assert added["accepted"] > 0
    assert added["refused"] > 0
    assert tokens(got) != tokens(plain.remembered(given, params()))
    assert tokens(got) == [tokens(score.generate([p], params()))[0] for p in given]


def test_requests_at_different_points_do_not_disturb_each_other(plain: Any, score: Any) -> None:
    """Exact and lossy requests in one batch, of different lengths: each is as if alone."""
    given = prompts(6, 5)
    mixed = [params(NEVER if i % 3 == 0 else None, max_tokens=20 + 7 * i) for i in range(6)]
    together = tokens(score.generate(given, mixed))
    alone = [tokens(score.generate([t], p))[0] for t, p in zip(given, mixed, strict=True)]
    assert together == alone
    for i in range(0, 6, 3):
        own = params(max_tokens=20 + 7 * i)
        assert together[i] == tokens(plain.generate([given[i]], own))[0]


def test_a_request_can_be_switched_off(plain: Any, logprob: Any) -> None:
    """Nothing is drafted for it, so nothing is judged."""
    off = params(ALWAYS, extra={"speculators_ext_enabled": 0})
    got, added = counted(lambda: logprob.generate(prompts(3, 6), off))
    assert tokens(got) == tokens(plain.remembered(prompts(3, 6), params()))
    assert added["drafted"] == 0


@pytest.mark.parametrize("kind", ["penalty", "bad words", "grammar", "unreadable"])
def test_some_kinds_of_request_are_always_exact(plain: Any, logprob: Any, kind: str) -> None:
    """Their logits depend on the tokens before, which a judged step would change unseen; or it is
    not known what they ask for.
    """
    options: dict[str, Any] = {
        "penalty": {"repetition_penalty": 1.2},
        "bad words": {"bad_words": ["e"]},
        "grammar": {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{20,60}")},
        "unreadable": {"extra": {"speculators_ext_threshhold": ALWAYS}},
    }[kind]
    given = prompts(3, 7)
    got, added = counted(lambda: logprob.generate(given, params(ALWAYS, **options)))
    assert tokens(got) == tokens(plain.generate(given, params(**options)))
    assert added["judged"] == 0


def test_outside_of_the_reasoning_nothing_is_judged(engines: Any, plain: Any) -> None:
    """Catches a span that is not looked for in the prompt, and steps judged in front of it."""
    given = prompts(4, 13)
    expected = tokens(plain.remembered(given, params()))
    tokenizer = plain.llm.get_tokenizer()
    known = {token for p in given for token in p["prompt_token_ids"]}.union(*expected)
    start, text = next(
        (token, tokenizer.decode([token]))
        for token in range(100, 500)
        if token not in known
        and tokenizer.encode(tokenizer.decode([token]), add_special_tokens=False) == [token]
    )
    engine = engines.get(config(judge="logprob", reasoning_start=text), model=TARGET)
    got, added = counted(lambda: engine.generate(given, params(ALWAYS)))
    assert tokens(got) == expected
    assert added["judged"] == 0
    opened = [{"prompt_token_ids": [*p["prompt_token_ids"], start]} for p in given]
    _, added = counted(lambda: engine.generate(opened, params(ALWAYS)))
    assert added["accepted"] == added["judged"] > 0


def test_a_step_longer_than_the_drafts_is_exact(engines: Any, plain: Any) -> None:
    """A step cut off by `num_speculative_tokens` was not read to its end."""
    made = config(judge="logprob", threshold=ALWAYS, delimiter="\x00", num_speculative_tokens=4)
    engine = engines.get(made, model=TARGET)
    got, added = counted(lambda: engine.generate(prompts(4, 8), params()))
    assert tokens(got) == tokens(plain.remembered(prompts(4, 8), params()))
    assert added["judged"] == 0
    assert engine.counters()["num_draft_tokens"] > 0


def test_logprobs_are_the_targets_of_every_token_shown(plain: Any, logprob: Any) -> None:
    """An accepted token's log-probability is what the target gives it, not the draft's or none."""
    [got] = logprob.generate(prompts(1, 9), params(ALWAYS, logprobs=1))
    shown = got.outputs[0]
    ids, prompt = list(shown.token_ids), list(got.prompt_token_ids)
    [read] = plain.generate(
        [{"prompt_token_ids": prompt + ids}], SamplingParams(max_tokens=1, prompt_logprobs=0)
    )
    for offset, token in enumerate(ids):
        own = shown.logprobs[offset][token].logprob
        theirs = read.prompt_logprobs[len(prompt) + offset][token].logprob
        assert own == pytest.approx(theirs, abs=1e-3)


def test_stops_cut_accepted_steps(logprob: Any) -> None:
    """A stop string or a stop token inside an accepted step ends the text there."""
    [given] = prompts(1, 10)
    whole = logprob.generate([given], params(ALWAYS))[0].outputs[0]
    ids = list(whole.token_ids)
    piece = whole.text[len(whole.text) // 2 :][:3]
    cut = logprob.generate([given], params(ALWAYS, stop=[piece]))[0].outputs[0]
    assert cut.text == whole.text.partition(piece)[0]
    cut = logprob.generate([given], params(ALWAYS, stop_token_ids=[ids[20]]))[0].outputs[0]
    assert list(cut.token_ids) == ids[: ids.index(ids[20]) + 1]


def test_an_abort_leaves_the_others_as_they_were(score: Any) -> None:
    """Catches steps of an aborted request that a later owner of its slot inherits."""
    engine = score.llm.llm_engine
    given = prompts(4, 12)
    alone = [tokens(score.generate([p], params()))[0] for p in given]
    for index in range(3):
        engine.add_request(f"{index}", given[index], params())
    done: dict[str, Any] = {}
    for step in range(200):
        if step == 4:
            engine.abort_request(["1"])
            engine.add_request("3", given[3], params())
        done |= {out.request_id: out for out in engine.step() if out.finished}
        if not engine.has_unfinished_requests():
            break
    for index in (0, 2, 3):
        assert tokens([done[str(index)]])[0] == alone[index]


def test_a_full_model_and_small_caches(engines: Any, plain: Any) -> None:
    """The end of the model, chunked prompts, preemption and prefix caching, exact and judged."""
    small = {"max_model_len": 96, "max_num_batched_tokens": 96, "num_gpu_blocks_override": 12}
    engine = engines.get(config(judge="score", threshold=4.5), model=TARGET, **small)
    given = prompts(5, 11)
    expected = plain.generate(given, params(max_tokens=69))
    for _ in range(2):
        got = engine.generate(given, params(NEVER, max_tokens=69))
        assert tokens(got) == tokens(expected)
    judged = tokens(engine.generate(given, params(max_tokens=96)))
    assert [len(t) for t in judged] == [96 - len(p["prompt_token_ids"]) for p in given]
    assert engine.counters()["preemptions"] > 0
