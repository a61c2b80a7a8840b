"""Files that the package carries, copied into the cache and checked."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from speculators_ext.assets.store import AssetError, sha256

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["copy_shipped"]

_CARD = "README.md"


def copy_shipped(digests: Mapping[str, str], folder: Path, *parts: str) -> None:
    """Copy files and their card.

    Args:
        digests: the SHA-256 each file must have, by its name: another file is not what its card
            describes, and must not be measured.
        folder: where they go.
        parts: folders inside of this one that hold them; a file is taken from the last that does.

    Raises:
        AssetError: one line, when a file is missing or damaged.
    """
    shipped = resources.files("speculators_ext.assets")
    places = [shipped.joinpath(part) for part in parts]
    for name in (*digests, _CARD):
        found = [place.joinpath(name) for place in places if place.joinpath(name).is_file()]
        if not found:
            raise AssetError(f"the package lacks assets/{parts[-1]}/{name}: reinstall it")
        (folder / name).write_bytes(found[-1].read_bytes())
    for name, digest in digests.items():
        if sha256(folder / name) != digest:
            raise AssetError(f"assets/{parts[-1]}/{name} is damaged: reinstall the package")
