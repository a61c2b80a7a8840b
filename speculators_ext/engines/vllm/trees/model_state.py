"""Hook 5 for draft trees: any of vLLM's model states, plus the trees of its requests.

It carries tree positions, the tree metadata of the attention backend, the tree sampler, and moves
the KV of an accepted path to the front once the step is sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from speculators_ext.engines.vllm.request_options import with_request_options
from speculators_ext.engines.vllm.trees.metadata import TREES
from speculators_ext.engines.vllm.trees.sampler import TreeRejectionSampler
from speculators_ext.engines.vllm.trees.store import TreeStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_states.interface import ModelState

__all__ = ["needs_chain", "with_trees"]


def needs_chain(params: SamplingParams | None) -> bool:
    """Whether a request's logits depend on the tokens before them, which a tree has several of."""
    if params is None:
        return False
    return bool(
        params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.repetition_penalty != 1
        or params.bad_words
        or params.structured_outputs is not None
        or getattr(params, "thinking_token_budget", None) is not None
    )


class _TreesMixin:
    trees: TreeStore
    chain_only: set[int]

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        state: Any = self
        spec = vllm_config.speculative_config
        self.trees = TreeStore(
            state.max_num_reqs,
            spec.num_speculative_tokens + 1,
            spec.method_config.depth,
            state.device,
        )
        self.chain_only = set()
        self._always_chain = bool(state.model_config.logits_processors)
        self._positions = torch.zeros(state.max_num_tokens, dtype=torch.int64, device=state.device)
        self.compact: Callable[[Any, torch.Tensor], None] | None = None

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """A new owner of the slot: no tree yet, and perhaps never one."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        self.trees.reset(req_index)
        self.chain_only.discard(req_index)
        if self._always_chain or needs_chain(new_req_data.sampling_params):
            self.chain_only.add(req_index)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """vLLM's sampler, and our rejection sampler around it."""
        state: Any = self
        spec = state.vllm_config.speculative_config
        return sampler, TreeRejectionSampler(sampler, spec, state.device, self.trees)

    def prepare_attn(
        self, input_batch: InputBatch, cudagraph_mode: Any, block_tables: Any, *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """vLLM's metadata, with the batch's trees beside it."""
        metadata = super().prepare_attn(  # type: ignore[misc]
            input_batch, cudagraph_mode, block_tables, *args, **kwargs
        )
        step = self.trees.begin(input_batch, block_tables)
        if step.trees:
            for layer_metadata in metadata.values():
                setattr(layer_metadata, TREES, step)
        return metadata

    def prepare_inputs(self, input_batch: InputBatch, req_states: Any) -> dict[str, Any]:
        """The batch's positions, a tree's nodes at the root's position plus their depth."""
        inputs = super().prepare_inputs(input_batch, req_states)  # type: ignore[misc]
        if not self.trees.step.trees:
            return inputs
        positions = self._positions[: input_batch.positions.shape[0]]
        positions.copy_(input_batch.positions)
        last = self.max_model_len - 1  # type: ignore[attr-defined]
        for tree in self.trees.step.trees:
            at = (tree.prefix_len + tree.depths).clamp_(max=last)
            positions[tree.rows] = at.to(positions.device)
        return inputs | {"positions": positions}

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: Any,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        """Move the KV of accepted nodes to the front, before the next drafts are made."""
        super().postprocess_state(  # type: ignore[misc]
            idx_mapping, num_sampled, num_computed_tokens
        )
        step = self.trees.step
        if self.compact is not None and step.trees and step.paths is not None:
            self.compact(step, num_sampled)


def with_trees(state_cls: type[ModelState]) -> type[ModelState]:
    """A subclass of ``state_cls`` (any of vLLM's, or a model's own) that knows draft trees."""
    if issubclass(state_cls, _TreesMixin):
        return state_cls
    base = with_request_options(state_cls)
    return type(f"{state_cls.__name__}WithTrees", (_TreesMixin, base), {})
