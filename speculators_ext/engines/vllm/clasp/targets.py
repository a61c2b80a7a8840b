"""Which target architectures can be entered layer by layer, and how they differ.

A decoder layer of every architecture here is called ``layer(positions, hidden, residual)`` and
returns ``(hidden, residual)``; the state between layers is ``hidden + residual``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["SKIPPABLE_TARGETS", "SkippableTarget", "find_obstacle", "find_target"]


class SkippableTarget(NamedTuple):
    """What a layer walk must know about an architecture.

    ``sublayers``: attention and MLP can be skipped separately, because the layer is
    ``x + attn(norm(x))`` then ``x + mlp(norm(x))`` and nothing else.
    """

    sublayers: bool = False


SKIPPABLE_TARGETS: dict[str, SkippableTarget] = {
    "LlamaForCausalLM": SkippableTarget(sublayers=True),
    "MistralForCausalLM": SkippableTarget(sublayers=True),
    "Qwen2ForCausalLM": SkippableTarget(sublayers=True),
    "Qwen3ForCausalLM": SkippableTarget(sublayers=True),
    "Phi3ForCausalLM": SkippableTarget(),
    "Gemma2ForCausalLM": SkippableTarget(),
    "Gemma3ForCausalLM": SkippableTarget(),
    "MixtralForCausalLM": SkippableTarget(),
    "Qwen3MoeForCausalLM": SkippableTarget(),
    "DeepseekV3ForCausalLM": SkippableTarget(),
}


def find_target(architectures: list[str] | tuple[str, ...]) -> SkippableTarget | None:
    """The entry of the first known architecture, or None."""
    return next((SKIPPABLE_TARGETS[a] for a in architectures if a in SKIPPABLE_TARGETS), None)


def find_obstacle(architectures: list[str] | tuple[str, ...], hf_config: Any) -> str | None:
    """Why the layers of this target cannot be skipped, as half a sentence; None when they can."""
    if find_target(architectures) is None:
        accepted = ", ".join(SKIPPABLE_TARGETS)
        return f"{', '.join(architectures) or 'it'} is not among {accepted}"
    if getattr(hf_config, "llama_4_scaling", None) is not None:
        return "its layers take position-dependent scaling (llama_4_scaling) from the whole model"
    if hasattr(hf_config, "index_topk"):
        return "its sparse attention shares top-k indices between layers"
    return None
