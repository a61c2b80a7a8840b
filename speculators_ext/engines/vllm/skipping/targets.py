"""Which target architectures can be entered layer by layer, and how they differ.

A decoder layer of every architecture here is called ``layer(positions, hidden, residual)`` and
returns ``(hidden, residual)``; the state between layers is ``hidden + residual``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from speculators_ext.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculators_ext.settings import SkipConfig

__all__ = ["SKIPPABLE_TARGETS", "SkippableTarget", "check_skip_unit", "find_obstacle"]


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


def _find_target(architectures: Sequence[str]) -> SkippableTarget | None:
    """The entry of the first known architecture, or None."""
    return next((SKIPPABLE_TARGETS[a] for a in architectures if a in SKIPPABLE_TARGETS), None)


def find_obstacle(architectures: Sequence[str], hf_config: Any) -> str | None:
    """Why the layers of this target cannot be skipped, as a clause; None when they can."""
    reason = _find_reason(architectures, hf_config)
    return reason and f"the target's layers cannot be skipped: {reason}"


def _find_reason(architectures: Sequence[str], hf_config: Any) -> str | None:
    if _find_target(architectures) is None:
        accepted = ", ".join(SKIPPABLE_TARGETS)
        return f"{', '.join(architectures) or 'it'} is not among {accepted}"
    if getattr(hf_config, "llama_4_scaling", None) is not None:
        return "its layers take position-dependent scaling (llama_4_scaling) from the whole model"
    if hasattr(hf_config, "index_topk"):
        return "its sparse attention shares top-k indices between layers"
    return None


def check_skip_unit(skips: SkipConfig, architectures: Sequence[str]) -> None:
    """Raise ``ConfigError`` where this target's layers have no halves to skip."""
    found = _find_target(architectures)
    if skips.skip_unit == "sublayer" and found is not None and not found.sublayers:
        raise ConfigError(
            f"speculative method_config: skip_unit='sublayer' is not supported for "
            f"{', '.join(architectures)}; accepted: 'layer'"
        )
