"""Finds out what kind of EAGLE head a user named; one that does not fit is refused early."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_ext.config import ConfigError
from speculators_ext.engines import head_files

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig

__all__ = ["inspect_head"]

_WHERE = "speculative config: model"


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
    sizes = target.get_hidden_size(), target.get_vocab_size()
    return head_files.inspect_head(_WHERE, model, config, *sizes)


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
            f"{_WHERE}={model!r} {problem}; accepted: the folder or hub "
            "name of an EAGLE checkpoint; check the path"
        )
    return config
