"""Skip sets chosen without context: sizes, pins, and searches that find what is there."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators_ext.config import ClaspConfig
from speculators_ext.proposers.skip_sets import (
    default_num_skip,
    evenly_spread,
    exhaustive_set,
    greedy_set,
    plan_skips,
    search_fixed_set,
)


def _pairs(skip_set):
    """A score greedy cannot climb: units 0 and 1 are bad alone and best together."""
    chosen = set(skip_set)
    return 10.0 if {0, 1} <= chosen else float(sum(skip_set)) / 100


@settings(max_examples=200)
@given(st.data())
def test_even_sets_are_even(data):
    """Size, pins, and gaps among the free units that differ by at most one."""
    num_units = data.draw(st.integers(1, 40))
    pinned = data.draw(st.sets(st.integers(0, num_units - 1)))
    free = [unit for unit in range(num_units) if unit not in pinned]
    num_skip = data.draw(st.integers(0, len(free)))
    chosen = evenly_spread(num_units, num_skip, pinned)
    assert len(chosen) == num_skip
    assert list(chosen) == sorted(set(chosen))
    assert set(chosen) <= set(free)
    places = [free.index(unit) for unit in chosen]
    gaps = [b - a for a, b in pairwise(places)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_even_sets_are_the_documented_ones():
    """The definition is public: a set in a log must be the same in the next release."""
    assert evenly_spread(30, 6) == (2, 7, 12, 17, 22, 27)
    assert evenly_spread(5, 2) == (1, 3)
    assert evenly_spread(6, 2, {0, 5}) == (2, 4)


@pytest.mark.parametrize(
    ("num_units", "num_pinned", "count"),
    [(30, 0, 13), (80, 0, 36), (2, 0, 0), (1, 0, 0), (10, 8, 2), (4, 4, 0)],
)
def test_the_default_is_45_percent_within_what_may_be_skipped(num_units, num_pinned, count):
    """At least one unit is left, and pinned ones are not counted on."""
    assert default_num_skip(num_units, num_pinned) == count


@pytest.mark.parametrize(
    ("settings_", "plan"),
    [
        ({}, (10, 4, frozenset(), (1, 3, 6, 8), True)),
        ({"policy": "even"}, (10, 4, frozenset(), (1, 3, 6, 8), False)),
        ({"skip_layers": [2, 3]}, (10, 2, frozenset(), (2, 3), False)),
        ({"num_skip_layers": 0}, (10, 0, frozenset(), (), False)),
        (
            {"skip_unit": "sublayer", "pinned_first": 4, "num_skip_layers": 5},
            (20, 5, frozenset(range(8)), (9, 11, 14, 16, 18), True),
        ),
    ],
    ids=["default", "even", "fixed", "none", "sublayer"],
)
def test_settings_resolve_to_one_plan(settings_, plan):
    """Both engines start from this, so a unit counted twice would show in both."""
    assert plan_skips(ClaspConfig(**settings_), 10) == plan


def test_exhaustive_search_is_exhaustive():
    """It is the yardstick of the others; NaN must not win by comparing false."""
    scores = {units: float(sum(units) % 5) for units in combinations((0, 1, 3, 4), 2)}
    scores[(0, 1)] = math.nan
    assert exhaustive_set(scores.__getitem__, 5, 2, {2}) == (0, 4)


def test_greedy_takes_the_best_next_unit():
    """And so misses a pair that is good only together."""
    assert greedy_set(_pairs, 6, 2) == (4, 5)
    assert greedy_set(lambda s: -abs(sum(s) - 3.0), 6, 2, {3}) == (1, 2)


def test_hill_climbing_finds_what_greedy_misses():
    """Catches a search that only ever returns its start."""
    result = search_fixed_set(_pairs, 8, 3, max_evaluations=56)
    assert set(result.skip_set) >= {0, 1}
    assert result.score == 10.0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 30))
def test_the_search_keeps_its_budget_and_never_loses_to_its_starts(seed, budget):
    """A score costs a generation run, so one too many matters; none is paid twice."""
    seen = []

    def score(units):
        seen.append(units)
        return float(hash((seed, units)) % 1000)

    starts = ((1, 2, 5), (2, 4, 5))
    result = search_fixed_set(score, 8, 3, {0}, starts=starts, max_evaluations=budget, seed=seed)
    assert len(seen) == len(set(seen)) == result.evaluations <= budget
    assert result.score == max(float(hash((seed, units)) % 1000) for units in seen)
    assert not any(0 in units or len(units) != 3 for units in seen)
    again = search_fixed_set(score, 8, 3, {0}, starts=starts, max_evaluations=budget, seed=seed)
    assert again == result


def test_a_size_that_does_not_fit_is_refused():
    """Division by zero and short sets would come much later."""
    for search in (greedy_set, exhaustive_set, search_fixed_set):
        with pytest.raises(ValueError, match="num_skip=4 does not fit 5 units"):
            search(_pairs, 5, 4, {0, 1})
    with pytest.raises(ValueError, match="num_skip=-1"):
        evenly_spread(5, -1)
