"""What the settings of methods share: their base, and the choice of layers to skip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from speculators_ext.errors import ConfigError

__all__ = ["WHERE", "MethodConfig", "SkipConfig", "TargetInfo"]

WHERE = "speculative method_config"
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

    def describe(self) -> str:
        """All that is set, for one line of a log: a line's end in a value is written out."""
        return ", ".join(
            f"{key}={value!r}"
            if isinstance(value, str) and not value.isprintable()
            else f"{key}={value}"
            for key, value in self.model_dump(exclude_none=True).items()
        )


def _list_as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class SkipConfig(MethodConfig):
    """Which layers a target skips while it drafts for itself (CLaSp, arXiv 2505.24196)."""

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
    grouping: Literal["batch", "per_request"] = Field(
        "batch", description="One skip set for the whole batch, or one for each request."
    )

    exclusive: ClassVar[frozenset[str]] = frozenset({"num_skip_layers", "skip_layers"})

    @model_validator(mode="after")
    def _check_fixed_set(self) -> SkipConfig:
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
                f"{WHERE}: pinned_first={self.pinned_first} and pinned_last={self.pinned_last} "
                f"pin more than the {target.num_layers} layers of the target; accepted: a sum of "
                f"at most {target.num_layers}; lower one of them"
            )
        pinned = self.pinned_units(target.num_layers)
        limit = min(units - 1, units - len(pinned))
        if self.num_skip_layers is not None and self.num_skip_layers > limit:
            raise ConfigError(
                f"{WHERE}: num_skip_layers={self.num_skip_layers} is too many for the target's "
                f"{units} {self.skip_unit}s{self._pins(len(pinned))}; accepted: 0 to {limit}; "
                "lower it or leave it out"
            )
        self._check_fixed_set_fits(units, pinned)

    def _pins(self, count: int) -> str:
        """For an error about what is left to skip: how many units are not, and by which keys."""
        keys = [
            f"{key}={getattr(self, key)}"
            for key in ("pinned_first", "pinned_last")
            if getattr(self, key)
        ]
        return f" of which {count} are pinned by {' and '.join(keys)}" if keys else ""

    def _check_fixed_set_fits(self, units: int, pinned: frozenset[int]) -> None:
        fixed = self.skip_layers or ()
        wrong = [u for u in fixed if u >= units]
        if wrong or len(fixed) >= units:
            what = f"names unit {wrong[0]}" if wrong else "skips every unit"
            raise ConfigError(
                f"{WHERE}: skip_layers={list(fixed)} {what} of a target with {units} "
                f"{self.skip_unit}s; accepted: numbers 0 to {units - 1}, at most {units - 1} of "
                "them; correct it"
            )
        held = sorted(pinned.intersection(fixed))
        if held:
            raise ConfigError(
                f"{WHERE}: skip_layers={list(fixed)} names unit {held[0]}, which pinned_first or "
                "pinned_last keeps; accepted: units that are not pinned; remove one or the other"
            )
