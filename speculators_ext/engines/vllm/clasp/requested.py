"""What ``clasp`` refuses before anything is loaded, in one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.vllm.skipping.targets import check_skip_unit, find_obstacle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config.model import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    from speculators_ext.config import ClaspConfig

__all__ = ["check_request", "find_target_obstacle"]


def find_target_obstacle(architectures: Sequence[str], hf_config: Any) -> str | None:
    """Why the target cannot draft for itself, as a clause; None when it can."""
    return find_obstacle(architectures, hf_config)


def check_request(
    request: dict[str, Any], options: ClaspConfig, args: EngineArgs, target: ModelConfig
) -> None:
    """Raise ``ConfigError`` where this target's layers have no halves to skip."""
    check_skip_unit(options, target.architectures)
