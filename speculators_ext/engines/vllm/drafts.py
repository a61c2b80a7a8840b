"""Hook 4: how many drafts a request can use, and the scheduler gets each one's own number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from speculators_ext.engines.vllm.request_options import DEFAULT_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

__all__ = [
    "UNUSED_DRAFT",
    "RaggedDraftTokensHandler",
    "limit_drafts",
    "make_unused_certain",
    "room_left",
]

UNUSED_DRAFT = -1
"""Marks the unused tail of a row. It reaches the scheduler only as a shorter list: under
synchronous scheduling a slot that was not scheduled is never embedded."""


class RaggedDraftTokensHandler(DraftTokensHandler):
    """Trims each row at its first unused slot; stock vLLM returns uniform rows only.

    Only for synchronous scheduling: with async scheduling the scheduler fixes every row's width
    before the drafts exist, so there the stock handler is right.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device)
        self._rows: list[list[int]] = []

    def set_draft_tokens(self, input_batch: InputBatch, draft_tokens: torch.Tensor) -> None:
        """Keep the drafts of this step.

        Args:
            input_batch: the batch the drafts belong to, row by row.
            draft_tokens: [num_reqs, K] int64, ``UNUSED_DRAFT`` in the unused tail of a row.
        """
        self.req_ids = input_batch.req_ids
        self._rows = [_trim(row) for row in draft_tokens.tolist()]

    def get_draft_tokens(self) -> DraftTokenIds | None:
        """The drafts of the last step, one list of 0 to K ids a request."""
        return DraftTokenIds(self.req_ids, self._rows)


def _trim(row: list[int]) -> list[int]:
    return row[: row.index(UNUSED_DRAFT)] if UNUSED_DRAFT in row else row


def room_left(req_states: RequestState, slot: int, length: int, max_model_len: int) -> int:
    """The most drafts on one path that a request can still use.

    Args:
        req_states: the runner's request table.
        slot: of the request.
        length: its tokens with KV; the bonus token follows them.
        max_model_len: longest sequence in tokens.
    """
    # A verification adds one token for free: drafts past the last one would be thrown away.
    end = min(int(req_states.max_seq_len[slot]) - 1, max_model_len - 1)
    return max(0, end - (length + 1))


def limit_drafts(
    speculator: Any,
    input_batch: InputBatch,
    sampled: Sequence[int],
    lengths: Sequence[int],
    num_speculative_tokens: int | None,
) -> list[int]:
    """The most drafts each request of a batch can use: its options, remaining tokens and room.

    Args:
        speculator: whose requests these are.
        input_batch: num_reqs requests.
        sampled: [num_reqs], new tokens of each, 0 for an unfinished prompt.
        lengths: [num_reqs], tokens with KV.
        num_speculative_tokens: the engine's own limit for this step, where it has one.
    """
    most = speculator.num_speculative_steps
    if num_speculative_tokens is not None:
        most = min(most, num_speculative_tokens)
    options, limits = speculator.model_state.request_options, []
    for slot, count, length in zip(
        input_batch.idx_mapping_np.tolist(), sampled, lengths, strict=False
    ):
        room = room_left(speculator._req_states, slot, length, speculator.max_model_len)
        asked = options.get(slot, DEFAULT_OPTIONS).limit(most)
        limits.append(min(asked, room) if count else 0)
    return limits


def make_unused_certain(draft_logits: torch.Tensor, slots: torch.Tensor) -> None:
    """Give unused drafts, which async scheduling verifies too, the law of the id they carry, 0.

    Only a law that gives it all keeps p/q acceptance lossless. Before drafting, in place.

    Args:
        draft_logits: [request slots, K, V].
        slots: int64 [num_reqs], of the batch.
    """
    draft_logits[slots] = float("-inf")
    draft_logits[slots, :, 0] = 0.0
