"""REASONING_STEP on SGLang, on two models that solve sums: exact when asked, else judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from speculators_ext.assets import build
from speculators_ext.assets.steps_world import check
from speculators_ext.assets.tiny_steps import DRAFT, TARGET, load_problems
from speculators_ext.method_configs import JUDGE_SUFFIX
from speculators_ext.proposers.step_tokens import find_suffix

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.engine
GREEDY = {"temperature": 0, "max_new_tokens": 120}
# What every step reaches with 'logprob' and with 'score', and what none does.
ALWAYS, ANY_SCORE, NEVER = -1000.0, 0.0, 1000.0
MODEL_LEN = 256  # of every engine
PAGES: dict[str, Any] = {"page_size": 16, "chunked_prefill_size": 32}
RETRACTION: dict[str, Any] = PAGES | {
    "environment": {
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    },
}
# A threshold that some steps of these problems reach and some do not.
SCORE = {"judge": "score", "threshold": 6.0}
SERVERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "logprob": ({"judge": "logprob"}, {}),
    "score": (SCORE, {}),
    "score-pages": (SCORE, PAGES),
    # A retracted request goes on with a token of the target's: a lossy text is another one then.
    "score-retraction": (SCORE, RETRACTION),
}


def servers(*names: str) -> Any:
    marks = {"score-pages": pytest.mark.full}
    given = [pytest.param(name, marks=marks.get(name, ())) for name in names]
    return pytest.mark.parametrize("server", given, scope="module")


def params(threshold: float | None = None, **options: Any) -> dict[str, Any]:
    own = {} if threshold is None else {"speculators_ext_threshold": threshold}
    return GREEDY | {"custom_params": own} | options


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [problem.text for problem in load_problems(build(TARGET))[:12]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(build(TARGET))


@pytest.fixture(scope="module")
def plain(engines: Any, prompts: list[str]) -> list[str]:
    return texts(engines.get(TARGET).generate(prompts, GREEDY))


def texts(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["text"] for answer in answers]


def ours(engines: Any, server: str) -> Any:
    config, options = SERVERS[server]
    return engines.get(
        TARGET,
        method_config={"lossy": True, "delimiter": "\n"} | config,
        speculative_algorithm="REASONING_STEP",
        speculative_draft_model_path=str(build(DRAFT)),
        speculative_num_steps=24,
        enable_metrics=True,
        **options,
    )


def alone(engines: Any, **options: Any) -> Any:
    """An engine whose target writes the steps itself."""
    skips = {"num_skip_layers": 2, "refresh_interval": 4}
    return engines.get(
        TARGET,
        method_config={"lossy": True, "delimiter": "\n", "judge": "score", "clasp": skips},
        speculative_algorithm="REASONING_STEP",
        speculative_num_steps=24,
        enable_metrics=True,
        **options,
    )


def counted(engine: Any, call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What a call returned and what it added to the engine's counters."""
    before = engine.do("counters")
    result = call()
    return result, {name: now - before[name] for name, now in engine.do("counters").items()}


def right(answers: list[str]) -> int:
    problems = load_problems(build(TARGET))
    return sum(check(p, text).right for p, text in zip(problems, answers, strict=False))


@pytest.mark.smoke
@servers("logprob")
def test_exact_judged_and_lenient(
    engines: Any, server: str, prompts: list[str], plain: list[str]
) -> None:
    """One engine: plain's text where nothing passes, sound steps of the small model where some do,
    and fewer right answers where all do.
    """
    engine = ours(engines, server)
    for group in (prompts, prompts[:1]):
        exact = engine.generate(group, params(NEVER))
        assert texts(exact) == plain[: len(group)]
    off = engine.generate(prompts, GREEDY | {"custom_params": {"speculators_ext_enabled": 0}})
    assert texts(off) == plain
    judged = texts(engine.generate(prompts, params()))
    assert judged != plain
    assert right(judged) >= right(plain) - 1
    lenient = engine.generate(prompts, params(ALWAYS))
    assert right(texts(lenient)) < right(judged) - 2
    rounds = sum(a["meta_info"]["spec_verify_ct"] for a in lenient)
    assert rounds < sum(a["meta_info"]["completion_tokens"] for a in lenient) / 4
    assert engine.do("used_tokens") == 0


