"""What ``eagle2`` refuses before anything is loaded, in one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.config import ConfigError
from speculators_ext.engines.vllm.eagle2.head_files import inspect_head
from speculators_ext.engines.vllm.trees.requested import check_trees, find_tree_obstacle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config.model import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    from speculators_ext.config import Eagle2Config

__all__ = ["check_request", "find_target_obstacle"]


def find_target_obstacle(architectures: Sequence[str], hf_config: Any) -> str | None:
    """Why no EAGLE head can draft trees for the target, as a clause; None when one can."""
    obstacle = find_tree_obstacle(hf_config)
    return obstacle and f"the target cannot attend a draft tree: {obstacle}"


def check_request(
    request: dict[str, Any], options: Eagle2Config, args: EngineArgs, target: ModelConfig
) -> str:
    """Check the options against each other, the engine, the head and the target.

    Returns:
        The built-in method the head's format rides: ``eagle`` or ``eagle3``.

    Raises:
        ConfigError: one line naming the key at fault.
    """
    nodes = request["num_speculative_tokens"]
    check_trees("eagle2", request, args, target)
    if nodes > options.num_candidates:
        raise ConfigError(
            f"speculative config: num_speculative_tokens={nodes} is more than the "
            f"{options.num_candidates} nodes that depth={options.depth} and topk={options.topk} "
            f"can grow; accepted: at most {options.num_candidates}; lower it, or raise depth or "
            "topk in method_config"
        )
    model = request.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError(
            "speculative config: 'model' is missing, 'eagle2' drafts with an EAGLE head; accepted: "
            "the path or name of an EAGLE, EAGLE-2 or EAGLE-3 checkpoint trained for this target"
        )
    rides = inspect_head(model, request.get("revision"), target)
    _check_target_class(rides, target)
    return rides


def _check_target_class(rides: str, target: ModelConfig) -> None:
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    if rides == "eagle3" and not supports_eagle3(get_model_cls(target)):
        raise ConfigError(
            f"speculative method 'eagle2': this vLLM does not hand out hidden states of "
            f"{', '.join(target.architectures)}, which an EAGLE-3 head reads; accepted: an EAGLE "
            "head, or another target"
        )
