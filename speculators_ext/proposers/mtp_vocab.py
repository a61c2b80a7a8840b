"""A reduced draft vocabulary without training: the tokens most seen in the traffic.

The output head is most of an MTP step, and drafts are mostly frequent tokens (FR-Spec, arXiv
2502.14856; FastMTP, arXiv 2509.18362, section on vocabularies). Token ids mean something else in
every tokenizer, so no table is shipped: prompts and answers are counted as they pass. Until enough
have passed the tokenizer's own order stands in, because byte-pair encodings number their tokens
from the most frequent merge on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["DraftVocabulary"]

# What the tokenizer's order is worth, in tokens seen; rank r has a share of 1 / (r + _FLAT).
_PRIOR_TOKENS, _FLAT = 1000.0, 64.0
# Tokens between two choices of the vocabulary: the first, and the most it doubles to.
_FIRST, _LAST = 512, 32768
# Share of what was counted that stays at each choice.
_KEEP = 0.5


class DraftVocabulary:
    """The tokens a module may draft, chosen anew now and then.

    Args:
        vocab_size: of the target.
        size: tokens to choose.
        always: ids that are always in it (end of sequence and the like).
        device: of all tensors here.

    Attributes:
        ids: int64 [size], the token in each slot. A token keeps its slot while it stays.
    """

    def __init__(
        self, vocab_size: int, size: int, always: Iterable[int], device: torch.device | str
    ) -> None:
        rank = torch.arange(vocab_size, dtype=torch.float32, device=device)
        share = 1 / (rank + _FLAT)
        self._score = share * (_PRIOR_TOKENS / share.sum())
        for token in always:
            if 0 <= token < vocab_size:
                self._score[token] = float("inf")
        self._seen, self._interval = 0, _FIRST
        self.ids = self._score.topk(size).indices.sort().values

    @property
    def offsets(self) -> Tensor:
        """int64 [size], what to add to a slot to get its token."""
        return self.ids - torch.arange(len(self.ids), device=self.ids.device)

    def count(self, tokens: Tensor) -> None:
        """Count tokens that passed: int64 [n], ids of the target. No host sync."""
        self._score.index_add_(0, tokens, self._score.new_ones(len(tokens)))
        self._seen += len(tokens)

    @property
    def due(self) -> bool:
        """Whether enough has passed for another choice."""
        return self._seen >= self._interval

    def choose(self) -> Tensor:
        """Choose anew.

        Returns:
            int64 [n], the slots whose token is another one now.
        """
        size = len(self.ids)
        chosen = torch.zeros_like(self._score, dtype=torch.bool)
        chosen[self._score.topk(size).indices] = True
        slots = (~chosen[self.ids]).nonzero().view(-1)
        chosen[self.ids] = False
        self.ids[slots] = chosen.nonzero().view(-1)
        self._score *= _KEEP
        self._seen, self._interval = 0, min(2 * self._interval, _LAST)
        return slots
