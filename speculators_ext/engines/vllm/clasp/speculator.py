"""Hook 3: the speculator of ``clasp``, the target drafting for itself with layers skipped.

A round: [search a skip set] -> draft token by token through the kept layers, on the target's own
KV cache -> hand 0 to K drafts a request to the scheduler. Verification by the target then
overwrites every KV slot the drafts wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from speculators_ext.engines.vllm.clasp.drafting import ChainSpeculator
from speculators_ext.engines.vllm.drafts import UNUSED_DRAFT, limit_drafts, make_unused_certain
from speculators_ext.engines.vllm.log import warn_untried_on_gpus
from speculators_ext.engines.vllm.ranks import decided_on_rank_0
from speculators_ext.engines.vllm.skipping.speculator import attend_packed_rows
from speculators_ext.engines.vllm.spec_config import ExtSpeculativeConfig
from speculators_ext.engines.vllm.step_clock import StepClock

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


__all__ = ["ClaspSpeculator", "build_speculator"]


def build_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> ClaspSpeculator:
    """The speculator for our config; called before the target's layers are built."""
    if device.type != "cpu":
        warn_untried_on_gpus("clasp")
    attend_packed_rows(device)
    return ClaspSpeculator(vllm_config, device, req_states)


class ClaspSpeculator(ChainSpeculator):
    """Drafts with the target's own layers; see the module's docstring for a round.

    Args:
        vllm_config: holds our speculative config.
        device: of the target.
        req_states: the runner's request table, read only.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        config = vllm_config.speculative_config
        assert isinstance(config, ExtSpeculativeConfig)
        super().__init__(vllm_config, device, req_states, config.method_config)
        self._async = vllm_config.scheduler_config.async_scheduling
        self._clock = StepClock(
            self.num_speculative_steps,
            self._options.refresh_interval,
            adaptive=self._options.adaptive,
            fixed_launches=device.type != "cpu",
        )

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft for every request of the batch that has a new token.

        Returns:
            [num_reqs, K] int64. Unused slots hold ``UNUSED_DRAFT`` under synchronous scheduling,
            a valid id under async scheduling (what reaches the input ids is embedded unchecked).
        """
        num_reqs = input_batch.num_reqs
        unused = 0 if self._async else UNUSED_DRAFT
        drafts = torch.full_like(self.draft_tokens[:num_reqs], unused)
        if dummy_run:
            return drafts.clamp_(min=0)
        self._clock.begin(input_batch)
        lengths = input_batch.seq_lens[:num_reqs].long() - num_rejected[:num_reqs].long()
        limits = limit_drafts(
            self, input_batch, num_sampled.tolist(), lengths.tolist(), num_speculative_tokens
        )
        depth = decided_on_rank_0(self._clock.depth(int((num_sampled > 0).sum())))
        limits = [min(limit, depth) for limit in limits]
        rows = [row for row, limit in enumerate(limits) if limit > 0]
        if self._async and self.draft_logits is not None:
            make_unused_certain(self.draft_logits, input_batch.idx_mapping)
        if rows:
            self._copy_request_inputs(num_reqs, input_batch.idx_mapping, temperature, seeds)
            tokens = last_sampled[input_batch.idx_mapping].view(-1)[:num_reqs]
            self._refresh_skip_sets(input_batch, rows, tokens, lengths)
            names = [input_batch.req_ids[row] for row in rows]
            for units, members in self._search.groups(names):
                group = [rows[m] for m in members]
                self._draft_rows(input_batch, units, group, limits, tokens, lengths, drafts)
        self._search.count_round()
        self._clock.end(input_batch, num_sampled, limits)
        return drafts

    def _search_skip_sets(self, *args: Any) -> None:
        with self._clock.searching():
            super()._search_skip_sets(*args)
