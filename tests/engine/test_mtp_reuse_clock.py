"""The clock of chains: what a draft is worth, and a round's own work counted as drafting's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from speculators_ext.engines import round_times
from speculators_ext.engines.vllm.mtp_reuse.clock import ReuseClock
from speculators_ext.proposers.mtp_reuse import Worth

PLAIN, STEP, TOKEN, IDLE = 1.0, 0.1, 0.05, 0.03


class Machine:
    """A request whose drafts are all accepted, and a clock that shows what a round costs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, around: float) -> None:
        self.clock = ReuseClock(4, adaptive=True, fixed_launches=False)
        self.now, self.around, self.drafted = 0.0, around, 0
        for clock in ("perf_counter", "thread_time"):
            monkeypatch.setattr(round_times.time, clock, lambda: self.now)

    def step(self) -> tuple[int, Worth]:
        self.now += PLAIN + TOKEN * self.drafted
        batch: Any = SimpleNamespace(
            req_ids=["one"], has_prefill=False, num_draft_tokens_per_req=np.array([self.drafted])
        )
        sampled = torch.tensor([self.drafted + 1])
        self.clock.begin(batch)
        self.now += IDLE
        depth, worth = self.clock.plan(1)
        if depth:
            self.now += self.around
            with self.clock.drafting(0):
                self.now += STEP * depth
                self.clock.ran(depth)
        self.drafted = depth
        self.clock.end(batch, sampled, [depth])
        return depth, worth


def test_what_a_draft_is_worth_comes_from_the_measured_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches costs in seconds where plain steps are meant, and a gain below plain's."""
    machine = Machine(monkeypatch, around=0.0)
    assert machine.step() == (0, Worth())
    for _ in range(60):
        depth, worth = machine.step()
    assert depth == 4
    assert worth.draft_step == pytest.approx(STEP, rel=0.1)
    assert worth.verify_token == pytest.approx(TOKEN, rel=0.1)
    assert worth.gain == pytest.approx(5 / (1 + 4 * (STEP + TOKEN)), rel=0.2)


def test_what_a_round_takes_beside_its_parts_is_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches bookkeeping of drafts paid by nobody: drafting would go on where it does not pay."""
    machine = Machine(monkeypatch, around=10.0)
    depths = [machine.step()[0] for _ in range(60)]
    assert any(depths), "it was never tried"
    assert not any(depths[-30:]), "it lost ten plain steps a round and went on"
