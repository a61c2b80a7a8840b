"""The pieces of a head's round that need no engine: layouts, widths, attention, the clock."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from speculators_ext.engines import round_times
from speculators_ext.engines.sglang.heads.attention import ExtendBackend, LevelBackend
from speculators_ext.engines.sglang.heads.tree_clock import TreeClock
from speculators_ext.engines.sglang.trees import common_width, tree_verify_input
from speculators_ext.proposers.eagle2 import Level
from speculators_ext.tree import DraftTree

#     0
#    1 2
#   3   4
BRANCHED = DraftTree(
    np.array([50, 51, 52, 53, 54]), np.array([-1, 0, 0, 1, 2]), np.log([1.0, 0.6, 0.3, 0.5, 0.1])
)
ROOT = DraftTree.of([60], [-1])


def test_trees_of_different_sizes_share_a_width():
    """Catches a padding row linked to a tree, a wrong child or sibling, a position past the last.

    Links are a row's first child and the next child of the same parent.
    """
    found = tree_verify_input([BRANCHED, ROOT], [8, 3], last=9)
    assert (found.draft_token_num, found.max_tree_depth) == (5, 3)
    assert found.draft_token.view(2, 5).tolist() == [[50, 51, 52, 53, 54], [60, 0, 0, 0, 0]]
    assert found.positions.view(2, 5).tolist() == [[8, 9, 9, 9, 9], [3, 3, 3, 3, 3]]
    assert found.retrieve_next_token.tolist() == [[1, 3, 4, -1, -1], [-1] * 5]
    assert found.retrieve_next_sibling.tolist() == [[-1, 2, -1, -1, -1], [-1] * 5]
    mask = found.custom_mask.view(2, 5, 5).int()
    assert mask[0].tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1],
    ]  # fmt: skip
    assert torch.equal(mask[1], torch.eye(5, dtype=torch.int32))


@pytest.mark.parametrize(
    ("floor", "width"), [(0.0, 5), (0.06, 4), (0.2, 3), (0.25, 3), (0.29, 2), (0.4, 1)]
)
def test_the_common_width_is_what_pays(floor, width):
    """Catches all requests made as wide as the one with the largest tree."""
    sorted_rows = DraftTree(
        BRANCHED.tokens, np.array([-1, 0, 1, 0, 3]), np.log([1.0, 0.6, 0.5, 0.3, 0.1])
    )
    assert common_width([sorted_rows, ROOT], floor) == width


class Pool:
    """SGLang's KV pool, one layer."""

    def __init__(self, slots: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.keys, self.values = torch.randn(2, slots, 2, 8, generator=generator)

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values

    def set_kv_buffer(self, layer, where, key, value):
        self.keys[where.loc], self.values[where.loc] = key, value


LAYER = SimpleNamespace(
    layer_id=0, scaling=0.3, tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, qk_head_dim=8,
    v_head_dim=8,
)  # fmt: skip


def naive(query, keys, values):
    """One query row [4, 8] over keys [n, 2, 8]."""
    keys, values = (part.repeat_interleave(2, dim=1) for part in (keys, values))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", query, keys) * LAYER.scaling, dim=-1)
    return torch.einsum("hn,nhd->hd", weights, values)


def test_extending_writes_each_row_and_sees_what_is_before_it():
    """Catches a row that sees its future, another request, or a stale slot."""
    pool, order = Pool(20), torch.randperm(20, generator=torch.Generator().manual_seed(1))
    slots, counts = [order[:7], order[10:12]], [3, 2]  # prefixes of 4 and 0
    own = torch.cat([slots[0][4:], slots[1]])
    q, k, v = (torch.randn(5, heads * 8) for heads in (4, 2, 2))
    batch = SimpleNamespace(out_cache_loc=own)
    out = ExtendBackend(pool, slots, counts).forward(q, k, v, LAYER, batch)
    assert torch.equal(pool.keys[own], k.view(5, 2, 8))
    assert torch.equal(pool.values[own], v.view(5, 2, 8))
    for row, seen in enumerate([slots[0][:5], slots[0][:6], slots[0], slots[1][:1], slots[1]]):
        wanted = naive(q[row].view(4, 8), pool.keys[seen], pool.values[seen])
        torch.testing.assert_close(out[row].view(4, 8), wanted)


def test_a_level_sees_its_prefix_and_its_ancestors():
    """Catches a node that sees its sibling or another request's, and drafts written to the pool."""
    pool = Pool(12)
    before = pool.keys.clone(), pool.values.clone()
    prefixes = [torch.tensor([3, 1, 7]), torch.tensor([0, 2])]
    backend = LevelBackend(pool, prefixes, num_places=6)
    hidden = torch.zeros(3, 1)
    first = Level(
        1, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), torch.zeros(3), hidden,
        torch.tensor([[1, 0], [0, 1], [1, 0]], dtype=torch.bool),
    )  # fmt: skip
    second = Level(
        2, torch.tensor([0, 0, 1]), torch.tensor([2, 3, 2]), torch.zeros(3), hidden,
        torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 1, 0]], dtype=torch.bool),
    )  # fmt: skip
    seen: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for level in (first, second):
        backend.level = level
        q, k, v = (torch.randn(3, heads * 8) for heads in (4, 2, 2))
        out = backend.forward(q, k, v, LAYER, None)
        places = zip(level.requests.tolist(), level.places.tolist(), strict=True)
        for row, at in enumerate(places):
            seen[at] = k[row].view(2, 8), v[row].view(2, 8)
        for row, request in enumerate(level.requests.tolist()):
            above = [seen[request, at] for at in level.sees[row].nonzero()[:, 0].tolist()]
            sides = [
                torch.cat([side[prefixes[request]], torch.stack([pair[i] for pair in above])])
                for i, side in enumerate(before)
            ]
            torch.testing.assert_close(out[row].view(4, 8), naive(q[row].view(4, 8), *sides))
    assert torch.equal(pool.keys, before[0])
    assert torch.equal(pool.values, before[1])


def test_the_clock_books_a_rounds_trees(monkeypatch):
    """Catches outcomes booked with another round's cut, and rows of requests that draft nothing."""
    now = [0.0]
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(round_times.time, clock, lambda: now[0])
    clock = TreeClock(2, adaptive=True)
    for _ in range(200):
        clock.begin(["a", "b"])
        plan = clock.plan(2)
        if plan.levels:
            with clock.drafting(0):
                now[0] += 0.05 * plan.levels
                clock.ran(plan.levels)
        clock.end_drafting()
        trees = [BRANCHED.cut((1, 3, 5)[plan.levels]), ROOT]
        now[0] += 1.0 + 0.01 * (len(trees[0]) - 1)
        path = [0, 1, 3][: plan.levels + 1]
        clock.verified_trees([plan.levels, 0], trees, [path, [0]])
    known = clock._controller.estimates(2)
    assert known.plain_seconds == pytest.approx(1.0, rel=0.05)
    assert known.draft_step == pytest.approx(0.05, rel=0.2)
    assert known.gain > 1.2
    assert plan.levels == 2


def test_without_adaptive_trees_are_full():
    """Catches an adaptive clock where the user asked for none."""
    clock = TreeClock(3, adaptive=False)
    assert clock.plan(4) == (3, 0.0, 0.0, False)
    assert clock.node_floor(4) == 0.0
