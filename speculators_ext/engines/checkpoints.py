"""What a checkpoint's own files say about its MTP modules, before an engine reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from speculators_ext.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["check_module_weights", "count_modules", "find_module_obstacle"]

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_MARKS = (".mtp", "mtp.", "mtp_", "nextn", "eh_proj", "enorm")


def count_modules(config: Any) -> int:
    """How many MTP modules a target's Hugging Face config names."""
    for part in (config, getattr(config, "text_config", None)):
        for key in _COUNTS:
            count = part.get(key) if isinstance(part, dict) else getattr(part, key, None)
            if count:
                return int(count)
    return 0


def find_module_obstacle(architectures: Sequence[str], config: Any) -> str | None:
    """Why the target cannot draft with an MTP module, as a clause; None when it can."""
    if count_modules(config):
        return None
    return (
        f"the target has no MTP module: its config.json sets none of {', '.join(_COUNTS)} "
        f"({', '.join(architectures)})"
    )


def check_module_weights(folder: Path, modules: int, layers: int, what: str, remedy: str) -> None:
    """Refuse a checkpoint that was saved without the modules its config names.

    Args:
        folder: of the checkpoint; a hub name is not checked.
        modules: that the config names.
        layers: decoder layers of the target, behind which the modules are numbered.
        what: the setting that asks for them, which begins the error.
        remedy: what to do, which ends it.

    Raises:
        ConfigError: one line.
    """
    marks = (*_MARKS, *(f".layers.{layers + index}." for index in range(modules)))
    names = _tensor_names(folder)
    if names is not None and not any(mark in name for name in names for mark in marks):
        raise ConfigError(
            f"{what}: config.json names {modules} MTP module(s) but the checkpoint has no tensor "
            f"of any (such as model.layers.{layers}.eh_proj.weight): it was saved without; {remedy}"
        )


def _tensor_names(folder: Path) -> Iterable[str] | None:
    """Names of a checkpoint's tensors where its safetensors are here, else None."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    from safetensors import safe_open

    names: list[str] = []
    for path in files:
        with safe_open(path, framework="numpy") as file:
            names += file.keys()
    return names
