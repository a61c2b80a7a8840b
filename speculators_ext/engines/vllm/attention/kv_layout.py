"""Read vLLM's CPU KV cache, whatever way the instruction set in use packs a block.

The CPU kernels store a block's keys transposed, pair-interleaved for AMX, and so on. Instead of a
table of layouts, the layout is learned once: a scratch block is filled through vLLM's own writer
with values that spell each element's index, and what stands where is read back. Every layout seen
is a reordering of digits of the index (a transpose, pairs interleaved, tiles), so a block is read
as one strided copy; a layout that is not falls back to an index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BlockLayout", "learn_layout", "read_prefix"]

_BASE = 8
"""Digits 0..7 are exact in every cache dtype, fp8 included."""

_FEW = 16
"""Up to so many positions are picked one by one; more are read with their whole blocks."""


class Strides(NamedTuple):
    """A permutation as a view: ``sizes`` multiply to the block's elements, first varies slowest."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class BlockLayout(NamedTuple):
    """Where the elements of one head of one block lie.

    ``key_order`` / ``value_order``: [block_size * head_size] int64; entry ``offset * head_size +
    dim`` is the element's place in the head's half of the block. ``key_strides`` /
    ``value_strides``: the same as a view, None where no view has that order.
    """

    block_size: int
    head_size: int
    key_order: torch.Tensor
    value_order: torch.Tensor
    key_strides: Strides | None = None
    value_strides: Strides | None = None


