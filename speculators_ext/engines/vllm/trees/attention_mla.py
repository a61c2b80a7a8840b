"""Draft trees on latent attention (MLA), over vLLM's reference backend for CPUs.

Rows of a verified tree come as decode rows, their latents already in the cache; each attends to
its request's prefix and to its ancestors there. Rows of a draft level attend to the prefix and to
this round's nodes, whose latents are kept in the level's memory and never written to the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    get_and_maybe_dequant_weights,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from speculators_ext.engines.vllm.attention.decode_rows_mla import DecodeRowsCPUMLABackend
from speculators_ext.engines.vllm.trees.metadata import TREES, DraftLevel
from speculators_ext.kernels.tree_attention_mla_ref import tree_attention_mla_gathered_ref

if TYPE_CHECKING:
    from collections.abc import Mapping

    from speculators_ext.engines.vllm.trees.metadata import Verification

__all__ = ["LatentCompactorCPU", "TreeMLABackend", "TreeMLAImpl", "has_latents"]


def has_latents(layer: Any) -> bool:
    """Whether a layer's cache holds latents."""
    return isinstance(getattr(layer, "impl", None), TreeMLAImpl)


class TreeMLABackend(DecodeRowsCPUMLABackend):
    """vLLM's reference MLA backend for CPUs with an implementation that attends trees."""

    @staticmethod
    def get_impl_cls() -> type[CPUMLAImpl]:
        """The implementation vLLM builds for each layer."""
        return TreeMLAImpl


class TreeMLAImpl(CPUMLAImpl):
    """vLLM's implementation, told by its metadata which rows are draft nodes."""

    _absorbed: tuple[torch.Tensor, torch.Tensor] | None = None

    def obstacle(self, layer: Any) -> str | None:
        """What of this layer a tree cannot reproduce, or None."""
        return None

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """vLLM's decode, and tree rows again with their own masks."""
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        out, lse = super().forward_mqa(query, kv_c_and_k_pe_cache, attn_metadata, layer)
        step: Verification | None = getattr(attn_metadata, TREES, None)
        for tree in step.trees if step is not None else ():
            table = attn_metadata.decode.block_table[tree.rows.start]
            count = tree.prefix_len + len(tree.depths)
            latents = _latents(kv_c_and_k_pe_cache, table, count)
            out[tree.rows] = tree_attention_mla_gathered_ref(
                query[tree.rows], latents, tree.sees, self.scale, self.kv_lora_rank
            )
        return out, lse

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """vLLM's prompts, or a draft level."""
        if not isinstance(attn_metadata, DraftLevel):
            super().forward_mha(
                q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output,
                *args, **kwargs,
            )  # fmt: skip
            return
        keys_up, values_up = self._absorb(q.dtype)
        nope = self.qk_nope_head_dim
        latent_query = torch.einsum("nhd,hdr->nhr", q[..., :nope], keys_up)
        query = torch.cat([latent_query, q[..., nope:]], dim=-1)
        own = torch.cat([kv_c_normed, k_pe.reshape(len(q), -1)], dim=-1)
        attended = self._attend_level(query, own, kv_c_and_k_pe_cache, attn_metadata)
        output.copy_(torch.einsum("nhr,hrv->nhv", attended, values_up).reshape(len(q), -1))

    def _attend_level(
        self, query: torch.Tensor, own: torch.Tensor, cache: torch.Tensor, level: DraftLevel
    ) -> torch.Tensor:
        """Absorbed queries [n, heads, latent + rope] and latents [n, latent + rope] of nodes."""
        name = str(id(self))
        if name not in level.memory:
            empty = own.new_zeros(len(level.rows), level.max_places, own.shape[1])
            level.memory[name] = empty, empty
        memory = level.memory[name][0]
        memory[level.requests, level.places] = own
        out = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        for request, rows in enumerate(level.rows):
            if rows.stop == rows.start:
                continue
            sees = level.sees[rows]
            prefix = _latents(cache, level.block_table[request], level.prefix_lens[request])
            latents = torch.cat([prefix.to(own.dtype), memory[request, : sees.shape[1]]])
            out[rows] = tree_attention_mla_gathered_ref(
                query[rows], latents, sees, self.scale, self.kv_lora_rank
            )
        return out

    def _absorb(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """What takes queries into the latent space, [heads, nope, rank], and out, [h, rank, v]."""
        if self._absorbed is None:
            weight = get_and_maybe_dequant_weights(self.kv_b_proj, out_dtype=dtype).T
            width = self.qk_nope_head_dim + self.v_head_dim
            weight = weight.reshape(self.kv_lora_rank, self.num_heads, width)
            keys_up, values_up = weight.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            self._absorbed = (
                keys_up.permute(1, 2, 0).contiguous(), values_up.transpose(0, 1).contiguous(),
            )  # fmt: skip
        return self._absorbed


def _latents(cache: torch.Tensor, table: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` positions of a request, of [num_blocks, block_size, width]."""
    blocks = table[: -(-count // cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)[:count]


class LatentCompactorCPU:
    """Moves the latents of accepted paths to the front.

    Args:
        layers: the target's attention layers by name, all with latents.
        group_of: cache group of each layer's name.
    """

    def __init__(self, layers: Mapping[str, Any], group_of: Mapping[str, int]) -> None:
        self._layers = layers
        self._group_of = group_of

    def __call__(self, step: Verification, num_sampled: torch.Tensor) -> None:
        """Compact every tree of the step whose path is not a prefix of its rows."""
        assert step.paths is not None
        kept = num_sampled.tolist()
        for tree in step.trees:
            path = step.paths[tree.request, : kept[tree.request]].long()
            goal = torch.arange(len(path))
            if torch.equal(path, goal):
                continue
            for name, layer in self._layers.items():
                table = step.block_tables[self._group_of[name]][tree.request]
                size, flat = layer.kv_cache.shape[1], layer.kv_cache.flatten(0, 1)
                places = tree.prefix_len + torch.stack([path, goal])
                source, slots = table[places // size].long() * size + places % size
                flat[slots] = flat[source]
