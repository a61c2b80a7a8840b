"""Each algorithm in a running SGLang engine: plain decoding's text, whatever else goes on."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from speculators_ext.assets import build

pytestmark = pytest.mark.engine

# Two of its best tokens closer than this are one to arithmetic in another order.
TIE = 1e-4
K = 4
MODEL_LEN = 256  # of every engine
SKIPS = {"num_skip_layers": 2, "adaptive": False, "refresh_interval": 2, "exit_threshold": 0.0}
CLASP: dict[str, Any] = {
    "speculative_algorithm": "CLASP",
    "speculative_num_steps": K,
    "method_config": SKIPS,
}
EAGLE2: dict[str, Any] = {
    "speculative_algorithm": "EAGLE2",
    "speculative_draft_model_path": "tiny-llama-eagle3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 9,
    "method_config": {"adaptive": False},
}
MTP_REUSE: dict[str, Any] = {
    "model": "mimo-tiny-mtp",
    "speculative_algorithm": "MTP_REUSE",
    "speculative_num_steps": K,
    "method_config": {"adaptive": False},
}
PAGES: dict[str, Any] = {
    "page_size": 16,
    "chunked_prefill_size": 32,
    "disable_overlap_schedule": True,
}
RETRACTION: dict[str, Any] = {
    "page_size": 16,
    "chunked_prefill_size": 32,
    "environment": {
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    },
}
MAIN: dict[str, dict[str, Any]] = {"clasp": CLASP, "eagle2": EAGLE2, "mtp_reuse": MTP_REUSE}
# The main ones first: pytest runs together what has the same place in its list.
SERVERS: dict[str, dict[str, Any]] = MAIN | {
    "clasp-pages": CLASP
    | PAGES
    | {"method_config": SKIPS | {"grouping": "per_request", "search_window": 4}},
    "clasp-retraction": CLASP | RETRACTION | {"method_config": SKIPS | {"exit_threshold": 0.02}},
    "eagle2-pages": EAGLE2 | PAGES,
    "eagle2-retraction": EAGLE2 | RETRACTION,
    "mtp_reuse-trees": MTP_REUSE
    | PAGES
    | {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 3,
        "speculative_num_draft_tokens": 9,
        "method_config": {"adaptive": False, "draft_vocab_size": 512},
    },
    "mtp_reuse-retraction": MTP_REUSE | RETRACTION,
    "eagle2-eagle": EAGLE2 | {"speculative_draft_model_path": "tiny-llama-eagle"},
}
# Half a minute each; their parts are in others too.
LONG = ("clasp-pages", "eagle2-pages", "eagle2-eagle")
# Pages, chunked prefill, overlap and retractions at once, so the few that every run starts.
SMOKE = tuple(f"{method}-retraction" for method in MAIN)
main = pytest.mark.parametrize("server", MAIN, indirect=True, scope="module")


def some(names, long=LONG):
    """As parameters; those in ``long`` are for the long proofs."""
    marks = {**dict.fromkeys(long, pytest.mark.full), **dict.fromkeys(SMOKE, pytest.mark.smoke)}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


@pytest.fixture(scope="module", params=some(SERVERS))
def server(request: pytest.FixtureRequest) -> str:
    """Which server; of module scope, so that pytest runs the tests of one together."""
    return request.param


def some_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of lengths from one to several chunks."""
    rng = random.Random(seed)
    lengths = [1, 90, 3, 17, 40, 64, 33, 16]
    return [[rng.randrange(5, 250) for _ in range(lengths[i % 8])] for i in range(count)]


def target(server: str) -> str:
    return SERVERS[server].get("model", "tiny-llama")


def ours(engines, server: str, **changes: Any):
    options = {"model": "tiny-llama"} | SERVERS[server] | changes
    head = options.get("speculative_draft_model_path")
    if head is not None:
        folder = engines.eagle_head(head) if head == "tiny-llama-eagle" else build(head)
        options["speculative_draft_model_path"] = str(folder)
    return engines.get(**options)


GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}


def plain_and_margins(engines, prompts, params, model="tiny-llama"):
    """Stock answers, and at each token how far its second best was."""
    answers = engines.plain(
        prompts, params, return_logprob=True, top_logprobs_num=2, logprob_start_len=-1, model=model
    )
    margins = [
        [best[0] - second[0] for best, second in answer["meta_info"]["output_top_logprobs"]]
        for answer in answers
    ]
    return answers, margins


def assert_same_text(answers, plain, margins) -> None:
    for answer, wanted, margin in zip(answers, plain, margins, strict=True):
        ids, expected = answer["output_ids"], wanted["output_ids"]
        differs = next(
            (i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), None
        )
        if differs is None:
            assert len(ids) == len(expected)
        else:
            assert margin[differs] < TIE, f"token {differs}: {ids} instead of {expected}"


