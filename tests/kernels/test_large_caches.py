"""Kernels whose caches are larger than 32-bit offsets reach: block 3 begins 3 * 2**30 elements on.

The stride itself fits 32 bits, as an engine's does. Memory that nobody touches takes an address and
no more, so this fits a small machine.
"""

from __future__ import annotations

import pytest
import torch

from speculators_ext.kernels.compact_kv import compact_kv
from speculators_ext.kernels.compact_kv_ref import CacheTable
from speculators_ext.kernels.packed_attention import packed_attention
from speculators_ext.kernels.tree_attention import tree_attention
from speculators_ext.kernels.tree_attention_mla import tree_attention_mla
from speculators_ext.kernels.tree_attention_ref import TreeBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STRIDE, FAR, BLOCK_SIZE = 2**30, 3, 16


def far_apart(near: torch.Tensor) -> torch.Tensor:
    """The same first and last block, ``STRIDE`` elements a block."""
    storage = torch.empty(FAR * STRIDE + near[0].numel(), dtype=near.dtype, device=DEVICE)
    view = storage.as_strided(near.shape, (STRIDE, *near.stride()[1:]))
    view[::FAR] = near[::FAR]
    return view


@pytest.fixture
def caches() -> torch.Tensor:
    """[2, 4, block_size, kv_heads, head_size] fp8: keys and values; two blocks are read."""
    torch.manual_seed(0)
    return torch.randn(2, FAR + 1, BLOCK_SIZE, 1, 32, device=DEVICE).to(torch.float8_e4m3fn)


def trees(prefix_len: int, num_rows: int) -> TreeBatch:
    """A chain behind a prefix that reaches into the second block."""
    words = (2 ** torch.arange(1, num_rows + 1) - 1).int()[:, None]
    return TreeBatch(
        torch.tensor([[0, FAR]], dtype=torch.int32, device=DEVICE),
        torch.tensor([prefix_len], device=DEVICE),
        torch.tensor([0, num_rows], dtype=torch.int32, device=DEVICE),
        words.to(DEVICE),
        num_rows,
    )


def test_tree_attention(caches: torch.Tensor) -> None:
    """Catches a block's offset computed in 32 bits."""
    query = torch.randn(3, 2, 32, device=DEVICE, dtype=torch.float16)
    call = {"trees": trees(20, 3), "scale": 0.2}
    near = tree_attention(query, *caches, **call)
    far = tree_attention(query, *(far_apart(cache) for cache in caches), **call)
    assert torch.equal(far, near)
    assert not near.isnan().any()


def test_tree_attention_mla(caches: torch.Tensor) -> None:
    """Likewise over latents: 16 numbers and a rotated key of 16."""
    query = torch.randn(3, 2, 32, device=DEVICE, dtype=torch.float16)
    call = {"trees": trees(20, 3), "scale": 0.2, "latent": 16}
    near = tree_attention_mla(query, caches[0, :, :, 0], **call)
    far = tree_attention_mla(query, far_apart(caches[0, :, :, 0].contiguous()), **call)
    assert torch.equal(far, near)


def test_packed_attention(caches: torch.Tensor) -> None:
    """Likewise for packed rows."""
    rows = torch.randn(3, 2, 1, 32, device=DEVICE, dtype=torch.float16)
    table, lens = trees(20, 1)[:2]
    near = packed_attention(*rows, *caches, table, lens, scale=0.2)
    spread = [far_apart(cache) for cache in caches]
    far = packed_attention(*rows, *spread, table, lens, scale=0.2)
    assert torch.equal(far, near)


def test_compact_kv(caches: torch.Tensor) -> None:
    """Catches a row moved to, or from, the wrong block."""
    table, lens = trees(14, 1)[:2]
    path = torch.tensor([[0, 2, 5]], dtype=torch.int32, device=DEVICE)
    accepted = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    near, spread = caches[0].clone(), far_apart(caches[0])
    for cache in (near, spread):
        compact_kv(CacheTable.of([cache]), table, lens, path, accepted)
    moved = near[::FAR].view(torch.uint8)
    assert torch.equal(spread[::FAR].view(torch.uint8), moved)
    assert not torch.equal(moved, caches[0, ::FAR].view(torch.uint8))
