"""Reading vLLM's CPU cache back: every packing its writers use, and one that is no view."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from speculators_ext.engines.vllm.attention.kv_layout import as_strides, learn_layout, read_prefix

if TYPE_CHECKING:
    from collections.abc import Callable

    Writer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

NUM_BLOCKS, NUM_HEADS = 6, 3


def vllm_writer(isa: str, kv_cache_dtype: str = "auto") -> Writer:
    """vLLM's own writer of one instruction set."""
    from vllm import _custom_ops as ops

    def write(
        key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        stored = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        halves = stored.view(*cache.shape[:2], 2 * cache.shape[2], -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            key, value, *halves, slots, isa, kv_cache_dtype=kv_cache_dtype
        )

    return write


def shuffling_writer(order: torch.Tensor) -> Writer:
    """A writer whose packing no view describes."""

    def write(
        key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        block_size, size = cache.shape[2], key.shape[2]
        halves = cache.view(*cache.shape[:2], 2, -1)
        for row, slot in enumerate(slots.tolist()):
            places = order[(slot % block_size) * size : (slot % block_size + 1) * size]
            halves[slot // block_size, :, 0, places] = key[row]
            halves[slot // block_size, :, 1, places] = value[row]

    return write


def check_reads_back(
    write: Writer,
    dtype: torch.dtype,
    block_size: int,
    head_size: int,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """What was written at scattered blocks comes back by position, from any start."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_BLOCKS, NUM_HEADS, block_size, 2 * head_size)
    cache = torch.full(shape, 9.0).to(cache_dtype or dtype)
    layout = learn_layout(cache, write, dtype)
    length = 2 * block_size + block_size // 2 + 1
    # Small integers, which every cache dtype holds exactly.
    key, value = torch.randint(-8, 9, (2, length, NUM_HEADS, head_size), generator=generator).to(
        dtype
    )
    table = torch.tensor([4, 1, 3], dtype=torch.int32)
    positions = torch.arange(length)
    slots = table[positions // block_size].long() * block_size + positions % block_size
    write(key, value, cache, slots)
    for start in (0, 1, block_size, block_size + 3):
        keys, values = read_prefix(cache, layout, table, start, length)
        assert torch.equal(keys.to(dtype), key[start:].transpose(0, 1))
        assert torch.equal(values.to(dtype), value[start:].transpose(0, 1))


@pytest.mark.parametrize(
    ("isa", "dtype", "block_size", "head_size"),
    [
        ("vec", torch.float32, 32, 64),
        ("vec", torch.bfloat16, 128, 64),
        ("vec", torch.float32, 32, 96),
        ("vec16", torch.float32, 16, 80),
        ("vec16", torch.bfloat16, 16, 128),
        pytest.param(
            "amx",
            torch.bfloat16,
            32,
            64,
            marks=pytest.mark.skipif(
                not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX"
            ),
        ),
    ],
)
def test_vllm_caches_read_back(
    isa: str, dtype: torch.dtype, block_size: int, head_size: int
) -> None:
    """A transposed, tiled or paired element read from the wrong place."""
    check_reads_back(vllm_writer(isa), dtype, block_size, head_size)


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 caches need AVX-512 on CPUs"
)
@pytest.mark.parametrize(
    ("name", "stored"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)]
)
def test_fp8_caches_read_back(name: str, stored: torch.dtype) -> None:
    """Bytes taken for numbers, or for those of the other fp8 format."""
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    write = vllm_writer(isa, name)
    check_reads_back(write, torch.bfloat16, 32, 64, cache_dtype=stored)


def test_a_packing_that_is_no_view_reads_back() -> None:
    """A permutation forced into strides that do not describe it."""
    order = torch.randperm(32 * 64, generator=torch.Generator().manual_seed(1))
    assert as_strides(order, (32, 64)) is None
    check_reads_back(shuffling_writer(order), torch.float32, 32, 64)


def test_a_transpose_is_one_view() -> None:
    """Factors left unmerged would make a copy of many tiny dimensions."""
    order = torch.arange(48).view(8, 6).t().reshape(-1)
    view = as_strides(order, (6, 8))
    assert view is not None
    assert view == ((6, 8), (1, 6))
