"""A target's config.json from the hub, asked for once: what is no model is told in one line."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from speculators_ext.cli.common import CliError

__all__ = ["fetch_config"]


def fetch_config(name: str) -> Path:
    """The config.json of the hub's model `name`, from the hub's cache where it is there.

    The hub is asked whether it has the file before its own download, which would try six times.

    Raises:
        CliError: there is no such model, the hub cannot be reached, or its client is not installed.
    """
    try:
        from huggingface_hub import (
            get_hf_file_metadata,
            hf_hub_download,
            hf_hub_url,
            try_to_load_from_cache,
        )
        from huggingface_hub.utils import get_session
    except ImportError as error:
        raise CliError(
            f"--target {name!r} is not a folder, and huggingface_hub, which comes with an engine, "
            "is not installed: give a model folder"
        ) from error
    # httpx or httpx2, as the client's version has it; their own errors come through unchanged.
    http: Any = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
        return Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError, http.HTTPError) as error:
        raise CliError(_refusal(name, _reason(error))) from error


def _refusal(name: str, reason: str) -> str:
    from speculators_ext import assets
    from speculators_ext.registry import near_miss

    near = near_miss(name, tuple(assets.names()))
    hint = f" (did you mean {near!r}?)" if near else ""
    return (
        f"--target {name!r}{hint}: accepted are a model folder, the name of a model on the hub "
        f"({reason}), and one of the assets: {', '.join(assets.names())}"
    )


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.RepositoryNotFoundError):
        return "which has none of this name, or asks for a token"
    if isinstance(error, errors.EntryNotFoundError):
        return "where this one has no config.json"
    if isinstance(error, errors.HFValidationError):
        return "which this cannot be"
    if isinstance(error, errors.HfHubHTTPError):
        return f"which said: {str(error).strip().splitlines()[0]}"
    return "which cannot be reached"
