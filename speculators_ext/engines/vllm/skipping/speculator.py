"""What every method does that drafts through the target's own layers, some of them left out.

Drafts write the target's own KV cache, in the layers they run through and behind what was verified.
Whatever comes next must run the whole target over those positions: verification does, and so leaves
nothing of a draft behind, taken or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from speculators_ext.engines.vllm.attention.packed_rows import (
    can_pack_rows,
    use_packed_rows_backend,
)
from speculators_ext.engines.vllm.cache_groups import group_of_layers
from speculators_ext.engines.vllm.log import logger
from speculators_ext.engines.vllm.skipping.layer_walk import LayerWalk
from speculators_ext.engines.vllm.skipping.skip_search import SearchRows, SkipSearch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.settings import SkipConfig

__all__ = ["LayerSkippingSpeculator", "attend_packed_rows"]


def attend_packed_rows(device: torch.device) -> None:
    """Choose the attention that a search needs; before the target's layers are built."""
    if device.type == "cpu":
        use_packed_rows_backend()
        return
    from speculators_ext.engines.vllm.attention.packed_rows_gpu import use_packed_rows_backend_gpu

    use_packed_rows_backend_gpu()


class LayerSkippingSpeculator(DraftModelSpeculator):
    """Runs rows of a batch through the layers kept, and searches which to skip.

    Args:
        vllm_config: holds our speculative config.
        device: of the target.
        req_states: the runner's request table, read only.
        skips: which layers may be skipped, and how they are chosen.
    """

    _req_states: RequestState

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        req_states: RequestState,
        skips: SkipConfig,
    ) -> None:
        super().__init__(vllm_config, device)
        self._req_states = req_states
        self._skips = skips
        self._arange = torch.arange(self.max_num_reqs + 1, dtype=torch.int32, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """No graph: the skip set changes at run time, layers are called eagerly."""

    def capture(self) -> None:
        """No graph to capture."""

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> Any:
        """The draft model is the target."""
        self._target_attn_layer_names = target_attn_layer_names
        self._walk = LayerWalk(target_model, sublayers=self._skips.skip_unit == "sublayer")
        can_pack = can_pack_rows(self.vllm_config, target_attn_layer_names)
        self._search = SkipSearch(self._walk, self._skips, self.vllm_config, can_pack=can_pack)
        if self._search.lacks_packing:
            logger.warning(
                "this attention backend cannot attend packed rows; drafting with an evenly "
                "spread skip set instead of searching one"
            )
        return target_model

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Build draft attention metadata with the target's layers, but own none of them."""
        self.draft_attn_layer_names = self._target_attn_layer_names
        super().set_attn(*args, **kwargs)
        self.draft_attn_layer_names = set()
        self._group_of = group_of_layers(self.kv_cache_config)

    def _refresh_skip_sets(
        self,
        input_batch: InputBatch,
        rows: list[int],
        tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Search sets for ``rows`` of the batch where that is due.

        Args:
            input_batch: num_reqs requests.
            rows: those that draft.
            tokens: [num_reqs] int64, the newest token of each, which has no KV yet.
            positions: [num_reqs] int64, its position.
        """
        self._search.forget_absent(self._req_states.req_id_to_index.__contains__)
        names = [input_batch.req_ids[row] for row in rows]
        if self._search.due(names):
            self._search_skip_sets(input_batch, rows, tokens, positions)

    def _search_skip_sets(
        self,
        input_batch: InputBatch,
        rows: list[int],
        tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        looked_at = self._search_rows(input_batch, rows, tokens, positions)
        self._search.search_rows(looked_at, [input_batch.req_ids[row] for row in rows])

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

    def _gather(self, input_batch: InputBatch, rows: list[int]) -> None:
        """Point what a forward reads at these rows of the batch, until it is called again."""
        self._mapping = input_batch.idx_mapping[rows]
        self._bound = input_batch.seq_lens_cpu_upper_bound[rows]
        self.block_tables.gather_block_tables(self._mapping, num_reqs_padded=len(rows))

    def _forward(
        self, units: Sequence[int], tokens: torch.Tensor, positions: torch.Tensor, step: int
    ) -> torch.Tensor:
        """Draft forward ``step`` of the n rows gathered: [n] ids and positions -> [n, H]."""
        n = tokens.shape[0]
        buffers = self.input_buffers
        buffers.positions[:n].copy_(positions)
        buffers.seq_lens[:n].copy_(positions + 1)
        buffers.query_start_loc[: n + 1].copy_(self._arange[: n + 1])
        slots = self.block_tables.compute_slot_mappings(
            self._mapping, buffers.query_start_loc[: n + 1], buffers.positions[:n], n
        )
        metadata = self._build_uniform_attn_metadata(
            batch_desc=BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE, num_tokens=n, num_reqs=n, uniform_token_count=1
            ),
            num_reqs=n,
            num_query_per_req=1,
            seq_lens_cpu_upper_bound=self._bound,
            step=step + 1,
        )
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=n,
            slot_mapping=build_slot_mappings_by_layer(slots, self.kv_cache_config),
        ):
            return self._walk.run(units, buffers.positions[:n], self._walk.embed(tokens))
