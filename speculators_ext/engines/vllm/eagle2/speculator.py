"""Hook 3 for ``eagle2``: draft trees grown by vLLM's EAGLE head.

A round: the head extends its own cache over the accepted rows, in path order and with the target's
hidden states -> a tree grows from each request's bonus token -> its nodes, best first, go to the
scheduler as 0 to K drafts a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from speculators_ext.engines.vllm.drafts import UNUSED_DRAFT
from speculators_ext.engines.vllm.eagle2.attention_cpu import TreeCPUImpl, use_tree_backend
from speculators_ext.engines.vllm.eagle2.compaction_cpu import CompactorCPU
from speculators_ext.engines.vllm.eagle2.growth import VllmHead
from speculators_ext.engines.vllm.request_options import DEFAULT_OPTIONS
from speculators_ext.engines.vllm.spec_config import ExtSpeculativeConfig
from speculators_ext.proposers.eagle2 import GrowthLimits, grow_trees
from speculators_ext.tree import DraftTree

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

__all__ = ["Eagle2Speculator", "build_eagle2_speculator"]

_NO_GRAPH = CUDAGraphMode.NONE


def build_eagle2_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> Eagle2Speculator:
    """The speculator for our config; called before the target's layers are built."""
    use_tree_backend()
    return Eagle2Speculator(vllm_config, device, req_states)


