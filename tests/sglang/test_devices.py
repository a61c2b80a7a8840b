"""Where tensors are: what a round gives SGLang's GPU is made there, and nothing is mixed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pretend_gpu import GPU, MixedDevices, OnGPU, pretend_gpu, to_gpu, value_of

from speculators_ext.config import Eagle2Config
from speculators_ext.engines.sglang import decode_steps, sampling
from speculators_ext.engines.sglang.attention import PackedRowsBackend
from speculators_ext.engines.sglang.chains import chain_verify_input
from speculators_ext.engines.sglang.decode_steps import decode_step
from speculators_ext.engines.sglang.eagle2.worker import Eagle2Worker
from speculators_ext.engines.sglang.heads.attention import ExtendBackend, LevelBackend
from speculators_ext.engines.sglang.heads.draft_model import DraftModel, prefix_slots
from speculators_ext.engines.sglang.heads.tree_clock import TreeClock
from speculators_ext.engines.sglang.mtp_reuse.worker import _ChainSteps
from speculators_ext.engines.sglang.request_rows import KnownRequests
from speculators_ext.engines.sglang.trees import tree_verify_input
from speculators_ext.engines.sglang.verify_shape import VerifyShape
from speculators_ext.kernels.growth_ops import growth_ops
from speculators_ext.proposers import eagle2
from speculators_ext.proposers.clasp import solve
from speculators_ext.proposers.drafting import clamp_ids, exit_mask
from speculators_ext.proposers.eagle2 import Level
from speculators_ext.proposers.head_rounds import Backlog, HeadRows, Plan, Roots, grow_planned
from speculators_ext.proposers.mtp_reuse import Choice, StopRule, draft_chains
from speculators_ext.tree import DraftTree

LENGTHS = [5, 2]
SHAPE = VerifyShape(width=5, sees_prefix=True, device=GPU)
TREE = DraftTree.of([7, 8, 9, 3], [-1, 0, 0, 2])
LAYER = SimpleNamespace(
    layer_id=0, scaling=0.3, tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, qk_head_dim=8,
    v_head_dim=8, sliding_window_size=-1,
)  # fmt: skip


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Pool:
    """SGLang's KV pool, one layer."""

    def __init__(self, place=to_gpu) -> None:
        self.keys, self.values = place(seeded(12, 2, 8)), place(seeded(12, 2, 8, seed=1))

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values

    def set_kv_buffer(self, layer, where, key, value):
        self.keys[where.loc], self.values[where.loc] = key, value


def batch_of(place=to_gpu):
    """SGLang's batch of two requests."""
    table = place(torch.arange(40, dtype=torch.int32).view(2, 20))
    return SimpleNamespace(
        seq_lens=place(torch.tensor(LENGTHS)), req_pool_indices=place(torch.tensor([1, 0])),
        req_to_token_pool=SimpleNamespace(req_to_token=table), forward_mode=None,
        reqs=[SimpleNamespace(rid="a"), SimpleNamespace(rid="b")], seq_lens_cpu=None,
    )  # fmt: skip


def test_the_device_is_as_strict_as_a_gpu():
    """Catches a stand-in that lets a tensor of the CPU through."""
    with pretend_gpu():
        there, here = torch.arange(3, device=GPU), torch.arange(3)
        assert value_of(there[here] + there).tolist() == [0, 2, 4]
        for mixed in (
            lambda: there + here, lambda: torch.cat([there, here]), lambda: here[there],
            lambda: torch.where(there > 1, there, here), lambda: value_of(here),
        ):  # fmt: skip
            with pytest.raises(MixedDevices):
                mixed()


@pytest.mark.parametrize(
    "lay",
    [
        lambda shape: chain_verify_input(
            torch.tensor([7, 9], dtype=torch.int32, device=shape.device), [[1, 2, 3], []],
            LENGTHS, 100, shape,
        ),
        lambda shape: tree_verify_input([TREE, TREE.cut(1)], LENGTHS, 100, shape),
    ],
    ids=["chains", "trees"],
)  # fmt: skip
def test_a_verification_is_on_the_gpu_as_wide_as_its_graph(lay):
    """Catches an input that kernels for GPUs cannot read: another device, dtype or width."""
    with pretend_gpu():
        given = lay(SHAPE)
        assert given.draft_token_num == given.num_tokens_per_req == 5
        found = {name: value_of(getattr(given, name)) for name in (
            "draft_token", "positions", "custom_mask", "retrieve_index", "retrieve_next_token",
            "retrieve_next_sibling",
        )}  # fmt: skip
    mask = found.pop("custom_mask")
    assert {value.dtype for value in found.values()} == {torch.int64}
    assert mask.dtype == torch.bool
    assert all(value.is_contiguous() for value in (*found.values(), mask))
    narrow = lay(VerifyShape(5, False, "cpu"))
    for name, value in found.items():
        assert torch.equal(value, getattr(narrow, name)), name
    start = 0
    for request, length in enumerate(LENGTHS):
        rows = mask[start : start + 5 * (length + 5)].view(5, length + 5)
        start += rows.numel()
        assert rows[:, :length].all()
        assert torch.equal(rows[:, length:], narrow.custom_mask.view(2, 5, 5)[request])
    assert start == mask.numel()


