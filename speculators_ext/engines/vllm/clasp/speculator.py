"""Hook 3: the speculator of ``clasp``, the target drafting for itself with layers skipped.

A round: [search a skip set] -> draft token by token through the kept layers, on the target's own
KV cache -> hand 0 to K drafts a request to the scheduler. Verification by the target then
overwrites every KV slot the drafts wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from speculators_ext.engines.vllm.attention.packed_rows import (
    can_pack_rows,
    use_packed_rows_backend,
)
from speculators_ext.engines.vllm.cache_groups import group_of_layers
from speculators_ext.engines.vllm.clasp.drafting import LayerSkippingSpeculator
from speculators_ext.engines.vllm.clasp.layer_walk import LayerWalk
from speculators_ext.engines.vllm.clasp.skip_search import SearchRows, SkipSearch
from speculators_ext.engines.vllm.drafts import UNUSED_DRAFT, limit_drafts, make_unused_certain
from speculators_ext.engines.vllm.log import logger, warn_untried_on_gpus
from speculators_ext.engines.vllm.ranks import decided_on_rank_0
from speculators_ext.engines.vllm.spec_config import ExtSpeculativeConfig
from speculators_ext.engines.vllm.step_clock import StepClock

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


__all__ = ["ClaspSpeculator", "build_speculator"]


def build_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> ClaspSpeculator:
    """The speculator for our config; called before the target's layers are built."""
    if device.type == "cpu":
        use_packed_rows_backend()
    else:
        from speculators_ext.engines.vllm.attention.packed_rows_gpu import (
            use_packed_rows_backend_gpu,
        )

        warn_untried_on_gpus("clasp")
        use_packed_rows_backend_gpu()
    return ClaspSpeculator(vllm_config, device, req_states)


class ClaspSpeculator(LayerSkippingSpeculator):
    """Drafts with the target's own layers; see the module's docstring for a round.

    Args:
        vllm_config: holds our speculative config.
        device: of the target.
        req_states: the runner's request table, read only.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        super().__init__(vllm_config, device)
        assert isinstance(self.speculative_config, ExtSpeculativeConfig)
        self._options = self.speculative_config.method_config
        self._req_states = req_states
        self._async = vllm_config.scheduler_config.async_scheduling
        self._clock = StepClock(
            self.num_speculative_steps,
            self._options.refresh_interval,
            adaptive=self._options.adaptive,
            fixed_launches=device.type != "cpu",
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """No graph: the skip set changes at run time, layers are called eagerly."""

    def capture(self) -> None:
        """No graph to capture."""

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> Any:
        """The draft model is the target."""
        self._target_attn_layer_names = target_attn_layer_names
        self._walk = LayerWalk(target_model, sublayers=self._options.skip_unit == "sublayer")
        can_pack = can_pack_rows(self.vllm_config, target_attn_layer_names)
        self._search = SkipSearch(self._walk, self._options, self.vllm_config, can_pack=can_pack)
        if self._search.lacks_packing:
            logger.warning(
                "clasp: this attention backend cannot attend packed rows; drafting with an "
                "evenly spread skip set instead of searching one"
            )
        return target_model

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Build draft attention metadata with the target's layers, but own none of them."""
        self.draft_attn_layer_names = self._target_attn_layer_names
        super().set_attn(*args, **kwargs)
        self.draft_attn_layer_names = set()
        self._group_of = group_of_layers(self.kv_cache_config)

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

    def _refresh_skip_sets(
        self,
        input_batch: InputBatch,
        rows: list[int],
        tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        self._search.forget_absent(self._req_states.req_id_to_index.__contains__)
        names = [input_batch.req_ids[row] for row in rows]
        if not self._search.due(names):
            return
        with self._clock.searching():
            looked_at = self._search_rows(input_batch, rows, tokens, positions)
            self._search.search_rows(looked_at, names)

    def _search_rows(
        self,
        input_batch: InputBatch,
        rows: list[int],
        tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> SearchRows:
        """The newest tokens of ``rows``: the bonus token, which has no KV yet, and those before."""
        rows, window = self._search.looked_at(rows)
        back = torch.arange(window, device=self.device)
        at = positions[rows].unsqueeze(1) - back  # [rows, search_window]
        slots = input_batch.idx_mapping[rows].unsqueeze(1).expand_as(at)
        ids = self._req_states.all_token_ids.gpu[slots, at.clamp(min=0)].long()
        ids[:, 0] = tokens[rows]
        exists = at >= 0
        owners = exists.nonzero()[:, 0].tolist()
        tables = [table.gpu[slots[exists]] for table in self.block_tables.block_tables]
        by_layer = {
            name: tables[group]
            for name, group in self._group_of.items()
            if name in self._target_attn_layer_names
        }
        names = [input_batch.req_ids[rows[owner]] for owner in owners]
        return SearchRows(names, ids[exists], at[exists], by_layer)
