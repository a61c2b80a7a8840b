"""Hook 6 for ``eagle2`` on CPUs: vLLM's CPU attention, which also understands draft trees.

With vLLM's own metadata it is vLLM's backend, untouched. Rows of a tree attend to their request's
prefix and to their ancestors; all other rows of the batch go vLLM's own way. Rows of a draft level
attend to the prefix in the head's cache and to ancestors of this round, which are kept in the
level's memory and never written to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from speculators_ext.engines.vllm.kv_layout import BlockLayout, learn_layout, read_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculators_ext.engines.vllm.eagle2.trees import TreeRows

__all__ = ["TREES", "DraftLevel", "TreeCPUBackend", "TreeCPUImpl", "use_tree_backend"]

TREES = "speculators_ext_trees"
"""Attribute of vLLM's metadata that holds the batch's trees."""


@dataclass
class DraftLevel:
    """Attention metadata of one level of draft nodes.

    Attributes:
        block_table: [num_reqs, max_blocks] int32 of the head's cache group.
        prefix_lens: tokens each request has in the head's cache.
        rows: where each request's nodes stand among the level's rows.
        places: int64 [n], each node's place among all nodes its request may grow.
        sees: bool [n, places so far], which nodes each node attends to, itself included.
        max_places: nodes a request may grow in a round.
        memory: keys and values by layer and request, kept from level to level of a round.
    """

    block_table: torch.Tensor
    prefix_lens: Sequence[int]
    rows: Sequence[slice]
    places: torch.Tensor
    sees: torch.Tensor
    max_places: int
    memory: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class TreeCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend with an implementation that attends trees."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The implementation vLLM builds for each layer."""
        return TreeCPUImpl


class TreeCPUImpl(CPUAttentionBackendImpl):
    """vLLM's implementation, told by its metadata which rows are draft nodes."""

    _layout: BlockLayout | None = None

    def obstacle(self) -> str | None:
        """What of this layer a tree cannot reproduce, or None."""
        for name in ("alibi_slopes", "sinks", "kv_sharing_target_layer_name"):
            if getattr(self, name, None) is not None:
                return name
        return None

    def layout(self, layer: Any, kv_cache: torch.Tensor, dtype: torch.dtype) -> BlockLayout:
        """How this layer's cache packs a block, learned once."""
        if self._layout is None:

            def write(
                key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
            ) -> None:
                self.do_kv_cache_update(layer, key, value, cache, slots)

            self._layout = learn_layout(kv_cache, write, dtype)
        return self._layout

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
        trees: list[TreeRows] = getattr(attn_metadata, TREES, [])
        if sum(len(tree.depths) for tree in trees) < query.shape[0]:
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        for tree in trees:
            start = self._first_seen(tree.prefix_len)
            keys, values = self._read(
                layer, kv_cache, key.dtype, attn_metadata.block_table[tree.request],
                start, tree.prefix_len + len(tree.depths),
            )  # fmt: skip
            bias = self._tree_bias(tree, start, query.dtype)
            output[tree.rows] = self._attend(query[tree.rows], keys, values, bias)
        return output

    def _first_seen(self, position: int) -> int:
        """The first position a row at ``position`` attends to."""
        return max(0, position + 1 - self.sliding_window) if self.sliding_window > 0 else 0

    def _read(
        self, layer: Any, kv_cache: torch.Tensor, dtype: torch.dtype, block_table: torch.Tensor,
        start: int, stop: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Keys and values [num_kv_heads, stop - start, head_size] of one request, in ``dtype``."""
        layout = self.layout(layer, kv_cache, dtype)
        keys, values = read_prefix(kv_cache, layout, block_table, start, stop)
        if self.is_fp8_kv_cache:
            return keys.to(dtype) * layer._k_scale_float, values.to(dtype) * layer._v_scale_float
        return keys, values

    def _tree_bias(self, tree: TreeRows, start: int, dtype: torch.dtype) -> torch.Tensor:
        """[n, keys] float: 0 where a row attends to a key, -inf elsewhere."""
        before = tree.prefix_len - start
        hidden = torch.zeros(len(tree.depths), before + len(tree.depths), dtype=torch.bool)
        hidden[:, before:] = ~tree.sees
        if self.sliding_window > 0:
            at = tree.prefix_len + tree.depths
            keys_at = torch.cat([torch.arange(start, tree.prefix_len), at])
            hidden |= at.unsqueeze(1) - keys_at >= self.sliding_window
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))

    def _attend_level(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, level: DraftLevel, output: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        for request, own in enumerate(level.rows):
            if own.stop == own.start:
                continue
            prefix_len = level.prefix_lens[request]
            kept = level.memory.get((layer.layer_name, request))
            if kept is None:
                prefix = self._read(
                    layer, kv_cache, key.dtype, level.block_table[request], 0, prefix_len
                )
                kept = tuple(  # type: ignore[assignment]
                    torch.nn.functional.pad(side, (0, 0, 0, level.max_places)) for side in prefix
                )
                level.memory[layer.layer_name, request] = kept  # type: ignore[assignment]
            keys, values = kept  # type: ignore[misc]
            places = prefix_len + level.places[own]
            keys[:, places] = key[own].transpose(0, 1)
            values[:, places] = value[own].transpose(0, 1)
            sees = level.sees[own]
            bias = query.new_zeros(sees.shape[0], prefix_len + sees.shape[1])
            bias[:, prefix_len:].masked_fill_(~sees, float("-inf"))
            stop = bias.shape[1]
            output[own] = self._attend(query[own], keys[:, :stop], values[:, :stop], bias)
        return output

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """query [n, heads, d], keys and values [kv_heads, k, d], bias [n, k] -> [n, heads, d]."""
        rows, heads, size = query.shape
        kv_heads = keys.shape[0]
        group = heads // kv_heads
        packed = query.view(rows, kv_heads, group, size).permute(1, 2, 0, 3)
        packed = packed.reshape(1, kv_heads, group * rows, size)
        bias = bias.repeat(group, 1)
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
