"""A head's round that grows draft trees, one forward of the head a level."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.vllm.cache_groups import group_of_layers
from speculators_ext.engines.vllm.heads.growing import GrowingSpeculator
from speculators_ext.engines.vllm.heads.vllm_head import VllmHead
from speculators_ext.engines.vllm.trees.devices import make_compactor, refuse_other_layers
from speculators_ext.engines.vllm.trees.tree_clock import TreeClock
from speculators_ext.proposers.head_rounds import grow_planned

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.proposers.head_rounds import Plan, Roots
    from speculators_ext.tree import DraftTree

__all__ = ["TreeSpeculator"]


class TreeSpeculator(GrowingSpeculator):
    """Drafts trees. The method's model state knows them, its settings are those of `grow_trees`.

    Args:
        vllm_config: holds our speculative config.
        device: of the target.
        req_states: the runner's request table, read only.
    """

    _clock: TreeClock
    _head_type: type[VllmHead] = VllmHead

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        super().__init__(vllm_config, device, req_states)
        self._clock = TreeClock(self._options.depth, adaptive=self._options.adaptive)

    def set_attn(self, model_state: Any, *args: Any, **kwargs: Any) -> None:
        """Link the trees the model state keeps, and what moves the KV of accepted paths."""
        super().set_attn(model_state, *args, **kwargs)
        self._group_of = group_of_layers(self.kv_cache_config)
        every = self.vllm_config.compilation_config.static_forward_context
        layers = {name: every[name] for name in self._group_of}
        refuse_other_layers(self._method, layers)
        targets = {n: layers[n] for n in layers if n not in self.draft_attn_layer_names}
        model_state.compact = make_compactor(
            self.device, targets, self._group_of, self.hidden_states.dtype
        )

    @property
    def full_depth(self) -> int:
        """Levels of a tree that holds all K drafts."""
        return self._options.depth

    def accepted_paths(self) -> dict[int, torch.Tensor]:
        """Local rows the step accepted, int32 [depth + 1], of each batch row that had a tree."""
        step = self._state.trees.step
        if step.paths is None:
            return {}
        return {tree.request: step.paths[tree.request] for tree in step.trees}

    def plan(self, num_rows: int) -> Plan:
        """What ``num_rows`` decoding rows may draft in this round."""
        self._clock.verified(self._state.trees.step.paths)
        return self._clock.plan(num_rows)

    def note_drafts(self, input_batch: InputBatch, trees: dict[int, DraftTree]) -> None:
        """Keep the shapes for verification."""
        for row, slot in enumerate(input_batch.idx_mapping_np.tolist()):
            if row in trees:
                self._state.trees.put(slot, trees[row])
            else:
                self._state.trees.reset(slot)
        self._clock.drafted({input_batch.req_ids[row]: tree for row, tree in trees.items()})

    def grow(self, input_batch: InputBatch, roots: Roots, plan: Plan) -> list[DraftTree]:
        """A tree from each root."""
        head = self._make_head(input_batch, roots)
        slots, chain_only = input_batch.idx_mapping_np, self._state.chain_only
        trees = grow_planned(
            head, roots, plan, self._options,
            chains=[int(slots[row]) in chain_only for row in roots.rows],
            num_rows=self.num_speculative_steps + 1, prune=self.device.type == "cpu",
        )  # fmt: skip
        self._clock.ran(1 + head.num_steps)
        return trees

    def _make_head(self, input_batch: InputBatch, roots: Roots) -> VllmHead:
        """The head over the caches of the requests that draft."""
        tables = self.block_tables.block_tables
        own = input_batch.idx_mapping[roots.rows]
        return self._head_type(
            self.model,
            self.vllm_config,
            [input_batch.req_ids[row] for row in roots.rows],
            {name: tables[self._group_of[name]].gpu[own] for name in self.draft_attn_layer_names},
            roots.lengths,
            self._options.topk * max(1, self._options.depth - 1),
            self._state.trees.shadow,
        )