def test_greedy_text_is_plain_decodings(engines, server):
    """Catches a draft's KV left in the cache, a wrong position, mask, slot or accepted count."""
    prompts = some_prompts(8)
    plain, margins = plain_and_margins(engines, prompts, GREEDY, target(server))
    answers = ours(engines, server).generate(prompts, GREEDY)
    assert_same_text(answers, plain, margins)
    rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    assert rounds < 0.9 * tokens  # drafts are accepted, or this compares plain with plain
    assert server not in SMOKE or retractions(answers) > 0


def retractions(answers) -> int:
    return sum(answer["meta_info"]["num_retractions"] for answer in answers)


def test_text_behind_a_cached_prefix(engines, server):
    """Catches a prefix cache that holds the KV of drafts."""
    prompts = some_prompts(4, seed=1)
    first, margins = plain_and_margins(engines, prompts, GREEDY, target(server))
    longer = [
        prompt + answer["output_ids"] + [7, 8]
        for prompt, answer in zip(prompts, first, strict=True)
    ]
    plain, more_margins = plain_and_margins(engines, longer, GREEDY, target(server))
    engine = ours(engines, server)
    assert_same_text(engine.generate(prompts, GREEDY), first, margins)
    answers = engine.generate(longer, GREEDY)
    assert_same_text(answers, plain, more_margins)
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 100


def test_slots_return_after_aborts(engines, server):
    """Catches KV slots lost with requests cut short in the middle of a round."""
    prompts = some_prompts(8, seed=2)
    engine = ours(engines, server)
    long = {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True}
    assert engine.do("abort", prompts=prompts, params=long, after=0.5) > 0
    assert engine.do("used_tokens") == 0
    plain, margins = plain_and_margins(engines, some_prompts(8), GREEDY, target(server))
    assert_same_text(ours(engines, server).generate(some_prompts(8), GREEDY), plain, margins)


@pytest.mark.full
@pytest.mark.parametrize("method", MAIN)
def test_slots_return_after_200_requests(engines, method):
    """Catches a slot lost now and then: requests are aborted and retracted all along."""
    server = f"{method}-retraction"
    prompts = some_prompts(40, seed=11)
    plain, margins = plain_and_margins(engines, prompts, GREEDY, target(server))
    engine = ours(engines, server)
    before, aborted, retracted = engine.do("used_tokens"), 0, 0
    for after in (0.3, 0.6, 0.9):
        others = some_prompts(40, seed=12)
        aborted += engine.do("abort", prompts=others, params=GREEDY, after=after)
        answers = engine.generate(prompts, GREEDY)
        assert_same_text(answers, plain, margins)
        retracted += retractions(answers)
    assert engine.do("used_tokens") == before
    assert min(aborted, retracted) > 20


def reserved(server: str) -> int:
    """Tokens SGLang keeps free for the drafts of a head: it refuses a request that needs them."""
    return {"clasp": 0, "eagle2": 9, "mtp_reuse": K + 1}[server]


@main
def test_lengths_are_kept(engines, server):
    """Catches drafts accepted past `max_new_tokens`, or past the model's last position."""
    prompts = some_prompts(6, seed=3)
    params = [GREEDY | {"max_new_tokens": count} for count in (1, 2, 3, 5, 6, 7)]
    full = [list(range(5, 5 + 240))]
    endless = GREEDY | {"max_new_tokens": MODEL_LEN - 240 - reserved(server)}
    plain, margins = plain_and_margins(engines, prompts, params, target(server))
    plain_full, full_margins = plain_and_margins(engines, full, endless, target(server))
    engine = ours(engines, server)
    answers = engine.generate(prompts, params)
    assert_same_text(answers, plain, margins)
    assert [len(answer["output_ids"]) for answer in answers] == [1, 2, 3, 5, 6, 7]
    assert_same_text(engine.generate(full, endless), plain_full, full_margins)


