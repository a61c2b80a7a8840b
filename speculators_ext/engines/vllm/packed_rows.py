"""Hook 6 on CPUs: vLLM's CPU attention backend, which also understands packed rows.

With vLLM's own metadata it is vLLM's backend, untouched. With ``PackedRows`` the rows of a request
attend to its prefix in the cache and to themselves, and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from speculators_ext.engines.vllm.kv_layout import BlockLayout, learn_layout, read_prefix
from speculators_ext.kernels.packed_attention_ref import packed_attention_ref

if TYPE_CHECKING:
    import torch

__all__ = ["PackedRows", "PackedRowsCPUBackend", "can_pack_rows", "use_packed_rows_backend"]


@dataclass(frozen=True)
class PackedRows:
    """Attention metadata of a packed call: the same number of rows for each request.

    ``block_table``: [num_reqs, max_blocks] int32 of this layer's cache group.
    ``prefix_lens``: positions each request has in the cache, which is also its rows' position.
    """

    block_table: torch.Tensor
    prefix_lens: list[int]


class PackedRowsCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend with an implementation that accepts ``PackedRows``."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The implementation vLLM builds for each layer."""
        return _PackedRowsCPUImpl


class _PackedRowsCPUImpl(CPUAttentionBackendImpl):
    _layout: BlockLayout | None = None

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
        if not isinstance(attn_metadata, PackedRows):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        if self._layout is None:
            self._layout = self._learn_layout(layer, kv_cache, key.dtype)
        width = query.shape[0] // len(attn_metadata.prefix_lens)
        for row, prefix_len in enumerate(attn_metadata.prefix_lens):
            own = slice(row * width, (row + 1) * width)
            start = max(0, prefix_len + 1 - self.sliding_window) if self.sliding_window > 0 else 0
            keys, values = read_prefix(
                kv_cache, self._layout, attn_metadata.block_table[row], start, prefix_len
            )
            if self.is_fp8_kv_cache:
                keys = keys.to(query.dtype) * layer._k_scale_float
                values = values.to(query.dtype) * layer._v_scale_float
            output[own] = packed_attention_ref(
                query[own], key[own], value[own], keys, values, self.scale, self.logits_soft_cap
            )
        return output

    def _learn_layout(self, layer: Any, kv_cache: torch.Tensor, dtype: torch.dtype) -> BlockLayout:
        def write(
            key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            self.do_kv_cache_update(layer, key, value, cache, slots)

        return learn_layout(kv_cache, write, dtype)


def use_packed_rows_backend() -> None:
    """Make vLLM build our backend where it would build CPU_ATTN, from the next layer on."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = f"{__name__}.{PackedRowsCPUBackend.__name__}"
    if AttentionBackendEnum.CPU_ATTN.get_path() == path:
        return
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
    # An engine that ran in this process before may have left the stock class in the cache.
    selector._cached_get_attn_backend.cache_clear()


def can_pack_rows(vllm_config: Any, layer_names: set[str]) -> bool:
    """Whether every one of these attention layers attends packed rows."""
    layers = vllm_config.compilation_config.static_forward_context
    return all(
        isinstance(getattr(layers[name], "impl", None), _PackedRowsCPUImpl) for name in layer_names
    )
