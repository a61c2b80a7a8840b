"""The pieces of a round that need no engine: layouts, limits, attention, draws."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from speculators_ext.engines import round_times
from speculators_ext.engines.sglang.attention import PackedRowsBackend
from speculators_ext.engines.sglang.chains import BonusInput, chain_verify_input
from speculators_ext.engines.sglang.cpu import verify_attention
from speculators_ext.engines.sglang.request_rows import KnownRequests
from speculators_ext.engines.sglang.round_clock import RoundClock


def test_chains_of_different_lengths_share_a_width():
    """Catches a padding row linked to a chain, or a position past the model's last."""
    found = chain_verify_input(torch.tensor([50, 60, 70]), [[51, 52], [], [71]], [4, 9, 6], 10)
    assert found.draft_token_num == 3
    assert found.draft_token.view(3, 3).tolist() == [[50, 51, 52], [60, 0, 0], [70, 71, 0]]
    assert found.positions.view(3, 3).tolist() == [[4, 5, 6], [9, 10, 10], [6, 7, 8]]
    assert found.retrieve_next_token.tolist() == [[1, 2, -1], [-1, -1, -1], [1, -1, -1]]
    assert found.custom_mask.view(3, 3, 3)[0].tolist() == [
        [True, False, False], [True, True, False], [True, True, True],
    ]  # fmt: skip
    assert found.max_tree_depth == 3


def test_no_drafts_at_all_verify_the_roots():
    """Catches a round of plain decoding that cannot be laid out."""
    found = chain_verify_input(torch.tensor([50, 60]), [[], []], [4, 9], 10)
    assert (found.draft_token_num, found.max_tree_depth) == (1, 1)
    assert found.draft_token.tolist() == [50, 60]


@pytest.mark.parametrize("key", ["bonus_tokens", "future_indices"])
def test_bonus_tokens_follow_their_requests(key):
    """Catches a token handed to another request when the batch is filtered or merged."""
    mine, other = BonusInput(**{key: torch.arange(4)}), BonusInput(**{key: torch.tensor([9])})
    mine.filter_batch(torch.tensor([3, 1]))
    mine.merge_batch(other)
    assert getattr(mine, key).tolist() == [3, 1, 9]


def request(max_new_tokens=20, prompt=5, **params):
    defaults = {
        "max_new_tokens": max_new_tokens, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "repetition_penalty": 1.0, "min_new_tokens": 0, "custom_params": None,
    }  # fmt: skip
    return SimpleNamespace(
        rid="r", origin_input_ids=list(range(prompt)), output_ids=[],
        sampling_params=SimpleNamespace(**defaults | params),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("req", "length", "expected"),
    [
        (request(), 5, 4),
        (request(max_new_tokens=4), 5, 2),  # one is out, one comes free, so two drafts are left
        (request(max_new_tokens=1), 5, 0),
        (request(max_new_tokens=500), 97, 2),  # positions 98 and 99
        (request(max_new_tokens=500), 99, 0),
        (request(frequency_penalty=0.5), 5, 0),
        (request(repetition_penalty=1.1), 5, 0),
        (request(min_new_tokens=3), 5, 0),
        (request(custom_params={"speculators_ext_enabled": "0"}), 5, 0),
        (request(custom_params={"speculators_ext_max_drafts": 3}), 5, 3),
        (request(custom_params={"speculators_ext_max_draft": 3, "their_key": 1}), 5, 4),
    ],
)
def test_a_request_drafts_what_it_can_use(req, length, expected):
    """Catches drafts that would be thrown away, do not fit, or are not wanted."""
    assert KnownRequests(tail=1).limit(req, length, most=4, last=99) == expected


def test_the_newest_tokens_are_known_though_sglang_lags():
    """Catches a search that looks at the round before last, as `output_ids` do under overlap."""
    known = KnownRequests(tail=3)
    known.start(request(prompt=2), 40)
    known.extend("r", [41, 42])
    assert known.newest("r", 3) == [40, 41, 42]
    assert known.newest("r", 2) == [41, 42]
    known.forget_absent(lambda rid: False)
    assert known.newest("r", 2) == []


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


def layer(window=-1):
    return SimpleNamespace(
        layer_id=0, scaling=0.3, sliding_window_size=window, tp_q_head_num=4, tp_k_head_num=2,
        tp_v_head_num=2, qk_head_dim=8, v_head_dim=8,
    )  # fmt: skip


