"""Per-request switches, read from what vLLM (`vllm_xargs`) and SGLang (`custom_params`) hand on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speculators_ext.errors import ConfigError
from speculators_ext.registry import near_miss

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """

    enabled: bool = True
    max_drafts: int | None = None
    threshold: float | None = None

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
