"""vLLM's MTP module as drafting sees it: states by our choice of norms, logits of our vocabulary.

Modules return their last state before their final norm (``compute_logits`` then applies it), after
it, or both. Which of them it is shows in where the norm stands; a module without one keeps its own
way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from speculators_ext.engines.vllm.ranks import tensor_from_rank_0
from speculators_ext.proposers.mtp_norms import undo_norm
from speculators_ext.proposers.mtp_reuse import Choice

if TYPE_CHECKING:
    import torch
    from torch import nn

    from speculators_ext.engines.vllm.mtp_reuse.reduced_head import ReducedHead
    from speculators_ext.proposers.mtp_norms import HiddenNorms, Side

__all__ = ["MtpModule", "first_layer"]


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
        self._own_norm = _look_at(find_final_norm(model.model), model)
        self._target_norm = _look_at(norm, target)
        self.choose(norms)

    def choose(self, norms: HiddenNorms) -> None:
        """Feed these states from now on.

        Raises:
            ValueError: one line, where the norm a choice is about was not found.
        """
        for key, side, norm in (
            ("first_hidden", norms.first, self._target_norm),
            ("recycled_hidden", norms.recycled, self._own_norm),
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

    def read(self, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """From what the module returned: what `logits` takes, what to recycle, [n, H] each."""
        hidden, recycled = out if isinstance(out, tuple) else (out, out)
        norm, side = self._own_norm, self.norms.recycled
        if norm is None or side is None or (side == "post" and isinstance(out, tuple)):
            return hidden, recycled
        return hidden, norm.feed(hidden, side)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V], or [n, V_draft] with a reduced head."""
        if self.reduced is None:
            return self.model.compute_logits(hidden)
        norm = self._own_norm
        return self.reduced.logits(hidden if norm is None else norm.feed(hidden, "post"))

    def draft(self, hidden: torch.Tensor) -> Choice:
        """The likeliest token behind each of [n, H], and its probability."""
        given, tokens = self.logits(hidden).float().softmax(dim=-1).max(dim=-1)
        if self.reduced is not None:
            tokens = self.reduced.vocabulary.ids[tokens]
        return Choice(tokens, tensor_from_rank_0(given))


def find_final_norm(inner: Any) -> Any:
    """The norm at the end of an MTP module, None where none was found."""
    layers = first_layer(inner)
    with_head = getattr(getattr(layers, "shared_head", None), "norm", None)
    return with_head or getattr(layers, "final_layernorm", None) or getattr(inner, "norm", None)


def first_layer(inner: Any) -> Any:
    """The first MTP layer of a model of vLLM's, whatever holds it."""
    layers = getattr(inner, "layers", None) or getattr(inner, "mtp_layers", None) or []
    return next(iter(layers.values() if hasattr(layers, "values") else layers), None)


def _look_at(norm: Any, model: Any) -> _FinalNorm | None:
    """What a norm multiplies by (its answer to ones), and whether the output head applies it."""
    if norm is None:
        return None
    example = next(p for p in model.parameters() if p.is_floating_point() and p.element_size() > 1)
    ones = example.new_ones(1, norm.weight.numel())
    ran: list[bool] = []
    watch = norm.register_forward_hook(lambda *_: ran.append(True))
    try:
        model.compute_logits(ones)
    finally:
        watch.remove()
    return _FinalNorm(norm, norm(ones)[0], bool(ran))