def naive(query, keys, values, scale):
    """One query row [4, 8] over keys [n, 2, 8]."""
    keys, values = (part.repeat_interleave(2, dim=1) for part in (keys, values))
    weights = torch.softmax(torch.einsum("hd,nhd->hn", query, keys) * scale, dim=-1)
    return torch.einsum("hn,nhd->hd", weights, values)


@pytest.mark.parametrize("window", [-1, 3])
def test_verification_attends_prefix_and_ancestors(window):
    """Catches a mask read for another request, stale draft slots, or a window off by one.

    Two requests, trees of 3 rows: the root and two children of it.
    """
    pool, table = Pool(40), torch.randperm(40, generator=torch.Generator().manual_seed(1))
    req_to_token = table.view(2, 20).to(torch.int32)
    lengths = torch.tensor([6, 2])
    positions = torch.tensor([6, 7, 7, 2, 3, 3])
    slots = (
        torch.stack([req_to_token[r, n : n + 3] for r, n in enumerate(lengths)]).flatten().long()
    )
    sees = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True), out_cache_loc=slots,
        spec_info=SimpleNamespace(draft_token_num=3, custom_mask=sees.repeat(2, 1, 1).flatten()),
        seq_lens=lengths, req_pool_indices=torch.tensor([0, 1]), positions=positions,
    )  # fmt: skip
    backend = SimpleNamespace(
        token_to_kv_pool=pool, swa_out_cache_loc=None,
        req_to_token_pool=SimpleNamespace(req_to_token=req_to_token),
    )  # fmt: skip
    q, k, v = (torch.randn(6, heads * 8) for heads in (4, 2, 2))
    out = verify_attention.forward_extend(
        lambda *args: pytest.fail("SGLang's own"), backend, q, k.view(6, 2, 8), v.view(6, 2, 8),
        layer(window), batch,
    )  # fmt: skip
    assert torch.equal(pool.keys[slots], k.view(6, 2, 8))
    for row in range(6):
        r, own = row // 3, row % 3
        kept = [int(req_to_token[r, p]) for p in range(int(lengths[r]))]
        at = list(range(int(lengths[r])))
        kept += [int(slots[r * 3 + j]) for j in range(3) if sees[own, j]]
        at += [int(positions[r * 3 + j]) for j in range(3) if sees[own, j]]
        if window > 0:
            near = [i for i, p in enumerate(at) if p >= int(positions[row]) - window]
            kept = [kept[i] for i in near]
        wanted = naive(q[row].view(4, 8), pool.keys[kept], pool.values[kept], 0.3)
        torch.testing.assert_close(out[row].view(4, 8), wanted)


def test_other_forwards_are_sglangs_own():
    """Catches the hook at work on prefills."""
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: False))
    found = verify_attention.forward_extend(lambda *args: args, 1, 2, 3, 4, 5, batch)
    assert found == (1, 2, 3, 4, 5, batch, True)


def test_packed_rows_see_the_prefix_and_themselves():
    """Catches rows of a search that see each other, or write to the cache."""
    pool = Pool(12)
    before = pool.keys.clone()
    prefixes = [torch.tensor([3, 1, 7]), torch.tensor([], dtype=torch.int64)]
    q, k, v = (torch.randn(4, heads * 8) for heads in (4, 2, 2))
    out = PackedRowsBackend(pool, prefixes).forward(q, k, v, layer(), None)
    for row in range(4):
        own = prefixes[row // 2]
        keys = torch.cat([pool.keys[own], k[row].view(1, 2, 8)])
        values = torch.cat([pool.values[own], v[row].view(1, 2, 8)])
        torch.testing.assert_close(out[row].view(4, 8), naive(q[row].view(4, 8), keys, values, 0.3))
    assert torch.equal(pool.keys, before)


def test_a_wait_for_other_requests_is_not_the_targets_step(monkeypatch):
    """Catches a prefill, or another batch, booked as the cost of verification."""
    now = [0.0]
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(round_times.time, clock, lambda: now[0])
    clock = RoundClock(4, 16, adaptive=True)
    seen = []
    monkeypatch.setattr(
        clock._controller, "observe", lambda rows, **kw: seen.append(kw["verify_seconds"])
    )
    for names, pause in ((["a"], 1.0), (["a"], 2.0), (["a", "b"], 4.0), (["a", "b"], 8.0)):
        clock.begin(names)
        clock.end_drafting()
        now[0] += pause
        clock.verified([0] * len(names), [0] * len(names), [0] * len(names))
    clock.interrupt()
    clock.begin(["a", "b"])
    clock.end_drafting()
    assert seen == [1.0, None, 4.0, None]
