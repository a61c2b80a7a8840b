"""The sizes of draft trees on simulated machines: as large as pays, many requests sharing a step.

A context is sure of itself or is not; its head says so, truly or not. Times carry 5 % noise, speeds
are computed from the noise-free costs, so that only decisions are judged.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

from speculators_ext.proposers.adaptive_trees import (
    BINS,
    TreeController,
    TreeCut,
    TreeOutcome,
    floor_of,
)

PLAIN_SECONDS = 0.03
TOPK, NODES, DEPTH = 4, 12, 3
NOTHING = TreeOutcome(
    TreeCut(0, 0), 0, *(np.empty(0, dtype=kind) for kind in (int, float, bool, bool))
)
SEEDS = range(2)


@dataclass(frozen=True)
class Machine:
    """Costs in plain steps; what the head says is likely is so, times `honesty`."""

    node: float
    trees: float = 0.05  # of verifying any node at all
    level: float = 0.05
    honesty: float = 0.9
    sure: tuple[float, ...] = (0.3, 0.6, 0.9)


def grow(rng, machine, levels):
    """The best nodes of a tree, what is accepted drawn: (chance, level, accepted, best) each."""
    first = rng.choice(machine.sure)
    shares = [first * (1 - first) ** i for i in range(TOPK)]
    nodes, frontier = [], [(1.0, True, True)]
    for level in range(1, levels + 1):
        after = []
        for chance, alive, best in frontier:
            draw, passed = rng.random() / machine.honesty, 0.0
            for share in shares:
                passed += share
                taken = alive and passed - share <= draw < passed
                after.append((chance * share, level, taken, best and share == shares[0]))
        nodes += after
        best_first = sorted(after, key=lambda node: (-node[0], not node[3]))
        frontier = [(node[0], node[2], node[3]) for node in best_first[:TOPK]]
    return sorted(nodes, key=lambda node: -node[0])[:NODES]


@cache
def trees_of(machine, levels):
    """Many such trees as (levels, chances, accepted)."""
    rng = random.Random(levels)
    trees = [zip(*grow(rng, machine, levels), strict=True) for _ in range(2000)]
    return [tuple(map(np.array, (n, c, a, best))) for c, n, a, best in trees]


def drawn(rng, machine, cut):
    """One of them, cut."""
    if not cut.levels:
        return NOTHING
    tree = rng.choice(trees_of(machine, cut.levels))
    keep = (tree[1] >= floor_of(cut.bin)) & (tree[3] if cut.chain else True)
    return TreeOutcome(cut, cut.levels, *(side[keep] for side in tree))


@dataclass
class Run:
    """A simulated server."""

    controller: TreeController
    seed: int = 0
    cuts: list[TreeCut] = field(default_factory=list)
    nodes: list[float] = field(default_factory=list)
    cost: float = 0.0
    tokens: float = 0.0
    once: float = 0.0  # of the first drafted step

    def __post_init__(self):
        self._rng = random.Random(self.seed)
        self._drafted: list[TreeOutcome] = []

    def _time(self, cost):
        outlier = 8.0 if self._rng.random() < 0.01 else 1.0
        return cost * PLAIN_SECONDS * self._rng.lognormvariate(0.0, 0.05) * outlier

    def step(self, machine, num_rows):
        rows = self._drafted if len(self._drafted) == num_rows else [NOTHING] * num_rows
        nodes = sum(len(row.levels) for row in rows) / num_rows
        branched = not all(row.best.all() for row in rows)
        verify = 1 + machine.node * nodes + machine.trees * branched
        self.tokens += 1 + sum(int(row.accepted.sum()) for row in rows) / num_rows
        cut = self.controller.cut(num_rows)
        self._drafted = [drawn(self._rng, machine, cut) for _ in range(num_rows)]
        draft = machine.level * cut.levels
        once, self.once = (self.once, 0.0) if cut.levels else (0.0, self.once)
        self.cuts.append(cut)
        self.nodes.append(nodes)
        self.cost += verify + draft + once
        self.controller.observe_trees(
            rows,
            verify_seconds=self._time(verify),
            draft_asked=cut.levels,
            draft_steps=cut.levels,
            draft_seconds=self._time(draft) if draft else 0.0,
            once_seconds=self._time(once) if once else 0.0,
        )

    def steps(self, count, machine, num_rows=1):
        """Speed relative to plain over so many steps."""
        cost, tokens = self.cost, self.tokens
        for _ in range(count):
            self.step(machine, num_rows)
        return (self.tokens - tokens) / (self.cost - cost)


def best_fixed(machine):
    """The best gain of one cut for all steps, and that cut."""
    found = []
    for levels in range(1, DEPTH + 1):
        trees = trees_of(machine, levels)
        for last in range(BINS):
            keep = [tree[1] >= floor_of(last) for tree in trees]
            nodes = sum(int(k.sum()) for k in keep) / len(trees)
            accepted = sum(int(t[2][k].sum()) for t, k in zip(trees, keep, strict=True))
            cost = 1 + machine.trees + machine.node * nodes + machine.level * levels
            found.append(((1 + accepted / len(trees)) / cost, TreeCut(levels, last)))
    return max(found)


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("node", [0.002, 0.03, 0.12])
def test_trees_are_as_large_as_pays(node, num_rows):
    """Catches a price of nodes that is not weighed: full trees for all, or chains for all."""
    machine = Machine(node)
    gain, cut = best_fixed(machine)
    for seed in SEEDS:
        run = Run(TreeController(DEPTH), seed)
        run.steps(300, machine, num_rows)
        # The rest goes to looks beyond the cut and at plain steps.
        assert run.steps(600, machine, num_rows) > 0.93 * gain, (gain, cut, run.cuts[-20:])


def test_chains_where_branches_cost_too_much():
    """Catches a price of branching laid on nodes: chains, which do not pay it, must be found."""
    machine = Machine(node=0.02, trees=0.8)
    for seed in SEEDS:
        run = Run(TreeController(DEPTH), seed)
        run.steps(200, machine, 4)
        assert run.steps(400, machine, 4) > 1.25
        assert sum(cut.chain for cut in run.cuts[-100:] if cut.levels) > 85


def test_many_rows_are_tried_with_small_trees():
    """Catches a try that makes sixteen requests wait for full trees of each other."""
    run = Run(TreeController(DEPTH))
    run.steps(14, Machine(0.1), 16)
    tried = [cut for cut in run.cuts if cut.levels]
    assert len(tried) >= 6
    assert max(cut.bin for cut in tried) == 2
    assert {cut.chain for cut in tried} == {False, True}


def test_dear_nodes_make_small_trees():
    """Catches a floor that does not follow the price, down to trees of a few sure nodes."""
    means = []
    for node in (0.002, 0.05, 0.15):
        run = Run(TreeController(DEPTH))
        run.steps(1000, Machine(node), 4)
        drafted = [nodes for nodes in run.nodes[-400:] if nodes]
        means.append(sum(drafted) / len(drafted))
    assert means[0] > 9
    assert means[0] > 1.3 * means[1] > 1.7 * means[2]
    assert means[2] < 4


def test_a_try_of_large_trees_does_not_rule_out_small_ones():
    """Catches a try judged by the trees it drafted: what a cut of them would give decides."""
    machine = Machine(node=0.12, level=0.02, trees=0.0)
    for seed in SEEDS:
        run = Run(TreeController(DEPTH), seed)
        run.steps(60, machine, 16)
        assert run.cuts[-1].levels > 0
        assert run.steps(500, machine, 16) > 1.1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize(
    "machine", [Machine(0.01, honesty=0.05), Machine(0.6, level=0.3), Machine(0.05, level=0.7)]
)
def test_where_no_tree_pays_none_is_drafted(machine, num_rows, seed):
    """Catches a server slowed down by a useless head."""
    run = Run(TreeController(DEPTH), seed)
    assert run.steps(2000, machine, num_rows) > 0.98
    # Tries follow each other sooner the less they lose.
    assert sum(cut.levels > 0 for cut in run.cuts) < 300


def test_a_head_sure_of_nothing_ends_its_try():
    """Catches a try that goes on for ever where no path is likely enough to be verified."""
    run = Run(TreeController(DEPTH))
    run.steps(400, Machine(0.01, sure=(0.01,)))
    assert sum(cut.levels > 0 for cut in run.cuts) < 40


def test_a_head_that_underrates_itself_is_corrected():
    """Catches floors on what the head says: here rare guesses hold more often than it says."""
    said = Machine(0.05)
    true, _ = best_fixed(said)
    run = Run(TreeController(DEPTH))
    run.steps(300, said)
    doubting = run.cuts[-1]
    run.steps(600, Machine(0.05, honesty=0.3))
    assert run.steps(300, Machine(0.05, honesty=0.3)) > 0.97
    assert run.cuts[-1] != doubting
    assert true > 1.2


def test_what_is_paid_once_does_not_stop_drafting():
    """Catches a prompt the head had to read booked as the price of every round."""
    machine = Machine(0.01)
    run = Run(TreeController(DEPTH), once=6.0)
    run.steps(60, machine)
    assert run.cuts[-1].levels > 0
    assert run.steps(300, machine) > 1.3


def test_what_is_paid_once_counts_where_requests_are_short():
    """Catches a cost left out: every other round here pays for a new prompt."""
    machine = Machine(0.02)
    run = Run(TreeController(DEPTH))
    for _ in range(600):
        run.once = 8.0
        run.steps(2, machine)
    assert sum(cut.levels > 0 for cut in run.cuts[-600:]) < 60


def test_asking_changes_nothing():
    """Plans are made on rank 0 and broadcast: how often must not matter."""
    runs = [Run(TreeController(DEPTH)) for _ in range(2)]
    for _ in range(200):
        for run in runs:
            run.step(Machine(0.02), 2)
        for num_rows in range(1, 20):
            runs[1].controller.cut(num_rows)
            runs[1].controller.estimates(num_rows)
    assert runs[0].cuts == runs[1].cuts
