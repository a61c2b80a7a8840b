"""The module as a chain is drafted with it: decode steps of vLLM's own attention.

A step writes its KV behind the prefix, provisionally: made from the module's own states, it is
overwritten by the next extend, which has the target's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from speculators_ext.engines.vllm.ranks import tensor_from_rank_0
from speculators_ext.proposers.drafting import clamp_ids
from speculators_ext.proposers.mtp_reuse import Choice

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ChainSteps"]


class ChainSteps:
    """One round of some requests' chains.

    Args:
        speculator: whose module, buffers and block tables are used.
        idx_mapping: [R] int64, the requests' slots.
        lengths: [R], tokens each request has in the module's cache, which is also the position its
            first draft is run at.
    """

    def __init__(self, speculator: Any, idx_mapping: torch.Tensor, lengths: Sequence[int]) -> None:
        self._of = speculator
        self._idx_mapping = idx_mapping
        self._lengths = lengths
        self._rows: Sequence[int] = ()
        self._own = idx_mapping

    def choose(self, hidden: torch.Tensor, rows: Sequence[int], step: int) -> Choice:
        """The likeliest token behind each row, or one drawn where drafts are probabilistic."""
        of = self._of
        if of.draft_logits is None:
            return of.module.draft(hidden)
        own = self._idx_mapping[rows]
        at = torch.tensor([self._lengths[row] + step for row in rows], device=own.device)
        tokens = of.sample_draft(
            hidden, at, own, of.temperature, of.seeds,
            torch.tensor(step, device=own.device),
            of.draft_logits,
        )  # fmt: skip
        tokens = clamp_ids(tokens, of.vocab_size)
        law = of.draft_logits[own, step].float().log_softmax(dim=-1)
        given = law.gather(1, tokens.unsqueeze(1)).squeeze(1).exp()
        return Choice(tokens, tensor_from_rank_0(given))

    def advance(
        self, rows: Sequence[int], tokens: torch.Tensor, features: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One decode step over the drafts just chosen."""
        of, count = self._of, len(rows)
        buffers, lengths = of.input_buffers, [self._lengths[row] + step + 1 for row in rows]
        positions, seq_lens = buffers.positions[:count], buffers.seq_lens[:count]
        starts = buffers.query_start_loc[: count + 1]
        if list(rows) == list(self._rows):
            positions.add_(1)
            seq_lens.add_(1)
        else:
            self._rows, self._own = rows, self._idx_mapping[rows]
            of.block_tables.gather_block_tables(self._own, num_reqs_padded=count)
            seq_lens.copy_(torch.tensor(lengths))
            torch.sub(seq_lens, 1, out=positions)
            torch.arange(count + 1, out=starts)
        slots = of.block_tables.compute_slot_mappings(self._own, starts, positions, count)
        of.draft_max_seq_len = max(lengths)
        metadata = of._build_uniform_attn_metadata(
            batch_desc=BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE, num_tokens=count, num_reqs=count, uniform_token_count=1
            ),
            num_reqs=count,
            num_query_per_req=1,
            seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
            step=0,
        )
        of._prepare_eplb_forward(count)
        with set_forward_context(
            metadata,
            of.vllm_config,
            num_tokens=count,
            slot_mapping=build_slot_mappings_by_layer(slots, of.kv_cache_config),
        ):
            out = of.model(input_ids=tokens.int(), positions=positions, hidden_states=features)
        return of.module.read(out)
