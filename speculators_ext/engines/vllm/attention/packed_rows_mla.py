"""Packed rows for vLLM's two CPU backends of multi-head latent attention (MLA).

The cache holds latents (kv_lora_rank + rope dimensions a token). The prefix's latents are gathered
and expanded to keys and values by the layer's own ``kv_b_proj``, as in a prefill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend, AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from speculators_ext.engines.vllm.attention.packed_rows import PackedRows, PackedRowsImpl
from speculators_ext.kernels.packed_attention_ref import packed_attention_ref

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PackedRowsAMXMLABackend", "PackedRowsCPUMLABackend"]


class _PackedRowsMLAImpl(PackedRowsImpl):
    # Set by the vLLM class this is mixed into.
    scale: float
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    kv_b_proj: Any

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
        if not isinstance(attn_metadata, PackedRows):
            super().forward_mha(  # type: ignore[misc]
                q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output,
                *args, **kwargs,
            )  # fmt: skip
            return
        own_latent = torch.cat([kv_c_normed, k_pe.reshape(k_pe.shape[0], -1)], dim=-1)
        prefixes = _latents(kv_c_and_k_pe_cache, attn_metadata)
        for own, prefix in zip(attn_metadata.row_slices(q.shape[0]), prefixes, strict=True):
            key, value = self._expand(torch.cat([prefix, own_latent[own]]))
            length = prefix.shape[0]
            attended = packed_attention_ref(
                q[own],
                key[length:],
                value[length:],
                key[:length].transpose(0, 1),
                value[:length].transpose(0, 1),
                self.scale,
            )
            output[own] = attended.reshape(attended.shape[0], -1)

    def _expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [n, rank + rope] -> keys [n, heads, nope + rope], values [n, heads, v]."""
        rank = self.kv_lora_rank
        expanded = self.kv_b_proj(latent[:, :rank].contiguous())[0]
        expanded = expanded.view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        nope, value = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        rope = latent[:, None, rank:].expand(-1, self.num_heads, -1)
        return torch.cat([nope, rope], dim=-1), value


def _latents(cache: torch.Tensor, rows: PackedRows) -> Iterator[torch.Tensor]:
    """Each request's prefix, [prefix_len, rank + rope], out of [num_blocks, block_size, ...]."""
    block_size = cache.shape[1]
    for row, prefix_len in enumerate(rows.prefix_lens):
        blocks = rows.block_table[row, : -(-prefix_len // block_size)].long()
        yield cache[blocks].flatten(0, 1)[:prefix_len]


class _CPUMLAImpl(_PackedRowsMLAImpl, CPUMLAImpl):
    pass


class _AMXMLAImpl(_PackedRowsMLAImpl, AMXMLAImpl):
    pass


class PackedRowsCPUMLABackend(CPUMLABackend):
    """vLLM's reference MLA backend for CPUs, which also accepts ``PackedRows``."""

    @staticmethod
    def get_impl_cls() -> type[CPUMLAImpl]:
        """The implementation vLLM builds for each layer."""
        return _CPUMLAImpl


class PackedRowsAMXMLABackend(AMXMLABackend):
    """vLLM's MLA backend for CPUs with AMX, which also accepts ``PackedRows``."""

    @staticmethod
    def get_impl_cls() -> type[AMXMLAImpl]:
        """The implementation vLLM builds for each layer."""
        return _AMXMLAImpl
