"""Turn what the user asked of SGLang into our settings, or refuse it in one line before loading."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from speculators_ext.config import ConfigError, TargetInfo, validate_num_speculative_tokens
from speculators_ext.engines.devices import find_gpu
from speculators_ext.engines.sglang.gpus import check_gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculators_ext.method_configs import TreeConfig

__all__ = [
    "DEFAULT_NUM_NODES",
    "ENVIRONMENT",
    "FLAG",
    "add_flag",
    "check_engine",
    "draft_count",
    "raw_settings",
    "refuse_flags",
    "same_as_flags",
    "target_config",
    "target_info",
    "tree_nodes",
]

DEFAULT_NUM_NODES = 12
FLAG = "--speculative-method-config"
# The same as the flag, and how the flag reaches SGLang's processes: its own arguments are a closed
# list of fields.
ENVIRONMENT = "SPECULATORS_EXT_METHOD_CONFIG"


class _IntoEnvironment(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        os.environ[ENVIRONMENT] = str(values)


def add_flag(result: None, parser: argparse.ArgumentParser) -> None:
    """After ``ServerArgs.add_cli_args``: our one flag."""
    parser.add_argument(
        FLAG,
        action=_IntoEnvironment,
        default=argparse.SUPPRESS,
        metavar="JSON",
        help="Settings of a method of speculators-ext, as an object. "
        f"The environment variable {ENVIRONMENT} does the same.",
    )


def raw_settings() -> dict[str, Any] | None:
    """The user's settings, None where he gave none; `ConfigError` where they are no JSON object."""
    text = os.environ.get(ENVIRONMENT, "").strip()
    if not text:
        return None
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{FLAG}: {text!r} is not JSON ({error}); accepted: an object such as "
            "'{\"refresh_interval\": 16}'; mend or remove it"
        ) from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{FLAG}: {text!r} is not an object; accepted: '{{\"key\": value}}'")
    return raw


# SGLang's own flags for settings of ours.
_SAME = {"depth": "speculative_num_steps", "topk": "speculative_eagle_topk"}


def same_as_flags(
    given: dict[str, Any] | None, server_args: Any, keys: Sequence[str] = ("depth", "topk")
) -> dict[str, Any]:
    """The user's settings of a tree, with what SGLang's own flags say of ``keys``.

    Raises:
        ConfigError: they say different things; one line.
    """
    raw = dict(given or {})
    for key in keys:
        argument = _SAME[key]
        value = getattr(server_args, argument)
        if value is None:
            continue
        if raw.get(key, value) != value:
            raise ConfigError(
                f"--{argument.replace('_', '-')}={value} and {key}={raw[key]} of {FLAG} differ; "
                f"accepted: one of them, or the same number in both; remove {key} or the flag"
            )
        raw[key] = value
    return raw


def target_config(server_args: Any) -> Any:
    """The checkpoint's Hugging Face config."""
    from sglang.srt.utils.hf_transformers.config import get_config

    return get_config(
        server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
    )


def target_info(server_args: Any) -> TargetInfo:
    """What settings are checked against, from the checkpoint's config."""
    config = target_config(server_args)
    return TargetInfo(
        name=server_args.model_path,
        architectures=tuple(config.architectures or ()),
        num_layers=config.num_hidden_layers,
        max_model_len=server_args.context_length,
    )


def draft_count(value: object, flag: str, most: int | None) -> int:
    """Check a number of drafts that came by ``flag``; `ConfigError` in one line."""
    try:
        return validate_num_speculative_tokens(value, most)
    except ConfigError as error:
        text = str(error).replace("speculative config: num_speculative_tokens", "")
        raise ConfigError(f"{flag}{text}") from None


def tree_nodes(options: TreeConfig, server_args: Any) -> int:
    """The most nodes of a draft tree; `ConfigError` in one line where they cannot grow."""
    asked = server_args.speculative_num_draft_tokens
    nodes = min(DEFAULT_NUM_NODES, options.num_candidates) if asked is None else asked - 1
    draft_count(nodes, "--speculative-num-draft-tokens", server_args.context_length)
    if nodes > options.num_candidates:
        raise ConfigError(
            f"--speculative-num-draft-tokens={asked} is more than the root and the "
            f"{options.num_candidates} nodes that depth={options.depth} and topk={options.topk} "
            f"can grow; accepted: at most {options.num_candidates + 1}; lower it, or raise "
            "--speculative-num-steps or --speculative-eagle-topk"
        )
    return nodes


