"""CLaSp: the set of layers to skip, found in context by dynamic programming.

Source: CLaSp, arXiv 2505.24196, section 3 and Algorithm 1. With x_i the hidden state after the
first i units of the full model and g(i, j) the state after i units of which j were skipped,

    g(i+1, j) = whichever of  f_i(g(i, j))   (unit i kept)
                and           g(i, j-1)      (unit i skipped)   is closer to x_{i+1} by cosine,

kept only where strictly closer. The answer is the path to g(U, M). Three things differ from the
printed algorithm: x_i is one more row of every unit's packed call instead of being captured from
the target; a parent bit a cell replaces the comparison of vectors in the backtrack; and cells
from which (U, M) cannot be reached are never computed. Rows of several requests share one
decision: their cosines are summed.

Nothing here waits for the device: all shapes follow from U, M and the pinned units.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from speculators_ext.proposers.skip_sets import SkipSet, free_units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Below every cosine, and finite, so that one broken request does not outvote the others.
_WORST = -2.0
_TINY = 1e-12


class LayerStack(Protocol):
    """The target's units, as the dynamic programme calls them."""

    num_units: int

    def apply(self, unit: int, states: Tensor) -> Tensor:
        """Run one unit.

        Args:
            unit: 0 .. num_units-1.
            states: [R, W, H], W packed states of each of R requests. All W share one position,
                attend to that request's prefix and to themselves only, and write nothing.

        Returns:
            [R, W, H], same dtype.
        """
        ...


