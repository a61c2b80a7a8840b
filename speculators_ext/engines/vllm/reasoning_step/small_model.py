"""Steps of a small model: vLLM's draft model, over a KV cache of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from speculators_ext.engines.vllm.reasoning_step.writing import StepSpeculator

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.config import ReasoningStepConfig

__all__ = ["SmallModelSteps"]


class SmallModelSteps(StepSpeculator, StandaloneARSpeculator):
    """Drafts steps with a model of its own.

    Args:
        vllm_config: holds our speculative config.
        device: of the target.
        req_states: the runner's request table, read only.
        options: of the method.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        req_states: RequestState,
        options: ReasoningStepConfig,
    ) -> None:
        super().__init__(vllm_config, device)
        self._options = options
        self._req_states = req_states
        # Padding of one vocabulary beyond the other's is never drafted and never read.
        self._both = min(self.vocab_size, vllm_config.model_config.get_vocab_size())

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """Logits of the tokens that both models have."""
        return super().compute_draft_logits(hidden_states, spec_step_idx)[:, : self._both]

    def _run_model(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super()._run_model(input_ids.clamp(max=self._both - 1), *args, **kwargs)

    def _catch_up(
        self,
        input_batch: InputBatch,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *,
        dummy_run: bool,
        skip_attn: bool,
    ) -> None:
        """Read as vLLM's own ``draft_model`` does; the first drafts come out of it."""
        num_reqs = input_batch.num_reqs
        if not dummy_run:
            # The judge's forward has gathered those of its own requests.
            self.block_tables.gather_block_tables(input_batch.idx_mapping, num_reqs_padded=num_reqs)
        self._prefill(input_batch, num_rejected, last_sampled, num_reqs, skip_attn, None)

    def _first_tokens(
        self, input_batch: InputBatch, rows: list[int], lengths: list[int]
    ) -> torch.Tensor:
        return self.draft_tokens[: input_batch.num_reqs, 0][rows]

    def _next_tokens(
        self,
        input_batch: InputBatch,
        rows: list[int],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: int,
    ) -> torch.Tensor:
        self._look_at(input_batch, rows)
        count, buffers = len(tokens), self.input_buffers
        buffers.input_ids[:count].copy_(tokens)
        buffers.positions[:count].copy_(positions)
        buffers.seq_lens[:count].copy_(positions + 1)
        mapping = self.block_tables.compute_slot_mappings(
            self._mapping,
            buffers.query_start_loc[: count + 1],
            buffers.positions[:count],
            count,
        )
        metadata = self._build_uniform_attn_metadata(
            batch_desc=BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE, num_tokens=count, num_reqs=count, uniform_token_count=1
            ),
            num_reqs=count,
            num_query_per_req=1,
            seq_lens_cpu_upper_bound=self._bound,
            step=step + 1,
        )
        hidden = self._run_model(
            buffers.input_ids[:count],
            buffers.positions[:count],
            metadata,
            build_slot_mappings_by_layer(mapping, self.kv_cache_config),
            None,
        )
        return self.compute_draft_logits(hidden, step).argmax(dim=-1)

    def _gather(self, input_batch: InputBatch, rows: list[int]) -> None:
        count = len(rows)
        self._mapping = input_batch.idx_mapping[rows]
        self._bound = input_batch.seq_lens_cpu_upper_bound[rows]
        self.block_tables.gather_block_tables(self._mapping, num_reqs_padded=count)
        self.input_buffers.query_start_loc[: count + 1].copy_(self.arange_gpu[: count + 1])