def test_rows_behind_the_drafts_are_reached_by_nothing():
    """Catches a row that only fills the width up, accepted as a draft."""
    given = tree_verify_input([TREE, TREE.cut(1)], LENGTHS, 100, VerifyShape(6))
    reached = torch.cat([given.retrieve_next_token, given.retrieve_next_sibling], dim=1).tolist()
    assert [sorted(set(row) - {-1}) for row in reached] == [[1, 2, 3], []]


def test_a_draft_step_is_on_the_gpu_but_for_the_hosts_lengths(monkeypatch):
    """Catches lengths that are on the GPU where the host reads them, or the other way round."""
    monkeypatch.setattr(decode_steps.ForwardBatch, "init_new", lambda step, *args, **kwargs: step)
    with pretend_gpu():
        step = decode_step(batch_of(), None, [1, 0, 1], [4, 5, 6], [2, 5, 3])
        assert value_of(step.seq_lens).tolist() == [3, 6, 4]
        assert value_of(step.input_ids).tolist() == [4, 5, 6]
        assert value_of(step.req_pool_indices).tolist() == [0, 1, 0]
        assert value_of(step.out_cache_loc).tolist() == [2, 25, 3]
        assert step.out_cache_loc.dtype == torch.int64
        assert not isinstance(step.seq_lens_cpu, OnGPU)
        assert step.seq_lens_cpu.tolist() == [3, 6, 4]
        assert step.seq_lens_sum == 13


def attend(kind: str, place, device):
    pool, prefixes = Pool(place), [torch.tensor([3, 1, 7]), torch.tensor([0, 2])]
    prefixes = [place(slots) for slots in prefixes]
    q, k, v = (place(seeded(4, heads * 8, seed=heads)) for heads in (4, 2, 2))
    if kind == "extending":
        backend = ExtendBackend(pool, prefixes, [2, 2])
        return backend.forward(
            q, k, v, LAYER, SimpleNamespace(out_cache_loc=place(torch.tensor([1, 7, 0, 2])))
        )
    if kind == "a level":
        level = LevelBackend(pool, prefixes, num_places=4)
        level.level = Level(
            1, place(torch.tensor([0, 0, 0, 1])), place(torch.tensor([0, 1, 2, 0])), q, q,
            torch.eye(3, dtype=torch.bool, device=device)[[0, 1, 2, 0]],
        )  # fmt: skip
        return level.forward(q, k, v, LAYER, None)
    window = SimpleNamespace(**vars(LAYER) | {"sliding_window_size": 2})
    return PackedRowsBackend(pool, prefixes).forward(
        q, k, v, window if kind == "windows" else LAYER, None
    )


@pytest.mark.parametrize("kind", ["extending", "a level", "packed rows", "windows"])
def test_our_attention_stays_on_the_gpu(kind):
    """Catches a mask or a place to write that is made on the CPU."""
    wanted = attend(kind, lambda value: value, "cpu")
    with pretend_gpu():
        found = value_of(attend(kind, to_gpu, GPU))
    torch.testing.assert_close(found, wanted)


def test_growth_and_chains_stay_on_the_gpu(monkeypatch):
    """Catches proposers, or what feeds them, that make a tensor elsewhere."""
    monkeypatch.setattr(eagle2, "growth_ops", lambda device: growth_ops(torch.device("cpu")))
    with pretend_gpu():
        weight, seen = to_gpu(seeded(8, 6)), []

        class Head:
            draft_to_target = torch.zeros(6, dtype=torch.int64, device=GPU)

            def logits(self, hidden):
                return hidden @ weight

            def step(self, level):
                seen.extend(value_of(part) for part in level[1:6])
                return level.features, level.features

        hidden = to_gpu(seeded(2, 8, seed=3))
        roots = Roots(
            [0, 1], LENGTHS, torch.tensor([1, 2], device=GPU), hidden, hidden, [4, 4], [2, 2]
        )
        options = Eagle2Config(depth=2, topk=2)
        trees = grow_planned(
            Head(), roots, Plan(2, 0.0, 0.0), options, chains=[False] * 2, num_rows=5, prune=True
        )
        assert [len(tree) for tree in trees] == [5, 5]

        class Module:
            def draft(self, hidden):
                return Choice(hidden.argmax(-1), hidden.softmax(-1).amax(-1))

        chains, _ = draft_chains(
            _ChainSteps(Head(), Module()), hidden, hidden, [2, 2], StopRule(0.0), num_rows=2
        )
        assert [len(chain.tokens) for chain in chains] == [2, 2]
        assert len(seen) == 10  # a level of the trees, a step of the chains


