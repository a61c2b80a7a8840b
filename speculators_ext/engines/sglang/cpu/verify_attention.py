"""Gives SGLang's ``torch_native`` attention the verification of drafts, which it lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from speculators_ext.engines.sglang.attention import attend_prefix, by_head

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["forward_extend"]


def forward_extend(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    """Around ``TorchNativeAttnBackend.forward_extend``: draft rows are ours, all else SGLang's.

    A request's n rows see its prefix and what the tree mask lets them see: with SGLang's CPU
    layout that is bool [requests * n * n], its own rows only.
    """
    if not forward_batch.forward_mode.is_target_verify():
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool = backend.token_to_kv_pool
    query, key, value = by_head(layer, q, k, v)
    if save_kv_cache:
        where = KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc)
        pool.set_kv_buffer(layer, where, key, value)
    n = forward_batch.spec_info.draft_token_num
    sees = forward_batch.spec_info.custom_mask.view(-1, n, n)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    table = backend.req_to_token_pool.req_to_token
    parts = []
    lengths = forward_batch.seq_lens.tolist()
    for request, (index, length) in enumerate(
        zip(forward_batch.req_pool_indices.tolist(), lengths, strict=True)
    ):
        own = slice(request * n, request * n + n)
        slots = table[index, :length].long()
        positions = forward_batch.positions[own]
        cached = (keys[slots], values[slots])
        parts.append(
            attend_prefix(layer, query[own], key[own], value[own], cached, sees[request], positions)
        )
    return torch.cat(parts).flatten(1)
