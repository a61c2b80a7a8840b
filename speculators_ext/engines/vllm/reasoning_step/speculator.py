"""Hook 3 for ``reasoning_step``: who writes the steps, a small model or the target itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculators_ext.engines.vllm.log import warn_untried_on_gpus
from speculators_ext.engines.vllm.spec_config import ExtSpeculativeConfig

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.engines.vllm.reasoning_step.writing import StepSpeculator

__all__ = ["build_speculator"]


def build_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> StepSpeculator:
    """The speculator for our config; called before the target's layers are built."""
    if device.type != "cpu":
        warn_untried_on_gpus("reasoning_step")
    config = vllm_config.speculative_config
    assert isinstance(config, ExtSpeculativeConfig)
    options = config.method_config
    if options.clasp is None:
        from speculators_ext.engines.vllm.reasoning_step.small_model import SmallModelSteps

        return SmallModelSteps(vllm_config, device, req_states, options)
    from speculators_ext.engines.vllm.reasoning_step.own_layers import OwnLayersSteps
    from speculators_ext.engines.vllm.skipping.speculator import attend_packed_rows

    attend_packed_rows(device)
    return OwnLayersSteps(vllm_config, device, req_states, options)
