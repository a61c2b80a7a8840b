"""Hook 6 on CPUs: vLLM's CPU attention backend, which also understands packed rows.

With vLLM's own metadata it is vLLM's backend, untouched. With ``PackedRows`` the rows of a request
attend to its prefix in the cache and to themselves, and nothing is written.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from speculators_ext.engines.vllm.attention.kv_layout import BlockLayout, learn_layout, read_prefix
from speculators_ext.kernels.tree_attention_ref import tree_attention_ref

__all__ = [
    "PackedRows",
    "PackedRowsCPUBackend",
    "PackedRowsCPUImpl",
    "PackedRowsImpl",
    "can_pack_rows",
    "replace_backends",
    "use_packed_rows_backend",
]


@dataclass(frozen=True)
class PackedRows:
    """Attention metadata of a packed call: the same number of rows for each request.

    ``block_table``: [num_reqs, max_blocks] int32 of this layer's cache group.
    ``prefix_lens``: positions each request has in the cache, which is also its rows' position;
    empty on GPUs, where reading them back would make the host wait.
    ``positions``: the same as [num_reqs] int64 beside the block table.
    """

    block_table: torch.Tensor
    prefix_lens: list[int]
    positions: torch.Tensor | None = None

    # vLLM's MLA layer asks its metadata which tokens decode from latents: none of ours do.
    num_actual_tokens: ClassVar[int] = sys.maxsize
    num_decodes: ClassVar[int] = 0
    num_decode_tokens: ClassVar[int] = 0
    num_prefills: ClassVar[int] = 1

    def row_slices(self, num_rows: int) -> list[slice]:
        """Where each request's rows stand among ``num_rows`` packed rows."""
        width = num_rows // len(self.prefix_lens)
        return [slice(i * width, (i + 1) * width) for i in range(len(self.prefix_lens))]


class PackedRowsImpl:
    """Marks attention implementations that accept ``PackedRows``."""

    def special_term(self) -> str | None:
        """What our attention cannot reproduce: ALiBi, sinks, another layer's cache; or None."""
        special = ("alibi_slopes", "sinks", "kv_sharing_target_layer_name")
        return next((name for name in special if getattr(self, name, None) is not None), None)

    def packs_rows(self, layer: Any) -> bool:
        """Whether packed rows reproduce this layer."""
        return self.special_term() is None


class PackedRowsCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend with an implementation that accepts ``PackedRows``."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The implementation vLLM builds for each layer."""
        return PackedRowsCPUImpl


class PackedRowsCPUImpl(PackedRowsImpl, CPUAttentionBackendImpl):
    """vLLM's implementation, which also attends ``PackedRows`` and can read its own cache."""

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
        """vLLM's forward, or packed rows against the prefix and themselves."""
        if not isinstance(attn_metadata, PackedRows):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        kv_cache, layout = self.readable(layer, kv_cache, key.dtype)
        width = query.shape[0] // len(attn_metadata.prefix_lens)
        itself = torch.eye(width, dtype=torch.bool)
        for row, own in enumerate(attn_metadata.row_slices(query.shape[0])):
            prefix_len = attn_metadata.prefix_lens[row]
            start = self.first_seen(prefix_len)
            keys, values = read_prefix(
                kv_cache, layout, attn_metadata.block_table[row], start, prefix_len
            )
            if self.is_fp8_kv_cache:
                keys = keys.to(query.dtype) * layer._k_scale_float
                values = values.to(query.dtype) * layer._v_scale_float
            output[own] = tree_attention_ref(
                query[own], key[own], value[own], keys, values, itself,
                self.scale, self.logits_soft_cap,
            )  # fmt: skip
        return output

    def readable(
        self, layer: Any, kv_cache: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, BlockLayout]:
        """The layer's cache in the dtype of its elements, and how it packs a block."""
        kv_cache = self._as_numbers(kv_cache)
        if self._layout is None:
            self._layout = self._learn_layout(layer, kv_cache, dtype)
        return kv_cache, self._layout

    def first_seen(self, position: int) -> int:
        """The first position a row at ``position`` attends to."""
        return max(0, position + 1 - self.sliding_window) if self.sliding_window > 0 else 0

    def _as_numbers(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The cache in the dtype of its elements: vLLM keeps fp8 ones as bytes."""
        if kv_cache.dtype != torch.uint8:
            return kv_cache
        e5m2 = self.kv_cache_dtype == "fp8_e5m2"
        return kv_cache.view(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn)

    def _learn_layout(self, layer: Any, kv_cache: torch.Tensor, dtype: torch.dtype) -> BlockLayout:
        # The scales of a quantised cache would turn the probe's digits into other numbers.
        unscaled: Any = SimpleNamespace(isa=layer.isa, _k_scale_float=1.0, _v_scale_float=1.0)

        def write(
            key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            # vLLM's writer takes quantised elements as bytes.
            stored = cache.view(torch.uint8) if cache.element_size() == 1 else cache
            self.do_kv_cache_update(unscaled, key, value, stored, slots)

        return learn_layout(kv_cache, write, dtype)


def use_packed_rows_backend() -> None:
    """Make vLLM build our backends where it would build its CPU ones, from the next layer on."""
    mla = f"{__name__}_mla"
    replace_backends(
        {
            "CPU_ATTN": f"{__name__}.PackedRowsCPUBackend",
            "CPU_MLA": f"{mla}.PackedRowsCPUMLABackend",
            "AMX_MLA": f"{mla}.PackedRowsAMXMLABackend",
        }
    )


def replace_backends(paths: dict[str, str]) -> None:
    """Make vLLM build other classes for entries of its backend registry, from the next layer on.

    Args:
        paths: importable path of a backend class by the entry's name.
    """
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in paths.items():
        entry = AttentionBackendEnum[name]
        if entry.get_path() != path:
            register_backend(entry, path)
            # An engine that ran in this process before may have left another class here.
            selector._cached_get_attn_backend.cache_clear()


def can_pack_rows(vllm_config: Any, layer_names: set[str]) -> bool:
    """Whether every one of these attention layers attends packed rows."""
    layers = vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        impl = getattr(layers[name], "impl", None)
        if not isinstance(impl, PackedRowsImpl) or not impl.packs_rows(layers[name]):
            return False
    return True
