"""Which methods SGLang has of us, and for which targets; SGLang itself is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.checkpoints import find_module_obstacle

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "GPU_METHODS",
    "LAYERED_TARGETS",
    "METHODS",
    "find_layer_obstacle",
    "find_target_obstacle",
]

METHODS = ("clasp", "eagle2", "mtp_reuse", "reasoning_step")
GPU_METHODS = ("clasp", "eagle2", "mtp_reuse")
"""Those that a user may try on a GPU."""

# Their decoders run `layers[start_layer:end_layer]` in a loop, each layer called
# `layer(positions, hidden_states, forward_batch)` with the residual in the batch.
LAYERED_TARGETS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def find_layer_obstacle(architectures: Sequence[str]) -> str | None:
    """Why the layers of this target cannot be skipped, as half a sentence; None when they can."""
    if any(name in LAYERED_TARGETS for name in architectures):
        return None
    return f"{', '.join(architectures) or 'it'} is not among {', '.join(LAYERED_TARGETS)}"


def find_target_obstacle(method: str, architectures: Sequence[str], hf_config: Any) -> str | None:
    """Why ``method`` cannot draft for a target on SGLang, as a clause; None when it can."""
    if method not in METHODS:
        return "SGLang does not have this method in this version"
    if method == "clasp":
        obstacle = find_layer_obstacle(architectures)
        return obstacle and f"layers of this target cannot be skipped on SGLang: {obstacle}"
    return find_module_obstacle(architectures, hf_config) if method == "mtp_reuse" else None
