"""The clock of draft trees: levels and nodes told apart, floors from measured costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from speculators_ext.engines.vllm import step_clock
from speculators_ext.engines.vllm.trees.tree_clock import Plan, TreeClock
from speculators_ext.tree import DraftTree

PLAIN, LEVEL, NODE = 1.0, 0.08, 0.02
TREE = DraftTree.of([0] * 7, [-1, 0, 0, 1, 1, 3, 3])  # 6 nodes, 3 levels


class Machine:
    """A request, and a clock that shows what a round of it costs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: TreeClock) -> None:
        self.clock, self.now = clock, 0.0
        self.scheduled: DraftTree | None = None
        monkeypatch.setattr(step_clock.time, "perf_counter", lambda: self.now)

    def step(self, accepted: int) -> Plan:
        """One verification that accepts so many drafts, then a round of drafting."""
        nodes = 0 if self.scheduled is None else len(self.scheduled) - 1
        self.now += PLAIN + NODE * nodes
        batch: Any = SimpleNamespace(
            req_ids=["one"], has_prefill=False, num_draft_tokens_per_req=np.array([nodes])
        )
        self.clock.begin(batch)
        plan = self.clock.plan(1)
        if plan.levels:
            with self.clock.drafting(0):
                self.now += LEVEL * 3
                self.clock.ran(3)
        self.scheduled = TREE if plan.levels else None
        self.clock.end(batch, torch.tensor([1 + (accepted if nodes else 0)]), [plan.levels])
        self.clock.drafted({"one": TREE} if plan.levels else {})
        return plan


def test_floors_follow_the_measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cost per level booked per node, or the other way round."""
    machine = Machine(monkeypatch, TreeClock(4, adaptive=True))
    plans = [machine.step(accepted=2) for _ in range(120)]
    last = next(plan for plan in reversed(plans) if plan.levels)
    assert last.level_floor == pytest.approx(LEVEL / 0.7, rel=0.2)
    assert last.node_floor == pytest.approx(NODE, rel=0.35)


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
