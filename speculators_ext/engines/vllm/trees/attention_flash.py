"""vLLM's Flash backend with an implementation that attends draft trees."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from speculators_ext.engines.vllm.trees.attention_gpu import TreeGPUImpl

__all__ = ["TreeFlashBackend"]


class _TreeFlashImpl(TreeGPUImpl, FlashAttentionImpl):
    pass


class _TreeFlashBuilder(FlashAttentionMetadataBuilder):
    """The rows of a tree differ from step to step, so no graph holds them."""

    @classmethod
    def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
        """None: graphs are piecewise, attention runs between them."""
        return AttentionCGSupport.NEVER


class TreeFlashBackend(FlashAttentionBackend):
    """vLLM's backend in all but the implementation and the builder."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """The implementation vLLM builds for each layer."""
        return _TreeFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """The builder of its metadata."""
        return _TreeFlashBuilder
