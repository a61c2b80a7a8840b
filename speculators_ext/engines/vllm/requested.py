"""Turn the user's ``--speculative-config`` into ours, or refuse it in one line before loading."""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING, Any, get_args

from speculators_ext.config import (
    METHODS,
    ConfigError,
    TargetInfo,
    parse_method_config,
    suggest_method,
    validate_num_speculative_tokens,
)
from speculators_ext.engines.vllm.log import logger
from speculators_ext.engines.vllm.methods import check_request, find_target_obstacle

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    from speculators_ext.engines.vllm.spec_config import ExtSpeculativeConfig

__all__ = ["build_speculative_config", "read_request", "refuse_misspelled"]

_FLAGS = (
    ("--spec-method", "spec_method", "method"),
    ("--spec-model", "spec_model", "model"),
    ("--spec-tokens", "spec_tokens", "num_speculative_tokens"),
)

_ACCEPTED_KEYS = (
    "method",
    "num_speculative_tokens",
    "method_config",
    "draft_sample_method",
    "rejection_sample_method",
    "num_speculative_tokens_per_batch_size",
)
# What a method with a draft checkpoint takes besides.
_CHECKPOINT_KEYS = ("model", "revision", "quantization", "draft_tensor_parallel_size")


def read_request(args: EngineArgs) -> dict[str, Any]:
    """The user's speculative options, flags folded in, as vLLM itself would fold them."""
    request = {k.replace("-", "_"): v for k, v in (args.speculative_config or {}).items()}
    for flag, attribute, key in _FLAGS:
        value = getattr(args, attribute, None)
        if value is None:
            continue
        if request.get(key, value) != value:
            raise ConfigError(
                f"{flag}={value!r} and --speculative-config['{key}']={request[key]!r} differ; "
                "accepted: one of them, or the same value in both; remove one"
            )
        request[key] = value
    return request


def refuse_misspelled(request: dict[str, Any]) -> None:
    """Say so when ``method`` is unknown to vLLM and close to one of ours, or lost its options."""
    method = request.get("method")
    if "method_config" in request and method is None:
        raise ConfigError(
            f"speculative config: 'method_config' needs 'method', one of {', '.join(METHODS)}"
        )
    if "method_config" in request and method in _builtin_methods():
        raise ConfigError(
            f"speculative config: 'method_config' belongs to {', '.join(METHODS)}, "
            f"not to vLLM's '{method}'; remove it"
        )
    if isinstance(method, str) and method not in _builtin_methods():
        suggestion = suggest_method(method)
        if suggestion is not None:
            raise ConfigError(
                f"speculative config: unknown method '{method}'; did you mean '{suggestion}'? "
                f"Added by speculators-ext: {', '.join(METHODS)}"
            )


def build_speculative_config(
    args: EngineArgs,
    request: dict[str, Any],
    target: ModelConfig,
    parallel: ParallelConfig,
) -> ExtSpeculativeConfig:
    """Validate every option and build the config; ``ConfigError`` names the key at fault."""
    from speculators_ext.engines.vllm.spec_config import ExtSpeculativeConfig

    method = request["method"]
    _check_keys(method, request)
    validate_num_speculative_tokens(request.get("num_speculative_tokens"), target.max_model_len)
    _check_sampling(method, request)
    _check_engine(method, args, parallel)
    _check_target(method, target)
    options = parse_method_config(
        method,
        request.get("method_config"),
        target=_target_info(target),
        draft_model=request.get("model"),
    )
    rides = check_request(method, request, options, args, target)
    stock = {k: v for k, v in request.items() if k not in ("method", "method_config")}
    config = ExtSpeculativeConfig(
        **stock,
        ext_method=method,
        method_config=options,
        rides=rides,
        target_model_config=target,
        target_parallel_config=parallel,
    )
    logger.info(
        "Speculative method '%s' (speculators-ext) is on: up to %d drafts a step, %s, %s.",
        method,
        config.num_speculative_tokens,
        options.describe(),
        "lossless" if METHODS[method].lossless else "LOSSY",
    )
    return config


