"""Attention of packed rows by our kernel: on GPUs, and in Triton's interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from speculators_ext.engines.sglang.attention import PackedRowsBackend, by_head
from speculators_ext.kernels.packed_attention import packed_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["KernelPackedRowsBackend", "reads_pool"]

_HEAD_SIZES = range(32, 257)
"""What our kernels take."""


def reads_pool(pool: Any) -> bool:
    """Whether our kernels read what ``pool`` holds."""
    keys = pool.get_key_buffer(pool.start_layer)
    values = pool.get_value_buffer(pool.start_layer)
    return keys.shape == values.shape and keys.dim() == 3 and keys.shape[2] in _HEAD_SIZES


class KernelPackedRowsBackend(PackedRowsBackend):
    """What `PackedRowsBackend` does, in one launch that reads prefixes where they are.

    Args:
        pool: SGLang's KV pool.
        slots: for each request, int64 [p], the cache slots of its prefix.
    """

    def __init__(self, pool: Any, slots: Sequence[Tensor]) -> None:
        super().__init__(pool, slots)
        self._table = torch.nn.utils.rnn.pad_sequence(list(slots), batch_first=True).int()
        lengths = [len(own) for own in slots]
        self._lengths = torch.tensor(lengths, device=self._table.device)

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
        if layer.sliding_window_size is not None and layer.sliding_window_size >= 0:
            return super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        return packed_attention(
            *by_head(layer, q, k, v),
            keys.unsqueeze(1),  # a block of the kernel is a slot
            values.unsqueeze(1),
            self._table,
            self._lengths,
            scale=layer.scaling,
        ).flatten(1)
