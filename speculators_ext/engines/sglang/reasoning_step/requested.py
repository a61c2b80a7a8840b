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
    target_config,
    target_info,
)
from speculators_ext.engines.sglang.skipping.checks import check_layers
from speculators_ext.proposers.step_tokens import find_span, find_suffix, same_tokens

if TYPE_CHECKING:
    from speculators_ext.config import ReasoningStepConfig
    from speculators_ext.proposers.step_tokens import JudgeSuffix

__all__ = [
    "DEFAULT_NUM_STEPS",
    "judge_suffix",
    "load_tokenizer",
    "prepare_reasoning_step",
    "reasoning_tokens",
    "step_settings",
    "widest_round",
]

DEFAULT_NUM_STEPS = 48
_NAME = "REASONING_STEP"
_MODEL = "--speculative-draft-model-path"
_suffixes: dict[tuple[str, str, str], JudgeSuffix] = {}


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


def reasoning_tokens(
    options: ReasoningStepConfig, server_args: Any, tokenizer: Any
) -> tuple[str | None, str | None]:
    """The texts of the tokens that open and close the reasoning: given, or the parser's."""
    if options.reasoning_start is not None or options.reasoning_end is not None:
        return options.reasoning_start, options.reasoning_end
    if not server_args.reasoning_parser:
        return None, None
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    detector = ReasoningParser(server_args.reasoning_parser, tokenizer=tokenizer).detector
    return detector.think_start_token, detector.think_end_token


def judge_suffix(server_args: Any, options: ReasoningStepConfig) -> JudgeSuffix | None:
    """What the judge puts behind a step; None for a judge that does not.

    Raises:
        ConfigError: no digit can follow it; one line.
    """
    if options.judge != "score":
        return None
    # Asked for again and again while the arguments are resolved, in each process.
    key = (server_args.model_path, server_args.tokenizer_path, options.judge_suffix)
    if key not in _suffixes:
        _suffixes[key] = find_suffix(load_tokenizer(server_args), options.judge_suffix)
    return _suffixes[key]


def widest_round(server_args: Any, width: int | None) -> int | None:
    """The most cache slots that a round writes behind a request: verification's and the judge's.

    Args:
        server_args: SGLang's.
        width: of verification, where it is known by now.
    """
    if width is None:
        return None
    suffix = judge_suffix(server_args, step_settings(server_args))
    return width if suffix is None else width + len(suffix.ids)


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
    path = server_args.speculative_draft_model_path
    if path is None:
        _check_own_layers(server_args, options)
    tokenizer = load_tokenizer(server_args)
    if path is not None:
        _check_tokenizer(tokenizer, server_args, path)
    find_span(tokenizer, *reasoning_tokens(options, server_args, tokenizer))
    steps = server_args.speculative_num_steps or DEFAULT_NUM_STEPS
    drafts = draft_count(steps, "--speculative-num-steps", server_args.context_length)
    if server_args.speculative_num_draft_tokens not in (None, drafts + 1):
        raise ConfigError(
            f"--speculative-num-draft-tokens={server_args.speculative_num_draft_tokens} does not "
            f"fit --speculative-num-steps={drafts}; accepted: {drafts + 1}, a step's tokens and "
            "the one before them; leave one out"
        )
    _check_room(server_args, options, drafts)
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
            path or "its own skipped layers",
            options.judge,
            options.passes_from,
        )


def _check_own_layers(server_args: Any, options: ReasoningStepConfig) -> None:
    """Refuse a target that cannot write its steps itself."""
    assert options.clasp is not None
    check_layers(
        f"--speculative-algorithm {_NAME} without {_MODEL}",
        server_args,
        options.clasp,
        f"give {_MODEL} a small model with the target's tokenizer",
    )


def _check_tokenizer(tokenizer: Any, server_args: Any, path: str) -> None:
    """Refuse a small model that has not the target's tokens."""
    difference = same_tokens(tokenizer, load_tokenizer(server_args, path))
    if difference is not None:
        raise ConfigError(
            f"{_MODEL}={path!r} has another tokenizer than the target: {difference}; choose a "
            "small model of the target's family"
        )


def _check_room(server_args: Any, options: ReasoningStepConfig, drafts: int) -> None:
    """Refuse a suffix that would never fit behind a step."""
    suffix = judge_suffix(server_args, options)
    if suffix is None:
        return
    from sglang.srt.utils.hf_transformers.common import get_context_length

    text = target_config(server_args).get_text_config()
    context = server_args.context_length or get_context_length(text)
    needed = drafts + 1 + len(suffix.ids)
    if needed >= context:
        raise ConfigError(
            f"{FLAG}: judge_suffix has {len(suffix.ids)} tokens, which with a step of {drafts} do "
            f"not fit --context-length={context}; accepted: fewer than {context} together; shorten "
            "it, lower --speculative-num-steps or choose judge='logprob'"
        )
