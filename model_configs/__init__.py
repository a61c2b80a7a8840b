"""Presets: method settings for known targets, as data; README.md here explains the fields."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from speculators_ext.config import METHODS, TargetInfo

__all__ = ["Match", "Preset", "load", "lookup", "names"]


class Match(BaseModel):
    """Which targets a preset is for: any of `names`, else any of `architectures`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    names: list[str] = Field([], description="Model names; owner and letter case are ignored.")
    architectures: list[str] = Field([], description="Class names, when no preset has the name.")
    num_layers: int = Field(ge=1, description="Decoder layers the target must have.")


class Preset(BaseModel):
    """One method's settings for one target."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    match: Match
    method: str
    config: dict[str, Any] = Field(description="Keys of the method's own settings.")
    source: str = Field(min_length=1, description="Where the numbers come from.")
    measured: dict[str, Any] | None = Field(description="What was measured and the command.")
    reason: str | None = Field(None, description="Why nothing was measured.")

    @model_validator(mode="after")
    def _check(self) -> Preset:
        METHODS[self.method].config_model.model_validate(self.config)
        if (self.measured is None) == (self.reason is None):
            raise ValueError("give either measured, or reason when measured is null")
        return self


def names() -> list[str]:
    """Return the names of all presets, sorted."""
    found = (entry.name for entry in files(__package__).iterdir())
    return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))


@cache
def load(name: str) -> Preset:
    """Read and validate one preset."""
    text = files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return Preset.model_validate(json.loads(text))


def lookup(target: TargetInfo, method: str) -> Preset | None:
    """Find the preset of `method` for a target: by its name, else by its architecture and depth."""
    base = _base_name(target.name)
    by_architecture = None
    for preset in map(load, names()):
        if preset.method != method or preset.match.num_layers != target.num_layers:
            continue
        if base in map(_base_name, preset.match.names):
            return preset
        if by_architecture is None and set(preset.match.architectures) & set(target.architectures):
            by_architecture = preset
    return by_architecture


def _base_name(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()
