"""Turn what the user asked of ``REASONING_STEP`` into settings, or refuse it in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from speculators_ext.config import ConfigError, parse_method_config
from speculators_ext.engines.sglang.log import logger
from speculators_ext.engines.sglang.requested import (
    FLAG,
    check_engine,
    draft_count,
    raw_settings,
    refuse_flags,
    target_info,
)
from speculators_ext.proposers.step_tokens import find_span, same_tokens

if TYPE_CHECKING:
    from speculators_ext.config import ReasoningStepConfig

__all__ = ["DEFAULT_NUM_STEPS", "load_tokenizer", "prepare_reasoning_step", "step_settings"]

DEFAULT_NUM_STEPS = 48
_NAME = "REASONING_STEP"
_MODEL = "--speculative-draft-model-path"


def step_settings(server_args: Any) -> ReasoningStepConfig:
    """The method's settings; `ConfigError` in one line."""
    found = parse_method_config(
        "reasoning_step",
        raw_settings(),
        target=target_info(server_args),
        draft_model=server_args.speculative_draft_model_path,
    )
    return cast("ReasoningStepConfig", found)


def load_tokenizer(server_args: Any, path: str | None = None) -> Any:
    """The target's tokenizer, or that of the model at ``path``."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(
        path or server_args.tokenizer_path or server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
    )


def prepare_reasoning_step(server_args: Any) -> None:
    """Check a server's arguments and fill in what the user left open.

    Raises:
        ConfigError: one line naming the flag, what is accepted and the remedy.
    """
    check_engine(_NAME, server_args)
    refuse_flags(
        _NAME,
        server_args,
        ("speculative_draft_window_size", "a step sees the whole prefix"),
        ("speculative_token_map", "both models have one vocabulary"),
        ("skip_tokenizer_init", "steps are found by their text"),
    )
    options = step_settings(server_args)
    if options.judge == "score":
        raise ConfigError(
            f"{FLAG}: judge='score' is not supported on SGLang, whose verification reserves no "
            "slots behind a step; accepted: 'logprob' or 'exact'; use one of them, or vLLM"
        )
    path = server_args.speculative_draft_model_path
    if path is None:
        raise ConfigError(
            f"--speculative-algorithm {_NAME}: {_MODEL} is missing; accepted: a small model with "
            "the target's tokenizer"
        )
    tokenizer = load_tokenizer(server_args)
    difference = same_tokens(tokenizer, load_tokenizer(server_args, path))
    if difference is not None:
        raise ConfigError(
            f"{_MODEL}={path!r} has another tokenizer than the target: {difference}; choose a "
            "small model of the target's family"
        )
    find_span(tokenizer, options.reasoning_start, options.reasoning_end)
    steps = server_args.speculative_num_steps or DEFAULT_NUM_STEPS
    drafts = draft_count(steps, "--speculative-num-steps", server_args.context_length)
    if server_args.speculative_num_draft_tokens not in (None, drafts + 1):
        raise ConfigError(
            f"--speculative-num-draft-tokens={server_args.speculative_num_draft_tokens} does not "
            f"fit --speculative-num-steps={drafts}; accepted: {drafts + 1}, a step's tokens and "
            "the one before them; leave one out"
        )
    server_args.speculative_num_steps = drafts
    server_args.speculative_eagle_topk = 1
    server_args.speculative_num_draft_tokens = drafts + 1
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48
    if options.judge != "exact":
        logger.warning(
            "%s is LOSSY: steps of %s that the judge '%s' gives at least %g are taken as they "
            "are; a lenient judge costs accuracy",
            _NAME,
            path,
            options.judge,
            options.passes_from,
        )
