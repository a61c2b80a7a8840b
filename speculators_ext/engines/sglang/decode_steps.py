"""Plain decode steps of some of a batch's requests, beside what the scheduler has planned."""

from __future__ import annotations

import copy
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

__all__ = ["decode_step"]


def decode_step(
    batch: Any,
    runner: Any,
    rows: list[int],
    tokens: torch.Tensor | list[int],
    positions: list[int],
    *,
    spec_info: Any = None,
    capture_hidden_mode: CaptureHiddenMode | None = None,
) -> ForwardBatch:
    """One row a token; a request may have several.

    Args:
        batch: SGLang's ``ScheduleBatch``; not changed.
        runner: the ``ModelRunner`` that will run it.
        rows: which of the batch's requests each row belongs to.
        tokens: int64, the id each row feeds in.
        positions: where; the slot of that position is the row's to write.
        spec_info: what the model asks for beyond ids.
        capture_hidden_mode: of hidden states; None: as SGLang would.
    """
    step, device = copy.copy(batch), batch.seq_lens.device
    at = torch.tensor(positions, device=device)
    step.forward_mode = ForwardMode.DECODE
    step.reqs = [batch.reqs[row] for row in rows]
    step.req_pool_indices = batch.req_pool_indices[torch.tensor(rows, device=device)]
    step.input_ids = torch.as_tensor(tokens, device=device)
    step.seq_lens = step.orig_seq_lens = at + 1
    step.seq_lens_cpu = torch.tensor(positions) + 1
    step.seq_lens_sum = sum(positions) + len(positions)
    table = batch.req_to_token_pool.req_to_token
    step.out_cache_loc = table[step.req_pool_indices.long(), at].to(torch.int64)
    step.spec_info, step.sampling_info = spec_info, None
    step.return_logprob = False
    return ForwardBatch.init_new(
        step,
        runner,
        capture_hidden_mode=capture_hidden_mode,
        return_hidden_states_before_norm=False,
    )
