"""User-facing settings: one pydantic model a method, and errors of one line.

Every error names the key, what was given, what is accepted and what to do, because it is read in
the last line of a server's log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from speculators_ext.errors import ConfigError
from speculators_ext.registry import Registry, near_miss
from speculators_ext.request_options import RequestOptions

__all__ = [
    "METHODS",
    "ClaspConfig",
    "ConfigError",
    "Method",
    "MethodConfig",
    "RequestOptions",
    "TargetInfo",
    "describe_schema",
    "parse_method_config",
    "suggest_method",
    "validate_num_speculative_tokens",
]

_WHERE = "speculative method_config"
_Index = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class TargetInfo:
    """What the settings are checked against.

    Attributes:
        name: model name or path, as the user gave it.
        architectures: class names from the checkpoint's config.
        num_layers: decoder layers.
        max_model_len: longest sequence in tokens, None when not yet known.
    """

    name: str
    architectures: tuple[str, ...]
    num_layers: int
    max_model_len: int | None = None


class MethodConfig(BaseModel):
    """Base of every method's settings: immutable, strict, no unknown key."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )

    # Keys of which a user's choice of one replaces a preset's choice of the others.
    exclusive: ClassVar[frozenset[str]] = frozenset()

    def check_target(self, target: TargetInfo) -> None:
        """Raise `ConfigError` where these settings do not fit the target."""


def _list_as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class ClaspConfig(MethodConfig):
    """Self-speculation with layers skipped (CLaSp, arXiv 2505.24196)."""

    num_skip_layers: int | None = Field(
        None,
        ge=0,
        description="Units skipped while drafting; null takes 45 % of them. A unit is a layer, "
        "or with skip_unit 'sublayer' half of one.",
    )
    refresh_interval: int = Field(
        16, ge=1, description="Verifications between two searches for the skip set."
    )
    search_window: int = Field(
        1,
        ge=1,
        le=64,
        description="Newest tokens of each request whose hidden states a search compares; "
        "1 is the paper's.",
    )
    exit_threshold: float = Field(
        0.7,
        ge=0.0,
        le=1.0,
        description="A row stops drafting once its top-1 probability is below this; 0 never stops.",
    )
    pinned_first: int = Field(0, ge=0, description="First layers that are never skipped.")
    pinned_last: int = Field(0, ge=0, description="Last layers that are never skipped.")
    skip_unit: Literal["layer", "sublayer"] = Field(
        "layer",
        description="'layer' skips whole layers; 'sublayer' attention (unit 2i) and MLP (2i+1) "
        "of layer i separately.",
    )
    policy: Literal["dp", "even"] = Field(
        "dp", description="'dp' searches the skip set in context; 'even' spreads it evenly."
    )
    skip_layers: Annotated[tuple[_Index, ...], BeforeValidator(_list_as_tuple)] | None = Field(
        None, description="A fixed skip set (unit numbers, ascending); replaces the policy."
    )
    adaptive: bool = Field(
        True, description="Draft only as deep as pays on this machine, down to not at all."
    )
    grouping: Literal["batch", "per_request"] = Field(
        "batch", description="One skip set for the whole batch, or one for each request."
    )

    exclusive: ClassVar[frozenset[str]] = frozenset({"num_skip_layers", "skip_layers"})

    @model_validator(mode="after")
    def _check_fixed_set(self) -> ClaspConfig:
        fixed = self.skip_layers
        if fixed is None:
            return self
        if self.num_skip_layers is not None:
            raise ConfigError(
                f"skip_layers={list(fixed)} and num_skip_layers={self.num_skip_layers} exclude "
                "each other; accepted: one of the two; remove one"
            )
        if list(fixed) != sorted(set(fixed)):
            raise ConfigError(
                f"skip_layers={list(fixed)} is not in ascending order without repeats; accepted: "
                f"for example {sorted(set(fixed))}; sort it and remove repeats"
            )
        return self

    def num_units(self, num_layers: int) -> int:
        """Return how many units of a target may be skipped or kept."""
        return num_layers * (2 if self.skip_unit == "sublayer" else 1)

    def pinned_units(self, num_layers: int) -> frozenset[int]:
        """Return the unit numbers that are never skipped."""
        per_layer = 2 if self.skip_unit == "sublayer" else 1
        units = range(num_layers * per_layer)
        first, last = self.pinned_first * per_layer, self.pinned_last * per_layer
        return frozenset(u for u in units if u < first or u >= len(units) - last)

    def check_target(self, target: TargetInfo) -> None:
        """Raise `ConfigError` where the skip set or its size does not fit the target's depth."""
        units = self.num_units(target.num_layers)
        if self.pinned_first + self.pinned_last > target.num_layers:
            raise ConfigError(
                f"{_WHERE}: pinned_first={self.pinned_first} and pinned_last={self.pinned_last} "
                f"pin more than the {target.num_layers} layers of the target; accepted: a sum of "
                f"at most {target.num_layers}; lower one of them"
            )
        pinned = self.pinned_units(target.num_layers)
        limit = min(units - 1, units - len(pinned))
        if self.num_skip_layers is not None and self.num_skip_layers > limit:
            raise ConfigError(
                f"{_WHERE}: num_skip_layers={self.num_skip_layers} is too many for the target's "
                f"{units} {self.skip_unit}s of which {len(pinned)} are pinned; accepted: 0 to "
                f"{limit}; lower it or leave it out"
            )
        self._check_fixed_set_fits(units, pinned)

    def _check_fixed_set_fits(self, units: int, pinned: frozenset[int]) -> None:
        fixed = self.skip_layers or ()
        wrong = [u for u in fixed if u >= units]
        if wrong or len(fixed) >= units:
            what = f"names unit {wrong[0]}" if wrong else "skips every unit"
            raise ConfigError(
                f"{_WHERE}: skip_layers={list(fixed)} {what} of a target with {units} "
                f"{self.skip_unit}s; accepted: numbers 0 to {units - 1}, at most {units - 1} of "
                "them; correct it"
            )
        held = sorted(pinned.intersection(fixed))
        if held:
            raise ConfigError(
                f"{_WHERE}: skip_layers={list(fixed)} names unit {held[0]}, which pinned_first or "
                "pinned_last keeps; accepted: units that are not pinned; remove one or the other"
            )


