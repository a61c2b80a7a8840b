"""What ``reasoning_step`` refuses before anything is loaded, in one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.config import ConfigError
from speculators_ext.engines.vllm.log import logger
from speculators_ext.engines.vllm.skipping.targets import check_skip_unit, find_obstacle
from speculators_ext.proposers.step_tokens import find_span, find_suffix, same_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config.model import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    from speculators_ext.config import ReasoningStepConfig, SkipConfig

__all__ = ["check_request", "find_target_obstacle", "reasoning_tokens"]

_METHOD = "speculative method 'reasoning_step'"


def find_target_obstacle(architectures: Sequence[str], hf_config: Any) -> str | None:
    """Why the target cannot be read step by step, as a clause; None when it can."""
    if getattr(hf_config, "is_encoder_decoder", False):
        return "the target is an encoder-decoder"
    return None


def check_request(
    request: dict[str, Any], options: ReasoningStepConfig, args: EngineArgs, target: ModelConfig
) -> None:
    """Check the options against each other, the engine and both models; async scheduling goes off,
    and the request gets the file that its engines count in.

    Raises:
        ConfigError: one line naming the key at fault.
    """
    _check_sampling(request)
    if args.async_scheduling:
        raise ConfigError(
            f"{_METHOD}: async_scheduling=True is not supported, how far a step goes is known only "
            "when it is drafted; remove it"
        )
    args.async_scheduling = False
    for flag in ("kv_transfer_config", "enable_batch_sharded_sampling", "return_sampling_mask"):
        if getattr(args, flag, None):
            raise ConfigError(f"{_METHOD}: {flag} is not supported; remove it")
    if target.is_hybrid or target.is_attention_free:
        raise ConfigError(
            f"{_METHOD}: the target has a recurrent state, which the judge would spoil; choose "
            "another target"
        )
    if options.clasp is not None:
        _check_layers(options.clasp, target)
    tokenizer = _check_tokenizers(request.get("model"), target)
    start, end = reasoning_tokens(options, args, tokenizer)
    find_span(tokenizer, start, end)
    if options.judge == "score":
        room, needed = (
            request["num_speculative_tokens"],
            len(find_suffix(tokenizer, options.judge_suffix).ids),
        )
        if needed > room:
            raise ConfigError(
                f"speculative method_config: judge_suffix has {needed} tokens, more than the "
                f"num_speculative_tokens={room} whose cache slots it borrows; shorten it or raise "
                f"num_speculative_tokens to {needed}"
            )
    if options.judge != "exact":
        logger.warning(
            "reasoning_step is LOSSY: steps of %s that the judge '%s' gives at least %g are taken "
            "as they are; a lenient judge costs accuracy",
            request.get("model", "the target itself, with layers skipped,"),
            options.judge,
            options.passes_from,
        )
    from speculators_ext.engines.vllm.reasoning_step.counts_page import make_counts_file

    request["counts_file"] = make_counts_file(args.data_parallel_size)


def reasoning_tokens(
    options: ReasoningStepConfig, source: Any, tokenizer: Any
) -> tuple[str | None, str | None]:
    """The texts of the tokens that open and close the reasoning: given, or the parser's.

    Args:
        options: the method's settings.
        source: engine arguments or an engine's config, whichever is there.
        tokenizer: of the target.
    """
    if options.reasoning_start is not None or options.reasoning_end is not None:
        return options.reasoning_start, options.reasoning_end
    parser = getattr(source, "reasoning_parser", None) or getattr(
        getattr(source, "structured_outputs_config", None), "reasoning_parser", None
    )
    if not parser:
        return None, None
    from vllm.reasoning import ReasoningParserManager

    made = ReasoningParserManager.get_reasoning_parser(parser)(tokenizer)
    return made.reasoning_start_str, made.reasoning_end_str


def _check_sampling(request: dict[str, Any]) -> None:
    for key, accepted in (
        ("draft_sample_method", "greedy"),
        ("rejection_sample_method", "standard"),
    ):
        if request.get(key, accepted) != accepted:
            raise ConfigError(
                f"speculative config: {key}={request[key]!r} is refused, 'reasoning_step' drafts "
                f"the likeliest tokens; accepted: {accepted}; remove it"
            )


def _check_layers(skips: SkipConfig, target: ModelConfig) -> None:
    """Without a small model the target writes the steps."""
    obstacle = find_obstacle(target.architectures, target.hf_text_config)
    if obstacle is not None:
        raise ConfigError(
            f"speculative config: 'model' is missing, and {obstacle}; give as 'model' the path or "
            "name of a small one with the target's tokenizer"
        )
    check_skip_unit(skips, target.architectures)


def _check_tokenizers(model: object, target: ModelConfig) -> Any:
    """The target's tokenizer, which a small model must share."""
    from vllm.tokenizers import get_tokenizer

    if target.skip_tokenizer_init:
        raise ConfigError(
            f"{_METHOD}: skip_tokenizer_init=True is not supported, steps are found by their "
            "text; remove it"
        )
    ours: Any = get_tokenizer(target.tokenizer, trust_remote_code=target.trust_remote_code)
    if model is None:
        return ours
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"speculative config: model={model!r} is not valid; accepted: the path or name of a "
            "small model with the target's tokenizer; give one, or leave it out"
        )
    theirs: Any = get_tokenizer(model, trust_remote_code=target.trust_remote_code)
    difference = same_tokens(ours, theirs)
    if difference is not None:
        raise ConfigError(
            f"speculative config: model={model!r} has another tokenizer than the target: "
            f"{difference}; choose a small model of the target's family"
        )
    return ours
