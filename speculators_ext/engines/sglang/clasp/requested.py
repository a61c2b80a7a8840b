"""Turn what the user asked of ``CLASP`` into settings, or refuse it in one line before loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from speculators_ext.config import ConfigError, parse_method_config
from speculators_ext.engines.sglang.requested import (
    check_engine,
    draft_count,
    raw_settings,
    refuse_flags,
    target_info,
)
from speculators_ext.engines.sglang.skipping.checks import check_layers

if TYPE_CHECKING:
    from speculators_ext.config import ClaspConfig

__all__ = ["DEFAULT_NUM_STEPS", "clasp_settings", "prepare_clasp"]

DEFAULT_NUM_STEPS = 6


def clasp_settings(server_args: Any) -> ClaspConfig:
    """The method's settings for this server's target: preset, then the user's keys.

    Raises:
        ConfigError: one line.
    """
    found = parse_method_config("clasp", raw_settings(), target=target_info(server_args))
    return cast("ClaspConfig", found)


def prepare_clasp(server_args: Any) -> None:
    """Check a server's arguments and fill in what the user left open.

    Raises:
        ConfigError: one line naming the flag, what is accepted and the remedy.
    """
    check_engine("CLASP", server_args, on_gpus=True)
    refuse_flags(
        "CLASP", server_args, ("speculative_draft_model_path", "the target drafts for itself")
    )
    topk = server_args.speculative_eagle_topk
    if topk not in (None, 1):
        raise ConfigError(
            f"--speculative-eagle-topk={topk} is not supported by CLASP, which drafts chains; "
            "accepted: 1; leave it out"
        )
    steps = _num_steps(server_args)
    check_layers(
        "--speculative-algorithm CLASP",
        server_args,
        clasp_settings(server_args),
        "choose such a target or another algorithm",
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
    return draft_count(steps, "--speculative-num-steps", server_args.context_length)
