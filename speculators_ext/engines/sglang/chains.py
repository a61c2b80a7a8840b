"""Draft chains as SGLang's speculative inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BonusInput", "chain_verify_input"]


class BonusInput(EagleDraftInput):
    """What a request carries from round to round: its last token, which has no KV yet."""

    bonus_tokens: torch.Tensor
    future_indices: torch.Tensor | None

    def filter_batch(
        self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None
    ) -> None:
        """Keep the requests ``new_indices``."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, spec_info: Any) -> None:
        """Append another batch's requests."""
        name = "bonus_tokens" if self.future_indices is None else "future_indices"
        setattr(self, name, torch.cat([getattr(self, name), getattr(spec_info, name)]))


def chain_verify_input(
    bonus: torch.Tensor, drafts: Sequence[Sequence[int]], lengths: Sequence[int], last: int
) -> EagleVerifyInput:
    """Lay the chains of a batch out for verification, all as wide as the longest.

    Rows behind a chain's end are linked to nothing, so nothing can accept them; they carry a valid
    id and position because what reaches the model is embedded unchecked.

    Args:
        bonus: int [R], each chain's root.
        drafts: the ids behind it, of each request.
        lengths: tokens with KV, of each request.
        last: greatest position the model has.
    """
    counts = torch.tensor([len(ids) for ids in drafts])
    width = int(counts.max()) + 1
    num_reqs, columns = len(drafts), torch.arange(width)
    tokens = torch.zeros(num_reqs, width, dtype=torch.int64)
    tokens[:, 0] = bonus
    for row, ids in enumerate(drafts):
        tokens[row, 1 : len(ids) + 1] = torch.tensor(ids, dtype=torch.int64)
    positions = (torch.tensor(lengths).unsqueeze(1) + columns).clamp(max=last)
    linked = columns < counts.unsqueeze(1)
    return EagleVerifyInput(
        draft_token=tokens.flatten(),
        custom_mask=torch.ones(width, width, dtype=torch.bool).tril().repeat(num_reqs, 1).flatten(),
        positions=positions.flatten(),
        retrieve_index=torch.arange(num_reqs * width).view(num_reqs, width),
        retrieve_next_token=torch.where(linked, columns + 1, -1),
        retrieve_next_sibling=torch.full((num_reqs, width), -1),
        retrieve_cum_len=None,
        spec_steps=width - 1,
        topk=1,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )
