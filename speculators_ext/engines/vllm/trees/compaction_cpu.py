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


class Runs(NamedTuple):
    """Where the elements of one position lie in a block's half.

    Attributes:
        starts: by the position's offset in its block.
        number: of runs.
        length: elements of a run.
        apart: places between two runs.
        step: places between two elements of a run.
    """

    starts: list[int]
    number: int
    length: int
    apart: int
    step: int


class _Stack(NamedTuple):
    """Caches that pack blocks alike and share their block tables."""

    caches: torch.Tensor  # [layers, num_blocks, num_kv_heads, 2, block_size * head_size]
    layout: BlockLayout
    runs: tuple[Runs, Runs]  # of keys, of values
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
        for tree in step.trees:
            path = step.paths[tree.request, : kept[tree.request]].tolist()
            step.shadow.keep(tree.owner, self._layers, tree.prefix_len, path)
            if path != list(range(len(path))):
                for stack in self._stacks or self._stack():
                    _move(stack, step.block_tables[stack.group], tree, path)

    def _stack(self) -> list[_Stack]:
        """Look at the caches once they are bound."""
        alike: dict[Any, list[tuple[torch.Tensor, BlockLayout]]] = {}
        for name, layer in self._layers.items():
            cache, layout = layer.impl.readable(layer, layer.kv_cache, self._dtype)
            key = (self._group_of[name], cache.shape, cache.stride())
            alike.setdefault(key, []).append((cache, layout))
        for (group, *_), members in alike.items():
            layout = members[0][1]
            shape = (layout.block_size, layout.head_size)
            runs = (
                find_runs(layout.key_order.view(shape)),
                find_runs(layout.value_order.view(shape)),
            )
            for caches in stack_caches([cache for cache, _ in members]):
                self._stacks.append(_Stack(caches, layout, runs, group))
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


def _move(stack: _Stack, block_tables: torch.Tensor, tree: TreeRows, path: list[int]) -> None:
    """Rows ascend and none is before its goal, so none is overwritten before it is read."""
    size, table = stack.layout.block_size, block_tables[tree.request]
    for goal, row in enumerate(path):
        if row == goal:
            continue
        places = [divmod(tree.prefix_len + place, size) for place in (row, goal)]
        for side in (0, 1):
            source, target = (
                _row(stack, int(table[block]), side, offset) for block, offset in places
            )
            target.copy_(source)


def _row(stack: _Stack, block: int, side: int, offset: int) -> torch.Tensor:
    """A position's keys (0) or values (1) in all layers, a view [layers, num_kv_heads, ...]."""
    half, runs = stack.caches[:, block, :, side], stack.runs[side]
    strides = (*half.stride()[:2], runs.apart, runs.step)
    start = half.storage_offset() + runs.starts[offset]
    return half.as_strided((*half.shape[:2], runs.number, runs.length), strides, start)


def find_runs(order: torch.Tensor) -> Runs:
    """How the elements of a position lie, [block_size, head_size] int64 places in a block.

    Raises:
        ValueError: not as runs of equal length, equally far apart, the same for all positions.
    """
    first = order[0]
    steps = first.diff()
    breaks = (steps != steps[0]).nonzero()
    length = int(breaks[0]) + 1 if len(breaks) else len(first)
    runs = Runs(
        order[:, 0].tolist(),
        len(first) // length,
        length,
        int(first[length] - first[0]) if length < len(first) else 0,
        int(steps[0]),
    )
    within = torch.arange(runs.number)[:, None] * runs.apart + torch.arange(length) * runs.step
    if len(first) % length or (order - order[:, :1] != within.flatten()).any():
        raise ValueError("the KV cache of this CPU packs a position in a way not known here")
    return runs
