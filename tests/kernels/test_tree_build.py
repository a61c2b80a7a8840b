"""Growing and choosing a draft tree, both implementations, against sorting in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from speculators_ext.kernels.tree_build import expand_frontier
from speculators_ext.kernels.tree_build_ref import (
    Candidates,
    Frontier,
    PaddedTree,
    expand_frontier_ref,
    level_columns,
    make_candidates,
    rerank_candidates_ref,
)
from speculators_ext.kernels.tree_rerank import rerank_candidates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPAND = {"ref": expand_frontier_ref, "triton": expand_frontier}
RERANK = {"ref": rerank_candidates_ref, "triton": rerank_candidates}

both_expand = pytest.mark.parametrize("expand", EXPAND.values(), ids=EXPAND)
both_rerank = pytest.mark.parametrize("rerank", RERANK.values(), ids=RERANK)


def likeliest(logits: list[float], topk: int) -> list[tuple[int, float]]:
    """(token, log-probability) of the children of one node: sort everything, in float64."""
    order = sorted(
        (token for token, logit in enumerate(logits) if logit > -math.inf),
        key=lambda token: (-logits[token], token),
    )
    if not order:
        return []
    largest = logits[order[0]]
    norm = largest + math.log(sum(math.exp(logits[token] - largest) for token in order))
    return [(token, logits[token] - norm) for token in order[:topk]]


def check_level(
    logits: torch.Tensor,
    candidates: Candidates,
    frontier: Frontier | None,
    grown: Frontier,
    topk: int,
    level: int,
    draft_to_target: torch.Tensor | None = None,
) -> None:
    num_reqs = candidates.scores.shape[0]
    width = logits.shape[0] // num_reqs
    start, stop = level_columns(level, topk)
    rows = logits.float().view(num_reqs, width, -1).tolist()
    tokens, scores, parents = (pool[:, start:stop].tolist() for pool in candidates)
    for request in range(num_reqs):
        for node in range(width):
            prior = 0.0 if frontier is None else frontier.scores[request, node].item()
            parent = -1 if frontier is None else frontier.columns[request, node].item()
            children = likeliest(rows[request][node], topk)
            for child in range(topk):
                column = node * topk + child
                if child >= len(children) or prior == -math.inf:
                    assert scores[request][column] == -math.inf
                    continue
                token, logprob = children[child]
                offset = 0 if draft_to_target is None else draft_to_target[token].item()
                assert tokens[request][column] == token + offset
                assert scores[request][column] == pytest.approx(prior + logprob, abs=1e-5)
                assert parents[request][column] == parent
        order = sorted(range(stop - start), key=lambda c: (-scores[request][c], c))[:topk]
        for place, column in enumerate(order):
            score = scores[request][column]
            assert grown.scores[request, place].item() == score
            if score == -math.inf:
                column = 0
            assert grown.columns[request, place].item() == start + column
            assert grown.origin[request, place].item() == column // topk
            assert grown.tokens[request, place].item() == tokens[request][column]


def grow(
    expand: Any,
    levels: list[torch.Tensor],
    num_reqs: int,
    topk: int,
    draft_to_target: torch.Tensor | None = None,
) -> Candidates:
    """Expand level after level, each checked; logits of a level are [R * F, V]."""
    candidates, frontier = make_candidates(num_reqs, len(levels), topk, DEVICE), None
    for level, logits in enumerate(levels):
        untouched = [pool[:, level_columns(level, topk)[1] :].clone() for pool in candidates]
        grown = expand(
            logits.to(DEVICE),
            candidates,
            frontier,
            topk=topk,
            level=level,
            draft_to_target=draft_to_target,
        )
        check_level(logits, candidates, frontier, grown, topk, level, draft_to_target)
        for pool, before in zip(candidates, untouched, strict=True):
            assert torch.equal(pool[:, level_columns(level, topk)[1] :], before)
        frontier = grown
    return candidates


def random_levels(
    num_reqs: int, depth: int, topk: int, vocab_size: int, *, tied: bool = False
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    levels = []
    for level in range(depth):
        shape = (num_reqs * (topk if level else 1), vocab_size)
        levels.append(torch.randint(0, 3, shape).float() if tied else torch.randn(shape) * 3)
    return levels


SHAPES = {
    "one request": (1, 3, 4, 300),
    "ragged blocks": (3, 2, 3, 513),
    "chain": (2, 3, 1, 100),
    "one block": (2, 2, 4, 7),
    "many blocks": (1, 2, 2, 4500),
    "the paper's width": (1, 2, 10, 700),
    "vocabulary smaller than topk": (1, 3, 4, 3),
}


@both_expand
@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_expand(expand: Any, shape: tuple[int, int, int, int], tied: bool) -> None:
    """Catches a wrong token, block, norm, parent, origin or tie: everything is sorted anew."""
    num_reqs, _, topk, _ = shape
    grow(expand, random_levels(*shape, tied=tied), num_reqs, topk)


@both_expand
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_expand_half_precision_logits(expand: Any, dtype: torch.dtype) -> None:
    """Catches a softmax computed in half precision; rounded logits tie often."""
    if dtype == torch.bfloat16 and expand is expand_frontier and DEVICE == "cpu":
        pytest.skip("Triton's interpreter gets bfloat16 wrong")
    levels = [logits.to(dtype) for logits in random_levels(2, 2, 3, 600)]
    grow(expand, levels, 2, 3)


@both_expand
def test_expand_all_equal_logits(expand: Any) -> None:
    """Catches blocks of equal maxima taken out of order: the children are tokens 0, 1, 2."""
    logits = torch.zeros(1, 2000, device=DEVICE)
    frontier = expand(logits, make_candidates(1, 1, 3, DEVICE), None, topk=3, level=0)
    assert frontier.tokens.tolist() == [[0, 1, 2]]


@both_expand
def test_expand_leaves_out_what_is_masked(expand: Any) -> None:
    """Catches NaN or -inf logits among the children, and one NaN that spoils a norm."""
    levels = random_levels(3, 2, 4, 600)
    masked = levels[0]
    masked[0, 2:] = -math.inf
    masked[1, :] = -math.inf
    levels[1][5, ::3] = -math.inf
    spoiled = [logits.clone() for logits in levels]
    spoiled[0][0, 2:] = math.nan
    spoiled[1][5, ::3] = math.nan
    wanted = grow(expand, levels, 3, 4)
    got = make_candidates(3, 2, 4, DEVICE)
    frontier = expand(spoiled[0].to(DEVICE), got, None, topk=4, level=0)
    expand(spoiled[1].to(DEVICE), got, frontier, topk=4, level=1)
    assert torch.equal(got.scores, wanted.scores)
    exists = got.scores > -math.inf
    assert torch.equal(got.tokens[exists], wanted.tokens[exists])
    assert exists.any(1).tolist() == [True, False, True]


@both_expand
def test_expand_maps_a_reduced_vocabulary(expand: Any) -> None:
    """Catches a pool that holds the head's own token numbers, or maps them twice."""
    torch.manual_seed(1)
    offsets = torch.randint(0, 1000, (300,), device=DEVICE).sort().values
    grow(expand, random_levels(2, 2, 3, 300), 2, 3, offsets)


