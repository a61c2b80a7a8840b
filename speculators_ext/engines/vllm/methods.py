"""What each method plugs into vLLM. A method is a folder beside this file with three modules:

- ``speculator``: ``build_speculator(vllm_config, device, req_states)``
- ``model_state``: ``extend_model_state(state_cls, options)``
- ``requested``: ``check_request(request, options, args, target)`` and
  ``find_target_obstacle(architectures, hf_config)``

Nothing of a method is imported before one of the functions below is called for it.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config import VllmConfig
    from vllm.config.model import ModelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu.model_states.interface import ModelState
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.config import MethodConfig

__all__ = ["build_speculator", "check_request", "extend_model_state", "find_target_obstacle"]


def build_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> BaseSpeculator:
    """Hook 3: the speculator of the method in ``vllm_config``, which is one of ours.

    Called before the target's layers are built, so it also sets their attention (hook 6).
    """
    config: Any = vllm_config.speculative_config
    build = _load(config.ext_method, "speculator:build_speculator")
    return build(vllm_config, device, req_states)


def extend_model_state(vllm_config: VllmConfig, state_cls: type[ModelState]) -> type[ModelState]:
    """Hook 5: a subclass of ``state_cls`` (any of vLLM's, or a model's own) for the method."""
    config: Any = vllm_config.speculative_config
    extend = _load(config.ext_method, "model_state:extend_model_state")
    return extend(state_cls, config.method_config)


def check_request(
    method: str,
    request: dict[str, Any],
    options: MethodConfig,
    args: EngineArgs,
    target: ModelConfig,
) -> str | None:
    """Check what only this method asks of a request; may switch engine options off.

    Returns:
        The built-in method to ride where the request decides it, else None.

    Raises:
        ConfigError: one line naming the key at fault.
    """
    check = _load(method, "requested:check_request")
    return check(request, options, args, target)


def find_target_obstacle(method: str, architectures: Sequence[str], hf_config: Any) -> str | None:
    """Why a target does not fit a method, as a clause, or None; imports no vLLM for `doctor`."""
    find = _load(method, "requested:find_target_obstacle")
    return find(architectures, hf_config)


def _load(method: str, name: str) -> Any:
    return pkgutil.resolve_name(f"{__package__}.{method}.{name}")
