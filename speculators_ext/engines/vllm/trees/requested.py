"""What a method that drafts trees refuses before anything is loaded, in one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.config import ConfigError

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

__all__ = ["check_trees", "find_tree_obstacle"]

MAX_NODES = 255

_REFUSED_FLAGS = {
    "kv_transfer_config": "KV is saved before an accepted path is moved to the front",
    "enable_batch_sharded_sampling": "a rank would see some of the accepted paths only",
    "kv_sharing_fast_prefill": "draft nodes are no prefill",
    "return_sampling_mask": "masks are not put into path order",
}


def check_trees(
    method: str, request: dict[str, Any], args: EngineArgs, target: ModelConfig
) -> None:
    """Check what every method that drafts trees asks of a request; switches async scheduling off.

    Raises:
        ConfigError: one line naming the key at fault.
    """
    nodes = request["num_speculative_tokens"]
    if nodes > MAX_NODES:
        raise ConfigError(
            f"speculative config: num_speculative_tokens={nodes} is too many nodes for a tree; "
            f"accepted: an integer from 1 to {MAX_NODES}; lower it"
        )
    for key, accepted in (
        ("draft_sample_method", "greedy"),
        ("rejection_sample_method", "standard"),
    ):
        if request.get(key, accepted) != accepted:
            raise ConfigError(
                f"speculative config: {key}={request[key]!r} is refused, '{method}' verifies trees "
                f"of the likeliest drafts; accepted: {accepted}; remove it"
            )
    for flag, reason in _REFUSED_FLAGS.items():
        if getattr(args, flag, None):
            raise ConfigError(
                f"speculative method '{method}': {flag} is not supported, {reason}; remove it"
            )
    if args.async_scheduling:
        raise ConfigError(
            f"speculative method '{method}': async_scheduling=True is not supported, the shape of "
            "a tree is read when it is scheduled; remove it"
        )
    args.async_scheduling = False
    if target.is_hybrid or target.is_attention_free:
        raise ConfigError(
            f"speculative method '{method}': the target cannot attend a draft tree: "
            "a recurrent state has no branches; choose another target"
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
