"""Moves the KV of accepted paths to the front, in vLLM's CPU caches whatever way they pack blocks.

A node's KV lies at the slot of its row; the next step expects it at the slot of its depth. A path
whose rows are 0, 1, 2, ... is in place already and moves nothing.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculators_ext.engines.vllm.attention.kv_layout import BlockLayout
    from speculators_ext.engines.vllm.trees.metadata import TreeRows, Verification

__all__ = ["CompactorCPU", "stack_caches"]

Moves = list[tuple["TreeRows", list[int]]]


class _Stack(NamedTuple):
    """Caches that pack blocks alike and share their block tables."""

    caches: torch.Tensor  # [layers, num_blocks, num_kv_heads, 2, block_size * head_size]
    layout: BlockLayout
    group: int


class CompactorCPU:
    """Compacts the caches of the target's layers, and the plain copies of their prefixes.

    Args:
        layers: the target's attention layers by name.
        group_of: cache group of each layer's name.
        dtype: of the keys and values the layers write.
    """

    def __init__(
        self, layers: dict[str, Any], group_of: dict[str, int], dtype: torch.dtype
    ) -> None:
        self._layers = layers
        self._group_of = group_of
        self._dtype = dtype
        self._stacks: list[_Stack] = []

    def __call__(self, step: Verification, num_sampled: torch.Tensor) -> None:
        """Compact every tree of the step whose path is not a prefix of its rows."""
        assert step.paths is not None
        kept = num_sampled.tolist()
        moves: Moves = []
        for tree in step.trees:
            path = step.paths[tree.request, : kept[tree.request]].tolist()
            step.shadow.keep(tree.owner, self._layers, tree.prefix_len, path)
            if path != list(range(len(path))):
                moves.append((tree, path))
        if moves:
            for stack in self._stacks or self._stack():
                _move(stack, step.block_tables[stack.group], moves)

    def _stack(self) -> list[_Stack]:
        """Look at the caches once they are bound."""
        alike: dict[Any, list[tuple[torch.Tensor, BlockLayout]]] = {}
        for name, layer in self._layers.items():
            cache, layout = layer.impl.readable(layer, layer.kv_cache, self._dtype)
            key = (self._group_of[name], cache.shape, cache.stride())
            alike.setdefault(key, []).append((cache, layout))
        for (group, *_), members in alike.items():
            for caches in stack_caches([cache for cache, _ in members]):
                self._stacks.append(_Stack(caches, members[0][1], group))
        return self._stacks


def stack_caches(caches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """View equal caches as one tensor where they lie evenly spaced in one allocation.

    Args:
        caches: [num_blocks, num_kv_heads, block_size, 2 * head_size] each, of equal strides.

    Returns:
        One [layers, num_blocks, num_kv_heads, 2, block_size * head_size], or one for each layer.
    """
    ordered = sorted(caches, key=torch.Tensor.storage_offset)
    offsets = [cache.storage_offset() for cache in ordered]
    steps = {after - before for before, after in pairwise(offsets)}
    shared = {cache.untyped_storage().data_ptr() for cache in caches}
    halves = [cache.view(*cache.shape[:2], 2, -1) for cache in ordered]
    if len(shared) > 1 or len(steps) != 1 or not steps.isdisjoint({0}):
        return [half.unsqueeze(0) for half in halves]
    first = halves[0]
    size, stride = (len(caches), *first.shape), (*steps, *first.stride())
    return [first.as_strided(size, stride, first.storage_offset())]


def _move(stack: _Stack, block_tables: torch.Tensor, moves: Moves) -> None:
    """All places are read before one is written: a place may be both a source and a goal."""
    layout = stack.layout
    blocks, offsets = [], []
    for tree, path in moves:
        moved = [(row, depth) for depth, row in enumerate(path) if row != depth]
        places = tree.prefix_len + torch.tensor(moved).T
        blocks.append(block_tables[tree.request][places // layout.block_size].long())
        offsets.append(places % layout.block_size)
    block, offset = torch.cat(blocks, dim=1), torch.cat(offsets, dim=1)
    source, goal = block.unsqueeze(-1)
    for side, order in enumerate((layout.key_order, layout.value_order)):
        elements = order.view(layout.block_size, layout.head_size)[offset]
        # Indices around a slice: [moves, head_size, layers, num_kv_heads].
        rows = stack.caches[:, source, :, side, elements[0]]
        stack.caches[:, goal, :, side, elements[1]] = rows
