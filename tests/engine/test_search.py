"""The search inside the engine: its states are the target's, its sets live as long as they may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm")
from vllm import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPTS = [
    "The capital of France is",
    "def fib(n):\n    return",
    "List three colours: red, green",
]
pytestmark = pytest.mark.engine


def greedy(max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class Seen(NamedTuple):
    """What one search said about one request: `token` should follow `position`."""

    request: str
    position: int
    token: int
    margin: float
    skipped: tuple[int, ...]


class Probe:
    """Looks into every search of one engine, changing nothing."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from speculators_ext.engines.vllm.skipping import skip_search

        self.seen: list[Seen] = []
        self.kept: list[set[str]] = []
        self._full_rows: list[torch.Tensor] = []
        self._engine = engine
        self._search = engine.speculator._search
        self._solve = skip_search.solve
        self._run = self._search.search_rows
        monkeypatch.setattr(skip_search, "solve", self._watched_solve)
        monkeypatch.setattr(self._search, "search_rows", self._watched_search)

    def _watched_solve(self, stack: Any, *args: Any, **kwargs: Any) -> Any:
        rows: dict[int, torch.Tensor] = {}

        class Watched:
            num_units = stack.num_units

            def apply(self, unit: int, states: torch.Tensor) -> torch.Tensor:
                out = stack.apply(unit, states)
                rows[unit] = out[:, 0].clone()
                return out

        result = self._solve(Watched(), *args, **kwargs)
        self._full_rows.append(rows[stack.num_units - 1])
        return result

    def _watched_search(self, rows: Any, req_ids: Any) -> None:
        self._full_rows.clear()
        self._run(rows, req_ids)
        self.kept.append(set(self._search._sets))
        states = torch.cat(self._full_rows)
        walk = self._search._walk
        logits = self._engine.speculator.model.compute_logits(walk.finish(states)).float()
        best = logits.topk(2, dim=-1)
        for row, name in enumerate(rows.req_ids):
            first, second = best.values[row].tolist()
            self.seen.append(
                Seen(
                    name.split("-")[0],
                    int(rows.positions[row]),
                    int(best.indices[row, 0]),
                    first - second,
                    self._search._sets[name],
                )
            )

    def check(self, outputs: list[Any], at_least: int, margin: float = 0.0) -> None:
        """Each search's unskipped row named the token that the target went on to emit."""
        whole = {o.request_id.split("-")[0]: o for o in outputs}
        compared = 0
        for seen in self.seen:
            output = whole[seen.request]
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            if seen.margin <= margin or seen.position + 1 >= len(tokens):
                continue
            compared += 1
            assert tokens[seen.position + 1] == seen.token, seen
        assert compared >= at_least


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Probe]:
    return lambda engine: Probe(engine, monkeypatch)


def test_the_unskipped_row_is_the_target(twins: Any, probe: Callable[[Any], Probe]) -> None:
    """Catches packed rows at a wrong position, over a wrong prefix, or that see one another."""
    watching = probe(twins.clasp)
    got = twins.check(PROMPTS, greedy())
    watching.check(got, at_least=10)
    assert all(len(seen.skipped) == 3 for seen in watching.seen)


@pytest.mark.parametrize(("dtype", "margin"), [("float32", 1e-3), ("bfloat16", 0.25)])
def test_the_unskipped_row_is_a_real_target(
    engines: Any, probe: Callable[[Any], Probe], dtype: str, margin: float
) -> None:
    """Catches a search that only fits toy shapes; bf16 rounds, so near ties are left out."""
    engine = engines.get(
        {
            "method": "clasp",
            "num_speculative_tokens": 4,
            "method_config": {"num_skip_layers": 9, "adaptive": False, "refresh_interval": 1},
        },
        model="smollm2-135m-instruct",
        dtype=dtype,
        num_gpu_blocks_override=32,
    )
    watching = probe(engine)
    got = engine.generate(["Count from one to twenty: one, two, three,"], greedy(28))
    watching.check(got, at_least=10, margin=margin)


def test_sets_go_with_their_requests(twins: Any, probe: Callable[[Any], Probe]) -> None:
    """Catches a set kept for a request that has ended: memory, and drafts from a stale set."""
    watching = probe(twins.clasp)
    for prompt in PROMPTS:
        before = len(watching.kept)
        (output,) = twins.check([prompt], greedy(8))
        names = {name.split("-")[0] for kept in watching.kept[before:] for name in kept}
        assert names == {output.request_id.split("-")[0]}