def check_engine(name: str, server_args: Any, *, on_gpus: bool = False) -> None:
    """Refuse, in one line, a machine or a topology that algorithm ``name`` was never run on.

    Args:
        name: of the algorithm.
        server_args: SGLang's.
        on_gpus: whether it has been written for GPUs, where a user may try it.
    """
    gpu = find_gpu()
    if on_gpus and gpu is not None:
        check_gpu(name, server_args, gpu)
    elif gpu is not None or server_args.device != "cpu":
        raise ConfigError(
            f"--speculative-algorithm {name}: runs on CPUs in this version, not with "
            f"--device {server_args.device}{f' ({gpu} is here)' if gpu else ''}; "
            "accepted: --device cpu on a machine without a GPU; use vLLM on GPUs"
        )
    else:
        _check_cpu_attention(name, server_args, interpreted=on_gpus)
    for flag in ("tp_size", "pp_size", "dp_size"):
        if getattr(server_args, flag) != 1:
            raise ConfigError(
                f"--speculative-algorithm {name}: --{flag.replace('_', '-')}="
                f"{getattr(server_args, flag)} is not supported; accepted: 1"
            )
    obstacle = _cache_obstacle(target_config(server_args), on_gpu=gpu is not None)
    if obstacle is not None:
        raise ConfigError(
            f"--speculative-algorithm {name}: {obstacle}; choose another target, or vLLM"
        )


def _check_cpu_attention(name: str, server_args: Any, *, interpreted: bool) -> None:
    backend = server_args.attention_backend
    # What runs on GPUs runs here too, slowly: the way to try it without one.
    interpreted = interpreted and os.environ.get("TRITON_INTERPRET") == "1"
    if backend not in (None, "torch_native", *(("triton",) if interpreted else ())):
        raise ConfigError(
            f"--attention-backend={backend} is not supported by {name}; accepted: torch_native"
        )


def _cache_obstacle(config: Any, *, on_gpu: bool) -> str | None:
    """Why a target's cache or positions are not those we draft and verify on; None: they are."""
    from sglang.srt.configs.model_config import is_hybrid_swa_model

    if getattr(config, "kv_lora_rank", None):
        if on_gpu:
            return "a cache of latent attention (MLA) is not supported on GPUs"
        return "SGLang's torch_native does not run latent attention (MLA), with or without drafts"
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    recurrent = sorted(kinds - {"full_attention", "sliding_attention"})
    if recurrent:
        return f"a recurrent state ({', '.join(recurrent)}) has no branches"
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        return "only targets that read nothing but text are supported"
    if is_hybrid_swa_model(list(config.architectures or ()), text):
        return "a second cache for sliding layers is not supported"
    if "sliding_attention" in kinds and on_gpu:
        return "layers with a sliding window are not supported on GPUs"
    return None


_REFUSED = (
    ("speculative_use_rejection_sampling", "its acceptance is lossless already"),
    ("enable_lora", "draft batches would need an adapter mapping of their own"),
    ("enable_mixed_chunk", "a mixed step carries no drafts"),
    ("enable_two_batch_overlap", "drafts are not split"),
    ("enable_return_hidden_states", "those of drafts are not told apart"),
)
# What these stand at is accepted, and nothing else.
_FIXED = (
    ("disaggregation_mode", "null", "drafts are not sent to another server"),
    ("speculative_accept_threshold_single", 1.0, "acceptance is exact"),
    ("speculative_accept_threshold_acc", 1.0, "acceptance is exact"),
)


def refuse_flags(name: str, server_args: Any, *more: tuple[str, str]) -> None:
    """Refuse, in one line, what algorithm ``name`` cannot go with: (argument, why) each."""
    for argument, reason in (*_REFUSED, *more):
        if getattr(server_args, argument, None):
            raise ConfigError(
                f"--speculative-algorithm {name}: --{argument.replace('_', '-')} is not supported, "
                f"{reason}; remove it"
            )
    for argument, value, reason in _FIXED:
        given = getattr(server_args, argument)
        if given != value:
            raise ConfigError(
                f"--speculative-algorithm {name}: --{argument.replace('_', '-')}={given} is not "
                f"supported, {reason}; accepted: {value}; leave it out"
            )
