"""User-facing settings: one pydantic model a method, and errors of one line.

Every error names the key, what was given, what is accepted and what to do, because it is read in
the last line of a server's log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from speculators_ext.errors import ConfigError
from speculators_ext.messages import describe_schema, did_you_mean, one_line
from speculators_ext.method_configs import (
    ClaspConfig,
    Eagle2Config,
    MtpReuseConfig,
    ReasoningStepConfig,
)
from speculators_ext.registry import Registry, near_miss
from speculators_ext.request_options import RequestOptions
from speculators_ext.settings import WHERE, MethodConfig, SkipConfig, TargetInfo

__all__ = [
    "METHODS",
    "ClaspConfig",
    "ConfigError",
    "Eagle2Config",
    "Method",
    "MethodConfig",
    "MtpReuseConfig",
    "ReasoningStepConfig",
    "RequestOptions",
    "SkipConfig",
    "TargetInfo",
    "describe_schema",
    "parse_method_config",
    "suggest_method",
    "validate_num_speculative_tokens",
]


@dataclass(frozen=True)
class Method:
    """One speculative-decoding method.

    Attributes:
        name: what a user writes.
        config_model: the model that validates its settings.
        rides: the engine's built-in method whose contract it follows.
        drafts_alone: the target drafts for itself: no `model` beside it.
        model_optional: it does so where no `model` is given.
        lossless: whether the text (or its distribution) is the target's.
        summary: one line for the log and for `doctor`.
        needs: what a user must supply.
    """

    name: str
    config_model: type[MethodConfig]
    rides: str
    lossless: bool
    summary: str
    needs: str
    drafts_alone: bool = True
    model_optional: bool = False


METHODS: Registry[Method] = Registry("method")
METHODS.add(
    "clasp",
    Method(
        name="clasp",
        config_model=ClaspConfig,
        rides="draft_model",
        lossless=True,
        summary="the target drafts for itself with some of its layers skipped",
        needs="nothing: no draft model, no training",
    ),
)
METHODS.add(
    "eagle2",
    Method(
        name="eagle2",
        config_model=Eagle2Config,
        rides="eagle3",  # or eagle, as the head's files say
        lossless=True,
        summary="an EAGLE head drafts a tree that grows where it is confident",
        needs="an EAGLE, EAGLE-2 or EAGLE-3 head trained for the target",
        drafts_alone=False,
    ),
)
METHODS.add(
    "mtp_reuse",
    Method(
        name="mtp_reuse",
        config_model=MtpReuseConfig,
        rides="mtp",
        lossless=True,
        summary="the target's own MTP module drafts, reused for as many steps as pay",
        needs="a target whose checkpoint has the weights of an MTP module",
    ),
)
METHODS.add(
    "reasoning_step",
    Method(
        name="reasoning_step",
        config_model=ReasoningStepConfig,
        rides="draft_model",
        lossless=False,
        summary="a small model, or the target with layers skipped, writes whole reasoning steps, "
        "which the target judges",
        needs="a smaller model with the target's tokenizer (optional), and your word that "
        "lossy is fine",
        drafts_alone=False,
        model_optional=True,
    ),
)


def suggest_method(name: str) -> str | None:
    """Return the method a mistyped name probably means, or None."""
    return near_miss(name, METHODS)


def parse_method_config(
    method: str,
    raw: Mapping[str, Any] | None,
    *,
    target: TargetInfo | None,
    draft_model: str | None = None,
) -> MethodConfig:
    """Build a method's settings: the target's preset, then the user's keys over it.

    Args:
        method: a name in `METHODS`.
        raw: the user's `method_config`, None for none.
        target: what to look a preset up for and to check against; None does neither.
        draft_model: the `model` given beside the settings, None for none. A method that may do
            without one then gets the settings of layers skipped.

    Raises:
        ConfigError: one line naming the key, what is accepted and the remedy.
    """
    if method not in METHODS:
        raise ConfigError(
            f"speculative method: unknown {method!r}; accepted: {', '.join(METHODS)}; "
            + did_you_mean(suggest_method(str(method)), "choose one of them")
        )
    model = METHODS[method].config_model
    given = _as_keys(model, raw)
    if METHODS[method].model_optional:
        given["clasp"] = _skips_without(draft_model, given.get("clasp"), target)
    return _settings(model, method, given, target)


def _as_keys(model: type[MethodConfig], raw: Mapping[str, Any] | None) -> dict[str, Any]:
    if raw is not None and not isinstance(raw, Mapping):
        raise ConfigError(
            f"{WHERE}: {raw!r} is not an object; accepted: an object with keys "
            f'{", ".join(model.model_fields)}; write it as {{"key": value}}'
        )
    return dict(raw or {})


def _settings(
    model: type[MethodConfig], method: str, given: dict[str, Any], target: TargetInfo | None
) -> MethodConfig:
    """The settings of ``model``, with what the target's preset of ``method`` knows of them."""
    preset = _preset_keys(model, method, given, target)
    config = _validate(model, preset | given)
    if target is not None:
        try:
            config.check_target(target)
        except ConfigError as error:
            raise ConfigError(f"{error}{_preset_note(str(error), preset, given)}") from None
    return config


