"""vLLM's Triton backend with an implementation that accepts ``PackedRows``."""

from __future__ import annotations

from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from speculators_ext.engines.vllm.attention.packed_rows_gpu import PackedRowsGPUImpl

__all__ = ["PackedRowsTritonBackend"]


class _PackedRowsTritonImpl(PackedRowsGPUImpl, TritonAttentionImpl):
    pass


class PackedRowsTritonBackend(TritonAttentionBackend):
    """vLLM's backend in all but the implementation it builds."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """The implementation vLLM builds for each layer."""
        return _PackedRowsTritonImpl