def test_a_search_and_a_draft_of_the_target_stay_on_the_gpu():
    """Catches CLaSp's programme, or what ends a chain, on the CPU."""
    with pretend_gpu():
        mixing = to_gpu(seeded(4, 8, 8) / 4)

        class Stack:
            num_units = 4

            def apply(self, unit, states):
                return states + states @ mixing[unit]

        result = solve(Stack(), to_gpu(seeded(2, 8, seed=2)), 2, (0,), candidates=((1, 2),))
        assert all(isinstance(part, OnGPU) for part in result if isinstance(part, torch.Tensor))
        drawn = exit_mask(to_gpu(seeded(3, 6)), 0.2)
        assert value_of(clamp_ids(drawn.tokens, 4)).max() < 4
        value_of(drawn.keep)


def test_draws_stay_on_the_gpu():
    """Catches sampling options expanded on the CPU."""
    with pretend_gpu():
        info = SimpleNamespace(
            temperatures=torch.ones(2, 1, device=GPU), sampling_seed=None,
            need_top_p_sampling=True, need_top_k_sampling=False, need_min_p_sampling=True,
            top_ks=torch.full((2,), 3, device=GPU), top_ps=torch.full((2,), 0.9, device=GPU),
            min_ps=torch.full((2,), 0.1, device=GPU),
        )  # fmt: skip
        drawn = sampling._draw(info, to_gpu(seeded(6, 5)), torch.arange(6, device=GPU))
        assert value_of(drawn).numel() == 6


class Model:
    """The head as a worker calls it."""

    draft_to_target = None

    def extend(self, batch, rows, pieces):
        self.seen = [
            value_of(torch.cat(part))
            for part in zip(*((p.tokens, p.hidden) for p in pieces), strict=True)
        ]
        return torch.cat([piece.hidden for piece in pieces])


def test_a_heads_round_stays_on_the_gpu():
    """Catches rows handed from one round to the next that left the GPU."""
    worker = object.__new__(Eagle2Worker)
    worker.model, worker._most, worker._last = Model(), 4, 100
    worker._options = Eagle2Config(depth=2, topk=2)
    worker._clock = TreeClock(2, adaptive=False)
    worker._known, worker._backlog = KnownRequests(tail=1), Backlog()
    worker._missing, worker._newest = set(), {}
    grown = []
    worker.grow = lambda batch, roots, plan: grown.append(roots) or [TREE]
    batch = batch_of()
    for req in batch.reqs:
        req.sampling_params = SimpleNamespace(custom_params=None)
    with pretend_gpu():
        rows = HeadRows(0, torch.tensor([5, 6], device=GPU), to_gpu(seeded(2, 8)))
        worker.keep("a", rows)
        bonus = torch.tensor([7, 8], device=GPU)
        trees = worker._draft_rows(batch, [2, 0], LENGTHS, bonus, Plan(2, 0.0, 0.0))
        assert trees == {0: TREE}
        [roots] = grown
        assert torch.equal(value_of(roots.hidden), rows.hidden.inner[1:])
        assert value_of(roots.tokens).tolist() == [7]
        batch.spec_info = SimpleNamespace(draft_token_num=5)
        result = SimpleNamespace(
            accept_lens=torch.tensor([3, 1], device=GPU),
            next_token_ids=torch.arange(10, dtype=torch.int32, device=GPU),
            logits_output=SimpleNamespace(hidden_states=to_gpu(seeded(10, 8))),
            accept_index=torch.tensor([[0, 2, 3], [5, -1, -1]], dtype=torch.int32, device=GPU),
        )
        paths = []
        worker.note_outcome = lambda batch, caps, trees, found: paths.extend(found)
        worker._note(batch, LENGTHS, [2, 0], [TREE, TREE.cut(1)], result)
        assert paths == [[0, 2, 3], [0]]
        kept = worker._backlog.take("a")
        assert value_of(kept.tokens).tolist() == [0, 1, 2]
        assert value_of(kept.hidden).shape == (3, 8)


def test_a_drafts_vocabulary_and_prefixes_are_on_the_gpu():
    """Catches ids of a smaller vocabulary, or slots of a prefix, made on the CPU."""
    with pretend_gpu():
        model = object.__new__(DraftModel)
        model.hot_token_id = torch.tensor([3, 5, 9], device=GPU)
        assert value_of(model.draft_to_target).tolist() == [3, 4, 7]
        slots = prefix_slots(batch_of(), [1, 0], [2, 3])
        assert [value_of(own).tolist() for own in slots] == [[0, 1], [20, 21, 22]]
        assert np.all([own.dtype == torch.int64 for own in slots])
