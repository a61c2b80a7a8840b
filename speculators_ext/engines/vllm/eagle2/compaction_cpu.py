"""Moves the KV of an accepted path to the front, in vLLM's CPU cache whatever way it packs blocks.

A node's KV lies at the slot of its row; the next step expects it at the slot of its depth. A path
whose rows are 0, 1, 2, ... is in place already and moves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from speculators_ext.engines.vllm.eagle2.trees import TreeRows, Verification
    from speculators_ext.engines.vllm.kv_layout import BlockLayout

__all__ = ["CompactorCPU"]


class CompactorCPU:
    """Compacts the caches of the target's layers.

    Args:
        layers: the target's attention layers, by name, their caches bound.
        group_of: cache group of each layer's name.
        dtype: of the keys and values the layers write.
    """

    def __init__(
        self, layers: Iterable[tuple[str, Any]], group_of: dict[str, int], dtype: torch.dtype
    ) -> None:
        self._layers = [(layer, group_of[name]) for name, layer in layers]
        self._dtype = dtype

    def __call__(self, step: Verification, num_sampled: torch.Tensor) -> None:
        """Compact every tree of the step whose path is not a prefix of its rows."""
        assert step.paths is not None
        kept = num_sampled.tolist()
        moves = []
        for tree in step.trees:
            path = step.paths[tree.request, : kept[tree.request]].tolist()
            if path != list(range(len(path))):
                moves.append((tree, path))
        for layer, group in self._layers if moves else ():
            cache, layout = layer.impl.readable(layer, layer.kv_cache, self._dtype)
            table = step.block_tables[group]
            for tree, path in moves:
                _move(cache, layout, table[tree.request], tree, path)


def _move(
    kv_cache: torch.Tensor,
    layout: BlockLayout,
    block_table: torch.Tensor,
    tree: TreeRows,
    path: list[int],
) -> None:
    """All rows are read before one is written: a place may be both a source and a goal."""
    halves = kv_cache.view(*kv_cache.shape[:2], 2, -1)
    places = tree.prefix_len + torch.tensor([path, list(range(len(path)))])
    blocks = block_table[places // layout.block_size].long()
    offsets = places % layout.block_size
    for side, order in enumerate((layout.key_order, layout.value_order)):
        elements = order.view(layout.block_size, layout.head_size)[offsets]
        # [moves, heads, head_size], advanced indices around a slice come first.
        rows = halves[blocks[0].unsqueeze(1), :, side, elements[0]]
        halves[blocks[1].unsqueeze(1), :, side, elements[1]] = rows
