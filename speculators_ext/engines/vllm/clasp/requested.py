"""What ``clasp`` refuses before anything is loaded, in one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.config import ConfigError
from speculators_ext.engines.vllm.clasp.targets import find_obstacle, find_target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config.model import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    from speculators_ext.config import ClaspConfig

__all__ = ["check_request", "find_target_obstacle"]


def find_target_obstacle(architectures: Sequence[str], hf_config: Any) -> str | None:
    """Why the target cannot draft for itself, as a clause; None when it can."""
    obstacle = find_obstacle(tuple(architectures), hf_config)
    return obstacle and f"the target's layers cannot be skipped: {obstacle}"


def check_request(
    request: dict[str, Any], options: ClaspConfig, args: EngineArgs, target: ModelConfig
) -> None:
    """Raise ``ConfigError`` where this target's layers have no halves to skip."""
    found = find_target(tuple(target.architectures))
    if options.skip_unit == "sublayer" and found is not None and not found.sublayers:
        raise ConfigError(
            f"speculative method_config: skip_unit='sublayer' is not supported for "
            f"{', '.join(target.architectures)}; accepted: 'layer'"
        )
