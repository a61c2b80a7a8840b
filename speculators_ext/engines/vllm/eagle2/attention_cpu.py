"""Hook 6 for ``eagle2`` on CPUs: vLLM's CPU attention, which also understands draft trees.

With vLLM's own metadata it is vLLM's backend, untouched. Rows of a tree attend to their request's
prefix and to their ancestors; all other rows of the batch go vLLM's own way. Rows of a draft level
attend to the prefix in the head's cache and to ancestors of this round, which are kept in the
level's memory and never written to the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from speculators_ext.engines.vllm.eagle2.trees import TREES, DraftLevel
from speculators_ext.engines.vllm.packed_rows import PackedRowsCPUBackend, PackedRowsCPUImpl

if TYPE_CHECKING:
    from speculators_ext.engines.vllm.eagle2.trees import TreeRows, Verification
    from speculators_ext.engines.vllm.prefix_shadow import PrefixShadow

__all__ = ["TreeCPUBackend", "TreeCPUImpl", "use_tree_backend"]


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
        special = ("alibi_slopes", "sinks", "kv_sharing_target_layer_name")
        return next((name for name in special if getattr(self, name, None) is not None), None)

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
            keys[:, tree.prefix_len :] = key[tree.rows].transpose(0, 1)
            values[:, tree.prefix_len :] = value[tree.rows].transpose(0, 1)
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

        def convert(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if not self.is_fp8_kv_cache:
                return keys, values
            return keys.to(dtype) * layer._k_scale_float, values.to(dtype) * layer._v_scale_float

        cache, layout = self.readable(layer, kv_cache, dtype)
        return shadow.rows(
            owner, layer.layer_name, cache, layout, block_table, prefix_len, extra, convert
        )

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
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        bias = bias.repeat(self.num_queries_per_kv, 1)
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
            bias = query.new_zeros(sees.shape[0], stop)
            bias[:, prefix_len:].masked_fill_(~sees, float("-inf"))
            bias = bias.repeat(self.num_queries_per_kv, 1)
            output[own] = self._attend(query[own], keys[:, :stop], values[:, :stop], bias)
        return output

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """query [n, heads, d], keys, values [kv_heads, k, d], bias [group * n, k] -> as query."""
        rows, heads, size = query.shape
        kv_heads, group = keys.shape[0], self.num_queries_per_kv
        packed = query.view(rows, kv_heads, group, size).permute(1, 2, 0, 3)
        packed = packed.reshape(1, kv_heads, group * rows, size)
        if self.logits_soft_cap > 0:
            scores = torch.matmul(packed.float(), keys.float().transpose(1, 2)) * self.scale
            scores = torch.tanh(scores / self.logits_soft_cap) * self.logits_soft_cap + bias
            out = torch.matmul(torch.softmax(scores, dim=-1), values.float()).to(query.dtype)
        else:
            out = scaled_dot_product_attention(
                packed, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=bias, scale=self.scale
            )
        out = out.view(kv_heads, group, rows, size).permute(2, 0, 1, 3)
        return out.reshape(rows, heads, size)


def use_tree_backend() -> None:
    """Make vLLM build our backend where it would build its CPU one, from the next layer on."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = f"{__name__}.TreeCPUBackend"
    if AttentionBackendEnum.CPU_ATTN.get_path() != path:
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
        # An engine that ran in this process before may have left another class here.
        selector._cached_get_attn_backend.cache_clear()
