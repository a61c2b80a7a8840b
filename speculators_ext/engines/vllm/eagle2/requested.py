"""What ``eagle2`` refuses before anything is loaded, in one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.config import ConfigError
from speculators_ext.engines.vllm.eagle2.head_files import inspect_head

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    from speculators_ext.config import Eagle2Config

__all__ = ["check_eagle2", "find_tree_obstacle"]

MAX_NODES = 255


_REFUSED_FLAGS = {
    "kv_transfer_config": "KV is saved before an accepted path is moved to the front",
    "enable_batch_sharded_sampling": "a rank would see some of the accepted paths only",
    "kv_sharing_fast_prefill": "draft nodes are no prefill",
    "return_sampling_mask": "masks are not put into path order",
}


def check_eagle2(
    request: dict[str, Any], options: Eagle2Config, args: EngineArgs, target: ModelConfig
) -> str:
    """Check the options against each other, the engine, the head and the target.

    Returns:
        The built-in method the head's format rides: ``eagle`` or ``eagle3``.

    Raises:
        ConfigError: one line naming the key at fault.
    """
    nodes = request["num_speculative_tokens"]
    if nodes > MAX_NODES:
        raise ConfigError(
            f"speculative config: num_speculative_tokens={nodes} is too many nodes for a tree; "
            f"accepted: an integer from 1 to {MAX_NODES}; lower it"
        )
    if nodes > options.num_candidates:
        raise ConfigError(
            f"speculative config: num_speculative_tokens={nodes} is more than the "
            f"{options.num_candidates} nodes that depth={options.depth} and topk={options.topk} "
            "can grow; lower it, or raise depth or topk in method_config"
        )
    for key, accepted in (
        ("draft_sample_method", "greedy"),
        ("rejection_sample_method", "standard"),
    ):
        if request.get(key, accepted) != accepted:
            raise ConfigError(
                f"speculative config: {key}={request[key]!r} is refused, 'eagle2' verifies trees "
                f"of the likeliest drafts; accepted: {accepted}; remove it"
            )
    for flag, reason in _REFUSED_FLAGS.items():
        if getattr(args, flag, None):
            raise ConfigError(
                f"speculative method 'eagle2': {flag} is not supported, {reason}; remove it"
            )
    if args.async_scheduling:
        raise ConfigError(
            "speculative method 'eagle2': async_scheduling=True is not supported, the shape of a "
            "tree is read when it is scheduled; remove it"
        )
    args.async_scheduling = False
    _check_target(target)
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


def find_tree_obstacle(config: Any) -> str | None:
    """Why no draft tree fits a target, from its Hugging Face config, as half a sentence."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if getattr(config, "kv_lora_rank", None):
        return "it has latent attention (MLA)"
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    if recurrent:
        return f"a recurrent state ({', '.join(recurrent)}) has no branches"
    return None


def _check_target(target: ModelConfig) -> None:
    obstacle = find_tree_obstacle(target.hf_text_config)
    if obstacle is None and (target.is_hybrid or target.is_attention_free):
        obstacle = "a recurrent state has no branches"
    if obstacle is not None:
        raise ConfigError(
            f"speculative method 'eagle2': the target cannot attend a draft tree: {obstacle}; "
            "choose another target"
        )
