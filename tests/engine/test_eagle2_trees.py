"""Growth replaced by doubles: whatever tree is verified, the text is plain decoding's."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm import SamplingParams

from speculators_ext.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEPTH, NODES = 4, 12
PROMPTS = [
    "The capital of France is",
    "def fib(n):\n    return",
    "List three colours: red, green",
    "serving" * 20,
]
pytestmark = pytest.mark.engine


def hidden_in_a_tree(
    truth: Sequence[int], root: int, num_rows: int, depth: int, rng: random.Random
) -> DraftTree:
    """A random tree that holds some of the true continuation, on whatever branches it falls.

    Every other node carries a token that is wrong where it stands.
    """
    tokens, parents, depths, path = [root], [-1], [0], [0]
    length = rng.randint(0, min(depth, len(truth)))
    while len(tokens) < num_rows:
        if len(path) <= length and rng.random() < 0.4:
            parent, token = path[-1], truth[len(path) - 1]
            path.append(len(tokens))
        else:
            parent, token = rng.randrange(len(tokens)), rng.randrange(3, 500)
            taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            if parent in path and path.index(parent) < len(truth):
                taken.add(truth[path.index(parent)])
            if depths[parent] >= depth or token in taken:
                continue
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return DraftTree.of(tokens, parents)


def chain_of(tokens: Sequence[int], root: int) -> DraftTree:
    """The tokens one after another."""
    return DraftTree.of([root, *tokens], [*range(-1, len(tokens))])


def star_of(tokens: Sequence[int], root: int) -> DraftTree:
    """All tokens as children of the root."""
    return DraftTree.of([root, *tokens], [-1, *(0 for _ in tokens)])


def replace_growth(monkeypatch: Any, engine: Any, answers: dict[Any, list[int]], make: Any) -> None:
    """Let ``make(truth, root, num_rows, depth)`` make every tree of the engine.

    ``answers`` maps a prompt's ids to prompt and plain continuation.
    """

    def grow(self: Any, batch: Any, roots: Any, plan: Any) -> list[DraftTree]:
        trees = []
        for index, row in enumerate(roots.rows):
            states, slot = self._req_states, int(batch.idx_mapping_np[row])
            length = int(states.prompt_len.np[slot])
            prompt = tuple(states.all_token_ids.gpu[slot, :length].tolist())
            truth = answers.get(prompt, [])[roots.lengths[index] + 1 :]
            root, num_rows = int(roots.tokens[index]), roots.max_drafts[index] + 1
            trees.append(make(truth, root, num_rows, roots.max_levels[index]))
        return trees

    monkeypatch.setattr(type(engine.speculator), "grow", grow)


def watch_paths(monkeypatch: Any, engine: Any) -> list[list[int]]:
    """Rows of every path accepted in a branching tree, from now on."""
    state = engine.runner.model_state
    compact, paths = state.compact, []

    def watched(step: Any, num_sampled: Any) -> None:
        for tree in step.trees:
            path = step.paths[tree.request].tolist()
            paths.append([row for row in path if row >= 0])
        compact(step, num_sampled)

    monkeypatch.setattr(state, "compact", watched)
    return paths


def greedy(max_tokens: int = 40, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | options
    )


@pytest.fixture(scope="module")
def twins(make_tree_twins: Any) -> Any:
    return make_tree_twins()


@pytest.fixture
def hide(twins: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """`hide(prompts, params)`: random trees that hold plain's answer; returns the paths taken.

    Of the module's twins, or of those in ``of``.
    """
    usual = twins

    def install(prompts: list[Any], params: Any, seed: int = 0, of: Any = None) -> list[list[int]]:
        answers, twins = {}, of or usual
        for output in twins.plain.remembered(prompts, params):
            prompt = tuple(output.prompt_token_ids)
            everything = [*prompt, *output.outputs[0].token_ids]
            answers[prompt] = max(answers.get(prompt, []), everything, key=len)
        rng = random.Random(seed)
        replace_growth(
            monkeypatch, twins.clasp, answers, lambda *tree: hidden_in_a_tree(*tree, rng)
        )
        return watch_paths(monkeypatch, twins.clasp)

    return install


def assert_branches_were_taken(paths: list[list[int]]) -> None:
    deep = [path for path in paths if len(path) > 2 and path != list(range(len(path)))]
    assert len(deep) >= 5, "no path left the first rows: compaction was not tried"


@pytest.mark.parametrize("count", [1, 4])
def test_the_answer_hidden_in_a_tree(twins: Any, hide: Any, count: int) -> None:
    """Catches a wrong mask, position, path, or KV left where its row was and not moved."""
    prompts = PROMPTS[-count:]
    paths = hide(prompts, greedy(80))
    twins.check(prompts, greedy(80))
    assert_branches_were_taken(paths)


def test_logprobs_follow_the_path(twins: Any, hide: Any) -> None:
    """Catches logprobs taken in row order and not in path order."""
    params = greedy(logprobs=3)
    paths = hide(PROMPTS, params)
    got = twins.check(PROMPTS, params)
    for ours, theirs in zip(got, twins.plain.remembered(PROMPTS, params), strict=True):
        pairs = zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True)
        for mine, stock in pairs:
            values = {token: value.logprob for token, value in stock.items()}
            assert {t: v.logprob for t, v in mine.items()} == pytest.approx(values, abs=1e-4)
    assert_branches_were_taken(paths)


def test_a_seed_says_what_plain_decoding_says(twins: Any, hide: Any) -> None:
    """Catches noise keyed by the row and not by the depth, and sampling options left off nodes."""
    params = [
        greedy(temperature=1.0, seed=3),
        greedy(temperature=0.7, seed=4, top_k=20),
        greedy(temperature=1.0, seed=5, top_p=0.9),
        greedy(temperature=0.5, seed=6, min_tokens=8, ignore_eos=False),
    ]
    paths = hide(PROMPTS, params)
    twins.check(PROMPTS, params)
    assert_branches_were_taken(paths)


def test_stop_strings_inside_a_path(twins: Any, hide: Any) -> None:
    """Catches tokens of a path kept behind the stop string they crossed."""
    free = twins.plain.remembered(PROMPTS, greedy())
    params = [greedy(stop=[f.outputs[0].text[7 + i : 10 + i]]) for i, f in enumerate(free)]
    hide(PROMPTS, greedy())
    got = twins.check(PROMPTS, params)
    assert {output.outputs[0].finish_reason for output in got} == {"stop"}


@pytest.mark.parametrize("length", [1, 2, DEPTH, DEPTH + 1, DEPTH + 2])
def test_max_tokens_inside_a_path(twins: Any, hide: Any, length: int) -> None:
    """Catches a token too many where a request ends inside an accepted path."""
    hide(PROMPTS, greedy())
    got = twins.check(PROMPTS, greedy(length), drafts=False)
    assert [len(output.outputs[0].token_ids) for output in got] == [length] * len(PROMPTS)


def test_prompt_chunks_between_trees(twins: Any, hide: Any) -> None:
    """Catches prompt rows that share a step with trees attended as nodes, or not at all."""
    long = [{"prompt_token_ids": [3 + (7 * i + k) % 500 for i in range(300)]} for k in range(2)]
    prompts = [*PROMPTS, *long]
    params = [greedy(60)] * len(PROMPTS) + [greedy(20)] * 2
    paths = hide(prompts, params)
    engine = twins.clasp.llm.llm_engine
    expected = twins.plain.remembered(prompts, params)
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        if index < len(PROMPTS):
            engine.add_request(f"tree-{index}", prompt, param)
    late = list(range(len(PROMPTS), len(prompts)))
    done: dict[str, Any] = {}
    steps = 0
    while engine.has_unfinished_requests() or late:
        steps += 1
        if steps % 4 == 0 and late:
            index = late.pop(0)
            engine.add_request(f"tree-{index}", prompts[index], params[index])
        done |= {output.request_id: output for output in engine.step() if output.finished}
    for index, output in enumerate(expected):
        got = done[f"tree-{index}"].outputs[0]
        assert list(got.token_ids) == list(output.outputs[0].token_ids)
    assert_branches_were_taken(paths)


def test_the_prefix_cache_holds_compacted_blocks(twins: Any, hide: Any) -> None:
    """Catches a block cached while a path's KV still lay at its rows."""
    prompt, block = PROMPTS[0], 32
    paths = hide([prompt], greedy(80))
    [first] = twins.check([prompt], greedy(80))
    assert_branches_were_taken(paths)
    longer = [*first.prompt_token_ids, *first.outputs[0].token_ids[:70]]
    assert len(longer) > 2 * block
    again = [{"prompt_token_ids": longer}]
    hide(again, greedy(30))
    [got] = twins.check(again, greedy(30))
    assert got.num_cached_tokens >= block


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 caches need AVX-512 on CPUs"
)
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_a_quantised_cache(make_eagle2_twins: Any, hide: Any, kind: str) -> None:
    """Catches nodes that attend to each other as computed and not as the cache rounds them."""
    twins = make_eagle2_twins(alike={"kv_cache_dtype": kind})
    paths = hide(PROMPTS, greedy(80), of=twins)
    twins.check(PROMPTS, greedy(80))
    assert_branches_were_taken(paths)


