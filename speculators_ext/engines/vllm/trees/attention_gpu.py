"""Hook 6 for draft trees on GPUs: vLLM's FlashAttention and Triton backends, told of draft trees.

Rows of a tree are already in the layer's cache, at the slots of their rows; our kernel attends them
under the mask, all other rows of the batch go vLLM's own way. Nodes of a draft level are in no
cache: their keys and values stay in the round's memory. Checked in Triton's interpreter against
vLLM's own Triton backend; **not yet run on a GPU**.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from speculators_ext.engines.vllm.attention.packed_rows_gpu import (
    PackedRowsGPUImpl,
    key_value_views,
)
from speculators_ext.engines.vllm.trees.metadata import TREES, DraftLevel, pack_words
from speculators_ext.kernels.packed_attention_ref import DequantScales
from speculators_ext.kernels.tree_attention import choose_splits, tree_attention
from speculators_ext.kernels.tree_attention_ref import LocalRows, TreeBatch

if TYPE_CHECKING:
    from speculators_ext.engines.vllm.trees.metadata import Verification

__all__ = ["TreeGPUImpl"]


class TreeGPUImpl(PackedRowsGPUImpl):
    """Mixed in before vLLM's implementation class."""

    def obstacle(self, layer: Any) -> str | None:
        """What of this layer a tree cannot reproduce, or None."""
        return None if self.packs_rows(layer) else "its attention has terms our kernel lacks"

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """vLLM's forward, tree rows and draft levels apart."""
        if isinstance(attn_metadata, DraftLevel):
            return self._attend_level(layer, query, key, value, kv_cache, attn_metadata, output)
        step: Verification | None = getattr(attn_metadata, TREES, None)
        if step is None or step.num_rows < attn_metadata.num_actual_tokens:
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        if step is None:
            return output
        flat = step.flat(query.device)
        trees = TreeBatch(
            attn_metadata.block_table[flat.requests], flat.prefix_lens, flat.cu_nodes, flat.words,
            flat.max_nodes, flat.depths,
        )  # fmt: skip
        longest = max(tree.prefix_len for tree in step.trees)
        output[flat.rows] = self._attend(layer, query[flat.rows], kv_cache, trees, longest)
        return output

    def _attend_level(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, level: DraftLevel, output: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        requests, places = len(level.rows), level.max_places
        kept = level.memory.get(layer.layer_name)
        if kept is None:
            shape = (requests * places, *key.shape[1:])
            kept = level.memory[layer.layer_name] = (key.new_zeros(shape), value.new_zeros(shape))
        at = level.requests * places + level.places
        kept[0][at], kept[1][at] = key, value
        sizes = {own.stop - own.start for own in level.rows}
        requests_before = torch.arange(requests + 1, dtype=torch.int32, device=query.device)
        if len(sizes) == 1:  # as growth on a GPU has it, where nothing is copied from the host
            ends = requests_before * max(sizes)
        else:
            stops = [0, *(own.stop for own in level.rows)]
            ends = torch.tensor(stops, dtype=torch.int32, device=query.device)
        sees = torch.nn.functional.pad(level.sees, (0, places - level.sees.shape[1]))
        depths = torch.arange(places, dtype=torch.int32, device=query.device) // level.topk
        local = LocalRows(*kept, requests_before * places, depths.repeat(requests))
        trees = TreeBatch(
            level.block_table, level.prefix, ends, pack_words(sees), max(sizes),
            depths.new_full((len(query),), level.depth - 1),
        )  # fmt: skip
        longest = max(level.prefix_lens)
        output.copy_(self._attend(layer, query, kv_cache, trees, longest, local))
        return output

    def _attend(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, trees: TreeBatch,
        longest: int, local: LocalRows | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Tree attention over the layer's cache; ``longest`` bounds the prefixes."""
        impl: Any = self
        quantized = kv_cache.element_size() == 1
        fp8_dtype = current_platform.fp8_dtype() if quantized else None
        keys, values = key_value_views(kv_cache, impl.head_size, fp8_dtype)
        dequant = DequantScales()
        if quantized:
            query_scale = layer._q_scale.view(1) if query.element_size() == 1 else None
            dequant = DequantScales(query_scale, layer._k_scale.view(1), layer._v_scale.view(1))
        # vLLM keeps (window - 1, 0), or (-1, -1) where there is none.
        window = impl.sliding_window[0] + 1
        splits = choose_splits(
            len(trees.prefix_lens), keys.shape[2], longest, _num_cores(query.device)
        )
        return tree_attention(
            query, keys, values, trees, scale=impl.scale, soft_cap=impl.logits_soft_cap or 0.0,
            sliding_window=window, local=local, dequant=dequant, num_splits=splits,
        )  # fmt: skip


@cache
def _num_cores(device: torch.device) -> int:
    """Multiprocessors of a GPU; one elsewhere, where Triton's interpreter runs."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
