"""Sets of skipped units that are chosen without the current context.

A unit is a layer, or half of one (attention, MLP); a skip set is an ascending tuple of unit
numbers. Everything here is plain Python and deterministic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from speculators_ext.settings import SkipConfig

SkipSet = tuple[int, ...]
Score = Callable[[SkipSet], float]

# SWIFT's ratio (arXiv 2410.06916); CLaSp's own best sets lie at 40 to 60 %.
DEFAULT_SKIP_PERCENT = 45


class SkipPlan(NamedTuple):
    """A `SkipConfig` resolved for one target.

    Attributes:
        num_units: units of the target, U.
        num_skip: units to skip, M.
        pinned: units that are never skipped.
        initial: the set to start from: the fixed set, else the evenly spread one.
        searched: whether the dynamic programme replaces `initial` in context.
    """

    num_units: int
    num_skip: int
    pinned: frozenset[int]
    initial: SkipSet
    searched: bool


def plan_skips(config: SkipConfig, num_layers: int) -> SkipPlan:
    """Resolve the settings for a target of `num_layers` decoder layers."""
    units = config.num_units(num_layers)
    pinned = config.pinned_units(num_layers)
    if config.skip_layers is not None:
        fixed = config.skip_layers
        return SkipPlan(units, len(fixed), pinned, fixed, searched=False)
    count = config.num_skip_layers
    if count is None:
        count = default_num_skip(units, len(pinned))
    initial = evenly_spread(units, count, pinned)
    return SkipPlan(units, count, pinned, initial, searched=config.policy == "dp" and count > 0)


def default_num_skip(num_units: int, num_pinned: int = 0) -> int:
    """Return 45 % of the units, rounded down, within what the pinned ones leave."""
    count = num_units * DEFAULT_SKIP_PERCENT // 100
    return max(0, min(count, num_units - num_pinned, num_units - 1))


def free_units(num_units: int, num_skip: int, pinned: Iterable[int] = ()) -> SkipSet:
    """Return the units that may be skipped.

    Raises:
        ValueError: they are fewer than `num_skip`, or `num_skip` is negative.
    """
    held = frozenset(pinned)
    free = tuple(unit for unit in range(num_units) if unit not in held)
    if not 0 <= num_skip <= len(free):
        raise ValueError(
            f"num_skip={num_skip} does not fit {num_units} units of which {len(free)} may be "
            "skipped"
        )
    return free


def evenly_spread(num_units: int, num_skip: int, pinned: Iterable[int] = ()) -> SkipSet:
    """Spread the skips evenly over the units that may be skipped.

    The n free units, in order, are cut into M bins of equal length; the unit at the centre of
    each is skipped: free[floor((2k + 1) n / 2M)] for k = 0 .. M-1.
    """
    free = free_units(num_units, num_skip, pinned)
    return tuple(free[(2 * k + 1) * len(free) // (2 * num_skip)] for k in range(num_skip))


def exhaustive_set(
    score: Score, num_units: int, num_skip: int, pinned: Iterable[int] = ()
) -> SkipSet:
    """Return the best of all sets (the first one where they tie); exponential in the depth."""
    free = free_units(num_units, num_skip, pinned)
    return max(combinations(free, num_skip), key=lambda units: _finite(score(units)))


def greedy_set(score: Score, num_units: int, num_skip: int, pinned: Iterable[int] = ()) -> SkipSet:
    """Skip one more unit at a time, always the one that leaves the best score (ties: lowest)."""
    free = free_units(num_units, num_skip, pinned)
    chosen: SkipSet = ()
    for _ in range(num_skip):
        grown = [tuple(sorted((*chosen, unit))) for unit in free if unit not in chosen]
        chosen = max(grown, key=lambda units: _finite(score(units)))
    return chosen


class SearchResult(NamedTuple):
    """What `search_fixed_set` found.

    Attributes:
        skip_set: the best set seen.
        score: its score.
        evaluations: different sets scored.
    """

    skip_set: SkipSet
    score: float
    evaluations: int


def search_fixed_set(
    score: Score,
    num_units: int,
    num_skip: int,
    pinned: Iterable[int] = (),
    *,
    starts: Sequence[SkipSet] = (),
    max_evaluations: int = 500,
    seed: int = 0,
) -> SearchResult:
    """Search the best fixed set by hill climbing with restarts.

    From each start (the evenly spread set, then `starts`, then random ones) it swaps one skipped
    unit for a kept one, in shuffled order, whenever that scores higher, until no swap does.

    Args:
        score: higher is better; a value that is not finite counts as the worst. Expensive: every
            set is scored once.
        num_units: units of the target.
        num_skip: size of the set.
        pinned: units that are never skipped.
        starts: further sets to climb from.
        max_evaluations: most sets to score.
        seed: of the shuffles and the random starts.
    """
    free = free_units(num_units, num_skip, pinned)
    climb = _Climb(score, free, max_evaluations, random.Random(seed))
    climb.run(evenly_spread(num_units, num_skip, pinned))
    for start in starts:
        climb.run(tuple(sorted(start)))
    total = math.comb(len(free), num_skip)
    while len(climb.scores) < min(max_evaluations, total):
        climb.run(tuple(sorted(climb.rng.sample(free, num_skip))))
    best = max(climb.scores, key=lambda units: climb.scores[units])
    return SearchResult(best, climb.scores[best], len(climb.scores))


class _Climb:
    """Hill climbing over sets of one size, with every score kept."""

    def __init__(self, score: Score, free: SkipSet, limit: int, rng: random.Random) -> None:
        self.scores: dict[SkipSet, float] = {}
        self.rng = rng
        self._score = score
        self._free = free
        self._limit = limit

    def run(self, start: SkipSet) -> None:
        """Climb from `start` to a local optimum, or until the evaluations are spent."""
        here = start
        while (value := self._value(here)) is not None:
            better = self._first_better(here, value)
            if better is None:
                return
            here = better

    def _first_better(self, here: SkipSet, value: float) -> SkipSet | None:
        swaps = [(out, into) for out in here for into in self._free if into not in here]
        self.rng.shuffle(swaps)
        for out, into in swaps:
            there = tuple(sorted({*here, into} - {out}))
            found = self._value(there)
            if found is None:
                return None
            if found > value:
                return there
        return None

    def _value(self, units: SkipSet) -> float | None:
        if units not in self.scores:
            if len(self.scores) >= self._limit:
                return None
            self.scores[units] = _finite(self._score(units))
        return self.scores[units]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