def _check_keys(method: str, request: dict[str, Any]) -> None:
    alone = METHODS[method].drafts_alone
    accepted = _ACCEPTED_KEYS if alone else (*_ACCEPTED_KEYS, *_CHECKPOINT_KEYS)
    without = METHODS[method].model_optional and request.get("model") is None
    for key in request:
        if without and key in _CHECKPOINT_KEYS[1:]:
            raise ConfigError(
                f"speculative config: '{key}' is of a draft model, and 'model' is missing; "
                "give both or neither"
            )
        if key in accepted:
            continue
        if key == "model":
            raise ConfigError(
                f"speculative config: 'model' is not used by '{method}', "
                "the target drafts for itself; remove it"
            )
        near = difflib.get_close_matches(key, accepted, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ConfigError(
            f"speculative config: unknown key '{key}' for '{method}'; "
            f"accepted: {', '.join(accepted)}{hint}"
        )


def _check_sampling(method: str, request: dict[str, Any]) -> None:
    drafts = request.get("draft_sample_method", "greedy")
    if drafts not in ("greedy", "probabilistic"):
        raise ConfigError(
            f"speculative config: draft_sample_method={drafts!r}; accepted: greedy, probabilistic"
        )
    rule = request.get("rejection_sample_method", "standard")
    if rule not in ("standard", "block"):
        raise ConfigError(
            f"speculative config: rejection_sample_method={rule!r} is refused, '{method}' is "
            "lossless; accepted: standard, block"
        )
    if rule == "block" and drafts != "probabilistic":
        raise ConfigError(
            "speculative config: rejection_sample_method='block' needs the draft distribution; "
            "set draft_sample_method to 'probabilistic'"
        )


def _check_engine(method: str, args: EngineArgs, parallel: ParallelConfig) -> None:
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"speculative method '{method}': pipeline_parallel_size="
            f"{parallel.pipeline_parallel_size} is not supported, every rank needs all layers; "
            "accepted: 1 (use tensor_parallel_size instead)"
        )
    for key in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, key, 1) > 1:
            raise ConfigError(
                f"speculative method '{method}': {key}={getattr(parallel, key)} is not supported; "
                "accepted: 1"
            )
    if parallel.use_ubatching:
        raise ConfigError(
            f"speculative method '{method}': dual-batch overlap (enable_dbo) is not supported; "
            "remove it"
        )
    if parallel.data_parallel_size > 1 and parallel.enable_expert_parallel:
        raise ConfigError(
            f"speculative method '{method}': data_parallel_size={parallel.data_parallel_size} with "
            "expert parallelism is not supported; accepted: either of the two alone"
        )
    if getattr(args, "enable_lora", False):
        raise ConfigError(
            f"speculative method '{method}': enable_lora=True is not supported, draft batches "
            "would need an adapter mapping of their own; remove it"
        )
    if getattr(args, "watermark_config", None) is not None:
        raise ConfigError(
            f"speculative method '{method}': watermarking is not supported; remove it"
        )
    _check_runner(method)


def _check_runner(method: str) -> None:
    from vllm import envs
    from vllm.triton_utils.importing import HAS_TRITON

    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise ConfigError(
            f"speculative method '{method}': VLLM_USE_V2_MODEL_RUNNER="
            f"{os.environ.get('VLLM_USE_V2_MODEL_RUNNER', '0')} forces the V1 model runner; "
            "the method needs V2: unset it"
        )
    if not HAS_TRITON:
        raise ConfigError(
            f"speculative method '{method}': Model Runner V2 is off because Triton has no backend "
            "here; on a CPU unset SPECULATORS_EXT_CPU_V2 (`speculators-ext doctor` says more)"
        )


def _check_target(method: str, target: ModelConfig) -> None:
    obstacle = find_target_obstacle(method, target.architectures, target.hf_text_config)
    if obstacle is not None:
        raise ConfigError(
            f"speculative method '{method}': {obstacle}; choose another target or another method"
        )
    if target.uses_mrope:
        raise ConfigError(
            f"speculative method '{method}': M-RoPE targets are not supported; "
            "choose a text-only target"
        )


def _target_info(target: ModelConfig) -> TargetInfo:
    return TargetInfo(
        name=target.model,
        architectures=tuple(target.architectures),
        num_layers=target.get_total_num_hidden_layers(),
        max_model_len=target.max_model_len,
    )


def _builtin_methods() -> frozenset[str]:
    from vllm.config.speculative import SpeculativeMethod

    return frozenset(_flatten(SpeculativeMethod))


def _flatten(literal: Any) -> list[str]:
    names: list[str] = []
    for value in get_args(literal):
        names.extend([value] if isinstance(value, str) else _flatten(value))
    return names
