"""The plain copy of a prefix stays what the cache holds, however a request moves on."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")
from vllm import _custom_ops as ops

from speculators_ext.engines.vllm.attention.kv_layout import learn_layout, read_prefix
from speculators_ext.engines.vllm.attention.prefix_shadow import PrefixShadow

BLOCK, HEADS, SIZE = 32, 2, 64
TABLE = torch.tensor([5, 0, 3, 7, 1, 2], dtype=torch.int32)


def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    halves = cache.view(*cache.shape[:2], 2 * cache.shape[2], -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, "vec")


def doubled(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return 2 * key, 2 * value


@pytest.mark.parametrize(
    "prefix_lens",
    [(40, 43, 44, 60, 65, 69, 160), (0, 1, 33), (100, 103, 90, 95), (31, 32, 33), (150, 7)],
    ids=["grows over blocks", "from nothing", "rolled back", "block edge", "starts anew"],
)
def test_rows_are_the_cache(prefix_lens: tuple[int, ...]) -> None:
    """A position skipped, read from another block, or overwritten by the caller's own rows."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(8, HEADS, BLOCK, 2 * SIZE, generator=generator)
    layout = learn_layout(cache, write, torch.float32)
    shadow = PrefixShadow()
    for prefix_len in prefix_lens:
        keys, values = shadow.rows("r", "layer", cache, layout, TABLE, prefix_len, 9, doubled)
        assert keys.shape == values.shape == (HEADS, prefix_len + 9, SIZE)
        want = read_prefix(cache, layout, TABLE, 0, prefix_len)
        assert torch.equal(keys[:, :prefix_len], 2 * want[0])
        assert torch.equal(values[:, :prefix_len], 2 * want[1])
        keys[:, prefix_len:] = 7.0
        values[:, prefix_len:] = 7.0


def test_owners_and_layers_are_apart() -> None:
    """A copy found under another request or layer, or one that outlives its request."""
    caches = [torch.full((8, HEADS, BLOCK, 2 * SIZE), float(n)) for n in range(3)]
    layout = learn_layout(caches[0].clone(), write, torch.float32)
    shadow = PrefixShadow()
    for owner, layer, cache in (("a", "0", 0), ("a", "1", 1), ("b", "0", 2)):
        keys, _ = shadow.rows(owner, layer, caches[cache], layout, TABLE, 40, 1, doubled)
        assert (keys[:, :40] == 2.0 * cache).all()
    shadow.keep_only(["a"])
    caches[2].fill_(5.0)
    keys, _ = shadow.rows("b", "0", caches[2], layout, TABLE, 40, 1, doubled)
    assert (keys[:, :40] == 10.0).all()
    shadow.keep_only(["b"])
    caches[0].fill_(6.0)
    keys, _ = shadow.rows("a", "0", caches[0], layout, TABLE, 40, 1, doubled)
    assert (keys[:, :40] == 12.0).all()


@pytest.mark.parametrize("path", [[0, 1, 2], [0, 2, 5], [0, 1, 4, 6], [0]])
def test_rows_that_stay_move_to_the_front(path: list[int]) -> None:
    """Catches rows of another layer or side moved, or one overwritten before it is read."""
    cache = torch.zeros(8, HEADS, BLOCK, 2 * SIZE)
    layout = learn_layout(cache.clone(), write, torch.float32)
    shadow, prefix_len, marks = PrefixShadow(), 40, {}
    for number, layer in enumerate("abcde"):
        sides = shadow.rows("r", layer, cache, layout, TABLE, prefix_len, 7, doubled)
        for side, rows in enumerate(sides):
            marks[layer, side] = torch.arange(7.0).view(1, 7, 1) + 10 * number + 100 * side
            rows[:, prefix_len:] = marks[layer, side]
    shadow.keep("r", "abd", prefix_len, path)  # the others are read from the cache again
    until = prefix_len + len(path)
    for layer in "abcde":
        sides = shadow.rows("r", layer, cache, layout, TABLE, until, 3, doubled)
        for side, rows in enumerate(sides):
            want = marks[layer, side][:, path] if layer in "abd" else torch.zeros(1, len(path), 1)
            assert (rows[:, prefix_len:until] == want).all(), (layer, side)
            assert (rows[:, :prefix_len] == 0).all()
