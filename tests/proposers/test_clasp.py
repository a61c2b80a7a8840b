"""The layer-skip search against running its answer, brute force and simple sets.

Stand-in for a decoder: residual layers without attention, in float64, so that a cell's state is a
function of its path alone and rounding decides nothing.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators_ext.proposers.clasp import DPResult, backtrack, best_set, lattice, solve
from speculators_ext.proposers.skip_sets import (
    evenly_spread,
    exhaustive_set,
    free_units,
    greedy_set,
)

HIDDEN = 8
# Similarities are returned in float32.
SAME = 2e-6


class Stack:
    """Residual layers x + tanh(x A) B; it counts the rows it is given and can poison some."""

    def __init__(self, num_units, seed, scale=0.7):
        generator = torch.Generator().manual_seed(seed)
        shape = (num_units, HIDDEN, HIDDEN)
        self.num_units = num_units
        self._a = torch.randn(shape, generator=generator, dtype=torch.float64) / HIDDEN**0.5
        self._b = torch.randn(shape, generator=generator, dtype=torch.float64) / HIDDEN**0.5
        self._scale = scale
        self.widths = []

    def apply(self, unit, states):
        self.widths.append(states.shape[1])
        return states + self._scale * torch.tanh(states @ self._a[unit]) @ self._b[unit]


def _inputs(num_requests, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_requests, HIDDEN, generator=generator, dtype=torch.float64)


def _true_similarity(stack, x0, skip_set):
    """Run the full model and the one with units left out."""
    full = cut = x0.unsqueeze(1)
    for unit in range(stack.num_units):
        full = stack.apply(unit, full)
        if unit not in skip_set:
            cut = stack.apply(unit, cut)
    return torch.cosine_similarity(full, cut, dim=-1).mean().item()


def _scorer(stack, x0):
    return lambda skip_set: _true_similarity(stack, x0, skip_set)


def _plain_dp(stack, x0, num_skip, pinned):
    """The paper's recurrence with a dictionary of cells, one request, nothing packed."""
    cells = {0: ((), x0)}
    full = x0
    for unit in range(stack.num_units):
        full = stack.apply(unit, full[None])[0]
        after = {}
        for j in range(num_skip + 1):
            options = []
            if unit not in pinned and j - 1 in cells:
                path, state = cells[j - 1]
                options.append(((*path, unit), state))
            if j in cells:
                path, state = cells[j]
                options.append((path, stack.apply(unit, state[None])[0]))
            if options:
                # max takes the first of equals: a tie skips.
                after[j] = max(
                    options, key=lambda o: torch.cosine_similarity(full, o[1], dim=-1).item()
                )
        cells = after
    return cells[num_skip][0]


@st.composite
def problems(draw):
    """(stack, x0 [R, H], num_skip, pinned)."""
    num_units = draw(st.integers(1, 9))
    pinned = frozenset(draw(st.sets(st.integers(0, num_units - 1), max_size=num_units)))
    num_skip = draw(st.integers(0, num_units - len(pinned)))
    seed = draw(st.integers(0, 10_000))
    return Stack(num_units, seed), _inputs(draw(st.integers(1, 4)), seed), num_skip, pinned


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_set_has_the_size_asked_for_and_spares_pinned_units(problem):
    """Catches a backtrack that leaves the lattice, and a pinned unit offered as a skip."""
    stack, x0, num_skip, pinned = problem
    skip_set = backtrack(solve(stack, x0, num_skip, pinned).parents, num_skip)
    assert len(skip_set) == num_skip
    assert list(skip_set) == sorted(set(skip_set))
    assert not pinned.intersection(skip_set)
    assert all(0 <= unit < stack.num_units for unit in skip_set)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_similarity_is_what_running_the_set_gives(problem):
    """Every cell is the state of one real path: catches states and parent bits drifting apart."""
    stack, x0, num_skip, pinned = problem
    result = solve(stack, x0, num_skip, pinned)
    skip_set = backtrack(result.parents, num_skip)
    expected = _true_similarity(stack, x0, skip_set)
    assert result.similarity.item() == pytest.approx(expected, abs=SAME)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_one_request_follows_the_papers_recurrence(problem):
    """Packing, dropped cells and parent bits change nothing in the answer."""
    stack, x0, num_skip, pinned = problem
    result = solve(stack, x0[:1], num_skip, pinned)
    assert backtrack(result.parents, num_skip) == _plain_dp(stack, x0[:1], num_skip, pinned)


