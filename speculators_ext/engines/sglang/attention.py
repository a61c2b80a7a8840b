"""Attention of rows that see a request's cached prefix and some of each other, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from speculators_ext.kernels.tree_attention_ref import tree_attention_ref

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["PackedRowsBackend", "attend_prefix", "by_head"]


def by_head(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as [n, heads, size]."""
    return (
        q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
        k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
        v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
    )


def attend_prefix(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cached: tuple[Tensor, Tensor],
    sees: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    """Attend the rows of one request.

    Args:
        layer: SGLang's ``RadixAttention``: scale and sliding window.
        query: [n, heads, head_dim].
        key: [L, kv_heads, head_dim], of what rows may see beside the prefix.
        value: [L, kv_heads, v_head_dim].
        cached: keys and values of the prefix, [p, kv_heads, ...] each, position 0 first.
        sees: bool [n, L].
        positions: int64 [n] with L = n, where the rows stand, for layers with a sliding window.

    Returns:
        [n, heads, v_head_dim] in the query's dtype.
    """
    keys, values = (part.to(query.dtype).transpose(0, 1) for part in cached)
    window = layer.sliding_window_size
    if window is None or window < 0 or positions is None:
        return tree_attention_ref(query, key, value, keys, values, sees, layer.scaling)
    at = torch.cat([torch.arange(keys.shape[1], device=positions.device), positions])
    near = at >= positions.unsqueeze(1) - window
    sees = torch.cat([sees.new_ones(len(sees), keys.shape[1]), sees], dim=1) & near
    key = torch.cat([keys.transpose(0, 1), key])
    value = torch.cat([values.transpose(0, 1), value])
    none = keys[:, :0], values[:, :0]
    return tree_attention_ref(query, key, value, *none, sees, layer.scaling)


class PackedRowsBackend:
    """Stands in for SGLang's attention backend while a layer search runs.

    The same number of rows for each request; all of a request's rows share a position, see its
    prefix and themselves only, and write nothing.

    Args:
        pool: SGLang's KV pool.
        slots: for each request, int64 [p], the cache slots of its prefix.
    """

    def __init__(self, pool: Any, slots: Sequence[Tensor]) -> None:
        self.token_to_kv_pool = pool
        self._slots = slots

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attend packed rows: [R * W, ...] -> [R * W, heads * v_head_dim]."""
        width = q.shape[0] // len(self._slots)
        itself = torch.eye(width, dtype=torch.bool, device=q.device)
        query, key, value = by_head(layer, q, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        parts = []
        for request, slots in enumerate(self._slots):
            own = slice(request * width, request * width + width)
            positions = torch.full((width,), slots.shape[0], device=q.device)
            cached = (keys[slots], values[slots])
            parts.append(
                attend_prefix(layer, query[own], key[own], value[own], cached, itself, positions)
            )
        return torch.cat(parts).flatten(1)
