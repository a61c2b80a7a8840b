"""Looks into an EAGLE head's files, so that one that does not fit is refused before loading."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from speculators_ext.errors import ConfigError

__all__ = ["inspect_head", "read_header"]

_LARGEST_HEADER = 1 << 27
_TRAINED = "train or fetch a head for this target"


def inspect_head(
    where: str, model: str, config: dict[str, Any], hidden_size: int, vocab_size: int
) -> str:
    """Check a head's configuration, and its tensors where its files are here.

    Args:
        where: the setting that names the head, which begins an error.
        model: folder or hub name.
        config: its config.json.
        hidden_size: of the target.
        vocab_size: of the target.

    Returns:
        The format: ``eagle`` or ``eagle3``.

    Raises:
        ConfigError: one line saying what does not fit.
    """
    named = f"{where}={model!r}"
    shapes = _read_shapes(Path(model))
    kind = _kind(named, config, shapes)
    _check_sizes(named, config, hidden_size, vocab_size)
    _check_vocabulary_map(named, kind, config, shapes, vocab_size)
    return kind


def _read_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes by tensor name from every safetensors header here; empty for a hub name."""
    shapes: dict[str, list[int]] = {}
    if folder.is_dir():
        for path in sorted(folder.glob("*.safetensors")):
            shapes |= read_header(path)
    return shapes


def read_header(path: Path) -> dict[str, list[int]]:
    """Shapes of a safetensors file's tensors, without reading them.

    Raises:
        ConfigError: it is no safetensors file.
    """
    try:
        with path.open("rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(min(size, _LARGEST_HEADER)))
        return {name: item["shape"] for name, item in header.items() if name != "__metadata__"}
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path.name} of the draft head is no safetensors file ({error}); copy it again"
        ) from None


def _kind(named: str, config: dict[str, Any], shapes: dict[str, list[int]]) -> str:
    """EAGLE-3 heads fuse three hidden states or name themselves so."""
    names = " ".join([*map(str, config.get("architectures") or ()), str(config.get("model_type"))])
    declared = str(config.get("speculators_model_type", names)).lower()
    if "eagle3" in declared or "d2t" in shapes or any(n.startswith("midlayer.") for n in shapes):
        return "eagle3"
    is_head = "eagle" in declared or "fc.weight" in shapes or not shapes
    if not is_head:
        raise ConfigError(f"{named} is not an EAGLE head (it has no fc.weight); {_TRAINED}")
    return "eagle"


def _check_sizes(named: str, config: dict[str, Any], hidden_size: int, vocab_size: int) -> None:
    layers = config.get("transformer_layer_config") or config
    theirs = config.get("target_hidden_size") or layers.get("hidden_size")
    if theirs is not None and theirs != hidden_size:
        raise ConfigError(
            f"{named} takes hidden states of size {theirs}, the target gives {hidden_size}; "
            f"{_TRAINED}"
        )
    full = layers.get("vocab_size")
    if full is not None and full != vocab_size:
        raise ConfigError(
            f"{named} has a vocabulary of {full}, the target one of {vocab_size}; {_TRAINED}"
        )


def _check_vocabulary_map(
    named: str, kind: str, config: dict[str, Any], shapes: dict[str, list[int]], vocab_size: int
) -> None:
    reduced = config.get("draft_vocab_size")
    if kind != "eagle3" or not shapes or reduced is None or reduced == vocab_size:
        return
    key = next((name for name in shapes if name.rpartition(".")[2] == "d2t"), None)
    if key is None:
        raise ConfigError(
            f"{named} has a draft vocabulary of {reduced} and no 'd2t' tensor that maps it to the "
            "target's; export the head with its vocabulary map"
        )
    if shapes[key] != [reduced]:
        raise ConfigError(
            f"{named} maps {shapes[key][0]} draft ids with 'd2t' but has a draft vocabulary of "
            f"{reduced}; export the head with its own vocabulary map"
        )