@settings(max_examples=60, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter(problem, rng):
    """A batch is reordered at every step; the set must not flicker with it."""
    stack, x0, num_skip, pinned = problem
    order = list(range(x0.shape[0]))
    rng.shuffle(order)
    first = solve(stack, x0, num_skip, pinned)
    second = solve(stack, x0[order], num_skip, pinned)
    assert backtrack(first.parents, num_skip) == backtrack(second.parents, num_skip)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(2, 5))
def test_equal_requests_decide_as_one(problem, copies):
    """A sum of equal cosines must compare as one of them does."""
    stack, x0, num_skip, pinned = problem
    one = solve(stack, x0[:1], num_skip, pinned)
    many = solve(stack, x0[:1].repeat(copies, 1), num_skip, pinned)
    assert torch.equal(one.parents, many.parents)
    assert many.similarity.item() == pytest.approx(one.similarity.item(), abs=SAME)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_separate_decisions_are_those_of_each_request_alone(problem):
    """Catches a row that reads its neighbour's state or decision."""
    stack, x0, num_skip, pinned = problem
    result = solve(stack, x0, num_skip, pinned, shared=False)
    for row in range(x0.shape[0]):
        alone = solve(stack, x0[row : row + 1], num_skip, pinned)
        own = DPResult(*(part[row] for part in result))
        assert best_set(own, num_skip)[0] == best_set(alone, num_skip)[0]
        assert own.similarity.item() == pytest.approx(alone.similarity.item(), abs=SAME)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_never_worse_than_the_sets_that_ride_along(problem):
    """The uniform and the greedy set, measured in the same pass, bound the result from below."""
    stack, x0, num_skip, pinned = problem
    score = _scorer(stack, x0)
    rivals = (
        evenly_spread(stack.num_units, num_skip, pinned),
        greedy_set(score, stack.num_units, num_skip, pinned),
    )
    result = solve(stack, x0, num_skip, pinned, candidates=rivals)
    for rival, similarity in zip(rivals, result.candidates.tolist(), strict=True):
        assert similarity == pytest.approx(score(rival), abs=SAME)
    skip_set, similarity = best_set(result, num_skip, rivals)
    assert score(skip_set) == pytest.approx(similarity, abs=SAME)
    assert score(skip_set) >= max(map(score, rivals)) - SAME


def _against(name, seeds=range(40), num_units=10, num_skip=4):
    """Mean similarity lost by the search alone against another set (negative: it won)."""
    rivals = {
        "even": lambda score: evenly_spread(num_units, num_skip),
        "greedy": lambda score: greedy_set(score, num_units, num_skip),
        "best": lambda score: exhaustive_set(score, num_units, num_skip),
    }
    losses = []
    for seed in seeds:
        stack, x0 = Stack(num_units, seed), _inputs(1, seed)
        score = _scorer(stack, x0)
        found = backtrack(solve(stack, x0, num_skip).parents, num_skip)
        losses.append(score(rivals[name](score)) - score(found))
    return losses


def test_the_search_alone_is_close_to_brute_force():
    """Measured: 0.037 lost on average, exact in 8 of 40; 0.577 with the comparison reversed."""
    losses = _against("best")
    assert min(losses) >= -SAME
    assert sum(losses) / len(losses) < 0.06


def test_the_search_alone_beats_even_spreading():
    """Measured: better in 40 of 40, by 0.227 on average; 0.312 worse
    with the comparison reversed."""
    losses = _against("even")
    assert sum(loss <= SAME for loss in losses) >= 36
    assert sum(losses) / len(losses) < -0.15


def test_brute_force_is_met_where_one_state_a_cell_suffices():
    """With one unit skipped every path is its own cell until the end: the search is exact up to
    the choice between neighbours, so it must find a unit that changes nothing."""
    for free in range(6):
        stack, x0 = Stack(6, seed=free), _inputs(2, seed=free)
        stack._b[free] = 0
        assert backtrack(solve(stack, x0, 1).parents, 1) == (free,)


def test_a_tie_skips():
    """Keep only where strictly better: a unit that does nothing is skipped as soon as it can be."""
    stack = Stack(5, seed=0, scale=0.0)
    result = solve(stack, _inputs(1, 0), 2)
    assert backtrack(result.parents, 2) == (3, 4)
    assert result.similarity.item() == pytest.approx(1.0, abs=SAME)


