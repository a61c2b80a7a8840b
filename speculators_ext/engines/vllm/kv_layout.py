"""Read vLLM's CPU KV cache, whatever way the instruction set in use packs a block.

The CPU kernels store a block's keys transposed, pair-interleaved for AMX, and so on. Instead of a
table of layouts, the layout is learned once: a scratch block is filled through vLLM's own writer
with values that spell each element's index, and what stands where is read back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BlockLayout", "learn_layout", "read_prefix"]

_BASE = 8
"""Digits 0..7 are exact in every cache dtype, fp8 included."""


class BlockLayout(NamedTuple):
    """Where the elements of one head of one block lie.

    ``key_order`` / ``value_order``: [block_size * head_size] int64; entry ``offset * head_size +
    dim`` is the element's place in the head's half of the block.
    """

    block_size: int
    head_size: int
    key_order: torch.Tensor
    value_order: torch.Tensor


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
    return BlockLayout(block_size, head_size, key_order, value_order)


def _invert(places: torch.Tensor) -> torch.Tensor:
    order = torch.argsort(places)
    if not torch.equal(places[order], torch.arange(places.numel())):
        raise RuntimeError("the KV cache of this backend is not a permutation of its elements")
    return order


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
    blocks = block_table[first_block : -(-stop // layout.block_size)].long()
    num_heads = kv_cache.shape[1]
    gathered = kv_cache[blocks].view(len(blocks), num_heads, 2, -1)
    begin = start - first_block * layout.block_size
    length = stop - start
    sides = []
    for side, order in enumerate((layout.key_order, layout.value_order)):
        flat = gathered[:, :, side].index_select(-1, order)
        rows = flat.view(len(blocks), num_heads, layout.block_size, layout.head_size)
        rows = rows.transpose(0, 1).reshape(num_heads, -1, layout.head_size)
        sides.append(rows[:, begin : begin + length])
    return sides[0], sides[1]