def test_the_target_writes_its_steps_itself(
    engines: Any, prompts: list[str], plain: list[str]
) -> None:
    """Without a small model. Catches drafts through skipped layers that are left in the cache, a
    neighbour's skip set or position, and steps that are never judged.
    """
    engine = alone(engines)
    for group in (prompts, prompts[:1], prompts):
        answers, added = counted(engine, lambda group=group: engine.generate(group, params(NEVER)))
        assert texts(answers) == plain[: len(group)]
        assert added["drafted"] > 0
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 100
    rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert rounds < sum(answer["meta_info"]["completion_tokens"] for answer in answers) - 50
    mixed = [params(ANY_SCORE if row % 2 else NEVER) for row in range(len(prompts))]
    found, added = counted(engine, lambda: engine.generate(prompts, mixed))
    assert texts(found)[::2] == plain[::2]
    assert texts(found)[1::2] != plain[1::2]
    assert added["accepted"] > 0
    # What was accepted is in the cache as a prompt of it would be, in every layer.
    read = [prompt + text for prompt, text in zip(prompts, texts(found), strict=True)]
    assert texts(engine.generate(read, params(NEVER))) == texts(
        engines.get(TARGET).generate(read, GREEDY)
    )
    assert engine.do("used_tokens") == 0


@servers("score", "score-retraction")
def test_nothing_is_left_of_the_suffix(
    engines: Any, server: str, prompts: list[str], plain: list[str]
) -> None:
    """Catches a judge that writes over the text's own cache, over another request's, into what the
    prefix cache keeps, or that loses slots.
    """
    longer = [prompt + text for prompt, text in zip(prompts, plain, strict=True)]
    more = texts(engines.get(TARGET).generate(longer, GREEDY))
    engine = ours(engines, server)
    for _ in range(2):
        answers, added = counted(engine, lambda: engine.generate(prompts, params(NEVER)))
        assert texts(answers) == plain
        assert added["judged"] == added["refused"] > 0
        assert added["judge_forwards"] > 0
        assert added["judge_seconds"] > 0
        assert added["accepted"] == added["tokens_against"] == 0
    answers = engine.generate(longer, params(NEVER))
    assert texts(answers) == more
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 100
    assert engine.do("used_tokens") == 0


@servers("score", "score-pages")
def test_the_number_is_that_of_a_plain_forward(
    engines: Any, server: str, prompts: list[str], tokenizer: Any
) -> None:
    """Catches a suffix at a wrong position, or that reads another request's or a stale cache: the
    first step that differs passes just below the number that stock SGLang computes, and just above
    it does not.
    """
    engine = ours(engines, server)
    exact, lenient = (
        [answer["output_ids"] for answer in engine.generate(prompts, params(threshold))]
        for threshold in (NEVER, ANY_SCORE)
    )
    suffix = find_suffix(tokenizer, JUDGE_SUFFIX)
    steps, read = {}, []
    for row, (ids, kept) in enumerate(zip(lenient, exact, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(ids, kept, strict=False)) if a != b), None)
        if at is not None:
            ends = range(at, len(ids))
            end = next(i for i in ends if "\n" in tokenizer.decode([ids[i]])) + 1
            steps[row] = at, end
            read.append([*tokenizer.encode(prompts[row]), *ids[:end], *suffix.ids])
    assert len(steps) > 5
    numbers = digits_of(engines.get(TARGET), read, list(suffix.digits))
    assert max(numbers) - min(numbers) > 0.02
    for offset in (-0.003, 0.003):
        asked = [params(number + offset) for number in numbers]
        answers = engine.generate([prompts[row] for row in steps], asked)
        for answer, (row, (at, end)) in zip(answers, steps.items(), strict=True):
            if offset < 0:
                assert answer["output_ids"][:end] == lenient[row][:end]
            else:
                assert answer["output_ids"][: at + 1] == exact[row][: at + 1]


