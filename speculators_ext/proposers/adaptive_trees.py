r"""How large draft trees may be: levels, and the least probability of a path worth verifying.

`DepthController` decides when to draft; here is what to draft. Nodes are counted in cells, by level
and by the head's probability V of their path in powers of two: how many a request brings, and how
many of them end up on the accepted path. So the head need not be calibrated, and the cells of any
smaller tree are known from the larger one. Of all cuts (levels L, least V of bin k) the best has

    gain(L, k) = (1 + accepted(L, k)) / (1 + verify(nodes(L, k)) + c * levels run(L) + once)

in plain steps, verify being the line measured at this batch size: many requests share a step, each
node then costs more, and trees shrink down to one sure draft. Chains of best children have counts
and a line of their own: where no row branches, an engine's own attention may cost far less. What
lies just beyond the cut is drafted once in a while, to see whether it has come to pay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from speculators_ext.proposers.adaptive import PROBE_DEPTH, DepthController, RowOutcome
from speculators_ext.proposers.estimates import LineWindow
from speculators_ext.proposers.regimes import Regime, bucket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculators_ext.proposers.estimates import SlopeWindow
    from speculators_ext.proposers.regimes import Transition

__all__ = ["BINS", "TreeController", "TreeCut", "TreeOutcome", "floor_of"]

# Bin k holds paths of probability in (2^-(k+1), 2^-k], the last one all below.
BINS = 9
# A try verifies paths down to these bins by turns, the last time as chains: two sizes of trees tell
# the price of a node from the price of having any.
PROBE_BINS = 5, 1, 5
# So many rows pay for their nodes together: their tries stay small, what pays is looked for later.
MANY_ROWS, PROBE_BINS_MANY = 8, (2, 0, 2)
# A cell is known once so many rows could have had nodes in it.
KNOWN_ROWS = 8.0
# Drafted steps between two looks beyond the cut, and between two while that is not known.
EXPLORE, EXPLORE_UNKNOWN = 32, 4
DECAY = 0.99
# Rows that the head's own word counts for in a cell, that V of a path is its chance to be accepted.
PRIOR_ROWS = 4.0
_CENTRES = 0.75 * 2.0 ** -np.arange(BINS)


class TreeCut(NamedTuple):
    """What trees may hold.

    Attributes:
        levels: of the trees; 0: none.
        bin: the last bin of path probabilities.
        chain: only the best child of each node.
    """

    levels: int
    bin: int
    chain: bool = False


class TreeOutcome(NamedTuple):
    """One row of a verified step; arrays are over the verified nodes without the root.

    Attributes:
        cut: what the row was allowed; levels fewer where its own options said so. 0 levels: it
            was not drafted for.
        run: levels that were run.
        levels: int [n], of each node, from 1.
        chances: float [n], the head's probability of each node's path.
        accepted: bool [n], whether the node is on the accepted path.
        best: bool [n], whether it and all above it are the best children of their parents.
    """

    cut: TreeCut
    run: int
    levels: np.ndarray
    chances: np.ndarray
    accepted: np.ndarray
    best: np.ndarray

    def as_chain(self) -> TreeOutcome:
        """The row had only its best chain been drafted; what left it is rejected there."""
        levels, chances, accepted = (
            side[self.best] for side in (self.levels, self.chances, self.accepted)
        )
        return TreeOutcome(self.cut, self.run, levels, chances, accepted, self.best[self.best])


def floor_of(last: int) -> float:
    """The least probability of a path in bin ``last`` or before."""
    return 0.0 if last >= BINS - 1 else 2.0 ** -(last + 1)


class _Cells:
    """Nodes and accepted nodes a row, by level and bin; and how often a level is run."""

    def __init__(self, depth: int) -> None:
        self.nodes = np.zeros((depth, BINS))
        self.accepted = np.zeros((depth, BINS))
        self.rows = np.zeros((depth, BINS))  # that were allowed the cell
        self.run = np.zeros(depth)
        self.asked = np.zeros(depth)  # drafted steps that were allowed the level

    def observe(self, rows: Sequence[TreeOutcome]) -> None:
        """Count a step's rows; what none was allowed keeps its counts."""
        allowed = np.zeros_like(self.rows)
        for row in rows:
            allowed[: row.cut.levels, : row.cut.bin + 1] += 1
        kept = np.where(allowed > 0, DECAY, 1.0)
        self.rows = self.rows * kept + allowed
        self.nodes *= kept
        self.accepted *= kept
        if rows:
            chances = np.concatenate([row.chances for row in rows]).clip(2.0**-BINS, 1.0)
            bins = (-np.log2(chances)).astype(int).clip(0, BINS - 1)
            places = np.concatenate([row.levels for row in rows]) - 1, bins
            np.add.at(self.nodes, places, 1)
            np.add.at(self.accepted, places, np.concatenate([row.accepted for row in rows]))

    def ran(self, asked: int, run: int) -> None:
        """A drafting round was allowed ``asked`` levels and ran ``run``."""
        self.asked[:asked] = DECAY * self.asked[:asked] + 1
        self.run[:asked] *= DECAY
        self.run[:run] += 1

    def forget(self, share: float) -> None:
        """Scale all counts."""
        for counts in (self.nodes, self.accepted, self.rows, self.run, self.asked):
            counts *= share

    def a_row(self) -> tuple[np.ndarray, np.ndarray]:
        """Nodes and accepted nodes, [depth, BINS] each, with no more levels (L - 1) and bins."""
        nodes = self.nodes / np.maximum(self.rows, 1e-9)
        accepted = self.accepted + PRIOR_ROWS * _CENTRES * nodes
        accepted = accepted / (self.rows + PRIOR_ROWS)
        return nodes.cumsum(0).cumsum(1), accepted.cumsum(0).cumsum(1)

    def steps(self) -> np.ndarray:
        """[depth], levels run where so many are allowed."""
        return ((self.run + 1e-3) / (self.asked + 1e-3)).cumsum()


