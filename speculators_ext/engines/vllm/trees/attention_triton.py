"""vLLM's Triton backend with an implementation that attends draft trees."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from speculators_ext.engines.vllm.trees.attention_gpu import TreeGPUImpl

__all__ = ["TreeTritonBackend"]


class _TreeTritonImpl(TreeGPUImpl, TritonAttentionImpl):
    pass


class _TreeTritonBuilder(TritonAttentionMetadataBuilder):
    """The rows of a tree differ from step to step, so no graph holds them."""

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        """None: graphs are piecewise, attention runs between them."""
        return AttentionCGSupport.NEVER


class TreeTritonBackend(TritonAttentionBackend):
    """vLLM's backend in all but the implementation and the builder."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """The implementation vLLM builds for each layer."""
        return _TreeTritonImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        """The builder of its metadata."""
        return _TreeTritonBuilder