def digits_of(plain: Any, prompts: list[list[int]], digits: list[int]) -> list[float]:
    """The digit that the model is expected to write behind each prompt, other tokens left out."""
    answers = plain.generate(
        prompts,
        {"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        token_ids_logprob=digits,
    )
    numbers = []
    for answer in answers:
        [shown] = answer["meta_info"]["output_token_ids_logprobs"]
        found = {token: 2.718281828459045**logprob for logprob, token, _ in shown}
        law = [found[token] for token in digits]
        numbers.append(sum(digit * p for digit, p in enumerate(law)) / sum(law))
    return numbers


@servers("logprob", "score")
def test_alone_and_together_are_the_same(engines: Any, server: str, prompts: list[str]) -> None:
    """Catches a step judged by another request's threshold, rows or suffix."""
    engine = ours(engines, server)
    mixed = [params(NEVER if index % 3 == 0 else None) for index in range(6)]
    together, added = counted(engine, lambda: texts(engine.generate(prompts[:6], mixed)))
    assert added["accepted"] > 0
    assert added["refused"] > 0
    alone = [
        engine.generate([prompt], own)[0]["text"]
        for prompt, own in zip(prompts, mixed, strict=False)
    ]
    assert together == alone


@servers("logprob", "score")
def test_a_text_may_end_where_the_model_ends(
    engines: Any, server: str, prompts: list[str], tokenizer: Any
) -> None:
    """Catches slots reserved outside of a request's row of SGLang's table, and a suffix behind the
    model's last position.
    """
    room = [MODEL_LEN - len(tokenizer.encode(prompt)) for prompt in prompts[:4]]
    wanted = [GREEDY | {"max_new_tokens": count, "ignore_eos": True} for count in room]
    full = [a["output_ids"] for a in engines.get(TARGET).generate(prompts[:4], wanted)]
    engine = ours(engines, server)
    for threshold in (NEVER, None):
        asked = [params(threshold, max_new_tokens=n, ignore_eos=True) for n in room]
        got = [a["output_ids"] for a in engine.generate(prompts[:4], asked)]
        assert [len(ids) for ids in got] == [len(ids) for ids in full]
        assert threshold is None or got == full


@servers("logprob")
def test_stops_cut_accepted_steps(engines: Any, server: str, prompts: list[str]) -> None:
    """A stop string inside an accepted step ends the text there, and so does a stop token, with
    which no step is judged.
    """
    engine = ours(engines, server)
    [whole] = engine.generate(prompts[:1], params(ALWAYS))
    piece = whole["text"][len(whole["text"]) // 2 :][:3]
    [cut] = engine.generate(prompts[:1], params(ALWAYS, stop=[piece]))
    assert cut["text"] == whole["text"].partition(piece)[0]
    stop = whole["output_ids"][20]
    [cut] = engine.generate(prompts[:1], params(ALWAYS, stop_token_ids=[stop]))
    assert cut["output_ids"].index(stop) == len(cut["output_ids"]) - 1
    assert engine.do("used_tokens") == 0


@servers("score-retraction")
def test_an_abort_leaves_the_others_as_they_were(
    engines: Any, server: str, prompts: list[str], plain: list[str], tokenizer: Any
) -> None:
    """Catches slots lost with a request that is cut short, and what a later one inherits."""
    engine = ours(engines, server)
    given = [tokenizer.encode(prompt) for prompt in prompts]
    long = params(max_new_tokens=200, ignore_eos=True)
    assert engine.do("abort", prompts=given, params=long, after=0.3) > 0
    assert texts(engine.generate(prompts, params(NEVER))) == plain
    assert engine.do("used_tokens") == 0


@servers("logprob")
@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {"20": 2.0}},
        {"regex": "[a-z0-9 :]{20,60}"},
        {"frequency_penalty": 0.5},
        {"custom_params": {"speculators_ext_threshhold": ALWAYS}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_some_kinds_of_request_are_always_exact(
    engines: Any, server: str, prompts: list[str], changes: dict[str, Any]
) -> None:
    """Their logits depend on more than the model: a judged step would not be theirs. Of the last
    it is not known what they ask for.
    """
    wanted = texts(engines.get(TARGET).generate(prompts[:3], GREEDY | changes))
    engine = ours(engines, server)
    asked = params(ALWAYS, **changes)
    given, added = counted(engine, lambda: engine.generate(prompts[:3], asked))
    assert added["judged"] == 0
    if "frequency_penalty" not in changes:
        assert texts(given) == wanted
        return
    # SGLang's own text with penalties is one of two from call to call, so drafts are counted.
    for answer in given:
        spent = answer["meta_info"]
        assert spent["spec_verify_ct"] == spent["completion_tokens"] - 1


@servers("logprob", "score")
def test_a_logprob_is_the_targets(
    engines: Any, server: str, prompts: list[str], tokenizer: Any
) -> None:
    """An accepted token's log-probability is what the target gives it. Catches a suffix that is
    left over an accepted step's last token.
    """
    engine = ours(engines, server)
    lenient = params(ALWAYS if server == "logprob" else ANY_SCORE)
    [got] = engine.generate(prompts[:1], lenient, return_logprob=True, logprob_start_len=-1)
    shown = got["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in shown] == got["output_ids"]
    [read] = engines.get(TARGET).generate(
        [[*tokenizer.encode(prompts[0]), *got["output_ids"]]],
        {"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
    )
    theirs = read["meta_info"]["input_token_logprobs"][-len(shown) :]
    assert [entry[0] for entry in shown] == pytest.approx([e[0] for e in theirs], abs=2e-3)
