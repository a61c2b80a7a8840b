"""Steps that the target writes itself, with some of its layers skipped, on its own KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from speculators_ext.engines.vllm.reasoning_step.writing import StepSpeculator
from speculators_ext.engines.vllm.skipping.speculator import LayerSkippingSpeculator

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.config import ReasoningStepConfig

__all__ = ["OwnLayersSteps"]


class OwnLayersSteps(StepSpeculator, LayerSkippingSpeculator):
    """Drafts steps through the target's layers that are not skipped.

    Args:
        vllm_config: holds our speculative config.
        device: of the target.
        req_states: the runner's request table, read only.
        options: of the method, which say what may be skipped.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        req_states: RequestState,
        options: ReasoningStepConfig,
    ) -> None:
        assert options.clasp is not None
        super().__init__(vllm_config, device, req_states, options.clasp)
        self._options = options

    def _catch_up(
        self,
        input_batch: InputBatch,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *,
        dummy_run: bool,
        skip_attn: bool,
    ) -> None:
        """Nothing to read: the target's KV cache is the drafts' too."""
        if not dummy_run:
            self._search.count_round()
            self._newest = last_sampled[input_batch.idx_mapping].view(-1)[: input_batch.num_reqs]

    def _first_tokens(
        self, input_batch: InputBatch, rows: list[int], lengths: list[int]
    ) -> torch.Tensor:
        """Through skip sets that are searched anew where that is due."""
        positions = torch.tensor(lengths, device=self.device)
        self._refresh_skip_sets(input_batch, rows, self._newest, positions)
        return self._next_tokens(input_batch, rows, self._newest[rows], positions[rows], 0)

    def _next_tokens(
        self,
        input_batch: InputBatch,
        rows: list[int],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: int,
    ) -> torch.Tensor:
        following = torch.empty_like(positions)
        names = [input_batch.req_ids[row] for row in rows]
        for units, members in self._search.groups(names):
            self._look_at(input_batch, [rows[member] for member in members])
            hidden = self._forward(units, tokens[members], positions[members], step)
            following[members] = self.compute_draft_logits(hidden, step).argmax(dim=-1)
        return following
