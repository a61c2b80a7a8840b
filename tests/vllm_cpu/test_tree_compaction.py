"""KV of an accepted path moves to the front, in every way vLLM's CPU writers pack a block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from speculators_ext.engines.vllm.attention.kv_layout import learn_layout, read_prefix
from speculators_ext.engines.vllm.attention.prefix_shadow import PrefixShadow
from speculators_ext.engines.vllm.trees.compaction_cpu import CompactorCPU, stack_caches
from speculators_ext.engines.vllm.trees.metadata import TreeRows, Verification

LAYERS, BLOCKS, HEADS, BLOCK, SIZE = 3, 8, 2, 32, 64


def write(isa: str, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor) -> None:
    from vllm import _custom_ops as ops

    halves = cache.view(*cache.shape[:2], 2 * cache.shape[2], -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)


def fake_layer(isa: str, cache: torch.Tensor) -> Any:
    """A layer as far as the compactor looks at one."""

    def readable(layer: Any, kv_cache: torch.Tensor, dtype: torch.dtype) -> Any:
        layout = learn_layout(kv_cache, lambda *args: write(isa, *args), dtype)
        return kv_cache, layout

    return SimpleNamespace(
        kv_cache=cache, impl=SimpleNamespace(readable=readable, is_fp8_kv_cache=False)
    )


def caches_of(dtype: torch.dtype, together: bool) -> list[torch.Tensor]:
    shape = (BLOCKS, HEADS, BLOCK, 2 * SIZE)
    if together:
        return list(torch.zeros(LAYERS, *shape, dtype=dtype))
    return [torch.zeros(shape, dtype=dtype) for _ in range(LAYERS)]


@pytest.mark.parametrize("together", [True, False], ids=["one allocation", "apart"])
@pytest.mark.parametrize(
    ("isa", "dtype"),
    [("vec", torch.float32), ("vec16", torch.bfloat16), ("amx", torch.bfloat16)],
)
def test_paths_move_to_the_front(isa: str, dtype: torch.dtype, together: bool) -> None:
    """Catches a row overwritten before it was read, a wrong block, a layer left out."""
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no AMX")
    generator = torch.Generator().manual_seed(0)
    caches = caches_of(dtype, together)
    tables = torch.tensor([[5, 2, 7, 1], [0, 6, 3, 4]], dtype=torch.int32)
    length = 4 * BLOCK
    sides: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for cache in caches:
        sides.append([])
        for table in tables:
            pair = torch.randn(2, length, HEADS, SIZE, generator=generator).to(dtype)
            slots = (table.long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
            write(isa, pair[0], pair[1], cache, slots)
            sides[-1].append((pair[0], pair[1]))
    prefix_lens, kept = [BLOCK - 3, 2 * BLOCK - 1], [[0, 2, 3, 7], [0, 1, 5]]
    nothing = torch.zeros(0)
    trees = [TreeRows(str(i), i, slice(0, 9), prefix_lens[i], nothing, nothing) for i in range(2)]
    step = Verification(trees, (tables,), PrefixShadow())
    step.paths = torch.tensor([[*path, *[-1] * (5 - len(path))] for path in kept])
    names = [f"layer {index}" for index in range(LAYERS)]
    layers = {name: fake_layer(isa, cache) for name, cache in zip(names, caches, strict=True)}
    compact = CompactorCPU(layers, dict.fromkeys(names, 0), dtype)
    compact(step, torch.tensor([len(path) for path in kept]))
    for cache, layer, pairs in zip(caches, layers.values(), sides, strict=True):
        _, layout = layer.impl.readable(layer, cache, dtype)
        for request, (table, pair) in enumerate(zip(tables, pairs, strict=True)):
            places = list(range(length))
            start, path = prefix_lens[request], kept[request]
            places[start : start + len(path)] = [start + row for row in path]
            got = read_prefix(cache, layout, table, 0, length)
            for mine, written in zip(got, pair, strict=True):
                assert torch.equal(mine, written[places].transpose(0, 1))


def test_caches_of_one_allocation_are_one_view() -> None:
    """Catches a view over memory that lies between or beyond the caches."""
    apart = caches_of(torch.float32, together=False)
    assert len(stack_caches(apart)) == LAYERS
    uneven = list(torch.arange(5 * 2 * 1 * 4 * 8).float().view(5, 2, 1, 4, 8))
    assert len(stack_caches([uneven[0], uneven[1], uneven[4]])) == 3
    [view] = stack_caches([uneven[4], uneven[0], uneven[2]])
    assert torch.equal(view, torch.stack([uneven[i] for i in (0, 2, 4)]).view(view.shape))
