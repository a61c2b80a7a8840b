"""Hook 6 for draft trees on CPUs: vLLM's CPU attention, which also understands draft trees.

With vLLM's own metadata it is vLLM's backend, untouched. Rows of a tree attend to their request's
prefix and to their ancestors; all other rows of the batch go vLLM's own way. Rows of a draft level
attend to the prefix in the head's cache and to ancestors of this round, which are kept in the
level's memory and never written to the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from speculators_ext.engines.vllm.attention.kv_layout import read_prefix
from speculators_ext.engines.vllm.attention.packed_rows import (
    PackedRowsCPUBackend,
    PackedRowsCPUImpl,
)
from speculators_ext.engines.vllm.trees.metadata import TREES, DraftLevel
from speculators_ext.kernels.tree_attention_ref import tree_attention_gathered_ref, tree_bias

if TYPE_CHECKING:
    from speculators_ext.engines.vllm.attention.prefix_shadow import PrefixShadow
    from speculators_ext.engines.vllm.trees.metadata import TreeRows, Verification

__all__ = ["TreeCPUBackend", "TreeCPUImpl"]


class TreeCPUBackend(PackedRowsCPUBackend):
    """vLLM's CPU backend with an implementation that attends trees."""

    @staticmethod
    def get_impl_cls() -> type[PackedRowsCPUImpl]:
        """The implementation vLLM builds for each layer."""
        return TreeCPUImpl


class TreeCPUImpl(PackedRowsCPUImpl):
    """vLLM's implementation, told by its metadata which rows are draft nodes."""

    def obstacle(self, layer: Any) -> str | None:
        """What of this layer a tree cannot reproduce, or None."""
        return self.special_term()

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
        if step is None or step.num_rows < query.shape[0]:
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        if step is None:
            return output
        for tree in step.trees:
            keys, values = self._prefix(
                layer, kv_cache, key.dtype, step.shadow, tree.owner,
                attn_metadata.block_table[tree.request], tree.prefix_len, len(tree.depths),
            )  # fmt: skip
            own = key[tree.rows].transpose(0, 1), value[tree.rows].transpose(0, 1)
            if self.is_fp8_kv_cache:  # plain decoding attends to what the cache made of them
                stop = tree.prefix_len + len(tree.depths)
                cache, layout = self.readable(layer, kv_cache, key.dtype)
                table = attn_metadata.block_table[tree.request]
                stored = read_prefix(cache, layout, table, tree.prefix_len, stop)
                own = self._computable(layer, *stored, key.dtype)
            keys[:, tree.prefix_len :], values[:, tree.prefix_len :] = own
            start = self.first_seen(tree.prefix_len)
            bias = self._tree_bias(step, tree, start, query.dtype)
            output[tree.rows] = self._attend(
                query[tree.rows], keys[:, start:], values[:, start:], bias
            )
        return output

    def _prefix(
        self, layer: Any, kv_cache: torch.Tensor, dtype: torch.dtype, shadow: PrefixShadow,
        owner: str, block_table: torch.Tensor, prefix_len: int, extra: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Keys and values [num_kv_heads, prefix_len + extra, head_size] of one request."""
        cache, layout = self.readable(layer, kv_cache, dtype)
        return shadow.rows(
            owner, layer.layer_name, cache, layout, block_table, prefix_len, extra,
            lambda keys, values: self._computable(layer, keys, values, dtype),
        )  # fmt: skip

    def _computable(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Elements of the cache as numbers of the query's dtype."""
        if not self.is_fp8_kv_cache:
            return keys, values
        return keys.to(dtype) * layer._k_scale_float, values.to(dtype) * layer._v_scale_float

    def _tree_bias(
        self, step: Verification, tree: TreeRows, start: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[group * n, keys] float: 0 where a row attends to a key, -inf elsewhere."""
        window = max(self.sliding_window, 0)
        known = step.biases.get((tree.owner, window, self.num_queries_per_kv, dtype))
        if known is not None:
            return known
        before = tree.prefix_len - start
        hidden = torch.zeros(len(tree.depths), before + len(tree.depths), dtype=torch.bool)
        hidden[:, before:] = ~tree.sees
        if window > 0:
            at = tree.prefix_len + tree.depths
            keys_at = torch.cat([torch.arange(start, tree.prefix_len), at])
            hidden |= at.unsqueeze(1) - keys_at >= window
        bias = tree_bias(~hidden, self.num_queries_per_kv, 0, dtype)
        step.biases[tree.owner, window, self.num_queries_per_kv, dtype] = bias
        return bias

    def _attend_level(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, level: DraftLevel, output: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        for request, own in enumerate(level.rows):
            if own.stop == own.start:
                continue
            prefix_len = level.prefix_lens[request]
            keys, values = self._prefix(
                layer, kv_cache, key.dtype, level.shadow, level.owners[request],
                level.block_table[request], prefix_len, level.max_places,
            )  # fmt: skip
            places = prefix_len + level.places[own]
            keys[:, places] = key[own].transpose(0, 1)
            values[:, places] = value[own].transpose(0, 1)
            sees = level.sees[own]
            stop = prefix_len + sees.shape[1]
            bias = tree_bias(sees, self.num_queries_per_kv, prefix_len, query.dtype)
            output[own] = self._attend(query[own], keys[:, :stop], values[:, :stop], bias)
        return output

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """query [n, heads, d], keys, values [kv_heads, k, d], bias [group * n, k] -> as query."""
        return tree_attention_gathered_ref(
            query, keys, values, bias, self.scale, self.logits_soft_cap
        )
