"""Moves the KV of accepted paths to the front, in all layers and caches of a GPU in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.vllm.attention.packed_rows_gpu import key_value_views
from speculators_ext.kernels.compact_kv import compact_kv
from speculators_ext.kernels.compact_kv_ref import CacheTable

if TYPE_CHECKING:
    import torch

    from speculators_ext.engines.vllm.trees.metadata import Verification

__all__ = ["CompactorGPU"]


class CompactorGPU:
    """Compacts the caches of the target's layers.

    Args:
        layers: the target's attention layers by name.
        group_of: cache group of each layer's name.
    """

    def __init__(self, layers: dict[str, Any], group_of: dict[str, int]) -> None:
        self._layers = layers
        self._group_of = group_of
        self._tables: dict[int, CacheTable] = {}

    def __call__(self, step: Verification, num_sampled: torch.Tensor) -> None:
        """Compact every tree of the step; the host does not wait."""
        assert step.paths is not None
        flat = step.flat(step.paths.device)
        paths = step.paths[flat.requests]
        accepted = (num_sampled[flat.requests] - 1).int()
        for group, table in (self._tables or self._make_tables()).items():
            block_table = step.block_tables[group][flat.requests]
            compact_kv(table, block_table, flat.prefix_lens, paths, accepted)

    def _make_tables(self) -> dict[int, CacheTable]:
        """Look at the caches once they are bound."""
        views: dict[int, list[torch.Tensor]] = {}
        for name, layer in self._layers.items():
            views.setdefault(self._group_of[name], []).extend(
                key_value_views(layer.kv_cache, layer.impl.head_size)
            )
        self._tables = {group: CacheTable.of(caches) for group, caches in views.items()}
        return self._tables