@both_expand
def test_expand_takes_rows_of_a_wider_buffer(expand: Any) -> None:
    """Catches logits taken for contiguous: a vocabulary is padded to a multiple in some heads."""
    levels = []
    for logits in random_levels(2, 2, 3, 300):
        wide = torch.full((len(logits), 320), math.nan)
        wide[:, :300] = logits
        levels.append(wide[:, :300])
    grow(expand, levels, 2, 3)


@both_expand
def test_no_requests_is_no_launch(expand: Any) -> None:
    """Catches a grid of size 0, which a GPU refuses."""
    logits = torch.zeros(0, 300, device=DEVICE)
    frontier = expand(logits, make_candidates(0, 1, 3, DEVICE), None, topk=3, level=0)
    assert frontier.tokens.shape == (0, 3)


def random_candidates(num_reqs: int, depth: int, topk: int, *, tied: bool = False) -> Candidates:
    """A pool as growing leaves it: parents are in the frontier of the level before."""
    torch.manual_seed(0)
    candidates = make_candidates(num_reqs, depth, topk, "cpu")
    candidates.tokens.random_(0, 50_000)
    for request in range(num_reqs):
        frontier, priors = [-1], [0.0]
        for level in range(depth):
            start, stop = level_columns(level, topk)
            parents = [parent for parent in frontier for _ in range(topk)]
            steps = -torch.rand(stop - start) if not tied else -torch.randint(0, 2, (stop - start,))
            scores = torch.tensor([p for p in priors for _ in range(topk)]) + steps
            candidates.parents[request, start:stop] = torch.tensor(parents)
            candidates.scores[request, start:stop] = scores
            best = sorted(range(stop - start), key=lambda c: (-scores[c].item(), c))[:topk]
            frontier, priors = [start + c for c in best], [scores[c].item() for c in best]
    return Candidates(*(pool.to(DEVICE) for pool in candidates))