class Lattice(NamedTuple):
    """The cells (i, j) that lie on a path from (0, 0) to (U, M).

    Attributes:
        low: smallest j at level i, i = 0 .. U.
        high: largest j at level i.
        pinned: units never skipped.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    pinned: frozenset[int]

    def kept(self, unit: int) -> range:
        """Return the columns j of level unit+1 that keeping `unit` leads to."""
        start = max(self.low[unit], self.low[unit + 1])
        return range(start, min(self.high[unit], self.high[unit + 1]) + 1)

    def skipped(self, unit: int) -> range:
        """Return the columns j of level unit+1 that skipping `unit` leads to."""
        if unit in self.pinned:
            return range(0)
        start = max(self.low[unit] + 1, self.low[unit + 1])
        return range(start, min(self.high[unit] + 1, self.high[unit + 1]) + 1)

    def widths(self, candidates: Sequence[SkipSet] = ()) -> tuple[int, ...]:
        """Return the packed rows W of each unit's call, the full model's row included."""
        return tuple(
            1 + sum(j > 0 for j in self.kept(unit)) + sum(unit not in units for units in candidates)
            for unit in range(len(self.low) - 1)
        )


@lru_cache(maxsize=64)
def lattice(num_units: int, num_skip: int, pinned: frozenset[int] = frozenset()) -> Lattice:
    """Return the reachable cells; raises `ValueError` where `num_skip` does not fit."""
    free = free_units(num_units, num_skip, pinned)
    before = [sum(unit < level for unit in free) for level in range(num_units + 1)]
    return Lattice(
        low=tuple(max(0, num_skip - (len(free) - count)) for count in before),
        high=tuple(min(count, num_skip) for count in before),
        pinned=pinned,
    )


class DPResult(NamedTuple):
    """Outcome of one search, still on the device.

    With `shared=False` every field has a leading [R].

    Attributes:
        parents: bool [U, M+1]; [i, j] says that cell (i+1, j) was reached by skipping unit i.
        similarity: float32 []; cosine between the full model's last state and that of the set
            found, mean over requests.
        candidates: float32 [C]; the same for each set passed as a candidate.
    """

    parents: Tensor
    similarity: Tensor
    candidates: Tensor


def solve(
    stack: LayerStack,
    x0: Tensor,
    num_skip: int,
    pinned: frozenset[int] = frozenset(),
    *,
    candidates: Sequence[SkipSet] = (),
    shared: bool = True,
) -> DPResult:
    """Find the skip set whose last state is closest to the full model's.

    The programme keeps one state a cell, so it can miss the best set, and an adverse stack can
    make it lose to a simple one. Sets passed as `candidates` ride along, one more packed row each,
    and `best_set` takes the best of all: the result is then never worse than any of them.

    Args:
        stack: the target's units.
        x0: [R, H], input of unit 0 for the last accepted token of each of R requests.
        num_skip: M, units to skip.
        pinned: units never skipped.
        candidates: known skip sets, for example the previous and the evenly spread one.
        shared: one set for all requests; False decides for each request by itself.
    """
    grid = lattice(stack.num_units, num_skip, pinned)
    groups = 1 if shared else x0.shape[0]
    parents = torch.zeros(groups, stack.num_units, num_skip + 1, dtype=torch.bool, device=x0.device)
    full = cells = x0.unsqueeze(1)  # [R, 1, H]; a cell of column 0 always equals `full`
    riders = full.expand(-1, len(candidates), -1)  # [R, C, H]
    for unit in range(stack.num_units):
        kept, low = grid.kept(unit), grid.low[unit]
        run = cells[:, max(kept.start, 1) - low : max(kept.stop, 1) - low]
        riding = [c for c, units in enumerate(candidates) if unit not in units]
        packed = torch.cat([full, run, *(riders[:, c : c + 1] for c in riding)], dim=1)
        full, run, rode = stack.apply(unit, packed).split([1, run.shape[1], len(riding)], dim=1)
        if 0 in kept:
            run = torch.cat([full, run], dim=1)
        riders = _replace(riders, riding, rode)
        cells = _merge(grid, unit, full, run, cells, parents)
    similarity = _score(full, torch.cat([cells, riders], dim=1), shared)
    similarity = (similarity / (x0.shape[0] if shared else 1)).float()
    result = DPResult(parents, similarity[:, 0], similarity[:, 1:])
    return DPResult(*(part[0] for part in result)) if shared else result


def _replace(rows: Tensor, columns: list[int], new: Tensor) -> Tensor:
    """Return rows [R, C, H] with the given columns taken from new [R, len(columns), H]."""
    if len(columns) == rows.shape[1]:
        return new
    parts = [rows[:, c : c + 1] for c in range(rows.shape[1])]
    for source, column in enumerate(columns):
        parts[column] = new[:, source : source + 1]
    return torch.cat(parts, dim=1)


def _merge(
    grid: Lattice, unit: int, full: Tensor, run: Tensor, cells: Tensor, parents: Tensor
) -> Tensor:
    """Choose between keeping and skipping for every cell of the next level.

    Args:
        grid: reachable cells.
        unit: the unit just run.
        full: [R, 1, H], the full model's state at the next level.
        run: [R, len(grid.kept(unit)), H], this level's cells with the unit run.
        cells: [R, low..high, H], this level's cells without it.
        parents: bool [G, U, M+1]; row `unit` is filled in. G is 1 (shared) or R.

    Returns:
        [R, low..high, H] of the next level.
    """
    kept, skipped = grid.kept(unit), grid.skipped(unit)
    shift = grid.low[unit] + 1  # a skip moves column j-1 to j
    moved = cells[:, max(skipped.start - shift, 0) : max(skipped.stop - shift, 0)]
    if not kept or not skipped:
        parents[:, unit, skipped.start : skipped.stop] = True
        return run if kept else moved
    # Both ranges end on the kept side first: kept only, then both ways, then skipped only.
    start, stop = skipped.start, kept.stop
    parents[:, unit, stop : skipped.stop] = True
    if start >= stop:
        return torch.cat([run, moved], dim=1)
    keeping, skipping = run[:, start - kept.start :], moved[:, : stop - start]
    both = _score(full, torch.cat([keeping, skipping], dim=1), parents.shape[0] == 1)
    better = both[:, : stop - start] > both[:, stop - start :]
    parents[:, unit, start:stop] = ~better
    chosen = torch.where(better.unsqueeze(-1), keeping, skipping)
    return torch.cat([run[:, : start - kept.start], chosen, moved[:, stop - start :]], dim=1)


def _score(full: Tensor, states: Tensor, shared: bool) -> Tensor:
    """Cosine to the full model's state, summed over requests when they share a decision.

    Cosines are taken in float32 and added in float64, where the sum is exact enough not to depend
    on the order of the requests or, for equal requests, on their number.

    Args:
        full: [R, 1, H].
        states: [R, W, H].
        shared: whether to sum over R.

    Returns:
        float64 [1, W] when shared, else [R, W].
    """
    full, states = full.float(), states.float()
    norms = torch.linalg.vector_norm(full, dim=-1) * torch.linalg.vector_norm(states, dim=-1)
    # A product and a sum, not a matmul: that may round its inputs on a GPU.
    cosine = (full * states).sum(-1) / norms.clamp(min=_TINY)
    cosine = cosine.nan_to_num(nan=_WORST, posinf=_WORST, neginf=_WORST).double()
    return cosine.sum(0, keepdim=True) if shared else cosine


def backtrack(parents: Tensor, num_skip: int) -> SkipSet:
    """Follow the parent bits from (U, M) back to (0, 0).

    Args:
        parents: bool [U, M+1] on the host.
        num_skip: M.

    Returns:
        The skipped units, ascending.
    """
    bits = parents.tolist()
    column, units = num_skip, []
    for unit in reversed(range(len(bits))):
        if bits[unit][column]:
            units.append(unit)
            column -= 1
    return tuple(reversed(units))


def best_set(
    result: DPResult, num_skip: int, candidates: Sequence[SkipSet] = ()
) -> tuple[SkipSet, float]:
    """Read a result on the host (this waits for the device).

    Args:
        result: of `solve` with `shared`, or one request's row of it.
        num_skip: M, as passed to `solve`.
        candidates: as passed to `solve`.

    Returns:
        The set found, or the candidate with the best similarity where that is strictly better;
        and its similarity.
    """
    similarity = float(result.similarity)
    best = backtrack(result.parents.cpu(), num_skip)
    for units, value in zip(candidates, result.candidates.tolist(), strict=True):
        if value > similarity:
            best, similarity = tuple(sorted(units)), value
    return best, similarity
