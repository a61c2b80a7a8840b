"""The clock of draft trees: levels and nodes told apart, floors from measured costs."""

from __future__ import annotations

from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from speculators_ext.engines import round_times
from speculators_ext.engines.vllm.trees.tree_clock import TreeClock
from speculators_ext.proposers.head_rounds import Plan
from speculators_ext.tree import DraftTree

PLAIN, LEVEL, NODE = 1.0, 0.08, 0.02
# 6 nodes on 3 levels; each has a likely child and a hardly likely one.
CHANCES = (1.0, 0.9, 0.05, 0.8, 0.05, 0.7, 0.05)
TREE = DraftTree(
    np.zeros(7, dtype=np.int64), np.array([-1, 0, 0, 1, 1, 3, 3]), np.log(np.array(CHANCES))
)
PATH = [0, 1, 3, 5]
LIKELY = DraftTree(TREE.tokens[:4], np.arange(-1, 3), TREE.scores[PATH])
ROW = 0.01  # of the head's extend


class Machine:
    """A request, and a clock that shows what a round of it costs."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, clock: TreeClock, node: float = NODE
    ) -> None:
        self.clock, self.now, self.node = clock, 0.0, node
        self.backlog = 0
        self.scheduled: DraftTree | None = None
        for clock in ("perf_counter", "thread_time"):
            monkeypatch.setattr(round_times.time, clock, lambda: self.now)

    def step(self, accepted: int, *, unlikely: bool = False) -> Plan:
        """One verification that accepts so many levels, or an unlikely node; then drafting."""
        nodes = 0 if self.scheduled is None else len(self.scheduled) - 1
        path = [0]
        if self.scheduled is not None:
            likely = PATH if nodes % 2 == 0 else range(4)
            path = [row for row in likely if row <= nodes][: accepted + 1]
            if unlikely:
                path = [0, 2] if likely is PATH else [0]
        self.now += PLAIN + self.node * nodes
        batch: Any = SimpleNamespace(
            req_ids=["one"], has_prefill=False, num_draft_tokens_per_req=np.array([nodes])
        )
        self.clock.begin(batch)
        self.clock.verified(torch.tensor([path + [-1] * (5 - len(path))]) if nodes else None)
        plan = self.clock.plan(1)
        self.backlog += len(path)
        self.scheduled = None
        if plan.levels:
            with self.clock.extending(len(path), self.backlog):
                self.now += ROW * self.backlog
            self.backlog, levels = 0, min(3, plan.levels)
            with self.clock.drafting(0):
                self.now += LEVEL * levels
                self.clock.ran(levels)
            tree = LIKELY if plan.chains or plan.node_floor > CHANCES[2] else TREE
            self.scheduled = tree.cut(1 + levels * (len(tree) // 3))
        self.clock.end(batch, torch.tensor([len(path)]), [plan.levels])
        self.clock.drafted({"one": self.scheduled} if self.scheduled else {})
        return plan


def test_the_floor_of_nodes_follows_their_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches unlikely nodes verified where each costs much, or left out where it costs nothing."""
    floors = []
    for node in (0.0, 0.2):
        machine = Machine(monkeypatch, TreeClock(4, adaptive=True), node)
        plans = [machine.step(accepted=3, unlikely=i % 8 == 0) for i in range(300)]
        floors.append(median(plan.node_floor for plan in plans[-40:] if plan.levels))
    assert floors[0] < CHANCES[2] < floors[1]


def test_the_floor_of_levels_follows_their_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cost per level booked per node, and an acceptance that is assumed."""
    floors = []
    for accepted in (3, 1):
        machine = Machine(monkeypatch, TreeClock(4, adaptive=True))
        plans = [machine.step(accepted) for _ in range(200)]
        known = machine.clock._controller.estimates(1)
        assert known.draft_step == pytest.approx(LEVEL, rel=0.3)
        last = next(plan for plan in reversed(plans) if plan.level_floor)
        floors.append(last.level_floor / (LEVEL * known.gain))
    assert floors[0] == pytest.approx(1.0, rel=0.3)  # what reaches a level is accepted in it
    assert floors[1] > 2


def test_catching_up_is_no_price_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a prompt of the head's booked as a draft step: drafting would stop where it pays."""
    machine = Machine(monkeypatch, TreeClock(4, adaptive=True))
    machine.backlog = 3000  # rows: 30 plain steps
    plans = [machine.step(accepted=2) for _ in range(40)]
    assert plans[-1].levels > 0
    assert machine.clock._controller.estimates(1).draft_step < 2 * LEVEL


def test_a_batch_in_another_order_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches steps that go unmeasured: vLLM orders a batch by its drafts, which differ."""
    now = 0.0
    monkeypatch.setattr(round_times.time, "perf_counter", lambda: now)
    clock = TreeClock(4, adaptive=True)
    for order in (["one", "two"], ["two", "one"]):
        batch: Any = SimpleNamespace(
            req_ids=order, has_prefill=False, num_draft_tokens_per_req=np.array([0, 0])
        )
        clock.begin(batch)
        seconds = clock._verify_seconds
        clock.end(batch, torch.tensor([1, 1]), [0, 0])
        now += PLAIN
    assert seconds == PLAIN


def test_trees_that_never_pay_are_not_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a useless head that keeps slowing a server down."""
    machine = Machine(monkeypatch, TreeClock(4, adaptive=True))
    plans = [machine.step(accepted=0) for _ in range(1500)]
    assert any(plan.levels for plan in plans), "it was never tried"
    assert sum(plan.levels > 0 for plan in plans) < 75


def test_switched_off_it_plans_full_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an adaptive clock where the user asked for none."""
    machine = Machine(monkeypatch, TreeClock(4, adaptive=False))
    assert {machine.step(accepted=0) for _ in range(30)} == {Plan(4, 0.0, 0.0)}