def check_tree(
    tree: PaddedTree,
    candidates: Candidates,
    roots: torch.Tensor,
    max_rows: torch.Tensor,
    topk: int,
    num_rows: int,
    floor: float,
) -> None:
    tokens, scores, parents = (pool.tolist() for pool in candidates)
    for request in range(len(tokens)):
        order = [
            c
            for c in sorted(range(len(scores[request])), key=lambda c: (-scores[request][c], c))
            if scores[request][c] > -math.inf and scores[request][c] >= floor
        ]
        count = min(len(order) + 1, num_rows, max_rows[request].item())
        rows = [-1, *order][:count]
        assert tree.counts[request].item() == count
        depths = {-1: 0}
        for c in sorted(rows[1:]):
            depths[c] = depths[parents[request][c]] + 1
        expected = [(roots[request].item(), -1, 0, 0.0)] + [
            (
                tokens[request][c],
                rows.index(parents[request][c]),
                depths[c],
                scores[request][c],
            )
            for c in rows[1:]
        ]
        expected = expected[:count] + [(-1, -1, 0, -math.inf)] * (num_rows - count)
        got = zip(*(part[request].tolist() for part in tree[:4]), strict=True)
        assert list(got) == expected


def run_rerank(
    rerank: Any,
    candidates: Candidates,
    max_rows: list[int],
    topk: int,
    num_rows: int,
    floor: float = -math.inf,
) -> PaddedTree:
    roots = torch.arange(len(max_rows), device=DEVICE) + 7
    limits = torch.tensor(max_rows, dtype=torch.int32, device=DEVICE)
    tree = rerank(candidates, roots, limits, topk=topk, num_rows=num_rows, floor=floor)
    check_tree(tree, candidates, roots, limits, topk, num_rows, floor)
    return tree


RERANKED = {
    "as many as there are": ([100, 100], 2, 3, 13),
    "ragged": ([0, 1, 2, 7, 40], 3, 3, 16),
    "more rows than candidates": ([50], 2, 2, 50),
    "root only": ([5], 2, 2, 1),
    "the paper's": ([60], 4, 10, 60),
    "256 rows": ([256], 4, 10, 256),
    "chain": ([5, 3], 6, 1, 7),
}


@both_rerank
@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize("shape", RERANKED.values(), ids=RERANKED)
def test_rerank(rerank: Any, shape: tuple[list[int], int, int, int], tied: bool) -> None:
    """Catches a tie that goes to the deeper node, a row whose parent is not in the tree, a tail."""
    max_rows, depth, topk, num_rows = shape
    candidates = random_candidates(len(max_rows), depth, topk, tied=tied)
    run_rerank(rerank, candidates, max_rows, topk, num_rows)