@main
@pytest.mark.parametrize(
    "changes",
    [
        {"frequency_penalty": 0.7},
        {"presence_penalty": 0.9},
        {"repetition_penalty": 1.3},
        {"logit_bias": {"40": 3.0, "41": -4.0}},
        {"regex": "[a-f]{3,30}0"},
        {"stop_token_ids": [60, 61, 62, 63]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_text_under_sampling_options(engines, server, changes):
    """Catches penalties counted by round, a grammar or a bias that verification does not see."""
    prompts = some_prompts(4, seed=4)
    params = GREEDY | {"ignore_eos": "regex" not in changes} | changes
    plain, margins = plain_and_margins(engines, prompts, params, target(server))
    answers = ours(engines, server).generate(prompts, params)
    assert_same_text(answers, plain, margins)
    if "regex" in changes:
        assert all(re.match("[a-f]{3,30}0?$", answer["text"]) for answer in answers)


@main
def test_a_request_switched_off_verifies_its_root_only(engines, server):
    """Catches per-request keys that never reach the worker, beside requests that draft."""
    prompts = some_prompts(9, seed=5)
    keys = [{"speculators_ext_enabled": "0"}, {"speculators_ext_max_drafts": 1}, {}]
    params = [GREEDY | {"custom_params": given} for given in keys * 3]
    plain, margins = plain_and_margins(engines, prompts, GREEDY, target(server))
    answers = ours(engines, server).generate(prompts, params)
    assert_same_text(answers, plain, margins)
    rounds = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
    assert rounds[::3] == [39] * 3  # the prompt's run gave the first of 40 tokens
    assert min(rounds[1::3]) >= 20
    assert sum(rounds[1::3]) < 39 * 3
    assert sum(rounds[2::3]) < 39 * 3


@main
def test_log_probabilities_are_plain_decodings(engines, server):
    """Catches the log-probability of a draft reported for another row's token."""
    prompts = some_prompts(4, seed=6)
    plain = engines.plain(prompts, GREEDY, return_logprob=True, model=target(server))
    answers = ours(engines, server).generate(prompts, GREEDY, return_logprob=True)
    for answer, wanted in zip(answers, plain, strict=True):
        mine, theirs = (a["meta_info"]["output_token_logprobs"] for a in (answer, wanted))
        assert [token for _, token, _ in mine] == [token for _, token, _ in theirs]
        assert [p for p, _, _ in mine] == pytest.approx([p for p, _, _ in theirs], abs=1e-4)


@main
def test_a_stream_is_the_text(engines, server):
    """Catches tokens of a round lost or doubled between chunks."""
    prompt = some_prompts(2, seed=7)[1]
    plain, margins = plain_and_margins(engines, [prompt], GREEDY, target(server))
    chunks = ours(engines, server).do("stream", prompt=prompt, params=GREEDY)
    assert len(chunks) > 3
    assert_same_text([{"output_ids": chunks[-1]}], plain, margins)


@main
@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
@pytest.mark.statistical
def test_sampled_text_follows_the_targets_law(engines, server, changes):
    """Catches greedy verification of sampled text, as SGLang itself does on CPUs.

    Two samples of the second and third token are compared by chi-square over the commonest
    outcomes.
    """
    count, prompt = 300, [[9, 30, 31]]
    params = {"temperature": 0.7, "max_new_tokens": 3, "ignore_eos": True} | changes
    plain = engines.plain(prompt * count, params, model=target(server))
    answers = ours(engines, server).generate(prompt * count, params)
    for place in (1, 2):
        drawn = [[answer["output_ids"][place] for answer in one] for one in (answers, plain)]
        statistic, degrees = two_sample_chi_square(*drawn)
        assert statistic < degrees + 10 * (2 * degrees) ** 0.5


def two_sample_chi_square(mine: list[int], theirs: list[int]) -> tuple[float, int]:
    """Of two samples of equal size; rare outcomes are one bin."""
    total = {token: mine.count(token) + theirs.count(token) for token in {*mine, *theirs}}
    bins = [[token] for token, seen in total.items() if seen >= 10]
    bins.append([token for token, seen in total.items() if seen < 10])
    statistic, used = 0.0, 0
    for members in bins:
        a, b = (sum(sample.count(token) for token in members) for sample in (mine, theirs))
        if a + b:
            statistic += (a - b) ** 2 / (a + b)
            used += 1
    return statistic, max(used - 1, 1)


@pytest.mark.parametrize(
    "server", some(MAIN, ("clasp", "mtp_reuse")), indirect=True, scope="module"
)
def test_adaptive_drafting_keeps_the_text(engines, server):
    """Catches a round without drafts that is laid out wrongly, or a clock that stops the engine."""
    prompts = some_prompts(6, seed=8)
    plain, margins = plain_and_margins(engines, prompts, GREEDY, target(server))
    config = SERVERS[server]["method_config"] | {"adaptive": True}
    engine = ours(engines, server, method_config=config)
    assert_same_text(engine.generate(prompts, GREEDY), plain, margins)
    assert_same_text(engine.generate(prompts, GREEDY), plain, margins)


@pytest.mark.parametrize(
    "model",
    [
        "tiny-qwen3",
        *(pytest.param(m, marks=pytest.mark.full) for m in ("tiny-qwen2", "tiny-mistral")),
    ],
)
def test_every_target_listed_drafts_for_itself(engines, model):
    """Catches a target in the list whose layers cannot be left out or called one by one."""
    prompts = some_prompts(4, seed=9)
    plain, margins = plain_and_margins(engines, prompts, GREEDY, model)
    answers = ours(engines, "clasp", model=model).generate(prompts, GREEDY)
    assert_same_text(answers, plain, margins)
    assert sum(answer["meta_info"]["spec_verify_ct"] for answer in answers) < 39 * 4