@dataclass(frozen=True)
class Method:
    """One speculative-decoding method.

    Attributes:
        name: what a user writes.
        config_model: the model that validates its settings.
        rides: the engine's built-in method whose contract it follows.
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


def suggest_method(name: str) -> str | None:
    """Return the method a mistyped name probably means, or None."""
    return near_miss(name, METHODS)


def parse_method_config(
    method: str, raw: Mapping[str, Any] | None, *, target: TargetInfo | None
) -> MethodConfig:
    """Build a method's settings: the target's preset, then the user's keys over it.

    Args:
        method: a name in `METHODS`.
        raw: the user's `method_config`, None for none.
        target: what to look a preset up for and to check against; None does neither.

    Raises:
        ConfigError: one line naming the key, what is accepted and the remedy.
    """
    if method not in METHODS:
        raise ConfigError(
            f"speculative method: unknown {method!r}; accepted: {', '.join(METHODS)}; "
            + _did_you_mean(suggest_method(str(method)), "choose one of them")
        )
    model = METHODS[method].config_model
    if raw is not None and not isinstance(raw, Mapping):
        raise ConfigError(
            f"{_WHERE}: {raw!r} is not an object; accepted: an object with keys "
            f'{", ".join(model.model_fields)}; write it as {{"key": value}}'
        )
    given = dict(raw or {})
    preset = _preset_keys(method, given, target)
    config = _validate(model, preset | given)
    if target is not None:
        try:
            config.check_target(target)
        except ConfigError as error:
            raise ConfigError(f"{error}{_preset_note(preset, given)}") from None
    return config


def _preset_note(preset: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    taken = ", ".join(f"{key}={value}" for key, value in preset.items() if key not in given)
    return f" (the target's preset gives {taken})" if taken else ""


def _preset_keys(
    method: str, given: Mapping[str, Any], target: TargetInfo | None
) -> dict[str, Any]:
    if target is None:
        return {}
    # model_configs validates its files with the models above, so it cannot be imported at the top.
    from speculators_ext.model_configs import lookup

    preset = lookup(target, method)
    if preset is None:
        return {}
    keys = dict(preset.config)
    if given.get("skip_unit", keys.get("skip_unit", "layer")) != keys.get("skip_unit", "layer"):
        return {}  # its numbers count other units
    exclusive = METHODS[method].config_model.exclusive
    if exclusive.intersection(given):
        keys = {key: value for key, value in keys.items() if key not in exclusive}
    return keys


def _validate(model: type[MethodConfig], values: Mapping[str, Any]) -> MethodConfig:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(_one_line(model, error)) from None


def _one_line(model: type[MethodConfig], error: ValidationError) -> str:
    """Turn pydantic's first complaint into our one line."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return f"{_WHERE}: {first['ctx']['error']}"
    key = str(first["loc"][0]) if first["loc"] else ""
    names = tuple(model.model_fields)
    if first["type"] == "extra_forbidden" or key not in names:
        return f"{_WHERE}: unknown key {key!r}; accepted: {', '.join(names)}; " + _did_you_mean(
            near_miss(key, names), "remove it"
        )
    schema = model.model_json_schema()["properties"][key]
    accepted = describe_schema(schema)
    given = first["input"]
    return (
        f"{_WHERE}: {key}={given!r} is not valid; accepted: {accepted}; "
        f"correct it or leave the key out for the default ({json.dumps(schema.get('default'))})"
    )


def describe_schema(schema: Mapping[str, Any]) -> str:
    """Say in a few words which values a field's JSON schema accepts."""
    if "anyOf" in schema:
        return " or ".join(describe_schema(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(repr(value) for value in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return f"a list of numbers, each {describe_schema(schema['items'])}"
    names = {"integer": "an integer", "number": "a number", "boolean": "true or false"}
    text = names.get(str(kind), str(kind))
    if "minimum" in schema and "maximum" in schema:
        return f"{text} from {schema['minimum']:g} to {schema['maximum']:g}"
    return f"{text} >= {schema['minimum']:g}" if "minimum" in schema else text


def _did_you_mean(name: str | None, otherwise: str) -> str:
    return f"did you mean {name!r}?" if name else otherwise


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
