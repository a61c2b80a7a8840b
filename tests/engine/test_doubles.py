"""The drafter replaced by doubles: whatever it drafts, the text is plain decoding's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

K = 4
PROMPTS = [
    "The capital of France is",
    "def fib(n):\n    return",
    "List three colours: red, green",
]
pytestmark = pytest.mark.engine


def greedy(max_tokens: int = 20, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | options
    )


@pytest.fixture
def draft_with(twins: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`draft_with(f)`: f(round, request id, position) gives the ids a row drafts, any number."""
    speculator = type(twins.clasp.speculator)

    def install(choose: Callable[[int, str, int], list[int]]) -> None:
        rounds = iter(range(10**9))

        def draft_rows(
            self: Any,
            batch: Any,
            units: Any,
            rows: Any,
            limits: Any,
            tokens: Any,
            at: Any,
            out: Any,
        ) -> None:
            number = next(rounds)
            for row in rows:
                ids = choose(number, batch.req_ids[row], int(at[row]))[: out.shape[1]]
                out[row, : len(ids)] = out.new_tensor(ids)

        monkeypatch.setattr(speculator, "_draft_rows", draft_rows)

    yield install
    monkeypatch.undo()
    twins.check(PROMPTS[:1], greedy(4))


def accepted_by(twins: Any, run: Callable[[], Any]) -> tuple[int, int]:
    before = twins.clasp.counters()
    run()
    after = twins.clasp.counters()
    names = ("num_draft_tokens", "num_accepted_tokens")
    drafted, accepted = (after[name] - before[name] for name in names)
    return drafted, accepted


def replay(twins: Any, prompts: list[str], params: Any) -> Callable[[int, str, int], list[int]]:
    """The right answer as drafts: what plain decoding says after each position."""
    answers = {}
    for output in twins.plain.remembered(prompts, params):
        everything = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        answers[tuple(output.prompt_token_ids)] = everything
    speculator = twins.clasp.speculator

    def choose(number: int, name: str, position: int) -> list[int]:
        states = speculator._req_states
        slot = states.req_id_to_index[name]
        length = int(states.prompt_len.np[slot])
        prompt = tuple(states.all_token_ids.gpu[slot, :length].tolist())
        return answers[prompt][position + 1 : position + 1 + K]

    return choose


def test_right_drafts_are_all_accepted(twins: Any, draft_with: Any) -> None:
    """Catches a correct draft refused, and positions or bonus tokens off by one."""
    draft_with(replay(twins, PROMPTS, greedy()))
    drafted, accepted = accepted_by(twins, lambda: twins.check(PROMPTS, greedy()))
    assert drafted == accepted == 3 * 16  # 20 tokens: the first, then blocks of 5


@pytest.mark.parametrize("length", [1, 2, K - 1, K, K + 1, K + 2])
def test_max_tokens_inside_an_accepted_block(twins: Any, draft_with: Any, length: int) -> None:
    """Catches a token too many where every draft is right and the request ends among them."""
    draft_with(replay(twins, PROMPTS, greedy()))
    got = twins.check(PROMPTS, greedy(length), drafts=False)
    assert [len(output.outputs[0].token_ids) for output in got] == [length] * 3


def test_stop_string_inside_an_accepted_block(twins: Any, draft_with: Any) -> None:
    """Catches tokens after a stop string kept because they were accepted with it."""
    free = twins.plain.remembered(PROMPTS, greedy())
    draft_with(replay(twins, PROMPTS, greedy()))
    stops = [output.outputs[0].text[4:7] for output in free]
    got = twins.check(PROMPTS, [greedy(stop=[stop], logprobs=1) for stop in stops])
    assert all(output.outputs[0].finish_reason == "stop" for output in got)


@pytest.mark.parametrize("least", [K - 1, K, K + 1])
def test_a_constant_stop_token_and_min_tokens(twins: Any, draft_with: Any, least: int) -> None:
    """Catches a drafted stop token that ends a request before min_tokens."""
    stop = twins.plain.remembered(PROMPTS, greedy())[0].outputs[0].token_ids[2]
    draft_with(lambda number, name, position: [stop] * K)
    twins.check(PROMPTS, greedy(min_tokens=least, stop_token_ids=[stop]))


BAD = {
    "constant": lambda number, name, position: [5] * K,
    "empty": lambda number, name, position: [],
    "every second step": lambda number, name, position: [7] * K if number % 2 else [],
    "by row and step": lambda number, name, position: [9] * ((number + int(name, 36)) % (K + 1)),
    "minus one": lambda number, name, position: [-1] * K,
    "minus one inside": lambda number, name, position: [5, -1, 5, 5],
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_drafts_change_nothing(twins: Any, draft_with: Any, name: str) -> None:
    """Catches a drafter whose mistakes reach the text, the embedding table or the scheduler."""
    draft_with(lambda number, request, position: BAD[name](number, str(number), position))
    params = [greedy(12), greedy(12, frequency_penalty=1.0), greedy(12, logprobs=1)]
    twins.check(PROMPTS, params, drafts=False)


def test_drafts_past_every_limit(twins: Any, draft_with: Any) -> None:
    """Catches trust in a drafter to stop: at max_tokens, or at the limit a request has set."""
    draft_with(replay(twins, PROMPTS, greedy()))
    capped = {"speculators_ext_max_drafts": 1}
    params = [greedy(2), greedy(5), greedy(7, extra_args=capped)]
    got = twins.check(PROMPTS, params)
    assert [len(output.outputs[0].token_ids) for output in got] == [2, 5, 7]


def test_wrong_drafts_are_all_refused(twins: Any, draft_with: Any) -> None:
    """Catches a counter, or a step, that takes drafts for granted."""
    used = {t for o in twins.plain.remembered(PROMPTS, greedy()) for t in o.outputs[0].token_ids}
    wrong = next(token for token in range(3, 512) if token not in used)
    draft_with(lambda number, name, position: [wrong] * K)
    drafted, accepted = accepted_by(twins, lambda: twins.check(PROMPTS, greedy()))
    assert drafted > 0
    assert accepted == 0


def test_drafts_out_of_range_from_the_sampler(twins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an id that `propose` hands on unchecked: it would be embedded."""
    import torch

    speculator = twins.clasp.speculator
    for wrong in (-1, speculator.vocab_size, 2**40):

        def sample(hidden: torch.Tensor, *args: Any, wrong: int = wrong) -> torch.Tensor:
            speculator.compute_draft_logits(hidden, 0)
            return torch.full((hidden.shape[0],), wrong, dtype=torch.int64)

        monkeypatch.setattr(speculator, "sample_draft", sample)
        drafted, _ = accepted_by(twins, lambda: twins.check(PROMPTS, greedy(8)))
        assert drafted > 0