@pytest.mark.parametrize(
    ("num_units", "num_skip", "forwards", "widest"), [(80, 44, 1584, 36), (32, 16, 256, 16)]
)
def test_unreachable_cells_are_not_computed(num_units, num_skip, forwards, widest):
    """M (U - M) forwards besides the full model's U, as counted for the paper's two sizes."""
    stack = Stack(num_units, seed=1)
    solve(stack, _inputs(1, 1), num_skip)
    assert stack.widths == list(lattice(num_units, num_skip).widths())
    assert sum(stack.widths) == forwards + num_units
    assert max(stack.widths) == widest + 1


@settings(max_examples=80, deadline=None)
@given(problems())
def test_the_lattice_is_what_paths_can_reach(problem):
    """Every cell inside the bounds lies on some choice of skips, and no choice leaves them."""
    stack, _, num_skip, pinned = problem
    grid = lattice(stack.num_units, num_skip, pinned)
    seen = [set() for _ in range(stack.num_units + 1)]
    free = free_units(stack.num_units, num_skip, pinned)
    for skip_set in itertools.combinations(free, num_skip):
        for level in range(stack.num_units + 1):
            seen[level].add(sum(unit < level for unit in skip_set))
    bounds = [set(range(a, b + 1)) for a, b in zip(grid.low, grid.high, strict=True)]
    assert bounds == seen


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_request_does_not_decide_for_the_others(value):
    """One row of NaN must leave the other rows' set as it is alone, and never be preferred."""
    stack, x0 = Stack(8, seed=4), _inputs(3, seed=4)
    broken = x0.clone()
    broken[1] = value
    alone = backtrack(solve(stack, x0[[0, 2]], 3).parents, 3)
    assert backtrack(solve(stack, broken, 3).parents, 3) == alone


def test_a_path_that_overflows_is_avoided():
    """Catches a comparison with NaN, which is false and would count as a choice."""

    class Overflowing(Stack):
        def apply(self, unit, states):
            out = super().apply(unit, states)
            if unit == 2:
                out[:, 1:] = math.nan  # every row but the full model's
            return out

    for seed in range(8):
        result = solve(Overflowing(6, seed), _inputs(1, seed), 3, frozenset({5}))
        skip_set = backtrack(result.parents, 3)
        assert min(skip_set) >= 2 or 2 in skip_set  # nothing skipped yet, or not run
        assert result.similarity.item() > -1


def test_bfloat16_states_are_compared_in_float32():
    """In bfloat16 most cosines round to 1 and the choice would be the tie rule's."""
    stack, x0 = Stack(10, seed=3, scale=0.2), _inputs(1, seed=3)
    exact = backtrack(solve(stack, x0, 4).parents, 4)

    class Rounded(Stack):
        def apply(self, unit, states):
            return super().apply(unit, states.double()).bfloat16()

    result = solve(Rounded(10, seed=3, scale=0.2), x0.bfloat16(), 4)
    assert result.similarity.dtype == torch.float32
    found = backtrack(result.parents, 4)
    assert _true_similarity(stack, x0, found) > _true_similarity(stack, x0, exact) - 0.01
    assert len(set(found) & set(exact)) >= 3


def test_the_search_never_waits_for_the_device():
    """On the meta device any read of a value raises, so this catches every hidden sync."""
    stack = Stack(9, seed=0)
    stack._a, stack._b = stack._a.to("meta"), stack._b.to("meta")
    x0 = torch.empty(3, HIDDEN, dtype=torch.float64, device="meta")
    rivals = (evenly_spread(9, 4),)
    for shared, lead in ((True, ()), (False, (3,))):
        result = solve(stack, x0, 4, frozenset({0}), candidates=rivals, shared=shared)
        assert result.parents.shape == (*lead, 9, 5)
        assert result.similarity.shape == lead
        assert result.candidates.shape == (*lead, 1)


def test_a_size_that_does_not_fit_is_refused():
    """Without the check the lattice would be empty and the error a shape mismatch."""
    for num_skip in (-1, 5):
        with pytest.raises(ValueError, match=f"num_skip={num_skip} does not fit 5 units"):
            solve(Stack(5, seed=0), _inputs(1, 0), num_skip, frozenset({2}))
