"""Drafting with the target's own layers, some of them left out, on the target's own KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from speculators_ext.engines.vllm.ranks import tensor_from_rank_0
from speculators_ext.proposers.drafting import clamp_ids, exit_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from speculators_ext.engines.vllm.clasp.layer_walk import LayerWalk
    from speculators_ext.engines.vllm.step_clock import StepClock

__all__ = ["LayerSkippingSpeculator"]


class LayerSkippingSpeculator(DraftModelSpeculator):
    """Drafts rows token by token through the units it is told to.

    Args:
        vllm_config: holds our speculative config.
        device: of the target.
    """

    _clock: StepClock
    _walk: LayerWalk

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        config: Any = self.speculative_config
        self._options = config.method_config
        self._draft_step = torch.zeros((), dtype=torch.int64, device=device)
        self._arange = torch.arange(self.max_num_reqs + 1, dtype=torch.int32, device=device)
        self._step_logits: torch.Tensor | None = None

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """The target's logits, kept for the exit rule of this step."""
        logits = super().compute_draft_logits(hidden_states, spec_step_idx)
        self._step_logits = logits
        return logits

    def _draft_rows(
        self,
        input_batch: InputBatch,
        units: Sequence[int],
        rows: list[int],
        limits: list[int],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        drafts: torch.Tensor,
    ) -> None:
        """Draft token by token; a row leaves the batch at its limit or when it is unsure."""
        tokens, positions = tokens[rows], positions[rows]
        gathered_for: list[int] | None = None
        for step in range(max(limits[row] for row in rows)):
            if gathered_for != rows:
                idx_mapping = input_batch.idx_mapping[rows]
                self.block_tables.gather_block_tables(idx_mapping, num_reqs_padded=len(rows))
                bound = input_batch.seq_lens_cpu_upper_bound[rows]
                gathered_for = rows
            with self._clock.drafting(step):
                hidden = self._forward(units, tokens, positions, idx_mapping, bound, step)
                tokens = self._sample(hidden, positions, idx_mapping, step)
                going = self._still_going(rows, limits, step)
            drafts[rows, step] = tokens
            if not going:
                return
            if len(going) < len(rows):
                rows = [rows[i] for i in going]
                tokens, positions = tokens[going], positions[going]
            positions = positions + 1

    def _sample(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        step: int,
    ) -> torch.Tensor:
        """One draft a row, [n] int64; its distribution is kept when sampling is probabilistic."""
        self._draft_step.fill_(step)
        tokens = self.sample_draft(
            hidden,
            positions,
            idx_mapping,
            self.temperature,
            self.seeds,
            self._draft_step,
            self.draft_logits,
        )
        return clamp_ids(tokens, self.vocab_size)

    def _still_going(self, rows: list[int], limits: list[int], step: int) -> list[int]:
        """Which of ``rows`` (as indices) draft another token after ``step``."""
        under_limit = [i for i, row in enumerate(rows) if limits[row] > step + 1]
        threshold = self._options.exit_threshold
        if threshold <= 0 or not under_limit or self._step_logits is None:
            return under_limit
        sure = tensor_from_rank_0(exit_mask(self._step_logits, threshold).keep).tolist()
        return [i for i in under_limit if sure[i]]

    def _forward(
        self,
        units: Sequence[int],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        seq_lens_bound: torch.Tensor,
        step: int,
    ) -> torch.Tensor:
        """One draft forward of n rows through ``units``: [n] ids and positions -> [n, H]."""
        n = tokens.shape[0]
        buffers = self.input_buffers
        buffers.positions[:n].copy_(positions)
        buffers.seq_lens[:n].copy_(positions + 1)
        buffers.query_start_loc[: n + 1].copy_(self._arange[: n + 1])
        slots = self.block_tables.compute_slot_mappings(
            idx_mapping, buffers.query_start_loc[: n + 1], buffers.positions[:n], n
        )
        metadata = self._build_uniform_attn_metadata(
            batch_desc=BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE, num_tokens=n, num_reqs=n, uniform_token_count=1
            ),
            num_reqs=n,
            num_query_per_req=1,
            seq_lens_cpu_upper_bound=seq_lens_bound,
            step=step + 1,
        )
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=n,
            slot_mapping=build_slot_mappings_by_layer(slots, self.kv_cache_config),
        ):
            return self._walk.run(units, buffers.positions[:n], self._walk.embed(tokens))
