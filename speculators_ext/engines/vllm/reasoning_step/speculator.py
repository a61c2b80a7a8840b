"""Hook 3 for ``reasoning_step``: vLLM's draft model writes to the end of a step.

A round: the draft model reads what was verified and the new token, as in vLLM's own ``draft_model``
-> it writes token by token, each request to the end of its step -> 0 to K drafts a request go to
the scheduler, and the book keeps which of them are whole steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from speculators_ext.engines.vllm.drafts import UNUSED_DRAFT, limit_drafts
from speculators_ext.engines.vllm.log import warn_untried_on_gpus
from speculators_ext.engines.vllm.ranks import tensor_from_rank_0
from speculators_ext.engines.vllm.reasoning_step.judging import SuffixForward
from speculators_ext.engines.vllm.spec_config import ExtSpeculativeConfig
from speculators_ext.proposers.step_tokens import find_suffix

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.proposers.reasoning_step import DraftedStep

__all__ = ["ReasoningStepSpeculator", "build_speculator"]


def build_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> ReasoningStepSpeculator:
    """The speculator for our config; called before the target's layers are built."""
    if device.type != "cpu":
        warn_untried_on_gpus("reasoning_step")
    return ReasoningStepSpeculator(vllm_config, device, req_states)


class ReasoningStepSpeculator(StandaloneARSpeculator):
    """Drafts steps with a model of its own; see the module's docstring for a round.

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
        self._target: Any = None
        # Padding of one vocabulary beyond the other's is never drafted and never read.
        self._both = min(self.vocab_size, vllm_config.model_config.get_vocab_size())

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> Any:
        """vLLM's draft model; the target is kept for judging."""
        self._target = target_model
        return super().load_draft_model(target_model, target_attn_layer_names)

    def set_attn(self, model_state: Any, *args: Any, **kwargs: Any) -> None:
        """Link the book, and lend it the judging forward."""
        super().set_attn(model_state, *args, **kwargs)
        self._book = model_state.book
        if self._options.judge == "score":
            tokenizer: Any = cached_tokenizer_from_config(self.vllm_config.model_config)
            suffix = find_suffix(tokenizer, self._options.judge_suffix)
            self._book.digit_logits = SuffixForward(self, self._target, suffix)
            self._book.suffix_room = len(suffix.ids)

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """Logits of the tokens that both models have."""
        return super().compute_draft_logits(hidden_states, spec_step_idx)[:, : self._both]

    def _run_model(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super()._run_model(input_ids.clamp(max=self._both - 1), *args, **kwargs)

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
        skip_attn_for_dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write each request's step to its end, or as far as drafts go.

        Returns:
            [num_reqs, K] int64, ``UNUSED_DRAFT`` in the unused tail of a row.
        """
        num_reqs = input_batch.num_reqs
        drafts = torch.full_like(self.draft_tokens[:num_reqs], UNUSED_DRAFT)
        self._copy_request_inputs(num_reqs, input_batch.idx_mapping, temperature, seeds, dummy_run)
        if not dummy_run:
            # The judge's forward has gathered those of its own requests.
            self.block_tables.gather_block_tables(input_batch.idx_mapping, num_reqs_padded=num_reqs)
        skip_attn = dummy_run and skip_attn_for_dummy_run
        self._prefill(input_batch, num_rejected, last_sampled, num_reqs, skip_attn, None)
        if dummy_run:
            return drafts.clamp_(min=0)
        sampled = num_sampled.tolist()
        lengths = (input_batch.seq_lens[:num_reqs] - num_rejected[:num_reqs]).tolist()
        self._feed_book(input_batch, sampled, lengths)
        limits = limit_drafts(self, input_batch, sampled, lengths, num_speculative_tokens)
        self._write_steps(input_batch, limits, lengths, drafts)
        return drafts

    def _feed_book(self, input_batch: InputBatch, sampled: list[int], lengths: list[int]) -> None:
        for slot, count, length in zip(
            input_batch.idx_mapping_np.tolist(), sampled, lengths, strict=False
        ):
            # The bonus token, which has no KV yet, is the last one written.
            missing = self._book.missing(slot, length + 1) if count else 0
            if missing:
                known = self._req_states.all_token_ids.gpu[slot, length + 1 - missing : length + 1]
                self._book.feed(slot, known.tolist())

    def _write_steps(
        self,
        input_batch: InputBatch,
        limits: list[int],
        lengths: list[int],
        drafts: torch.Tensor,
    ) -> None:
        """Draft token by token into ``drafts``; a row leaves at the end of its step."""
        slots = input_batch.idx_mapping_np.tolist()
        walks = {row: self._book.begin_step(slots[row]) for row, n in enumerate(limits) if n > 0}
        written = dict.fromkeys(walks, 0)
        rows = list(walks)
        tokens = self.draft_tokens[: len(limits), 0][rows]
        step, gathered_for = 0, None
        while rows:
            tokens = tensor_from_rank_0(tokens)
            drafts[rows, step] = tokens
            going = []
            for index, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
                written[row] += 1
                if walks[row].push(token) and written[row] < limits[row]:
                    going.append(index)
            rows = [rows[index] for index in going]
            if not rows:
                break
            step += 1
            if gathered_for != rows:
                self._gather(input_batch, rows)
                gathered_for = rows
            # The first draft was read off the token behind `length` tokens.
            positions = torch.tensor([lengths[row] + step for row in rows], device=self.device)
            tokens = self._next_tokens(tokens[going], positions, step)
        self._note(slots, limits, walks, written)

    def _note(
        self,
        slots: list[int],
        limits: list[int],
        walks: dict[int, DraftedStep],
        written: dict[int, int],
    ) -> None:
        for row in range(len(limits)):
            whole = row in walks and walks[row].judgeable
            self._book.note_drafts(slots[row], written.get(row, 0), whole)

    def _gather(self, input_batch: InputBatch, rows: list[int]) -> None:
        """Point the buffers at these rows of the batch."""
        count = len(rows)
        self._rows_mapping = input_batch.idx_mapping[rows]
        self._rows_bound = input_batch.seq_lens_cpu_upper_bound[rows]
        self.block_tables.gather_block_tables(self._rows_mapping, num_reqs_padded=count)
        self.input_buffers.query_start_loc[: count + 1].copy_(self.arange_gpu[: count + 1])

    def _next_tokens(
        self, tokens: torch.Tensor, positions: torch.Tensor, step: int
    ) -> torch.Tensor:
        """One forward of the draft model, [n] ids and positions -> [n] ids."""
        count, buffers = len(tokens), self.input_buffers
        buffers.input_ids[:count].copy_(tokens)
        buffers.positions[:count].copy_(positions)
        buffers.seq_lens[:count].copy_(positions + 1)
        mapping = self.block_tables.compute_slot_mappings(
            self._rows_mapping,
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
            seq_lens_cpu_upper_bound=self._rows_bound,
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