def learn_layout(
    kv_cache: torch.Tensor,
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any],
    dtype: torch.dtype,
) -> BlockLayout:
    """Learn the layout of a cache from its writer.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], a layer's cache.
        write: ``write(key, value, cache, slots)`` with key and value [tokens, heads, head_size].
        dtype: dtype of the keys and values the layer writes.

    Raises:
        RuntimeError: the writer's layout is not a permutation of the block (padding, or a packing
            that mixes keys with values).
    """
    _, num_heads, block_size, row = kv_cache.shape
    head_size = row // 2
    count = block_size * head_size
    scratch = torch.zeros_like(kv_cache[:1])
    slots = torch.arange(block_size, dtype=torch.int64)
    places = torch.zeros(2 * count, dtype=torch.int64)
    index = torch.arange(count)
    scale = 1
    while scale < count:
        digit = ((index // scale) % _BASE).to(dtype).view(block_size, 1, head_size)
        digit = digit.expand(-1, num_heads, -1).contiguous()
        write(digit, digit, scratch, slots)
        places += scale * scratch[0, 0].reshape(-1).float().round().long()
        scale *= _BASE
    key_places, value_places = places[:count], places[count:]
    key_order, value_order = _invert(key_places), _invert(value_places)
    sizes = (block_size, head_size)
    return BlockLayout(
        block_size,
        head_size,
        key_order,
        value_order,
        as_strides(key_order, sizes),
        as_strides(value_order, sizes),
    )


def _invert(places: torch.Tensor) -> torch.Tensor:
    order = torch.argsort(places)
    if not torch.equal(places[order], torch.arange(places.numel())):
        raise RuntimeError("the KV cache of this backend is not a permutation of its elements")
    return order


def as_strides(order: torch.Tensor, sizes: tuple[int, ...]) -> Strides | None:
    """The view that has this order, found by giving every prime factor of the sizes a stride.

    Args:
        order: [prod(sizes)] int64, a permutation.
        sizes: of the plain, row-major index that ``order`` is indexed by.

    Returns:
        The view with adjacent factors merged, or None where the order is no view.
    """
    factors = [factor for size in sizes for factor in _prime_factors(size)]
    merged: list[tuple[int, int]] = []
    rest = order.numel()
    for factor in factors:
        rest //= factor
        stride = int(order[rest])
        if merged and merged[-1][1] == factor * stride:
            factor *= merged.pop()[0]
        merged.append((factor, stride))
    view = Strides(tuple(size for size, _ in merged), tuple(stride for _, stride in merged))
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(*view, strict=True):
        places = (places.unsqueeze(-1) + stride * torch.arange(size)).view(-1)
    return view if torch.equal(places, order) else None


def _prime_factors(number: int) -> list[int]:
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors


def read_prefix(
    kv_cache: torch.Tensor,
    layout: BlockLayout,
    block_table: torch.Tensor,
    start: int,
    stop: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions ``start`` to ``stop`` of one request.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].
        layout: what ``learn_layout`` found for this cache.
        block_table: [max_blocks] int32, the request's blocks.
        start: first position (a sliding window's first, else 0).
        stop: one past the last position.

    Returns:
        Two tensors [num_kv_heads, stop - start, head_size] in the cache's dtype.
    """
    first_block = start // layout.block_size
    blocks = block_table[first_block : -(-stop // layout.block_size)].tolist()
    halves = kv_cache.view(*kv_cache.shape[:2], 2, -1)
    begin = start - first_block * layout.block_size
    if stop - start <= _FEW and len(blocks) == 1:
        span = slice(begin * layout.head_size, (begin + stop - start) * layout.head_size)
        block = halves[blocks[0]]
        keys = block[:, 0].index_select(-1, layout.key_order[span])
        values = block[:, 1].index_select(-1, layout.value_order[span])
        shape = (block.shape[0], stop - start, layout.head_size)
        return keys.view(shape), values.view(shape)
    end = begin + stop - start
    sides = (layout.key_order, layout.key_strides), (layout.value_order, layout.value_strides)
    keys, values = (
        _read_blocks(halves[:, :, side], blocks, layout, end, order, view)
        for side, (order, view) in enumerate(sides)
    )
    return keys[:, begin:end], values[:, begin:end]


def _read_blocks(
    half: torch.Tensor,
    blocks: list[int],
    layout: BlockLayout,
    end: int,
    order: torch.Tensor,
    view: Strides | None,
) -> torch.Tensor:
    """Blocks of one half of the cache, [num_blocks, heads, elements], as [heads, n, head_size].

    Only the first ``end`` of the n positions are sure to be read.
    """
    num_heads, size = half.shape[1], layout.block_size
    out = half.new_empty(num_heads, len(blocks) * size, layout.head_size)
    for place, block in enumerate(blocks):
        rows, packed = out[:, place * size : (place + 1) * size], half[block]
        if view is None:
            rows.copy_(packed.index_select(-1, order).view(rows.shape))
        else:
            _strided_copy(rows, packed, view, end - place * size)
    return out


def _strided_copy(rows: torch.Tensor, packed: torch.Tensor, view: Strides, count: int) -> None:
    """The first ``count`` positions of a block (the rest may be left out).

    Args:
        rows: [heads, block_size, head_size], written.
        packed: [heads, block_size * head_size], read.
        view: plain order as a view of ``packed``.
        count: positions asked for; more than the block has is all of it.
    """
    size, pair = rows.shape[1], 2 if packed.element_size() == 2 else 1
    if pair > 1 and view.sizes[-1] % pair == 0 and view.strides[-1] == 1:
        # AMX keeps keys in pairs; moved as one word each they take half the time.
        whole = (*view.strides[:-1], packed.stride(0), packed.storage_offset())
        if all(stride % pair == 0 for stride in whole):
            rows, packed = rows.view(torch.int32), packed.view(torch.int32)
            sizes = (*view.sizes[:-1], view.sizes[-1] // pair)
            strides = (*(stride // pair for stride in view.strides[:-1]), 1)
            view = Strides(sizes, strides)
    heads = packed.shape[0]
    source = packed.as_strided(
        (heads, *view.sizes), (packed.stride(0), *view.strides), packed.storage_offset()
    )
    # The slowest dimension counts positions, a few or a part of one at a time.
    steps = -(-count * view.sizes[0] // size)
    rows.view(heads, *view.sizes)[:, :steps].copy_(source[:, :steps])
