"""Hook 3 for ``eagle2``: vLLM's EAGLE head drafts trees, see ``heads`` for a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from speculators_ext.engines.vllm.heads.tree_speculator import TreeSpeculator
from speculators_ext.engines.vllm.trees.devices import use_tree_backends

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.states import RequestState

__all__ = ["Eagle2Speculator", "build_speculator"]


def build_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> Eagle2Speculator:
    """The speculator for our config; called before the target's layers are built."""
    use_tree_backends(device, "eagle2")
    return Eagle2Speculator(vllm_config, device, req_states)


class Eagle2Speculator(TreeSpeculator, EagleSpeculator):
    """Drafts trees with an EAGLE head."""

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> Any:
        """vLLM's EAGLE model; where the target ties its head to its embedding, so does ours."""
        model = super().load_draft_model(target_model, target_attn_layer_names)
        if not hasattr(model, "lm_head"):
            model.compute_logits = target_model.compute_logits
        return model

    def head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """EAGLE-3 fuses the hidden states of several of the target's layers into one."""
        model: Any = self.model
        return model.combine_hidden_states(hidden) if self.method == "eagle3" else hidden