class TreeController(DepthController):
    """Chooses levels and floor of the next trees.

    A draft step is a level, a row's width is its verified nodes.

    Args:
        max_depth: the deepest trees.
        margin: gain over plain needed to switch on.
    """

    def __init__(self, max_depth: int, *, margin: float = 0.02) -> None:
        super().__init__(max_depth, 1, margin=margin)
        self._cells = _Cells(max_depth), _Cells(max_depth)  # of trees, of their best chains
        self._branched = True

    def cut(self, num_rows: int) -> TreeCut:
        """What the next trees of ``num_rows`` decoding rows may hold. A pure read."""
        levels = self.depth(num_rows)
        if levels == 0:
            return TreeCut(0, 0)
        regime = self._regimes[bucket(num_rows)]
        bins = PROBE_BINS if num_rows < MANY_ROWS else PROBE_BINS_MANY
        if regime.mode == "probe":
            turn = regime.left % len(bins)
            return TreeCut(levels, bins[turn], turn == len(bins) - 1)
        gains = self._gains(regime)
        if gains is None:
            return TreeCut(levels, bins[0])
        turn = regime.drafting_steps
        chain = bool(gains[1][levels - 1].max() >= gains[0][levels - 1].max())
        if turn % EXPLORE == 5:
            chain = not chain
        own = gains[int(chain)][levels - 1]
        last = int(np.flatnonzero(own == own.max())[-1])  # a bin without nodes is free
        deeper, wider = min(levels, self._max_depth - 1), min(last + 1, BINS - 1)
        rows = self._cells[chain].rows
        if turn % self._period(rows[levels - 1, wider]) == 1:
            last = wider
        elif turn % self._period(rows[deeper, min(1, last)]) == 3:
            levels = deeper + 1
        return TreeCut(levels, last, chain)

    @staticmethod
    def _period(rows: float) -> int:
        return EXPLORE if rows >= KNOWN_ROWS else EXPLORE_UNKNOWN

    def observe_trees(
        self,
        rows: Sequence[TreeOutcome],
        *,
        verify_seconds: float | None,
        draft_asked: int = 0,
        draft_steps: int = 0,
        draft_seconds: float = 0.0,
        once_seconds: float = 0.0,
    ) -> Transition | None:
        """Take in one step; see `DepthController.observe`.

        Args:
            rows: every decoding row of the step, drafted or not.
            verify_seconds: the target's step.
            draft_asked: levels the drafting after it was allowed.
            draft_steps: levels it ran.
            draft_seconds: what it took.
            once_seconds: what it took beyond, paid once.
        """
        drafted = [row for row in rows if row.cut.levels]
        self._branched = not all(row.best.all() for row in rows)
        if drafted:
            self._cells[0].observe([row for row in drafted if not row.cut.chain])
            self._cells[1].observe([row.as_chain() for row in drafted])
        for cells in self._cells if draft_asked else ():
            cells.ran(draft_asked, draft_steps)
        return self.observe(
            [RowOutcome(row.run, len(row.levels), int(row.accepted.sum())) for row in rows],
            verify_seconds=verify_seconds,
            draft_steps=draft_steps,
            draft_seconds=draft_seconds,
            once_seconds=once_seconds,
        )

    def _new_regime(self) -> Regime:
        return Regime(verify=LineWindow(48))

    def _forget(self, share: float) -> None:
        super()._forget(share)
        for cells in self._cells:
            cells.forget(share)

    def _verify_of(self, regime: Regime) -> SlopeWindow | LineWindow:
        return regime.verify if self._branched else regime.chain

    def _gains(self, regime: Regime) -> np.ndarray | None:
        """[2, depth, BINS], the gain of each cut of trees and of chains, 0 where it is not known.

        None without prices.
        """
        draft, gains = regime.draft.value(), np.zeros((2, self._max_depth, BINS))
        if draft is None:
            return None
        for own, line, cells in zip(gains, (regime.verify, regime.chain), self._cells, strict=True):
            slope = line.value()
            if slope is None:
                continue
            (nodes, accepted), steps = cells.a_row(), cells.steps()[:, None]
            price = np.where(nodes > 0, line.at(1.0) - slope + slope * nodes, 0.0)
            cost = 1 + price + draft * steps + regime.once_share()
            known = np.minimum.accumulate(np.minimum.accumulate(cells.rows, 0), 1) > 0
            own[:] = np.where(known, (1 + accepted) / cost, 0.0)
        return gains if gains.any() else None

    def _best(self, regime: Regime, num_rows: int, limit: int) -> tuple[int, float]:
        gains = self._gains(regime)
        if gains is None:
            return min(limit, PROBE_DEPTH), 1.0
        by_depth = gains[:, :limit].max(axis=(0, 2))
        best = int(by_depth.argmax())
        return best + 1, float(by_depth[best])