@both_rerank
def test_a_prefix_of_the_rows_is_the_tree_of_that_size(rerank: Any) -> None:
    """Catches rows ordered by level: cutting a verify short would then cut the deep nodes first."""
    candidates = random_candidates(2, 3, 4)
    whole = run_rerank(rerank, candidates, [20, 20], 4, 20)
    for size in (1, 2, 9):
        small = run_rerank(rerank, candidates, [20, 20], 4, size)
        for part, cut in zip(whole[:4], small[:4], strict=True):
            assert torch.equal(part[:, :size], cut)


@both_rerank
@pytest.mark.parametrize("floor", [-0.8, -0.2, 0.0], ids=str)
def test_rerank_drops_what_is_under_the_floor(rerank: Any, floor: float) -> None:
    """Catches a floor on a step's probability, not the path's, and a strict comparison."""
    candidates = random_candidates(3, 3, 4, tied=floor == 0.0)
    tree = run_rerank(rerank, candidates, [30, 1, 0], 4, 30, floor)
    assert tree.counts.tolist()[1:] == [1, 0]
    assert tree.counts[0] < 30


@both_rerank
def test_rerank_of_levels_that_were_not_run(rerank: Any) -> None:
    """Catches candidates of an earlier round, or -inf ones, in the tree: the root stays alone."""
    candidates = random_candidates(2, 3, 3)
    candidates.scores[0, 3:] = -math.inf
    candidates.scores[1, :] = -math.inf
    tree = run_rerank(rerank, candidates, [20, 20], 3, 20)
    assert tree.counts.tolist() == [4, 1]


@both_rerank
def test_rerank_of_no_requests(rerank: Any) -> None:
    """Catches a grid of size 0, which a GPU refuses."""
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    candidates = make_candidates(0, 2, 3, DEVICE)
    tree = rerank(candidates, none, none.to(torch.int32), topk=3, num_rows=5)
    assert tree.tokens.shape == (0, 5)
    assert tree.counts.shape == (0,)


def call_expand(**changes: Any) -> None:
    call: dict[str, Any] = {
        "logits": torch.zeros(2, 300, device=DEVICE),
        "candidates": make_candidates(2, 1, 3, DEVICE),
        "frontier": None,
        "topk": 3,
        "level": 0,
    }
    expand_frontier(**{**call, **changes})


BROKEN = {
    "rows": ({"logits": torch.zeros(3, 300, device=DEVICE)}, "rows of logits: expected 2"),
    "dtype": ({"logits": torch.zeros(2, 300, device=DEVICE).double()}, "logits dtype"),
    "topk": ({"topk": 33}, "topk: expected 1 to 32, got 33"),
    "level": ({"level": 1}, "level without a frontier: expected 0"),
    "pool": ({"topk": 4}, "candidates at level 0: expected at least 4, got 3"),
    "map": (
        {"draft_to_target": torch.zeros(299, dtype=torch.int64, device=DEVICE)},
        "draft_to_target shape",
    ),
    "device": ({"logits": torch.zeros(2, 300, device="meta")}, "logits device"),
}


@pytest.mark.parametrize(("changes", "message"), BROKEN.values(), ids=BROKEN)
def test_expand_arguments_that_do_not_fit(changes: dict, message: str) -> None:
    """Catches an argument the kernel would read past, or in the wrong dtype, without a word."""
    with pytest.raises(ValueError, match=message):
        call_expand(**changes)


def test_rerank_arguments_that_do_not_fit() -> None:
    """Likewise for the rerank."""
    candidates = make_candidates(2, 1, 3, DEVICE)
    roots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    limits = roots.to(torch.int32)
    with pytest.raises(ValueError, match="max_rows shape and dtype"):
        rerank_candidates(candidates, roots, roots, topk=3, num_rows=4)
    with pytest.raises(ValueError, match="num_rows: expected at least 1"):
        rerank_candidates(candidates, roots, limits, topk=3, num_rows=0)
    with pytest.raises(ValueError, match="root_tokens shape"):
        rerank_candidates(candidates, roots[:1], limits, topk=3, num_rows=4)
