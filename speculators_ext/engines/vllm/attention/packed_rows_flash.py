"""vLLM's FlashAttention backend with an implementation that accepts ``PackedRows``."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from speculators_ext.engines.vllm.attention.packed_rows_gpu import PackedRowsGPUImpl

__all__ = ["PackedRowsFlashBackend"]


class _PackedRowsFlashImpl(PackedRowsGPUImpl, FlashAttentionImpl):
    pass


class PackedRowsFlashBackend(FlashAttentionBackend):
    """vLLM's backend in all but the implementation it builds."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """The implementation vLLM builds for each layer."""
        return _PackedRowsFlashImpl
