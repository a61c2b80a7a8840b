"""The torch stand-ins for ``sgl_kernel``'s slot operations, against SGLang's own Triton kernels."""

from __future__ import annotations

import pytest
import torch
from sglang.kernels.ops.kvcache.cache_move import copy_all_layer_kv_cache_tiled
from sglang.kernels.ops.speculative import cache_locs, eagle
from sglang.kernels.ops.speculative.multi_layer_eagle import rotate_input_ids_kernel
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool

from speculators_ext.engines.sglang.cpu import cache_ops

POOL_LEN = 96


@pytest.fixture
def table() -> torch.Tensor:
    """int32 [requests, POOL_LEN], every cell another slot."""
    cells = torch.randperm(6 * POOL_LEN, generator=torch.Generator().manual_seed(0))
    return cells.view(6, POOL_LEN).to(torch.int32)


# Requests in no order; lengths 0, 1, and more than a block of the kernel (32).
OWNERS = torch.tensor([4, 0, 5, 2])
START = torch.tensor([3, 0, 10, 50])
END = torch.tensor([3, 1, 80, 57])


def test_slots_are_written_to_the_table(table):
    """Catches a slot in another request's row, or one off in the running offset."""
    slots = torch.arange(1000, 1000 + int((END - START).sum()))
    ours, theirs = table.clone(), table.clone()
    cache_ops.assign_req_to_token_pool_cpu(OWNERS, ours, START, END, slots, POOL_LEN)
    assign_req_to_token_pool[(4,)](OWNERS, theirs, START, END, slots, POOL_LEN, 4)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, table)


def test_slots_are_read_from_the_table(table):
    """Catches a request's slots in another's place of the flat output."""
    ours, theirs = torch.full((2, 100), -7)
    cache_ops.assign_extend_cache_locs_cpu(OWNERS, table, START, END, ours, POOL_LEN)
    cache_locs.assign_extend_cache_locs[(4,)](OWNERS, table, START, END, theirs, POOL_LEN, 4)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("topk", "steps"), [(1, 1), (1, 5), (4, 3)])
def test_draft_slots_follow_each_length(table, topk, steps):
    """Catches draft slots that start elsewhere than behind the request's tokens."""
    ours, theirs = torch.full((2, 4 * topk * steps), -7)
    cache_ops.assign_draft_cache_locs_contiguous_cpu(
        OWNERS, table, START, ours, POOL_LEN, topk, steps
    )
    cache_locs.assign_draft_cache_locs_contiguous[(4,)](
        OWNERS, table, START, theirs, POOL_LEN, topk, steps
    )
    assert torch.equal(ours, theirs)


def test_the_bonus_is_the_last_accepted_token():
    """Catches the count of accepted tokens taken without the bonus, or the wrong row stride."""
    tokens = torch.arange(100, 112, dtype=torch.int32).view(3, 4)
    counts = torch.tensor([1, 4, 2], dtype=torch.int32)
    ours, theirs = torch.full((2, 3), -7, dtype=torch.int32)
    cache_ops.fill_bonus_tokens_cpu(tokens, counts, ours, 4)
    eagle.fill_bonus_tokens[(3,)](tokens, counts, theirs, 4)
    assert torch.equal(ours, theirs)
    assert ours.tolist() == [100, 107, 109]


def test_accepted_slots_move_to_the_front():
    """Catches padding (-1) read as the last slot, or left as a hole."""
    accepted = torch.tensor([[0, 2, -1], [3, -1, -1], [6, 7, 8]], dtype=torch.int32)
    slots = torch.arange(50, 59)
    ours, theirs = torch.full((2, 9), -7)
    cache_ops.fill_accept_out_cache_loc_cpu(accepted, slots, ours)
    eagle.fill_accept_out_cache_loc[(9,)](accepted, slots, theirs, 16)
    assert torch.equal(ours, theirs)


def test_cache_rows_move_at_once():
    """Catches a row overwritten before it is read: targets overlap sources on purpose."""
    generator = torch.Generator().manual_seed(1)
    buffers = [torch.randn(12, 2, size, generator=generator) for size in (3, 8)]
    target, source = torch.tensor([1, 2, 3, 11]), torch.tensor([2, 3, 5, 11])
    ours, theirs = ([b.clone() for b in buffers] for _ in range(2))
    for copies, move in ((ours, "ours"), (theirs, "theirs")):
        pointers = torch.tensor([b.data_ptr() for b in copies], dtype=torch.uint64)
        strides = torch.tensor([b[0].nbytes for b in copies])
        if move == "ours":
            cache_ops.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
        else:
            copy_all_layer_kv_cache_tiled[(2, 1)](pointers, strides, target, source, 4, 4, 128)
    for mine, other, before in zip(ours, theirs, buffers, strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(mine[1:4], before[[2, 3, 5]])


@pytest.mark.parametrize("select", [None, torch.tensor([2, 5, 6])])
def test_ids_rotate_within_their_request(select):
    """Catches ids shifted across a request's border, and a new token at the wrong row."""
    start, lengths = torch.tensor([0, 4, 6]), torch.tensor([4, 2, 1])
    new = torch.tensor([70, 71, 72])
    ours, theirs = torch.arange(7), torch.arange(7)
    cache_ops.rotate_input_ids_cpu(ours, start, lengths, new, select)
    rotate_input_ids_kernel[(3,)](theirs, start, lengths, new, select, BLOCK_SIZE=8)
    assert torch.equal(ours, theirs)
