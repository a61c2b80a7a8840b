"""SGLang's MTP module as drafting sees it: states by our choice of norms, our vocabulary.

In SGLang the target and the module both hand out states behind their final norm, and the output
head takes those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from speculators_ext.proposers.mtp_norms import undo_norm
from speculators_ext.proposers.mtp_reuse import Choice
from speculators_ext.proposers.mtp_vocab import DraftVocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from speculators_ext.engines.sglang.heads.draft_model import DraftModel
    from speculators_ext.proposers.mtp_norms import HiddenNorms, Side

__all__ = ["MtpModule"]


class MtpModule:
    """What goes into the module and comes out of it.

    Args:
        model: the module, as SGLang loads it.
        target: SGLang's target model.
        norms: which states to feed.

    Attributes:
        vocabulary: the tokens it may draft; None: all.

    Raises:
        ValueError: one line, where the norm a choice is about was not found.
    """

    def __init__(self, model: DraftModel, target: Any, norms: HiddenNorms) -> None:
        self.vocabulary: DraftVocabulary | None = None
        self._model, self._norms = model, norms
        inner = model.draft_runner.model.model
        own = getattr(inner, "final_layernorm", None) or getattr(
            getattr(inner, "shared_head", None), "norm", None
        )
        of_target = getattr(getattr(target, "model", None), "norm", None)
        self._own_norm, self._target_norm = _weight(own), _weight(of_target)
        for key, side, weight in (
            ("first_hidden", norms.first, self._target_norm),
            ("recycled_hidden", norms.recycled, self._own_norm),
        ):
            if side == "pre" and weight is None:
                raise ValueError(
                    f"speculative method_config: {key}='pre': the final norm of "
                    f"{type(model.draft_runner.model).__name__} or its target was not found; "
                    "leave the key out"
                )
        self._rows: Tensor | None = None

    def reduce(self, size: int, always: list[int]) -> None:
        """Draft ``size`` tokens only, ``always`` among them; the target's head is known by now."""
        weight = self._model.draft_runner.model.lm_head.weight
        self.vocabulary = DraftVocabulary(weight.shape[0], size, always, weight.device)
        self._rows = weight[self.vocabulary.ids].clone()

    def update(self) -> None:
        """Choose the vocabulary anew where enough traffic has passed."""
        if self.vocabulary is not None and self.vocabulary.due:
            slots = self.vocabulary.choose()
            weight = self._model.draft_runner.model.lm_head.weight
            assert self._rows is not None
            self._rows[slots] = weight[self.vocabulary.ids[slots]]

    def first(self, hidden: Tensor) -> Tensor:
        """The states that enter the first step, of those the target hands out, [n, H] both."""
        return _side(hidden, self._norms.first, self._target_norm)

    def recycled(self, hidden: Tensor) -> Tensor:
        """The states that enter the next step, of those the module returned, [n, H] both."""
        return _side(hidden, self._norms.recycled, self._own_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V], or [n, V_draft] with a reduced vocabulary."""
        return self._model.logits(hidden, self._rows)

    def draft(self, hidden: Tensor) -> Choice:
        """The likeliest token behind each of [n, H], and its probability."""
        given, tokens = self.logits(hidden).float().softmax(dim=-1).max(dim=-1)
        if self.vocabulary is not None:
            tokens = self.vocabulary.ids[tokens]
        return Choice(tokens, given)


def _weight(norm: Any) -> Tensor | None:
    """What a norm multiplies by, as it answers to ones; None without one."""
    if norm is None:
        return None
    with torch.no_grad():
        return norm(torch.ones_like(norm.weight).unsqueeze(0))[0]


def _side(normed: Tensor, side: Side | None, weight: Tensor | None) -> Tensor:
    return undo_norm(normed, weight) if side == "pre" and weight is not None else normed