def _skips_without(
    draft_model: str | None, raw: Mapping[str, Any] | None, target: TargetInfo | None
) -> MethodConfig | None:
    """The layers that a target skips where no model drafts for it; None where one does."""
    if draft_model is not None:
        if raw is not None:
            raise ConfigError(
                f"{WHERE}: clasp={raw!r} is for a target that writes its steps itself, and "
                f"model={draft_model!r} writes them; accepted: one of the two; remove one"
            )
        return None
    try:
        return _settings(SkipConfig, "clasp", _as_keys(SkipConfig, raw), target)
    except ConfigError as error:
        raise ConfigError(str(error).replace(WHERE, f"{WHERE}['clasp']", 1)) from None


def _preset_note(problem: str, preset: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Which of the keys that ``problem`` names are the preset's."""
    named = set(re.findall(r"\w+", problem))
    taken = ", ".join(
        f"{key}={value}" for key, value in preset.items() if key in named and key not in given
    )
    return f" (the target's preset gives {taken})" if taken else ""


def _preset_keys(
    model: type[MethodConfig],
    method: str,
    given: Mapping[str, Any],
    target: TargetInfo | None,
) -> dict[str, Any]:
    if target is None:
        return {}
    # model_configs validates its files with the models above, so it cannot be imported at the top.
    from speculators_ext.model_configs import lookup

    preset = lookup(target, method)
    if preset is None:
        return {}
    keys = {key: value for key, value in preset.config.items() if key in model.model_fields}
    if given.get("skip_unit", keys.get("skip_unit", "layer")) != keys.get("skip_unit", "layer"):
        return {}  # its numbers count other units
    exclusive = model.exclusive
    if exclusive.intersection(given):
        keys = {key: value for key, value in keys.items() if key not in exclusive}
    return keys


def _validate(model: type[MethodConfig], values: Mapping[str, Any]) -> MethodConfig:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(one_line(model, error, values)) from None


def validate_num_speculative_tokens(value: object, max_model_len: int | None) -> int:
    """Check the number of drafts a step may hold at most.

    Args:
        value: what the user gave; None when missing.
        max_model_len: longest sequence in tokens, None when not yet known.

    Raises:
        ConfigError: one line naming `num_speculative_tokens`.
    """
    key = "num_speculative_tokens"
    high = None if max_model_len is None else max_model_len - 1
    accepted = "an integer >= 1" if high is None else f"an integer from 1 to {high}"
    if value is None:
        raise ConfigError(f"speculative config: {key} is missing; accepted: {accepted}; try 6")
    if isinstance(value, bool) or not isinstance(value, int):
        problem, remedy = "is not an integer", "try 6"
    elif value < 1:
        problem, remedy = "is too small", "try 6, or remove the speculative config"
    elif high is not None and value > high:
        problem = f"does not fit max_model_len={max_model_len} beside the token it follows"
        remedy = "lower it or raise max_model_len"
    else:
        return value
    raise ConfigError(
        f"speculative config: {key}={value!r} {problem}; accepted: {accepted}; {remedy}"
    )
