"""Rounds with a head: rows that wait for it, and what became of a tree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speculators_ext.method_configs import Eagle2Config
from speculators_ext.proposers.adaptive_trees import TreeCut
from speculators_ext.proposers.head_rounds import (
    Backlog,
    HeadRows,
    Plan,
    Roots,
    grow_planned,
    outcome_of,
)
from speculators_ext.tree import DraftTree


def rows(start: int, count: int) -> HeadRows:
    at = torch.arange(start, start + count)
    return HeadRows(start, at + 100, at.float().unsqueeze(1))


def test_rows_wait_in_order_and_leave_together():
    """Catches rows run twice, lost, or run in another order than the target kept them."""
    backlog: Backlog[str] = Backlog()
    backlog.add("a", rows(0, 3))
    backlog.add("b", rows(7, 1))
    backlog.add("a", rows(3, 2))
    assert (backlog.size("a"), backlog.size("b"), backlog.size("c")) == (5, 1, 0)
    taken = backlog.take("a")
    assert (taken.start, taken.tokens.tolist()) == (0, [100, 101, 102, 103, 104])
    assert taken.hidden[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert backlog.owners() == ["b"]


def test_an_owner_that_begins_anew_owes_nothing():
    """Catches the rows of a retracted request run at positions of its second life."""
    backlog: Backlog[int] = Backlog()
    backlog.add(1, rows(0, 3))
    backlog.add(1, rows(1, 2))
    assert backlog.take(1).start == 1
    backlog.add(2, rows(0, 1))
    backlog.drop(2)
    backlog.drop(2)
    assert backlog.size(2) == 0


class Head:
    """Likes token 1 best, then 2 ..., whatever it sees."""

    draft_to_target = None

    def logits(self, hidden):
        return torch.log_softmax(-torch.arange(6.0), dim=-1).expand(len(hidden), -1)

    def step(self, level):
        return level.features, level.features


@pytest.mark.parametrize(
    ("plan", "chains", "sizes"),
    [
        (Plan(2, 0.0, 0.0), [False, False], [9, 9]),
        (Plan(2, 0.0, 0.0), [True, False], [3, 9]),
        (Plan(2, 0.0, 0.0, chains=True), [False, False], [3, 3]),
        (Plan(2, 0.0, 0.1), [False, False], [6, 6]),
        (Plan(2, 0.99, 0.0), [False, False], [4, 4]),
    ],
)
def test_trees_grow_within_their_plan(plan, chains, sizes):
    """Catches a floor, a chain or a request's limit that does not reach the growth.

    Of the root's law 0.63, 0.23, 0.09, ... the best paths of two tokens have 0.40, 0.15, 0.15.
    """
    hidden = torch.zeros(2, 4)
    roots = Roots([0, 1], [5, 6], torch.tensor([7, 8]), hidden, hidden, [8, 8], [2, 2])
    grown = grow_planned(
        Head(), roots, plan, Eagle2Config(depth=2, topk=3), chains=chains, num_rows=9, prune=True
    )
    assert [len(tree) for tree in grown] == sizes
    assert [int(tree.tokens[0]) for tree in grown] == [7, 8]


def test_what_became_of_a_tree():
    """Catches the root counted as a draft, or a second-best path taken for the best chain."""
    tree = DraftTree(
        np.array([9, 1, 2, 3, 4]), np.array([-1, 0, 0, 1, 2]), np.log([1.0, 0.5, 0.4, 0.3, 0.2])
    )
    found = outcome_of(tree, [0, 2, 4], TreeCut(2, 3), 2)
    assert found.levels.tolist() == [1, 1, 2, 2]
    assert found.accepted.tolist() == [False, True, False, True]
    assert found.best.tolist() == [True, False, True, False]
    assert found.chances == pytest.approx([0.5, 0.4, 0.3, 0.2])
