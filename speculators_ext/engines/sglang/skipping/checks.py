"""What SGLang's targets must have for their layers to be skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.config import ConfigError
from speculators_ext.engines.sglang.methods import find_layer_obstacle
from speculators_ext.engines.sglang.requested import FLAG, target_info

if TYPE_CHECKING:
    from speculators_ext.settings import SkipConfig

__all__ = ["check_layers"]


def check_layers(asked: str, server_args: Any, skips: SkipConfig, remedy: str) -> None:
    """Refuse, in one line, a target whose layers cannot be skipped as ``skips`` says.

    Args:
        asked: the words of the user that want it.
        server_args: SGLang's.
        skips: which layers may be skipped.
        remedy: what else the user may do.
    """
    obstacle = find_layer_obstacle(target_info(server_args).architectures)
    if obstacle is not None:
        raise ConfigError(f"{asked}: layers of this target cannot be skipped: {obstacle}; {remedy}")
    if skips.skip_unit != "layer":
        raise ConfigError(
            f"{FLAG}: skip_unit={skips.skip_unit!r} is not supported on SGLang; "
            "accepted: 'layer'; correct it or leave the key out"
        )
