"""Looks into an EAGLE head's files, so that one that does not fit is refused before loading."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_ext.config import ConfigError

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig

__all__ = ["inspect_head", "read_header"]

_LARGEST_HEADER = 1 << 27
_TRAINED = "train or fetch a head for this target"


def inspect_head(model: str, revision: str | None, target: ModelConfig) -> str:
    """Check a head's configuration, and its tensors where its files are here.

    Args:
        model: folder or hub name.
        revision: of the hub's.
        target: what the head must fit.

    Returns:
        The built-in method that loads it: ``eagle`` or ``eagle3``.

    Raises:
        ConfigError: one line saying what does not fit.
    """
    config = _read_config(model, revision)
    shapes = _read_shapes(Path(model))
    layers = config.get("transformer_layer_config") or config
    rides = _kind(model, config, shapes)
    _check_sizes(model, rides, config, layers, shapes, target)
    return rides


def _read_config(model: str, revision: str | None) -> dict[str, Any]:
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    from speculators_ext import assets

    problem = "has no config.json that could be read or fetched"
    config = None
    if model in assets.names():
        problem = f"is an asset, not yet a folder: `speculators-ext assets {model}` prints its own"
    elif model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        problem = "is no folder"
    else:
        try:
            config = get_hf_file_to_dict("config.json", model, revision)
        except (OSError, ValueError) as error:
            problem = f"cannot be read ({' '.join(str(error).split())[:120]})"
    if not isinstance(config, dict):
        raise ConfigError(
            f"speculative config: model={model!r} {problem}; accepted: the folder or hub "
            "name of an EAGLE checkpoint; check the path"
        )
    return config


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
            f"speculative config: {path.name} of the head is no safetensors file ({error}); "
            "copy it again"
        ) from None


def _kind(model: str, config: dict[str, Any], shapes: dict[str, list[int]]) -> str:
    """EAGLE-3 heads fuse three hidden states or name themselves so."""
    names = " ".join([*map(str, config.get("architectures") or ()), str(config.get("model_type"))])
    declared = str(config.get("speculators_model_type", names)).lower()
    if "eagle3" in declared or "d2t" in shapes or any(n.startswith("midlayer.") for n in shapes):
        return "eagle3"
    is_head = "eagle" in declared or "fc.weight" in shapes or not shapes
    if not is_head:
        raise ConfigError(
            f"speculative config: model={model!r} is not an EAGLE head (it has no fc.weight); "
            f"{_TRAINED}"
        )
    return "eagle"


def _check_sizes(
    model: str,
    rides: str,
    config: dict[str, Any],
    layers: dict[str, Any],
    shapes: dict[str, list[int]],
    target: ModelConfig,
) -> None:
    hidden = target.get_hidden_size()
    theirs = config.get("target_hidden_size") or layers.get("hidden_size")
    if theirs is not None and theirs != hidden:
        raise ConfigError(
            f"speculative config: model={model!r} takes hidden states of size {theirs}, the target "
            f"gives {hidden}; {_TRAINED}"
        )
    vocabulary = target.get_vocab_size()
    full = layers.get("vocab_size")
    if full is not None and full != vocabulary:
        raise ConfigError(
            f"speculative config: model={model!r} has a vocabulary of {full}, the target one of "
            f"{vocabulary}; {_TRAINED}"
        )
    reduced = config.get("draft_vocab_size")
    if rides != "eagle3" or not shapes or reduced is None or reduced == vocabulary:
        return
    if not any(name.rpartition(".")[2] == "d2t" for name in shapes):
        raise ConfigError(
            f"speculative config: model={model!r} has a draft vocabulary of {reduced} and no 'd2t' "
            "tensor that maps it to the target's; export the head with its vocabulary map"
        )
    mapped = shapes[next(name for name in shapes if name.rpartition(".")[2] == "d2t")]
    if mapped != [reduced]:
        raise ConfigError(
            f"speculative config: model={model!r} maps {mapped[0]} draft ids with 'd2t' but has a "
            f"draft vocabulary of {reduced}; export the head with its own vocabulary map"
        )
