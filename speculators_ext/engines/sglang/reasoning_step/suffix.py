"""The judging suffix: one forward of the target behind the open steps of a batch.

It runs as SGLang runs the next piece of a prompt behind a cached one, on whatever attention backend
that has, and writes into the slots that the scheduler reserves behind the drafts
(`ReasoningStepAlgorithm.resolve_max_speculative_num_draft_tokens` asks for them). Nothing is left
of it: the next verification writes the same positions before anything reads them, and slots behind
a request's end are freed with it.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.runtime_context import get_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from speculators_ext.proposers.step_tokens import JudgeSuffix

__all__ = ["SuffixForward"]


class SuffixForward:
    """Reads the target's logits of the digits behind the suffix.

    Args:
        runner: the target's ``ModelRunner``.
        suffix: S tokens and the digits.

    Attributes:
        forwards: how many were run.
    """

    def __init__(self, runner: Any, suffix: JudgeSuffix) -> None:
        self._runner = runner
        self._suffix = torch.tensor(suffix.ids, device=runner.device)
        self._digits = torch.tensor(suffix.digits, device=runner.device)
        schedule = get_schedule()
        most = schedule.chunked_prefill_size
        most = most if most and most > 0 else schedule.max_prefill_tokens
        self._at_once = max(1, most // len(suffix.ids))
        self.forwards = 0

    def __len__(self) -> int:
        """S, the slots it needs behind a step."""
        return len(self._suffix)

    def digit_logits(self, batch: Any, rows: Sequence[int], lasts: Sequence[int]) -> Tensor:
        """Of n requests.

        Args:
            batch: SGLang's ``ScheduleBatch``; not changed.
            rows: [n], requests of it.
            lasts: [n], position of the last token of each one's step, whose KV is there.

        Returns:
            fp32 [n, 10].
        """
        size = self._at_once
        parts = [
            self._run(batch, list(rows[i : i + size]), list(lasts[i : i + size]))
            for i in range(0, len(rows), size)
        ]
        return torch.cat(parts)

    def _run(self, batch: Any, rows: list[int], lasts: list[int]) -> Tensor:
        self.forwards += 1
        with torch.no_grad():
            output = self._runner.forward(self._piece(batch, rows, lasts)).logits_output
        return output.next_token_logits[:, self._digits].float()

    def _piece(self, batch: Any, rows: list[int], lasts: list[int]) -> ForwardBatch:
        """The suffix as the next piece of each request's text."""
        count, width = len(rows), len(self)
        starts = [last + 1 for last in lasts]
        ends = torch.tensor(starts) + width
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        piece = copy.copy(batch)
        piece.forward_mode = ForwardMode.EXTEND
        piece.reqs = [batch.reqs[row] for row in rows]
        piece.req_pool_indices = batch.req_pool_indices[rows]
        piece.req_pool_indices_cpu = piece.req_pool_indices.cpu()
        piece.input_ids = self._suffix.repeat(count)
        piece.seq_lens_cpu, piece.seq_lens_sum = ends, int(ends.sum())
        piece.seq_lens = piece.orig_seq_lens = ends.to(batch.seq_lens.device)
        piece.prefix_lens, piece.extend_lens = starts, [width] * count
        piece.extend_num_tokens = count * width
        owners = piece.req_pool_indices.long()[:, None]
        slots = batch.req_to_token_pool.req_to_token[owners, positions.to(owners.device)]
        piece.out_cache_loc = slots.flatten().to(torch.int64)
        piece.spec_info = piece.sampling_info = None
        piece.return_logprob = False
        return ForwardBatch.init_new(
            piece,
            self._runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