class Eagle2Speculator(EagleSpeculator):
    """Drafts trees with an EAGLE head; see the module's docstring for a round.

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
        self._options: Any = self.speculative_config.method_config
        self._state: Any = None
        self._req_states = req_states

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> Any:
        """vLLM's EAGLE model; where the target ties its head to its embedding, so does ours."""
        model = super().load_draft_model(target_model, target_attn_layer_names)
        if not hasattr(model, "lm_head"):
            model.compute_logits = target_model.compute_logits
        return model

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """No graph: the rows of a round differ from step to step."""

    def capture(self) -> None:
        """No graph to capture."""

    def set_attn(self, model_state: Any, *args: Any, **kwargs: Any) -> None:
        """Link the trees the model state keeps, and what moves the KV of accepted paths."""
        super().set_attn(model_state, *args, **kwargs)
        self._state = model_state
        layers = self.vllm_config.compilation_config.static_forward_context
        self._group_of = {
            name: index
            for index, group in enumerate(self.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        for name in self._group_of:
            impl = getattr(layers[name], "impl", None)
            obstacle = impl.obstacle() if isinstance(impl, TreeCPUImpl) else type(impl).__name__
            if obstacle is not None:
                raise ValueError(
                    f"speculative method 'eagle2': layer {name} cannot attend a draft tree "
                    f"({obstacle}); choose another method"
                )
        targets = {n: layers[n] for n in self._group_of if n not in self.draft_attn_layer_names}
        model_state.compact = CompactorCPU(targets, self._group_of, self.hidden_states.dtype)

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
        slots = input_batch.idx_mapping
        sampled = num_sampled.tolist()
        next_tokens = torch.where(
            num_sampled > 0, last_sampled[slots].view(-1), next_prefill_tokens[0, slots]
        )
        hidden, features, lengths = self._extend(
            input_batch,
            aux_hidden_states or [last_hidden_states],
            next_tokens,
            sampled,
            num_rejected.tolist(),
        )
        max_drafts, depths = self._limits(input_batch, sampled, lengths, num_speculative_tokens)
        trees = self._state.trees
        for slot in input_batch.idx_mapping_np.tolist():
            trees.reset(slot)
        rows = [row for row in range(num_reqs) if min(max_drafts[row], depths[row]) > 0]
        if not rows:
            return drafts
        grown = self._grow(
            input_batch, rows, lengths, hidden[rows], features[rows], next_tokens[rows].long(),
            [max_drafts[row] for row in rows], [depths[row] for row in rows],
        )  # fmt: skip
        for row, tree in zip(rows, grown, strict=True):
            trees.put(int(input_batch.idx_mapping_np[row]), tree)
            drafts[row, : len(tree) - 1] = torch.from_numpy(tree.tokens[1:])
        return drafts

    def _limits(
        self,
        input_batch: InputBatch,
        sampled: list[int],
        lengths: list[int],
        num_speculative_tokens: int | None,
    ) -> tuple[list[int], list[int]]:
        """The most drafts and the most levels each request can use."""
        most = self.num_speculative_steps
        if num_speculative_tokens is not None:
            most = min(most, num_speculative_tokens)
        options = self._state.request_options
        drafts, depths = [], []
        for row, slot in enumerate(input_batch.idx_mapping_np.tolist()):
            # `length` tokens have KV, the bonus token follows, and a verification adds one more:
            # drafts past the request's last token would be thrown away.
            end = min(int(self._req_states.max_seq_len[slot]) - 1, self.max_model_len - 1)
            room = end - (lengths[row] + 1)
            limit = options.get(slot, DEFAULT_OPTIONS).limit(most)
            drafts.append(limit if sampled[row] > 0 else 0)
            depths.append(max(0, min(self._options.depth, room)))
        return drafts, depths

    def _extend(
        self,
        input_batch: InputBatch,
        hidden_states: list[torch.Tensor],
        next_tokens: torch.Tensor,
        sampled: list[int],
        rejected: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """One forward of the head over all rows the target kept, in path order.

        Returns:
            What `compute_logits` takes and the head's features, [num_reqs, H] each, at every
            request's last row; and the number of tokens each request has in the caches.
        """
        num_reqs = input_batch.num_reqs
        rows, counts = self._kept_rows(input_batch, sampled, rejected)
        ends = np.cumsum([0, *counts]).astype(np.int32)
        total = int(ends[-1])
        computed = input_batch.num_computed_tokens_np[:num_reqs]
        lengths = [int(done) + count for done, count in zip(computed, counts, strict=True)]
        buffers = self.input_buffers
        buffers.query_start_loc[: num_reqs + 1].copy_(torch.from_numpy(ends))
        buffers.seq_lens[:num_reqs].copy_(torch.tensor(lengths))
        offsets = np.arange(total) - np.repeat(ends[:-1] - computed, counts)
        buffers.positions[:total].copy_(torch.from_numpy(offsets))
        tokens = buffers.input_ids[:total]
        tokens[:-1] = input_batch.input_ids[rows[1:]]
        last = torch.from_numpy(ends[1:] - 1).long()
        tokens[last] = next_tokens.to(tokens.dtype)
        hidden = torch.cat([states[rows] for states in hidden_states], dim=-1)
        if self.method == "eagle3":
            model: Any = self.model
            hidden = model.combine_hidden_states(hidden)
        before_logits, features = self._forward(input_batch, ends, lengths, hidden)
        return before_logits[last], features[last], lengths

    def _kept_rows(
        self, input_batch: InputBatch, sampled: list[int], rejected: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Rows of the batch that stay, [n] int64 in path order, and how many each request has."""
        step = self._state.trees.step
        trees = {tree.request: tree for tree in step.trees} if step.paths is not None else {}
        start = input_batch.query_start_loc_np.tolist()
        kept, counts = [], []
        for row in range(input_batch.num_reqs):
            if row in trees:
                rows = (start[row] + step.paths[row, : sampled[row]].long()).tolist()
            else:
                rows = list(range(start[row], start[row + 1] - rejected[row]))
            kept += rows
            counts.append(len(rows))
        return torch.tensor(kept), counts

    def _forward(
        self, input_batch: InputBatch, ends: np.ndarray, lengths: list[int], hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The head over rows prepared in ``input_buffers``: [n, H] -> two of [n, H]."""
        num_reqs, total = input_batch.num_reqs, int(ends[-1])
        buffers = self.input_buffers
        slots = self.block_tables.compute_slot_mappings(
            input_batch.idx_mapping,
            buffers.query_start_loc[: num_reqs + 1],
            buffers.positions[:total],
            total,
        )
        self.draft_max_seq_len = max(lengths)
        metadata = self._build_attn_metadata(
            num_reqs=num_reqs,
            batch_desc=BatchExecutionDescriptor(
                cg_mode=_NO_GRAPH, num_tokens=total, num_reqs=num_reqs, uniform_token_count=None
            ),
            query_start_loc_np=ends,
            seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
            step=0,
        )
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=total,
            slot_mapping=build_slot_mappings_by_layer(slots, self.kv_cache_config),
        ):
            out = self.model(
                input_ids=buffers.input_ids[:total],
                positions=buffers.positions[:total],
                hidden_states=hidden,
            )
        return out if isinstance(out, tuple) else (out, out)

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
    ) -> list[DraftTree]:
        """A tree for each of the batch's ``rows``."""
        tables = self.block_tables.input_block_tables
        head = VllmHead(
            self.model,
            self.vllm_config,
            [input_batch.req_ids[row] for row in rows],
            {name: tables[self._group_of[name]][rows] for name in self.draft_attn_layer_names},
            [lengths[row] for row in rows],
            self._options.topk * max(1, self._options.depth - 1),
            self._state.trees.shadow,
        )
        chain_only = self._state.chain_only
        slots = input_batch.idx_mapping_np
        limits = GrowthLimits(
            torch.tensor([drafts + 1 for drafts in max_drafts], dtype=torch.int32),
            torch.tensor(depths),
            torch.tensor([int(slots[row]) in chain_only for row in rows]),
        )
        grown = grow_trees(
            head, hidden, features, root_tokens, limits, self._options,
            num_rows=self.num_speculative_steps + 1, prune=True,
        )  # fmt: skip
        return [
            DraftTree(grown.tokens[i, :n].numpy(), grown.parents[i, :n].numpy())
            for i, n in enumerate(grown.counts.tolist())
        ]
