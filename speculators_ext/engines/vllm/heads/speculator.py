"""Hook 3 for methods that draft trees with a head of vLLM's; a chain is a tree.

A round: the head extends its own cache over the accepted rows, in path order and with the target's
hidden states -> a tree grows from each request's bonus token -> its nodes, best first, go to the
scheduler as 0 to K drafts a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from speculators_ext.engines.vllm.cache_groups import group_of_layers
from speculators_ext.engines.vllm.drafts import UNUSED_DRAFT, room_left
from speculators_ext.engines.vllm.heads.extend import ExtendingSpeculator
from speculators_ext.engines.vllm.heads.vllm_head import VllmHead
from speculators_ext.engines.vllm.ranks import decided_on_rank_0
from speculators_ext.engines.vllm.request_options import DEFAULT_OPTIONS
from speculators_ext.engines.vllm.spec_config import ExtSpeculativeConfig
from speculators_ext.engines.vllm.trees.devices import make_compactor, refuse_other_layers
from speculators_ext.engines.vllm.trees.tree_clock import Plan, TreeClock
from speculators_ext.proposers.eagle2 import GrowthLimits, grow_trees
from speculators_ext.tree import DraftTree

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

__all__ = ["HeadSpeculator"]

MAX_BACKLOG = 256
"""Rows the head may lag behind before it catches up: bounds what is kept, and one catching up."""


class HeadSpeculator(ExtendingSpeculator):
    """Drafts trees; see the module's docstring for a round.

    Stands before vLLM's speculator of the head among a method's bases, which loads the model:
    ``class Eagle2Speculator(HeadSpeculator, EagleSpeculator)``. The method's settings have
    ``depth``, ``topk``, ``adaptive`` and the floors of `grow_trees`.

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
        self._method = self.speculative_config.ext_method
        self._options: Any = self.speculative_config.method_config
        self._req_states = req_states
        self._clock = TreeClock(self._options.depth, adaptive=self._options.adaptive)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """No graph: the rows of a round differ from step to step."""

    def capture(self) -> None:
        """No graph to capture."""

    def set_attn(self, model_state: Any, *args: Any, **kwargs: Any) -> None:
        """Link the trees the model state keeps, and what moves the KV of accepted paths."""
        super().set_attn(model_state, *args, **kwargs)
        self._state = model_state
        self._group_of = group_of_layers(self.kv_cache_config)
        every = self.vllm_config.compilation_config.static_forward_context
        layers = {name: every[name] for name in self._group_of}
        refuse_other_layers(self._method, layers)
        targets = {n: layers[n] for n in layers if n not in self.draft_attn_layer_names}
        model_state.compact = make_compactor(
            self.device, targets, self._group_of, self.hidden_states.dtype
        )

    def accepted_paths(self) -> dict[int, torch.Tensor]:
        """Local rows the step accepted, int32 [depth + 1], of each batch row that had a tree."""
        step = self._state.trees.step
        if step.paths is None:
            return {}
        return {tree.request: step.paths[tree.request] for tree in step.trees}

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
        """Extend the head over what was accepted, and grow a tree for every request that can.

        Returns:
            [num_reqs, K] int64, ``UNUSED_DRAFT`` in the unused tail of a row.
        """
        num_reqs = input_batch.num_reqs
        drafts = torch.full_like(self.draft_tokens[:num_reqs], UNUSED_DRAFT)
        if dummy_run:
            options: dict[str, Any] = kwargs | {"dummy_run": True, "num_speculative_tokens": 1}
            super().propose(
                input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states,
                num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds,
                **options,
            )  # fmt: skip
            return drafts.clamp_(min=0)
        self._clock.begin(input_batch)
        slots, sampled = input_batch.idx_mapping, num_sampled.tolist()
        next_tokens = torch.where(
            num_sampled > 0, last_sampled[slots].view(-1), next_prefill_tokens[0, slots]
        ).long()
        lengths = self._note_kept_rows(
            input_batch, aux_hidden_states or [last_hidden_states], next_tokens, sampled,
            num_rejected.tolist(),
        )  # fmt: skip
        plan = decided_on_rank_0(self._clock.plan(sum(count > 0 for count in sampled)))
        caps = self._limits(input_batch, sampled, lengths, plan.levels)
        trees = self._draft(input_batch, caps, next_tokens, num_speculative_tokens, plan)
        for row, slot in enumerate(input_batch.idx_mapping_np.tolist()):
            self._state.trees.reset(slot)
            if row in trees:
                self._state.trees.put(slot, trees[row])
                drafts[row, : len(trees[row]) - 1] = torch.from_numpy(trees[row].tokens[1:])
        self._clock.end(input_batch, num_sampled, caps)
        self._clock.drafted({input_batch.req_ids[row]: tree for row, tree in trees.items()})
        return drafts

    def _draft(
        self,
        input_batch: InputBatch,
        caps: list[int],
        next_tokens: torch.Tensor,
        num_speculative_tokens: int | None,
        plan: Plan,
    ) -> dict[int, DraftTree]:
        """Run the head over what it must catch up with, and grow trees, by row of the batch."""
        slots = input_batch.idx_mapping_np.tolist()
        backlog = self._state.backlog
        rows = [
            row for row, cap in enumerate(caps) if cap or backlog.size(slots[row]) >= MAX_BACKLOG
        ]
        if not rows:
            return {}
        with self._clock.drafting(0):
            hidden, features, lengths = self._extend(input_batch, rows)
            growing = [index for index, row in enumerate(rows) if caps[row]]
            if not growing:
                return {}
            rows = [rows[index] for index in growing]
            nodes = -(-self.num_speculative_steps * plan.levels // self._options.depth)
            options = self._state.request_options
            limits = [options.get(slots[row], DEFAULT_OPTIONS).limit(nodes) for row in rows]
            if num_speculative_tokens is not None:
                limits = [min(limit, num_speculative_tokens) for limit in limits]
            trees = self._grow(
                input_batch, rows, [lengths[index] for index in growing], hidden[growing],
                features[growing], next_tokens[rows], limits, [caps[row] for row in rows], plan,
            )  # fmt: skip
        return {row: tree for row, tree in zip(rows, trees, strict=True) if len(tree) > 1}

    def _limits(
        self, input_batch: InputBatch, sampled: list[int], lengths: list[int], levels: int
    ) -> list[int]:
        """The most levels each request can use."""
        options = self._state.request_options
        caps = []
        for row, slot in enumerate(input_batch.idx_mapping_np.tolist()):
            room = room_left(self._req_states, slot, lengths[row], self.max_model_len)
            asked = sampled[row] > 0 and options.get(slot, DEFAULT_OPTIONS).limit(1) > 0
            caps.append(min(levels, room) if asked else 0)
        return caps

    def _grow(
        self,
        input_batch: InputBatch,
        rows: list[int],
        lengths: list[int],
        hidden: torch.Tensor,
        features: torch.Tensor,
        root_tokens: torch.Tensor,
        max_drafts: list[int],
        depths: list[int],
        plan: Plan,
    ) -> list[DraftTree]:
        """A tree for each of the batch's ``rows``."""
        tables, slots = self.block_tables.block_tables, input_batch.idx_mapping_np
        own = input_batch.idx_mapping[rows]
        head = VllmHead(
            self.model,
            self.vllm_config,
            [input_batch.req_ids[row] for row in rows],
            {name: tables[self._group_of[name]].gpu[own] for name in self.draft_attn_layer_names},
            lengths,
            self._options.topk * max(1, self._options.depth - 1),
            self._state.trees.shadow,
        )
        chain_only = self._state.chain_only
        limits = GrowthLimits(
            torch.tensor([n + 1 for n in max_drafts], dtype=torch.int32, device=self.device),
            torch.tensor(depths, device=self.device),
            torch.tensor([int(slots[row]) in chain_only for row in rows], device=self.device),
        )
        least = self._options.min_path_probability, self._options.min_level_probability
        floors = {
            "min_path_probability": max(least[0], plan.node_floor),
            "min_level_probability": max(least[1], plan.level_floor),
        }
        grown = grow_trees(
            head, hidden, features, root_tokens, limits, self._options.model_copy(update=floors),
            num_rows=self.num_speculative_steps + 1, depth=max(depths),
            prune=self.device.type == "cpu",
        )  # fmt: skip
        self._clock.ran(1 + head.num_steps)
        tokens, parents = grown.tokens.cpu().numpy(), grown.parents.cpu().numpy()
        return [
            DraftTree(tokens[i, :n], parents[i, :n]) for i, n in enumerate(grown.counts.tolist())
        ]
