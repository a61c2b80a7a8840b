"""Hook 3 for methods that draft with a head of vLLM's: the round they share.

A round: the head extends its own cache over the accepted rows, in path order and with the target's
hidden states -> drafts grow from each request's bonus token, as the method has it -> they go to the
scheduler as 0 to K drafts a request.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from speculators_ext.engines.vllm.drafts import UNUSED_DRAFT, room_left
from speculators_ext.engines.vllm.heads.extend import ExtendingSpeculator
from speculators_ext.engines.vllm.ranks import decided_on_rank_0
from speculators_ext.engines.vllm.request_options import DEFAULT_OPTIONS
from speculators_ext.engines.vllm.spec_config import ExtSpeculativeConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.engines.vllm.step_clock import StepClock
    from speculators_ext.engines.vllm.trees.tree_clock import Plan
    from speculators_ext.tree import DraftTree

__all__ = ["HeadSpeculator", "Roots"]

MAX_BACKLOG = 256
"""Rows the head may lag behind before it catches up: bounds what is kept, and one catching up."""


class Roots(NamedTuple):
    """Where drafts grow from: the bonus token of each request that drafts, R of them.

    Attributes:
        rows: [R] of the batch.
        lengths: [R], tokens with KV, which is the root's position.
        tokens: int64 [R].
        hidden: [R, H], what the head's `compute_logits` takes.
        features: [R, H], what the head gives the nodes behind.
        max_drafts: [R].
        max_levels: [R], drafts on one path.
    """

    rows: list[int]
    lengths: list[int]
    tokens: torch.Tensor
    hidden: torch.Tensor
    features: torch.Tensor
    max_drafts: list[int]
    max_levels: list[int]


class HeadSpeculator(ExtendingSpeculator):
    """Drafts with a head; see the module's docstring for a round.

    Stands before vLLM's speculator of the head among a method's bases, which loads the model. The
    method's model state has a backlog, and the method sets a clock.

    Args:
        vllm_config: holds our speculative config.
        device: of the target.
        req_states: the runner's request table, read only.
    """

    _clock: StepClock

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        super().__init__(vllm_config, device)
        assert isinstance(self.speculative_config, ExtSpeculativeConfig)
        self._method = self.speculative_config.ext_method
        self._options: Any = self.speculative_config.method_config
        self._req_states = req_states

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """No graph: the rows of a round differ from step to step."""

    def capture(self) -> None:
        """No graph to capture."""

    def set_attn(self, model_state: Any, *args: Any, **kwargs: Any) -> None:
        """Link the model state, which holds the backlog."""
        super().set_attn(model_state, *args, **kwargs)
        self._state = model_state

    @property
    def full_depth(self) -> int:
        """Levels of a tree that holds all K drafts; a chain has as many as drafts."""
        return self.num_speculative_steps

    @abstractmethod
    def plan(self, num_rows: int) -> Plan:
        """What ``num_rows`` decoding rows may draft in this round; decided on rank 0."""

    @abstractmethod
    def grow(self, input_batch: InputBatch, roots: Roots, plan: Plan) -> list[DraftTree]:
        """Draft from the roots, one tree or chain each; one of its root alone is no draft."""

    def note_drafts(self, input_batch: InputBatch, trees: dict[int, DraftTree]) -> None:
        """The round is over, with these drafts by row of the batch."""

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
        """Extend the head over what was accepted, and draft for every request that can.

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
        plan = decided_on_rank_0(self.plan(sum(count > 0 for count in sampled)))
        caps = self._limits(input_batch, sampled, lengths, plan.levels)
        trees = self._draft(input_batch, caps, sampled, next_tokens, num_speculative_tokens, plan)
        for row, tree in trees.items():
            drafts[row, : len(tree) - 1] = torch.from_numpy(tree.tokens[1:])
        self._clock.end(input_batch, num_sampled, caps)
        self.note_drafts(input_batch, trees)
        return drafts

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

    def _draft(
        self,
        input_batch: InputBatch,
        caps: list[int],
        sampled: list[int],
        next_tokens: torch.Tensor,
        num_speculative_tokens: int | None,
        plan: Plan,
    ) -> dict[int, DraftTree]:
        """Run the head over what it must catch up with, and draft, by row of the batch."""
        slots = input_batch.idx_mapping_np.tolist()
        backlog = self._state.backlog
        rows = [
            row for row, cap in enumerate(caps) if cap or backlog.size(slots[row]) >= MAX_BACKLOG
        ]
        if not rows:
            return {}
        growing = [index for index, row in enumerate(rows) if caps[row]]
        sizes = [backlog.size(slots[row]) for row in rows]
        new = sum(min(sizes[index], sampled[rows[index]]) for index in growing)
        with self._clock.extending(new, sum(sizes)):
            hidden, features, lengths = self._extend(input_batch, rows)
        if not growing:
            return {}
        with self._clock.drafting(0):
            if len(growing) < len(rows):
                hidden, features = hidden[growing], features[growing]
            rows = [rows[index] for index in growing]
            nodes = -(-self.num_speculative_steps * plan.levels // self.full_depth)
            options = self._state.request_options
            limits = [options.get(slots[row], DEFAULT_OPTIONS).limit(nodes) for row in rows]
            if num_speculative_tokens is not None:
                limits = [min(limit, num_speculative_tokens) for limit in limits]
            roots = Roots(
                rows, [lengths[index] for index in growing], next_tokens[rows], hidden, features,
                limits, [caps[row] for row in rows],
            )  # fmt: skip
            trees = self.grow(input_batch, roots, plan)
        return {row: tree for row, tree in zip(rows, trees, strict=True) if len(tree) > 1}
