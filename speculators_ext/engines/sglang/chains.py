"""Draft chains as SGLang's speculative inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput

from speculators_ext.engines.sglang.verify_shape import AS_NEEDED, VerifyShape, lay_mask

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
    bonus: torch.Tensor,
    drafts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    last: int,
    shape: VerifyShape = AS_NEEDED,
) -> EagleVerifyInput:
    """Lay the chains of a batch out for verification, all of one width.

    Rows behind a chain's end are linked to nothing, so nothing can accept them; they carry a valid
    id and position because what reaches the model is embedded unchecked.

    Args:
        bonus: int [R], each chain's root.
        drafts: the ids behind it, of each request.
        lengths: tokens with KV, of each request.
        last: greatest position the model has.
        shape: as the attention wants it.
    """
    sizes, device = [len(ids) for ids in drafts], shape.device
    width = shape.width or max(sizes) + 1
    num_reqs, columns = len(drafts), torch.arange(width, device=device)
    rows = [[0, *ids, *[0] * (width - 1 - len(ids))] for ids in drafts]
    tokens = torch.tensor(rows, dtype=torch.int64, device=device)
    tokens[:, 0] = bonus
    starts = torch.tensor(lengths, dtype=torch.int64, device=device).unsqueeze(1)
    linked = columns < torch.tensor(sizes, device=device).unsqueeze(1)
    sees = (columns <= columns.unsqueeze(1)).expand(num_reqs, width, width)
    return EagleVerifyInput(
        draft_token=tokens.flatten(),
        custom_mask=lay_mask(sees, lengths, shape),
        positions=(starts + columns).clamp(max=last).flatten(),
        retrieve_index=torch.arange(num_reqs * width, device=device).view(num_reqs, width),
        retrieve_next_token=torch.where(linked, columns + 1, -1),
        retrieve_next_sibling=torch.full((num_reqs, width), -1, device=device),
        retrieve_cum_len=None,
        spec_steps=width - 1,
        topk=1,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )
