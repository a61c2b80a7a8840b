"""Per-request switches, read from what vLLM (`vllm_xargs`) and SGLang (`custom_params`) hand on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from speculators_ext.errors import ConfigError
from speculators_ext.registry import near_miss

PREFIX = "speculators_ext_"
ENABLED = f"{PREFIX}enabled"
MAX_DRAFTS = f"{PREFIX}max_drafts"
THRESHOLD = f"{PREFIX}threshold"
_KEYS = (ENABLED, MAX_DRAFTS, THRESHOLD)
_SWITCH = {"0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True)
class RequestOptions:
    """What one request asks of drafting.

    Attributes:
        enabled: False turns drafting off for this request.
        max_drafts: most drafts a step, None for the server's number.
        threshold: from where on a judge lets a reasoning step pass, None for the server's.
        exact: True lets none pass, whatever the threshold: what was asked could not be read.
    """

    enabled: bool = True
    max_drafts: int | None = None
    threshold: float | None = None
    exact: bool = False

    def limit(self, num_speculative_tokens: int) -> int:
        """Return the most drafts a step for this request, 0 when it is switched off."""
        if not self.enabled:
            return 0
        if self.max_drafts is None:
            return num_speculative_tokens
        return min(self.max_drafts, num_speculative_tokens)

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None, *, where: str = "extra_args") -> RequestOptions:
        """Read our keys and leave other keys alone.

        Args:
            given: what the engine hands on of a request; None and absent keys give the defaults.
            where: the engine's name for it, for errors.

        Raises:
            ConfigError: one line, for a bad value or an unknown key with our prefix.
        """
        args = given or {}
        for key in args:
            if isinstance(key, str) and key.startswith(PREFIX) and key not in _KEYS:
                close = near_miss(key, _KEYS)
                hint = f"did you mean {close!r}?" if close else "remove it"
                raise ConfigError(
                    f"{where}: unknown key {key!r}; accepted: {', '.join(_KEYS)}; {hint}"
                )
        return cls(
            enabled=_switch(args[ENABLED], where) if ENABLED in args else True,
            max_drafts=_count(args[MAX_DRAFTS], where) if MAX_DRAFTS in args else None,
            threshold=_number(args[THRESHOLD], where) if THRESHOLD in args else None,
        )


def read_options(
    given: object, where: str, least_threshold: float | None = None
) -> tuple[RequestOptions, str | None]:
    """The options of a request that is already admitted, and a warning where they are not valid.

    It must be served all the same: by a lossless method with default options, and exactly by a
    lossy one, whose defaults are not what was asked for and change the text.

    Args:
        given: what the engine hands on of the request.
        where: the engine's name for it, for the warning.
        least_threshold: of a lossy method, the least a request may set: below it everything would
            pass. None for a lossless method.

    Returns:
        The options, and None or one line.
    """
    try:
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(
                f"{where}: {given!r} is not an object; accepted: keys and values; correct it"
            )
        options = RequestOptions.parse(given, where=where)
        asked = options.threshold
        if asked is not None and least_threshold is not None and asked < least_threshold:
            raise ConfigError(
                f"{where}: {THRESHOLD}={asked:g} is below the judge's scale; accepted: a number >= "
                f"{least_threshold:g}; correct it"
            )
    except ConfigError as error:
        if least_threshold is None:
            return RequestOptions(), f"{error}; the request is served with default options"
        warning = f"{error}; the request is served exactly: no step of it is judged"
        return RequestOptions(exact=True), warning
    return options, None


def _switch(value: object, where: str) -> bool:
    if isinstance(value, int | str) and str(value).lower() in _SWITCH:
        return _SWITCH[str(value).lower()]
    raise ConfigError(
        f"{where}: {ENABLED}={value!r} is not valid; accepted: 0, 1, true or false; correct it"
    )


def _count(value: object, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    raise ConfigError(
        f"{where}: {MAX_DRAFTS}={value!r} is not valid; accepted: an integer >= 0; correct it"
    )


def _number(value: object, where: str) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    raise ConfigError(
        f"{where}: {THRESHOLD}={value!r} is not valid; accepted: a finite number; correct it"
    )
