"""The module as a chain is drafted with it: decode steps of vLLM's own attention.

A step writes its KV behind the prefix, provisionally: made from the module's own states, it is
overwritten by the next extend, which has the target's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer

from speculators_ext.engines.vllm.ranks import tensor_from_rank_0
from speculators_ext.proposers.drafting import clamp_ids
from speculators_ext.proposers.mtp_reuse import Choice

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ChainSteps", "DecodeBuffers"]


class DecodeBuffers:
    """What steps of one row a request are described to vLLM with; kept, as only values change.

    Args:
        speculator: whose buffers, block tables and attention these are views of.
        count: of requests.
    """

    def __init__(self, speculator: Any, count: int) -> None:
        buffers, tables = speculator.input_buffers, speculator.block_tables
        self.positions = buffers.positions[:count]
        self.seq_lens = buffers.seq_lens[:count]
        self.starts = buffers.query_start_loc[: count + 1]
        self.numbers = torch.arange(count + 1, dtype=torch.int32)
        self._slots = tables.slot_mappings[:, :count]
        self.slots_by_layer = build_slot_mappings_by_layer(self._slots, speculator.kv_cache_config)
        self._tables = [table[:count] for table in tables.input_block_tables]
        self._prefilling = speculator.draft_is_prefilling[:count]
        self._count = count

    def metadata(self, speculator: Any, lengths: Sequence[int]) -> dict[str, Any]:
        """vLLM's, by layer, for requests of these lengths, the step's rows included."""
        return build_attn_metadata(
            attn_groups=speculator.attn_groups,
            num_reqs=self._count,
            num_tokens=self._count,
            query_start_loc_gpu=self.starts,
            query_start_loc_cpu=self.numbers,
            max_query_len=1,
            seq_lens=self.seq_lens,
            max_seq_len=max(lengths),
            block_tables=self._tables,
            slot_mappings=self._slots,
            kv_cache_config=speculator.kv_cache_config,
            seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
            positions=self.positions,
            is_prefilling=self._prefilling,
        )


class ChainSteps:
    """One round of some requests' chains.

    Args:
        speculator: whose module, buffers and block tables are used.
        idx_mapping: [R] int64, the requests' slots.
        lengths: [R], tokens each request has in the module's cache, which is also the position its
            first draft is run at.
        gathered: vLLM's block tables hold those of these requests, in this order.
    """

    def __init__(
        self,
        speculator: Any,
        idx_mapping: torch.Tensor,
        lengths: Sequence[int],
        *,
        gathered: bool = False,
    ) -> None:
        self._of = speculator
        self._idx_mapping = idx_mapping
        self._lengths = lengths
        self._rows: Sequence[int] = ()
        self._own = idx_mapping
        self._gathered = gathered

    def choose(self, hidden: torch.Tensor, rows: Sequence[int], step: int) -> Choice:
        """The likeliest token behind each row, or one drawn where drafts are probabilistic."""
        of = self._of
        if of.draft_logits is None:
            return of.module.draft(hidden, of.module.index(step))
        own = self._idx_mapping[rows]
        at = torch.tensor([self._lengths[row] + step for row in rows], device=own.device)
        tokens = of.sample_draft(
            hidden, at, own, of.temperature, of.seeds,
            torch.tensor(step, device=own.device),
            of.draft_logits, of.module.index(step),
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
        lengths = [self._lengths[row] + step + 1 for row in rows]
        buffers, module = of.decode_buffers(count), of.module
        if rows == self._rows:
            buffers.positions.add_(1)
            buffers.seq_lens.add_(1)
        else:
            self._take(rows, lengths, buffers)
        of.block_tables.compute_slot_mappings(self._own, buffers.starts, buffers.positions, count)
        metadata = buffers.metadata(of, lengths)
        of._prepare_eplb_forward(count)
        with set_forward_context(
            metadata, of.vllm_config, num_tokens=count, slot_mapping=buffers.slots_by_layer
        ):
            return module.run(tokens.int(), buffers.positions, features, module.index(step + 1))

    def _take(self, rows: Sequence[int], lengths: list[int], buffers: DecodeBuffers) -> None:
        """Point vLLM's buffers at these rows."""
        self._rows = rows
        if len(rows) < len(self._lengths):
            self._own, self._gathered = self._idx_mapping[rows], False
        if not self._gathered:
            self._of.block_tables.gather_block_tables(self._own, num_reqs_padded=len(rows))
        buffers.seq_lens.copy_(torch.tensor(lengths))
        torch.sub(buffers.seq_lens, 1, out=buffers.positions)
        buffers.starts.copy_(buffers.numbers)
