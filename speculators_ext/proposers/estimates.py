"""Running estimates that shrug off outliers: costs by median, survival by decayed counts."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Windows look at every point while they have so few, then at every so many together: what comes of
# dozens of points hardly changes with one more, and looking takes time of every step. A line takes
# the most.
_FEW, _TOGETHER, _TOGETHER_LINE = 12, 4, 16
# A unit of counts so large is scaled down.
_LARGEST = 1e6


class RunningMedian:
    """Median of the last `window` values."""

    def __init__(self, window: int) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self._median: float | None = None

    def __len__(self) -> int:
        return len(self._values)

    def observe(self, value: float) -> None:
        """Add one value."""
        self._values.append(value)
        self._median = median(self._values)

    def clear(self) -> None:
        """Forget all values; the median holds until the next one."""
        self._values.clear()

    def value(self) -> float | None:
        """Return the median, None before the first value."""
        return self._median


class SlopeWindow:
    """Slope of a line through the origin, from the last `window` points.

    The slope minimises the sum of absolute residuals, sum |y - slope * x|: it is the median of
    y / x weighted by x. A point far off (a compilation, a garbage collection) does not move it.
    """

    def __init__(self, window: int) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=window)
        self._slope: float | None = None
        self._unseen = 0

    def observe(self, x: float, y: float) -> None:
        """Add one point, x > 0."""
        self._points.append((x, y))
        self._unseen += 1
        if len(self._points) <= _FEW or self._unseen >= _TOGETHER:
            self._unseen = 0
            self._look()

    def value(self) -> float | None:
        """Return the slope, at least 0; None before the first point."""
        return self._slope

    def at(self, x: float) -> float:
        """Return y at x, 0 before the first point."""
        return x * (self._slope or 0.0)

    def rescale(self, factor: float, base: float = 0.0) -> None:
        """Multiply all y, and what they are without x, `base`, by `factor`."""
        points = [(x, (y + base) * factor - base) for x, y in self._points]
        self._points.clear()
        self._points.extend(points)
        if points:
            self._look()

    def _look(self) -> None:
        self._slope = max(0.0, _weighted_median([(y / x, x) for x, y in self._points]))

    def keep_last(self, count: int) -> None:
        """Forget all but the last `count` points; the slope holds until the next one."""
        while len(self._points) > count:
            self._points.popleft()


class LineWindow:
    """A line a + b x with a, b >= 0, from the last `window` points, x > 0.

    The slope is the median of all slopes between two points (Theil and Sen), a the median of what
    is left: a third of the points may lie anywhere. Where the x lie too close together to tell, a
    stays what it was, 0 at first: the points alone would give all they cost to the slope.
    """

    def __init__(self, window: int) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=window)
        self._start = 0.0
        self._slope: float | None = None
        self._unseen = 0

    def observe(self, x: float, y: float) -> None:
        """Add one point, x > 0."""
        self._points.append((x, y))
        self._unseen += 1
        if len(self._points) <= _FEW or self._unseen >= _TOGETHER_LINE:
            self._unseen = 0
            self._look()

    def _look(self) -> None:
        xs, ys = np.asarray(self._points).T
        if len(xs) >= 4 and np.ptp(xs) >= max(1.0, 0.5 * float(np.median(xs))):
            first, second = _pairs(len(xs))
            run = xs[second] - xs[first]
            apart = np.abs(run) >= 0.4 * np.ptp(xs)
            slope = max(0.0, float(np.median((ys[second] - ys[first])[apart] / run[apart])))
            self._start = max(0.0, float(np.median(ys - slope * xs)))
        rest = ((ys - self._start) / xs).tolist()
        self._slope = max(0.0, _weighted_median(zip(rest, xs.tolist(), strict=True)))

    def value(self) -> float | None:
        """Return the slope, at least 0; None before the first point."""
        return self._slope

    def at(self, x: float) -> float:
        """Return y at x; 0 at 0 and before the first point."""
        return 0.0 if x <= 0 else self._start + x * (self._slope or 0.0)

    def rescale(self, factor: float, base: float = 0.0) -> None:
        """Multiply all y, and what they are without x, `base`, by `factor`."""
        points = [(x, (y + base) * factor - base) for x, y in self._points]
        self._points.clear()
        self._points.extend(points)
        if points:
            self._look()

    def keep_last(self, count: int) -> None:
        """Forget all but the last `count` points; the line holds until the next one."""
        while len(self._points) > count:
            self._points.popleft()


@lru_cache(maxsize=64)
def _pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.triu_indices(count, 1)
    return first, second


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    passed = 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    return ordered[-1][0]


class Survival:
    """Probability that a row reaches position i = 1 .. depth, from decayed counts.

    p_i is the chance to reach i given i-1 was reached and i was allowed:
    p_i = (reached_i + strength * p_{i-1}) / (tried_i + strength). A position seldom tried so takes
    after the one before it, and what has not been tried for long is forgotten and tried again.

    Args:
        depth: positions.
        prior: p_0.
        strength: observations the prior is worth.
        decay: what a count keeps at each `observe`.
    """

    def __init__(self, depth: int, prior: float, strength: float, decay: float) -> None:
        self._tried = [0.0] * depth
        self._reached = [0.0] * depth
        self._unit = 1.0  # what a row counts now, so that all before it count less
        self._prior = prior
        self._strength = strength
        self._decay = decay

    def observe(self, rows: Sequence[tuple[int, int]]) -> None:
        """Count one step's rows, each (positions allowed, positions reached)."""
        self.forget(self._decay)
        for allowed, reached in rows:
            for position in range(min(allowed, reached + 1, len(self._tried))):
                self._tried[position] += self._unit
                if position < reached:
                    self._reached[position] += self._unit

    def forget(self, share: float) -> None:
        """Scale all counts by `share`."""
        self._unit /= share
        if self._unit > _LARGEST:
            self._tried = [count / self._unit for count in self._tried]
            self._reached = [count / self._unit for count in self._reached]
            self._unit = 1.0

    def conditional(self) -> list[float]:
        """Return p_1 .. p_depth."""
        chances, before, strength = [], self._prior, self._strength * self._unit
        for tried, reached in zip(self._tried, self._reached, strict=True):
            before = (reached + strength * before) / (tried + strength)
            chances.append(before)
        return chances

    def survival(self) -> list[float]:
        """Return p_1, p_1 p_2, ..."""
        alive, values = 1.0, []
        for chance in self.conditional():
            alive *= chance
            values.append(alive)
        return values
