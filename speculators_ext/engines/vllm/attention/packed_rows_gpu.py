"""Hook 6 on GPUs: vLLM's FlashAttention and Triton backends, which also understand packed rows.

With vLLM's own metadata they are vLLM's, untouched. With ``PackedRows`` our kernel reads the
layer's cache through the views that backend makes, and nothing is written. Checked against vLLM's
own Triton backend in Triton's interpreter; **not yet run on a GPU**.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

from speculators_ext.engines.source_probe import Expectation, engine_root, find_problem
from speculators_ext.engines.vllm.attention.packed_rows import (
    PackedRows,
    PackedRowsImpl,
    replace_backends,
)
from speculators_ext.engines.vllm.log import logger
from speculators_ext.kernels.packed_attention import packed_attention
from speculators_ext.kernels.packed_attention_ref import DequantScales

if TYPE_CHECKING:
    import torch

__all__ = ["PackedRowsGPUImpl", "key_value_views", "use_packed_rows_backend_gpu"]

_PLAIN_CACHES = ("auto", "float32", "float16", "bfloat16")
_FP8_CACHES = ("fp8", "fp8_e4m3")
_HEAD_SIZES = range(32, 257)


def key_value_views(
    kv_cache: torch.Tensor, head_size: int, fp8_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache of either backend, vLLM 0.32 and 0.33, without a copy.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size] in any physical order.
        head_size: of keys and of values.
        fp8_dtype: what the stored bytes are, where the cache is quantized.

    Returns:
        Two views [num_blocks, block_size, num_kv_heads, head_size].
    """
    key_cache, value_cache = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    if fp8_dtype is None:
        return key_cache, value_cache
    return key_cache.view(fp8_dtype), value_cache.view(fp8_dtype)


class PackedRowsGPUImpl(PackedRowsImpl):
    """Mixed in before vLLM's implementation class."""

    def packs_rows(self, layer: Any) -> bool:
        """As on CPUs; also one scale a tensor, a head size of the kernel's, no context parallel."""
        impl: Any = self
        plain = impl.kv_cache_dtype in _PLAIN_CACHES
        per_tensor = layer._k_scale.numel() == layer._v_scale.numel() == 1
        return (
            super().packs_rows(layer)
            and (plain or (impl.kv_cache_dtype in _FP8_CACHES and per_tensor))
            and impl.head_size in _HEAD_SIZES
            and impl.attn_type == AttentionType.DECODER
            and impl.dcp_world_size == 1
            and getattr(impl, "chunk_lookback", -1) == -1
        )

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
        """vLLM's forward, or packed attention; the host never waits."""
        if not isinstance(attn_metadata, PackedRows):
            return super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        if attn_metadata.positions is None:
            raise ValueError("packed rows on a GPU need `positions`: expected a tensor, got None")
        impl: Any = self
        quantized = impl.kv_cache_dtype in _FP8_CACHES
        fp8_dtype = current_platform.fp8_dtype() if quantized else None
        key_cache, value_cache = key_value_views(kv_cache, impl.head_size, fp8_dtype)
        return packed_attention(
            query,
            key,
            value,
            key_cache,
            value_cache,
            attn_metadata.block_table,
            attn_metadata.positions,
            scale=impl.scale,
            soft_cap=impl.logits_soft_cap,
            # vLLM keeps (window - 1, 0), or (-1, -1) where there is none.
            sliding_window=impl.sliding_window[0] + 1,
            dequant=_dequant_scales(layer, query, fp8_dtype),
            out=output,
        )


def _dequant_scales(
    layer: Any, query: torch.Tensor, fp8_dtype: torch.dtype | None
) -> DequantScales:
    if fp8_dtype is None:
        return DequantScales()
    query_scale = layer._q_scale.view(1) if query.dtype == fp8_dtype else None
    return DequantScales(query_scale, layer._k_scale.view(1), layer._v_scale.view(1))


class _Backend(NamedTuple):
    """An enum entry, vLLM's module and implementation behind it, and ours over them."""

    entry: str
    module: str
    impl: str
    path: str


_PACKAGE = __name__.rpartition(".")[0]
_BACKENDS = (
    _Backend(
        "FLASH_ATTN",
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionImpl",
        f"{_PACKAGE}.packed_rows_flash.PackedRowsFlashBackend",
    ),
    _Backend(
        "TRITON_ATTN",
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionImpl",
        f"{_PACKAGE}.packed_rows_triton.PackedRowsTritonBackend",
    ),
)
_FORWARD = ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")


def use_packed_rows_backend_gpu() -> None:
    """Make vLLM build our backends where it would build these two, from the next layer on.

    A backend that cannot be replaced here stays vLLM's, with one line in the log; layers built
    with it do not pack rows.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for backend in _BACKENDS:
        if AttentionBackendEnum[backend.entry].get_path() == backend.path:
            continue
        problem = _find_problem(backend)
        if problem is not None:
            logger.warning("clasp: %s stays without packed rows: %s", backend.entry, problem)
            continue
        replace_backends({backend.entry: backend.path})


def _find_problem(backend: _Backend) -> str | None:
    """Why ours cannot stand over vLLM's, or None."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    root = engine_root("vllm")
    forward = Expectation(backend.module, f"{backend.impl}.forward", _FORWARD)
    problem = "vLLM is not installed" if root is None else find_problem(forward, root)
    if problem is not None:
        return problem
    try:
        resolve_obj_by_qualname(backend.path)
    except (AttributeError, ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None
