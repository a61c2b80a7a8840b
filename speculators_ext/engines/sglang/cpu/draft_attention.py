"""Gives SGLang's own EAGLE drafting an attention over ``torch_native``, which has none for it.

For comparison with ours. Of ``topk`` branches a request, branch k sees the request's prefix and the
slots that branch k has written in this round, as SGLang's GPU backends have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from speculators_ext.kernels.tree_attention_ref import tree_attention_ref

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["create_decode_backend", "create_draft_extend_backend"]


def create_decode_backend(original: Callable[..., Any], factory: Any) -> Any:
    """Around ``DraftBackendFactory.create_decode_backend``."""
    if not _is_torch_native(factory) or factory.speculative_num_steps <= 1:
        return original(factory)
    return _DraftBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def create_draft_extend_backend(original: Callable[..., Any], factory: Any) -> Any:
    """Around ``DraftBackendFactory.create_draft_extend_backend``: None leaves the runner's own."""
    return None if _is_torch_native(factory) else original(factory)


def _is_torch_native(factory: Any) -> bool:
    from sglang.srt.runtime_context import attention_backends

    return (factory.draft_attn_backend or attention_backends()[1]) == "torch_native"


class _DraftBackend:
    """One attention a step, over what `init_forward_metadata` was told."""

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        self.topk, self.num_steps = topk, num_steps
        self.attn_backends = [_StepBackend(self, runner, step) for step in range(num_steps)]
        self.prefixes: list[Tensor] = []
        self.written = torch.empty(0)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Note the slots of a round: of each prefix, and [bs, topk, num_steps] to be written."""
        table = self.attn_backends[0].req_to_token_pool.req_to_token
        rows = zip(
            forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True
        )
        self.prefixes = [table[index, :length].long() for index, length in rows]
        self.written = forward_batch.out_cache_loc.view(-1, self.topk, self.num_steps)


class _StepBackend:
    """The attention of draft step ``step``."""

    def __init__(self, of: _DraftBackend, runner: Any, step: int) -> None:
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._of, self._step = of, step

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Write each row's KV to its slot and attend: [bs * topk, ...] -> the same."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        pool, of = self.token_to_kv_pool, self._of
        query = q.view(-1, of.topk, layer.tp_q_head_num, layer.qk_head_dim)
        key = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        value = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), key, value)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        branch = torch.arange(of.topk)
        sees = branch.repeat_interleave(self._step + 1) == branch.unsqueeze(1)
        parts = []
        for rows, prefix, written in zip(query, of.prefixes, of.written, strict=True):
            own = written[:, : self._step + 1].flatten().long()
            parts.append(
                tree_attention_ref(
                    rows, keys[own], values[own], keys[prefix].transpose(0, 1),
                    values[prefix].transpose(0, 1), sees, layer.scaling,
                )
            )  # fmt: skip
        return torch.cat(parts).flatten(1)
