"""Hook 3 for methods that draft with a head of vLLM's: what every such speculator does.

A round: the head extends its own cache over the accepted rows, in path order and with the target's
hidden states -> drafts grow from each request's bonus token, as the method has it -> they go to the
scheduler as 0 to K drafts a request.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from speculators_ext.engines.vllm.drafts import room_left
from speculators_ext.engines.vllm.heads.extend import ExtendingSpeculator
from speculators_ext.engines.vllm.request_options import DEFAULT_OPTIONS
from speculators_ext.engines.vllm.spec_config import ExtSpeculativeConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.engines.vllm.step_clock import StepClock

__all__ = ["HeadSpeculator", "TargetStep"]


class TargetStep(NamedTuple):
    """What the runner hands over of the target's step, beside the batch.

    Attributes:
        attn_metadata: by layer, of the head's too.
        slot_mappings: by layer.
        hidden: [num_tokens, H] each; one, or those of the layers an EAGLE-3 head reads.
        num_sampled: [num_reqs], accepted drafts + 1 of each row, 0 for unfinished prompts.
        num_rejected: [num_reqs].
        last_sampled: [request slots, 1].
        next_prefill_tokens: [lookahead, request slots].
        temperature: [request slots].
        seeds: [request slots].
        most: drafts a request may have in this step, None: K.
    """

    attn_metadata: Any
    slot_mappings: Any
    hidden: list[torch.Tensor]
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    next_prefill_tokens: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    most: int | None

    def next_tokens(self, input_batch: InputBatch) -> torch.Tensor:
        """int64 [num_reqs], the token behind what each request has in the caches."""
        slots = input_batch.idx_mapping
        sampled = self.last_sampled[slots].view(-1)
        if not input_batch.has_prefill:
            return sampled.long()
        return torch.where(self.num_sampled > 0, sampled, self.next_prefill_tokens[0, slots]).long()


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

    @abstractmethod
    def draft_round(self, input_batch: InputBatch, step: TargetStep) -> torch.Tensor:
        """Extend the head over what was accepted, and draft for every request that can.

        Returns:
            [num_reqs, K] int64, ``UNUSED_DRAFT`` in the unused tail of a row.
        """

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
        """A round, or vLLM's own dummy run of the head."""
        if dummy_run:
            options: dict[str, Any] = kwargs | {"dummy_run": True, "num_speculative_tokens": 1}
            super().propose(
                input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states,
                num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds,
                **options,
            )  # fmt: skip
            return self.draft_tokens[: input_batch.num_reqs].zero_()
        step = TargetStep(
            attn_metadata, slot_mappings, aux_hidden_states or [last_hidden_states], num_sampled,
            num_rejected, last_sampled, next_prefill_tokens, temperature, seeds,
            num_speculative_tokens,
        )  # fmt: skip
        return self.draft_round(input_batch, step)

    def _limits(
        self, input_batch: InputBatch, sampled: Sequence[int], lengths: Sequence[int], levels: int
    ) -> list[int]:
        """The most levels each request can use."""
        if not levels:
            return [0] * input_batch.num_reqs
        options = self._state.request_options
        caps = []
        for row, slot in enumerate(input_batch.idx_mapping_np.tolist()):
            room = room_left(self._req_states, slot, lengths[row], self.max_model_len)
            asked = sampled[row] > 0 and options.get(slot, DEFAULT_OPTIONS).limit(1) > 0
            caps.append(min(levels, room) if asked else 0)
        return caps
