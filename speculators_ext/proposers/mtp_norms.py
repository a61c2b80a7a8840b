"""Which hidden states an MTP module is fed: before or after a final norm.

Two places have a choice: the target's state that enters the first step, and the module's own that
enters the next. A module trained on one and fed the other still drafts fluently and is accepted
less, so nothing but acceptance shows a wrong choice. ``None`` leaves the engine's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["CHOICES", "KNOWN_NORMS", "HiddenNorms", "Side", "find_norms", "undo_norm"]

Side = Literal["pre", "post"]


class HiddenNorms(NamedTuple):
    """Which states are fed, relative to the final norm of what they come from."""

    first: Side | None = None
    recycled: Side | None = None


CHOICES = tuple(
    HiddenNorms(first, recycled) for first in ("post", "pre") for recycled in ("post", "pre")
)

_POST = HiddenNorms("post", "post")

KNOWN_NORMS: dict[str, HiddenNorms] = {
    # Recycled after the norm: acceptance length 3.04 -> 3.46 on GLM-5.2 (ROCm/ATOM PR 1742),
    # vllm PR 45895. The first state is what the released modelling code hands over.
    "DeepseekV3ForCausalLM": _POST,
    "DeepseekV32ForCausalLM": _POST,
    "GlmMoeDsaForCausalLM": _POST,
    # GLM's NextN ends every step with its norm (vllm PR 46075).
    "Glm4MoeForCausalLM": _POST,
    "Glm4MoeLiteForCausalLM": _POST,
    # After the norm: accepted length 1.80 -> 2.74 (ModelTC/LightLLM PR 1402), acceptance 71 -> 76 %
    # (kekzl/imp PR 1800), also ggml-org/llama.cpp PR 24025. waybarrios/vllm-mlx PR 660 holds the
    # opposite and measured nothing.
    "Qwen3NextForCausalLM": _POST,
    "Qwen3_5ForCausalLM": _POST,
    "Qwen3_5MoeForCausalLM": _POST,
    # vLLM hands over the state before the norm, which it applies with the output head; the module
    # ends with its norm and returns what is behind it.
    "MiMoForCausalLM": HiddenNorms("pre", "post"),
}


def find_norms(architectures: Iterable[str]) -> HiddenNorms:
    """What is known for a target's architectures."""
    found = (KNOWN_NORMS[name] for name in architectures if name in KNOWN_NORMS)
    return next(found, HiddenNorms())


def undo_norm(normed: Tensor, weight: Tensor) -> Tensor:
    """A state before its RMS norm, up to a factor a row.

    RMSNorm gives ``weight * x / rms(x)``: divided by the weight, x is left but for its size. Every
    MTP module passes what it is fed through an RMSNorm of its own, which size does not enter.
    Dimensions whose weight is 0 are lost, and come out as 0.

    Args:
        normed: [n, H].
        weight: [H], as it multiplies.

    Returns:
        [n, H] in the dtype of ``normed``.
    """
    inverse = torch.where(weight == 0, 0.0, 1.0 / weight.float())
    return (normed.float() * inverse).to(normed.dtype)
