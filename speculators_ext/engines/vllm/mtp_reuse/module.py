"""vLLM's MTP modules as drafting sees them: states by our choice of norms, our vocabulary's logits.

Most targets have one module, which drafts all of a chain. Of several each has weights and a cache
of its own; the last drafts whatever is beyond. Modules return their last state before their final
norm (``compute_logits`` then applies it), after it, or both. Which of them it is shows in where the
norm stands; a module without one keeps its own way.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from speculators_ext.engines.vllm.mtp_reuse.reduced_head import ReducedHead, mtp_layers
from speculators_ext.engines.vllm.ranks import tensor_from_rank_0
from speculators_ext.proposers.mtp_norms import undo_norm
from speculators_ext.proposers.mtp_reuse import Choice

if TYPE_CHECKING:
    from torch import nn

    from speculators_ext.proposers.mtp_norms import HiddenNorms, Side

__all__ = ["MtpModule"]


class _FinalNorm(NamedTuple):
    """A final norm.

    Attributes:
        module: the norm itself, an RMSNorm of any kind.
        weight: [H], what it multiplies by.
        with_head: the output head applies it, so the states handed out are those before it.
    """

    module: Any
    weight: torch.Tensor
    with_head: bool

    def feed(self, handed_out: torch.Tensor, side: Side) -> torch.Tensor:
        """The states of a side, of those handed out, [n, H] both."""
        if side == "post":
            return self.module(handed_out) if self.with_head else handed_out
        return handed_out if self.with_head else undo_norm(handed_out, self.weight)


class MtpModule:
    """What goes into the module and comes out of it.

    Args:
        model: vLLM's MTP model, its embedding and head already shared with the target's.
        target: the target's model.
        norms: which states to feed.

    Attributes:
        count: of modules.
        norms: which states are fed.
        reduced: a head of fewer tokens; None drafts with the target's own.
    """

    def __init__(self, model: Any, target: nn.Module, norms: HiddenNorms) -> None:
        self.model = model
        self.reduced: ReducedHead | None = None
        language_model: Any = getattr(target, "get_language_model", lambda: target)()
        norm = getattr(language_model.model, "norm", None)
        if hasattr(target, "get_mtp_target_hidden_states"):
            norm = None  # it hands out states of another kind, on neither side of its norm
        layers = mtp_layers(model.model)
        takes_number = "spec_step_idx" in inspect.signature(model.forward).parameters
        self.count = max(1, len(layers)) if takes_number else 1
        self._own_norms = [
            _look_at(find_final_norm(model.model, layer), model, *self._numbered(index))
            for index, layer in enumerate((layers or [None])[: self.count])
        ]
        self._target_norm = _look_at(norm, target)
        self.choose(norms)

    def choose(self, norms: HiddenNorms) -> None:
        """Feed these states from now on.

        Raises:
            ValueError: one line, where the norm a choice is about was not found.
        """
        for key, side, norm in (
            ("first_hidden", norms.first, self._target_norm),
            ("recycled_hidden", norms.recycled, self._own_norms[0]),
        ):
            if side is not None and norm is None:
                raise ValueError(
                    f"speculative method_config: {key}={side!r}: the final norm of "
                    f"{type(self.model).__name__} or its target was not found; leave the key out"
                )
        self.norms = norms

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        """The states that enter the first step, of those the target hands out, [n, H] both."""
        norm, side = self._target_norm, self.norms.first
        return hidden if norm is None or side is None else norm.feed(hidden, side)

    def index(self, step: int) -> int:
        """Which module a draft step is of."""
        return min(step, self.count - 1)

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, index: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A module in the forward context that is set: what `logits` takes, what to recycle."""
        numbered = {"spec_step_idx": index} if self.count > 1 else {}
        out = self.model(input_ids=tokens, positions=positions, hidden_states=hidden, **numbered)
        return self.read(out, index)

    def read(self, out: Any, index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """From what a module returned: what `logits` takes, what to recycle, [n, H] each."""
        hidden, recycled = out if isinstance(out, tuple) else (out, out)
        norm, side = self._own_norms[index], self.norms.recycled
        if norm is None or side is None or (side == "post" and isinstance(out, tuple)):
            return hidden, recycled
        return hidden, norm.feed(hidden, side)

    def logits(self, hidden: torch.Tensor, index: int = 0) -> torch.Tensor:
        """[n, H] -> [n, V], or [n, V_draft] with a reduced head."""
        if self.reduced is None:
            return self.model.compute_logits(hidden, *self._numbered(index))
        norm = self._own_norms[index]
        return self.reduced.logits(hidden if norm is None else norm.feed(hidden, "post"))

    def _numbered(self, index: int) -> tuple[int, ...]:
        """How vLLM is told which module is meant; models of one may not know the argument."""
        return (index,) if self.count > 1 else ()

    def draft(self, hidden: torch.Tensor, index: int = 0) -> Choice:
        """The likeliest token behind each of [n, H], and its probability."""
        law = self.logits(hidden, index).float().softmax(dim=-1)
        if law.device.type == "cpu":  # NumPy's search is far quicker than torch's
            tokens = torch.from_numpy(law.numpy().argmax(axis=-1))
            given = law.gather(1, tokens.unsqueeze(1)).squeeze(1)
        else:
            given, tokens = law.max(dim=-1)
        if self.reduced is not None:
            tokens = self.reduced.vocabulary.ids[tokens]
        return Choice(tokens, tensor_from_rank_0(given))


def find_final_norm(inner: Any, layer: Any) -> Any:
    """The norm at the end of an MTP module, None where none was found."""
    with_head = getattr(getattr(layer, "shared_head", None), "norm", None)
    return with_head or getattr(layer, "final_layernorm", None) or getattr(inner, "norm", None)


def _look_at(norm: Any, model: Any, *index: int) -> _FinalNorm | None:
    """What a norm multiplies by (its answer to ones), and whether the output head applies it."""
    if norm is None:
        return None
    example = next(p for p in model.parameters() if p.is_floating_point() and p.element_size() > 1)
    ones = example.new_ones(1, norm.weight.numel())
    ran: list[bool] = []
    watch = norm.register_forward_hook(lambda *_: ran.append(True))
    try:
        model.compute_logits(ones, *index)
    finally:
        watch.remove()
    return _FinalNorm(norm, norm(ones)[0], bool(ran))
