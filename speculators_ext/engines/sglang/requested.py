"""Turn what the user asked of SGLang into our settings, or refuse it in one line before loading."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any, cast

from speculators_ext.config import (
    ConfigError,
    TargetInfo,
    parse_method_config,
    validate_num_speculative_tokens,
)
from speculators_ext.engines.devices import find_gpu

if TYPE_CHECKING:
    from speculators_ext.config import ClaspConfig

__all__ = ["ENVIRONMENT", "FLAG", "add_flag", "clasp_settings", "prepare_clasp"]

FLAG = "--speculative-method-config"
# The same as the flag, and how the flag reaches SGLang's processes: its own arguments are a closed
# list of fields.
ENVIRONMENT = "SPECULATORS_EXT_METHOD_CONFIG"
DEFAULT_NUM_STEPS = 6


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


def _raw_settings() -> dict[str, Any] | None:
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


def clasp_settings(server_args: Any) -> ClaspConfig:
    """The method's settings for this server's target: preset, then the user's keys.

    Raises:
        ConfigError: one line.
    """
    target = _target_info(server_args)
    return cast("ClaspConfig", parse_method_config("clasp", _raw_settings(), target=target))


def _target_info(server_args: Any) -> TargetInfo:
    from sglang.srt.utils.hf_transformers.config import get_config

    config = get_config(
        server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
    )
    return TargetInfo(
        name=server_args.model_path,
        architectures=tuple(config.architectures or ()),
        num_layers=config.num_hidden_layers,
        max_model_len=server_args.context_length,
    )


def prepare_clasp(server_args: Any) -> None:
    """Check a server's arguments for ``CLASP`` and fill in what the user left open.

    Raises:
        ConfigError: one line naming the flag, what is accepted and the remedy.
    """
    _check_engine(server_args)
    _check_flags(server_args)
    steps = _num_steps(server_args)
    target = _target_info(server_args)
    from speculators_ext.engines.sglang.clasp.target_layers import find_obstacle

    obstacle = find_obstacle(target.architectures)
    if obstacle is not None:
        raise ConfigError(
            f"--speculative-algorithm CLASP: layers of this target cannot be skipped: {obstacle}; "
            "choose such a target or another algorithm"
        )
    config = cast("ClaspConfig", parse_method_config("clasp", _raw_settings(), target=target))
    if config.skip_unit != "layer":
        raise ConfigError(
            f"{FLAG}: skip_unit={config.skip_unit!r} is not supported on SGLang; "
            "accepted: 'layer'; correct it or leave the key out"
        )
    server_args.speculative_num_steps = steps
    server_args.speculative_num_draft_tokens = steps + 1
    server_args.speculative_eagle_topk = 1
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48


def _num_steps(server_args: Any) -> int:
    steps, tokens = server_args.speculative_num_steps, server_args.speculative_num_draft_tokens
    if steps is None:
        steps = DEFAULT_NUM_STEPS if tokens is None else tokens - 1
    if tokens is not None and tokens != steps + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens={tokens} does not fit --speculative-num-steps={steps};"
            f" accepted: {steps + 1}, a chain's drafts and the token before them; leave one out"
        )
    try:
        return validate_num_speculative_tokens(steps, server_args.context_length)
    except ConfigError as error:
        text = str(error).replace("speculative config: num_speculative_tokens", "")
        raise ConfigError(f"--speculative-num-steps{text}") from None


def _check_engine(server_args: Any) -> None:
    gpu = find_gpu()
    if server_args.device != "cpu" or gpu is not None:
        raise ConfigError(
            f"--speculative-algorithm CLASP: runs on CPUs in this version, not with "
            f"--device {server_args.device}{f' ({gpu} is here)' if gpu else ''}; "
            "accepted: --device cpu on a machine without a GPU; use vLLM on GPUs"
        )
    for flag, accepted in (("tp_size", 1), ("pp_size", 1), ("dp_size", 1)):
        if getattr(server_args, flag) != accepted:
            raise ConfigError(
                f"--speculative-algorithm CLASP: --{flag.replace('_', '-')}="
                f"{getattr(server_args, flag)} is not supported; accepted: {accepted}"
            )


_REFUSED = (
    ("speculative_draft_model_path", "the target drafts for itself"),
    ("speculative_use_rejection_sampling", "its acceptance is lossless already"),
    ("enable_lora", "draft batches would need an adapter mapping of their own"),
    ("enable_mixed_chunk", "a mixed step carries no drafts"),
    ("enable_two_batch_overlap", "drafts are not split"),
)


def _check_flags(server_args: Any) -> None:
    for name, reason in _REFUSED:
        if getattr(server_args, name, None):
            raise ConfigError(
                f"--speculative-algorithm CLASP: --{name.replace('_', '-')} is not supported, "
                f"{reason}; remove it"
            )
    topk = server_args.speculative_eagle_topk
    if topk not in (None, 1):
        raise ConfigError(
            f"--speculative-eagle-topk={topk} is not supported by CLASP, which drafts chains; "
            "accepted: 1; leave it out"
        )
    backend = server_args.attention_backend
    if backend not in (None, "torch_native"):
        raise ConfigError(
            f"--attention-backend={backend} is not supported by CLASP; accepted: torch_native"
        )
