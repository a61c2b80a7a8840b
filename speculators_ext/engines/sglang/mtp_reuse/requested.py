"""Turn what the user asked of ``MTP_REUSE`` into settings, or refuse it before anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from speculators_ext.config import ConfigError, parse_method_config
from speculators_ext.engines.checkpoints import (
    check_module_weights,
    count_modules,
    find_module_obstacle,
)
from speculators_ext.engines.sglang.requested import (
    FLAG,
    check_engine,
    draft_count,
    raw_settings,
    refuse_flags,
    same_as_flags,
    target_config,
    target_info,
    tree_nodes,
)

if TYPE_CHECKING:
    from speculators_ext.config import MtpReuseConfig

__all__ = ["DEFAULT_NUM_STEPS", "mtp_reuse_settings", "prepare_mtp_reuse"]

_ASKED = "--speculative-algorithm MTP_REUSE"
_CHOOSE = "choose a target with such a module, or another algorithm"
DEFAULT_NUM_STEPS = 8


def mtp_reuse_settings(server_args: Any) -> MtpReuseConfig:
    """The method's settings for this server's target: preset, SGLang's flags, the user's keys.

    Of a chain, ``--speculative-num-steps`` is the length and no setting.

    Raises:
        ConfigError: one line.
    """
    target, raw = target_info(server_args), raw_settings()
    raw = same_as_flags(raw, server_args, ("topk",))
    found = parse_method_config("mtp_reuse", raw, target=target)
    if cast("MtpReuseConfig", found).topk > 1:
        raw = same_as_flags(raw, server_args, ("depth",))
        found = parse_method_config("mtp_reuse", raw, target=target)
    return cast("MtpReuseConfig", found)


def prepare_mtp_reuse(server_args: Any) -> None:
    """Check a server's arguments and fill in what the user left open.

    Raises:
        ConfigError: one line naming the flag, what is accepted and the remedy.
    """
    check_engine("MTP_REUSE", server_args, on_gpus=True)
    refuse_flags(
        "MTP_REUSE",
        server_args,
        ("speculative_token_map", "draft_vocab_size reduces the vocabulary"),
    )
    path = server_args.speculative_draft_model_path
    if path not in (None, server_args.model_path):
        raise ConfigError(
            f"{_ASKED}: --speculative-draft-model-path={path} is not supported, the target's own "
            "module drafts; remove it"
        )
    config, info = target_config(server_args), target_info(server_args)
    obstacle = find_module_obstacle(info.architectures, config)
    if obstacle is not None:
        raise ConfigError(f"{_ASKED}: {obstacle}; {_CHOOSE}")
    modules = count_modules(config)
    check_module_weights(Path(server_args.model_path), modules, info.num_layers, _ASKED, _CHOOSE)
    options = mtp_reuse_settings(server_args)
    _check_settings(options, config.vocab_size)
    drafts = _num_drafts(options, server_args)
    if modules > 1 and drafts > 1:
        raise ConfigError(
            f"{_ASKED}: the target has {modules} MTP modules, each with a cache of its own, and "
            "one is reused only where there is one; accepted: --speculative-num-steps=1, or "
            "SGLang's own NEXTN"
        )
    server_args.speculative_draft_model_path = server_args.model_path
    server_args.speculative_num_steps = options.depth if options.topk > 1 else drafts
    server_args.speculative_eagle_topk = options.topk
    server_args.speculative_num_draft_tokens = drafts + 1
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48


def _check_settings(options: MtpReuseConfig, vocab_size: int) -> None:
    if options.calibrate:
        raise ConfigError(
            f"{FLAG}: calibrate=True is not supported on SGLang; accepted: false; leave it out, "
            "or calibrate on vLLM and give first_hidden and recycled_hidden here"
        )
    size = options.draft_vocab_size
    if size is not None and size >= vocab_size:
        raise ConfigError(
            f"{FLAG}: draft_vocab_size={size} does not fit the target's vocabulary of "
            f"{vocab_size}; accepted: an integer from 2 to {vocab_size - 1}; try {vocab_size // 4}"
        )


def _num_drafts(options: MtpReuseConfig, server_args: Any) -> int:
    """Drafts of a round: the nodes of a tree or the length of a chain."""
    if options.topk > 1:
        return tree_nodes(options, server_args)
    steps, tokens = server_args.speculative_num_steps, server_args.speculative_num_draft_tokens
    if steps is None:
        steps = DEFAULT_NUM_STEPS if tokens is None else tokens - 1
    if tokens is not None and tokens != steps + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens={tokens} does not fit --speculative-num-steps={steps};"
            f" accepted: {steps + 1}, a chain's drafts and the token before them; leave one out"
        )
    return draft_count(steps, "--speculative-num-steps", server_args.context_length)