def test_adaptive_trees_are_exact(make_eagle2_twins: Any) -> None:
    """Catches sizes that change from round to round getting into the text."""
    twins = make_eagle2_twins({"adaptive": True})
    twins.check([*PROMPTS, *PROMPTS], greedy(80))
    twins.check(PROMPTS[:1], greedy(80))
    sizes = twins.clasp.speculator._clock._sizes
    assert sizes.estimates(8).verify_per_token is not None, "no tree was priced"


BAD = {
    "a wrong chain": lambda truth, root, rows, depth: chain_of([5] * depth, root),
    "a wrong star": lambda truth, root, rows, depth: star_of(range(5, 4 + rows), root),
    "twins": lambda truth, root, rows, depth: star_of([*truth[:1] * 2, 7, 7], root),
    "the root alone": lambda truth, root, rows, depth: chain_of([], root),
    "the right chain": lambda truth, root, rows, depth: chain_of(truth[:depth], root),
}


@pytest.mark.parametrize("name", list(BAD))
def test_odd_trees_change_nothing(twins: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Catches a tree's shape taken for granted: no draft, no branch, equal siblings."""
    answers = {
        tuple(o.prompt_token_ids): [*o.prompt_token_ids, *o.outputs[0].token_ids]
        for o in twins.plain.remembered(PROMPTS, greedy())
    }
    replace_growth(monkeypatch, twins.clasp, answers, BAD[name])
    twins.check(PROMPTS, greedy(), drafts=False)
