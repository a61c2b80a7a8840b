"""Short queries as decode rows, in vLLM's reference MLA backend for CPUs.

That backend knows one token a request or a prompt, and takes a verification for a prompt: the whole
prefix is expanded to keys and values in every layer. A query of a few tokens is as well one row a
token, each a token longer than the row before it, since a layer writes all their latents before any
of them attends. That is also how plain decoding computes the same tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

__all__ = ["DecodeRowsCPUMLABackend", "split_short_queries"]

_MOST = 16
"""Tokens of a query that counts as short, or as many as a verification has."""


def split_short_queries(
    batch: CommonAttentionMetadata, most: int = _MOST
) -> CommonAttentionMetadata:
    """The same batch, its first requests with short queries given as one request a token.

    Only the first: vLLM wants decode rows before prompts, and puts short queries first itself.

    Args:
        batch: what vLLM builds metadata from, on the host.
        most: tokens of a query that counts as short.
    """
    if batch.max_query_len == 1:
        return batch
    starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].numpy()
    lengths = np.diff(starts)
    count = int((lengths <= most).cumprod().sum())
    num_rows = int(starts[count])
    if num_rows <= count:
        return batch
    repeats = np.concatenate([lengths[:count], np.ones(batch.num_reqs - count, dtype=np.int64)])
    owners = torch.from_numpy(np.repeat(np.arange(batch.num_reqs), repeats))
    behind = np.zeros(len(owners), dtype=np.int32)
    behind[:num_rows] = np.repeat(starts[1 : count + 1], lengths[:count]) - np.arange(
        1, num_rows + 1
    )
    less = torch.from_numpy(behind)

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values[: batch.num_reqs].index_select(0, owners)

    def shortened(lengths: torch.Tensor) -> torch.Tensor:
        return spread(lengths).sub_(less)

    first = torch.from_numpy(np.concatenate([np.arange(num_rows), starts[count:]]).astype(np.int32))
    optional: dict[str, Any] = {
        "seq_lens_cpu_upper_bound": shortened,
        "is_prefilling": spread,
    }
    present = {name: getattr(batch, name) for name in optional}
    return replace(
        batch,
        query_start_loc=first,
        query_start_loc_cpu=first,
        seq_lens=shortened(batch.seq_lens),
        num_reqs=num_rows + batch.num_reqs - count,
        max_query_len=max(1, *lengths[count:].tolist()) if count < batch.num_reqs else 1,
        block_table_tensor=spread(batch.block_table_tensor),
        **{n: optional[n](value) for n, value in present.items() if value is not None},
    )


class _DecodeRowsBuilder(MLACommonMetadataBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        spec: Any = self.vllm_config.speculative_config
        most = _MOST if spec is None else max(_MOST, spec.num_speculative_tokens + 1)
        batch = split_short_queries(common_attn_metadata, most)
        return super().build(common_prefix_len, batch, fast_build)


class DecodeRowsCPUMLABackend(CPUMLABackend):
    """vLLM's reference MLA backend for CPUs, with short queries as decode rows."""

    @staticmethod
    def get_builder_cls() -> type[MLACommonMetadataBuilder]:
        """The builder of its metadata."""
        return _DecodeRowsBuilder
