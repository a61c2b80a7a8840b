"""What a round of ``reasoning_step`` is, whoever writes the steps.

A round: the writer is brought up to date with what was verified -> it writes token by token, each
request to the end of its step -> 0 to K drafts a request go to the scheduler, and the book keeps
which of them are whole steps.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from speculators_ext.engines.vllm.drafts import UNUSED_DRAFT, limit_drafts
from speculators_ext.engines.vllm.ranks import tensor_from_rank_0
from speculators_ext.engines.vllm.reasoning_step.judging import SuffixForward
from speculators_ext.proposers.step_tokens import find_suffix

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.config import ReasoningStepConfig
    from speculators_ext.engines.vllm.reasoning_step.book import StepBook
    from speculators_ext.proposers.reasoning_step import DraftedStep

__all__ = ["StepSpeculator"]


class StepSpeculator(DraftModelSpeculator):
    """Writes steps; a subclass says what writes the next token of each.

    It comes before the speculator it is mixed with, which loads the writer's layers.
    """

    _options: ReasoningStepConfig
    _req_states: RequestState
    _book: StepBook
    _gather: Callable[[InputBatch, list[int]], None]
    """Points what a draft forward reads at these rows of the batch."""
    _looked_at: list[int]

    @abstractmethod
    def _catch_up(
        self,
        input_batch: InputBatch,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *,
        dummy_run: bool,
        skip_attn: bool,
    ) -> None:
        """Read what was verified, of every request, drafted for or not.

        Args:
            input_batch: num_reqs requests.
            num_rejected: [num_reqs].
            last_sampled: [request slots, 1], the newest token of each, which has no KV yet.
            dummy_run: a profiling or warm-up batch, whose slots hold no request.
            skip_attn: such a batch before there is a KV cache.
        """

    @abstractmethod
    def _first_tokens(
        self, input_batch: InputBatch, rows: list[int], lengths: list[int]
    ) -> torch.Tensor:
        """The first draft of ``rows`` of the batch, behind the newest token: [n] int64.

        Args:
            input_batch: num_reqs requests.
            rows: those that draft.
            lengths: [num_reqs], tokens with KV.
        """

    @abstractmethod
    def _next_tokens(
        self,
        input_batch: InputBatch,
        rows: list[int],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: int,
    ) -> torch.Tensor:
        """Draft ``step`` of ``rows``, behind ``tokens`` at ``positions``, all [n] int64."""

    def _look_at(self, input_batch: InputBatch, rows: list[int]) -> None:
        """Gather these rows, unless they are those of the last forward."""
        if rows != self._looked_at:
            self._looked_at = rows
            self._gather(input_batch, rows)

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> Any:
        """The writer's model; the target is kept for judging."""
        self._target = target_model
        # Of the speculator that this one is mixed with.
        return super().load_draft_model(  # type: ignore[safe-super]
            target_model, target_attn_layer_names
        )

    def set_attn(self, model_state: Any, *args: Any, **kwargs: Any) -> None:
        """Link the book, and lend it the judging forward."""
        super().set_attn(model_state, *args, **kwargs)
        self._book = model_state.book
        if self._options.judge == "score":
            tokenizer: Any = cached_tokenizer_from_config(self.vllm_config.model_config)
            suffix = find_suffix(tokenizer, self._options.judge_suffix)
            self._book.digit_logits = SuffixForward(self, self._target, suffix)
            self._book.suffix_room = len(suffix.ids)

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
        self._looked_at = []  # the target's forward has gathered others since
        skip_attn = dummy_run and skip_attn_for_dummy_run
        self._catch_up(
            input_batch, num_rejected, last_sampled, dummy_run=dummy_run, skip_attn=skip_attn
        )
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
        rows, step = list(walks), 0
        tokens = self._first_tokens(input_batch, rows, lengths) if rows else None
        while tokens is not None:
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
            # The first draft was read off the token behind `length` tokens.
            positions = torch.tensor([lengths[row] + step for row in rows], device=self.device)
            tokens = self._next_tokens(input_batch, rows, tokens[going], positions, step)
        self._note(slots, limits, walks, written)

    def _note(
        self,
        slots: list[int],
        limits: list[int],
        walks: dict[int, DraftedStep],
        written: dict[int, int],
    ) -> None:
        for row in range(len(limits)):
            self._book.note_drafts(slots[row], written.get(row, 0), walks.get(row))