def test_a_search_comes_every_refresh_interval(twins: Any, probe: Callable[[Any], Probe]) -> None:
    """Catches a search in every step, or a set that is never renewed."""
    watching = probe(twins.clasp)
    before = twins.clasp.counters()["num_drafts"]
    twins.check(PROMPTS[:1], greedy())
    rounds = twins.clasp.counters()["num_drafts"] - before
    assert len(watching.kept) == pytest.approx(rounds / 2, abs=1)


def test_one_set_a_request(
    make_twins: Any, probe: Callable[[Any], Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches per_request grouping that drafts a row through the layers of another."""
    twins = make_twins({"grouping": "per_request"})
    search = twins.clasp.speculator._search
    solve, choices = search._solve, [(0, 1, 2), (2, 4, 6), (5, 6, 7)]
    used: set[int] = set()

    def one_for_each(rows: Any, previous: Any) -> Any:
        solve(rows, previous)
        used.add(int(rows.req_ids[0].split("-")[0]) % 3)
        return choices[int(rows.req_ids[0].split("-")[0]) % 3]

    monkeypatch.setattr(search, "_solve", one_for_each)
    watching = probe(twins.clasp)
    got = twins.check(PROMPTS, greedy())
    watching.check(got, at_least=10)
    assert used == {0, 1, 2}
    assert all(seen.skipped == choices[int(seen.request) % 3] for seen in watching.seen)


@pytest.mark.parametrize(
    ("options", "skipped"),
    [
        ({"policy": "even"}, None),
        ({"num_skip_layers": None, "skip_layers": [1, 2, 6]}, (1, 2, 6)),
        ({"num_skip_layers": 0}, ()),
    ],
    ids=["even", "given", "none"],
)
def test_a_fixed_set_is_never_searched(
    make_twins: Any, options: dict[str, Any], skipped: tuple[int, ...] | None
) -> None:
    """Catches a fixed set that is not the one in use."""
    twins = make_twins(options)
    search = twins.clasp.speculator._search
    before = twins.clasp.counters()
    twins.check(PROMPTS, greedy())
    after = twins.clasp.counters()
    assert not search.searches
    ((kept, rows),) = search.groups(["a", "b"])
    expected = search._even if skipped is None else skipped
    assert sorted({*kept, *expected}) == list(range(8))
    assert not set(kept) & set(expected)
    assert rows == [0, 1]
    drafted, accepted = (after[n] - before[n] for n in ("num_draft_tokens", "num_accepted_tokens"))
    assert (accepted == drafted) == (skipped == ())


def test_half_layers(make_twins: Any, probe: Callable[[Any], Probe]) -> None:
    """Catches attention and MLP of a layer mixed up when they are skipped separately."""
    twins = make_twins({"skip_unit": "sublayer", "num_skip_layers": 5})
    watching = probe(twins.clasp)
    got = twins.check(PROMPTS, greedy())
    watching.check(got, at_least=10)
    assert {len(seen.skipped) for seen in watching.seen} == {5}
    assert max(unit for seen in watching.seen for unit in seen.skipped) > 7


def test_pinned_layers_are_kept(make_twins: Any, probe: Callable[[Any], Probe]) -> None:
    """Catches a pinned layer in a searched set."""
    twins = make_twins({"pinned_first": 2, "pinned_last": 2})
    watching = probe(twins.clasp)
    twins.check(PROMPTS, greedy())
    units = {unit for seen in watching.seen for unit in seen.skipped}
    assert units
    assert units <= {2, 3, 4, 5}


def test_a_wide_batch_is_searched_by_few_rows(twins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a search whose cost grows with the batch: at 16 requests it cost tens of steps."""
    from speculators_ext.proposers.skip_search import MAX_SEARCH_ROWS

    search, seen = twins.clasp.speculator._search, []
    run = search.search_rows

    def watched(rows: Any, req_ids: Any) -> None:
        seen.append((len(rows.req_ids), len(req_ids)))
        run(rows, req_ids)

    monkeypatch.setattr(search, "search_rows", watched)
    twins.check([f"{i} {prompt}" for prompt in PROMPTS for i in range(4)], greedy(8))
    assert max(requests for _, requests in seen) > MAX_SEARCH_ROWS
    assert max(rows for rows, _ in seen) <= MAX_SEARCH_ROWS
