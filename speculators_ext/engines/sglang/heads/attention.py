"""Attention of a draft model's rows: of trees that grow, and of what its cache is filled with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from speculators_ext.engines.sglang.attention import by_head
from speculators_ext.kernels.tree_attention_ref import tree_attention_gathered_ref, tree_bias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from speculators_ext.proposers.eagle2 import Level

__all__ = ["ExtendBackend", "LevelBackend"]


class ExtendBackend:
    """Stands in for a draft runner's attention backend: consecutive rows of some requests.

    Each row is written to its slot of the pool and sees all positions up to its own.

    Args:
        pool: the draft model's KV pool.
        slots: for each request, int64 [p + n], its prefix's and its n rows' slots.
        counts: n of each request; the rows stand one request after another.
    """

    def __init__(self, pool: Any, slots: Sequence[Tensor], counts: Sequence[int]) -> None:
        self.token_to_kv_pool = pool
        self._slots = slots
        self._counts = counts

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
        """Attend and write: [n, ...] -> [n, heads * v_head_dim]."""
        query, key, value = by_head(layer, q, k, v)
        where = KVWriteLoc(forward_batch.out_cache_loc, None)
        self.token_to_kv_pool.set_kv_buffer(layer, where, key, value)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        parts = []
        pieces = zip(query.split(list(self._counts)), self._slots, strict=True)
        for rows, slots in pieces:
            n, length = len(rows), len(slots)
            at = torch.arange(length, device=rows.device)
            sees = at <= at[length - n :].unsqueeze(1)
            out = torch.nn.functional.scaled_dot_product_attention(
                rows.transpose(0, 1).unsqueeze(0),
                keys[slots].to(rows.dtype).transpose(0, 1).unsqueeze(0),
                values[slots].to(rows.dtype).transpose(0, 1).unsqueeze(0),
                attn_mask=sees,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts).flatten(1)


class LevelBackend:
    """Stands in for a draft runner's attention backend while trees grow.

    The nodes' keys and values are kept here and never written to the pool: only what is verified
    gets slots.

    Args:
        pool: the draft model's KV pool.
        slots: for each request, int64 [p], the slots of its prefix.
        num_places: nodes a request may run in a round.

    Attributes:
        level: the nodes that `forward` attends.
    """

    def __init__(self, pool: Any, slots: Sequence[Tensor], num_places: int) -> None:
        self.token_to_kv_pool = pool
        self.level: Level | None = None
        self._slots = slots
        self._num_places = num_places
        self._grown: dict[int, list[tuple[Tensor, Tensor]]] = {}

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
        """Attend the nodes of ``level``: [n, ...] -> [n, heads * v_head_dim]."""
        level = self.level
        assert level is not None
        query, key, value = by_head(layer, q, k, v)
        group = layer.tp_q_head_num // layer.tp_k_head_num
        width = level.sees.shape[1]
        out = query.new_empty(*query.shape[:2], layer.v_head_dim)
        counts = torch.bincount(level.requests, minlength=len(self._slots)).tolist()
        start = 0
        for n, slots, (keys, values) in zip(
            counts, self._slots, self._memory(layer, query.dtype), strict=True
        ):
            own, stop = slice(start, start + n), len(slots) + width
            start += n
            if not n:
                continue
            at = len(slots) + level.places[own]
            keys[:, at] = key[own].transpose(0, 1)
            values[:, at] = value[own].transpose(0, 1)
            bias = tree_bias(level.sees[own], group, len(slots), query.dtype)
            out[own] = tree_attention_gathered_ref(
                query[own], keys[:, :stop], values[:, :stop], bias, layer.scaling
            )
        return out.flatten(1)

    def _memory(self, layer: Any, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """For each request keys and values [kv_heads, p + places, size]: the prefix, then nodes."""
        if layer.layer_id not in self._grown:
            pools = (
                self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            )
            self._grown[layer.layer_id] = [
                self._gather(pools, slots, dtype) for slots in self._slots
            ]
        return self._grown[layer.layer_id]

    def _gather(
        self, pools: tuple[Tensor, Tensor], slots: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        def one(pool: Tensor) -> Tensor:
            side = pool.new_zeros(
                pool.shape[1], len(slots) + self._num_places, pool.shape[2], dtype=dtype
            )
            side[:, : len(slots)] = pool[slots].to(dtype).transpose(0, 1)
            return side

        return one(pools[0]), one(pools[1])
