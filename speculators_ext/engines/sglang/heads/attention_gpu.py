"""Attention of trees that grow, by our kernel: on GPUs, and in Triton's interpreter.

What `LevelBackend` does, but a request's prefix is read where it is and never gathered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.utils import get_device_core_count

from speculators_ext.engines.sglang.attention import by_head
from speculators_ext.kernels.tree_attention import choose_splits, tree_attention
from speculators_ext.kernels.tree_attention_ref import LocalRows, TreeBatch, pack_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from speculators_ext.proposers.eagle2 import Level

__all__ = ["KernelLevelBackend"]


class KernelLevelBackend:
    """Stands in for a draft runner's attention backend while trees grow.

    Args:
        pool: the draft model's KV pool.
        slots: for each request, int64 [p], the slots of its prefix.
        num_places: nodes a request may run in a round.

    Attributes:
        level: the nodes that `forward` attends; request after request.
    """

    def __init__(self, pool: Any, slots: Sequence[Tensor], num_places: int) -> None:
        self.token_to_kv_pool = pool
        self.level: Level | None = None
        self._places = num_places
        self._longest = max(len(own) for own in slots)
        device = slots[0].device
        self._table = torch.nn.utils.rnn.pad_sequence(list(slots), batch_first=True).int()
        self._lengths = torch.tensor([len(own) for own in slots], device=device)
        self._starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=device)
        self._grown: dict[int, tuple[Tensor, Tensor]] = {}

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
        level, places = self.level, self._places
        assert level is not None
        query, key, value = by_head(layer, q, k, v)
        kept = self._grown.get(layer.layer_id)
        if kept is None:
            shape = ((len(self._starts) - 1) * places, *key.shape[1:])
            kept = self._grown[layer.layer_id] = key.new_zeros(shape), value.new_zeros(shape)
        at = level.requests * places + level.places
        kept[0][at], kept[1][at] = key, value
        sees = torch.nn.functional.pad(level.sees, (0, places - level.sees.shape[1]))
        trees = TreeBatch(
            self._table,
            self._lengths,
            torch.searchsorted(level.requests, self._starts.long()).int(),
            pack_words(sees),
            min(len(query), places),
        )
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        cores = max(1, get_device_core_count(query.device.index or 0))
        return tree_attention(
            query,
            keys.unsqueeze(1),  # a block of the kernel is a slot
            values.unsqueeze(1),
            trees,
            scale=layer.scaling,
            local=LocalRows(*kept, self._starts * places),
            num_splits=choose_splits(len(self._lengths), keys.shape[1], self._longest, cores),
        ).flatten(1)
