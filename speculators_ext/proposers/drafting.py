"""Tensor pieces of a chain drafting loop. No host sync; shapes depend on shapes only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


class ExitMask(NamedTuple):
    """One greedy draft a row and whether the row goes on.

    Attributes:
        tokens: int64 [R], the likeliest token.
        keep: bool [R]; False where its probability is below the threshold: that token is the
            row's last draft.
    """

    tokens: Tensor
    keep: Tensor


def exit_mask(logits: Tensor, threshold: float) -> ExitMask:
    """Take each row's likeliest token and stop the rows that are not sure of it.

    Source: the draft-exiting threshold of CLaSp (arXiv 2505.24196). The unsure token itself stays
    a draft: it is already computed, and verifying it costs one more row of the target's forward.

    Args:
        logits: [R, V], any float dtype; a row with NaN stops.
        threshold: probability in [0, 1]; 0 stops no finite row.
    """
    values = logits.float()
    top, tokens = values.max(dim=-1)
    probability = torch.exp(top - values.logsumexp(dim=-1))
    return ExitMask(tokens, probability >= threshold)


def clamp_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Replace ids outside 0 .. vocab_size-1 by 0, which can be embedded.

    A greedy (one-hot) draft of any valid id stays lossless, so a wrong id costs a rejection and
    nothing else.

    Args:
        ids: int [...].
        vocab_size: rows of the embedding.

    Returns:
        Same shape and dtype.
    """
    return torch.where((ids >= 0) & (ids < vocab_size), ids, 0)
