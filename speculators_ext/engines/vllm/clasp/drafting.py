"""Chains of drafts with layers skipped, each as long as it is sure and as it pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from speculators_ext.engines.vllm.ranks import tensor_from_rank_0
from speculators_ext.engines.vllm.skipping.speculator import LayerSkippingSpeculator
from speculators_ext.proposers.drafting import clamp_ids, exit_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.config import ClaspConfig
    from speculators_ext.engines.vllm.step_clock import StepClock

__all__ = ["ChainSpeculator"]


class ChainSpeculator(LayerSkippingSpeculator):
    """Drafts rows token by token through the units it is told to.

    Args:
        vllm_config: holds our speculative config.
        device: of the target.
        req_states: the runner's request table, read only.
        options: of the method.
    """

    _clock: StepClock

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        req_states: RequestState,
        options: ClaspConfig,
    ) -> None:
        super().__init__(vllm_config, device, req_states, options)
        self._options = options
        self._draft_step = torch.zeros((), dtype=torch.int64, device=device)
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
                self._gather(input_batch, rows)
                gathered_for = rows
            with self._clock.drafting(step):
                hidden = self._forward(units, tokens, positions, step)
                tokens = self._sample(hidden, positions, step)
                going = self._still_going(rows, limits, step)
            drafts[rows, step] = tokens
            if not going:
                return
            if len(going) < len(rows):
                rows = [rows[i] for i in going]
                tokens, positions = tokens[going], positions[going]
            positions = positions + 1

    def _sample(self, hidden: torch.Tensor, positions: torch.Tensor, step: int) -> torch.Tensor:
        """One draft a row, [n] int64; its distribution is kept when sampling is probabilistic."""
        self._draft_step.fill_(step)
        tokens = self.sample_draft(
            hidden,
            positions,
            self._mapping,
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
