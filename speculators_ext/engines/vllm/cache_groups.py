"""Which group of vLLM's caches a layer's keys and values are in: groups have their own blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["group_of_layers"]


def group_of_layers(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Index of the cache group (and so of the block table) of every layer, by the layer's name."""
    return {
        name: index
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    }
