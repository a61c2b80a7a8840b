"""The EAGLE-3 head for SmolLM2-135M-Instruct that the package carries, copied into the cache.

The files are the output of ``benchmarks/training``; their card (``smollm2_eagle3/README.md``) says
how they were made and what was measured.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

from speculators_ext.assets.store import AssetError, sha256

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Report = Callable[[str], None]

FOLDER = "smollm2_eagle3"
# What the card describes; a file that a checkout or an installer damaged must not be measured.
FILES = {
    "config.json": "53f94eeaec2cec165121ad4cf5977d3439428cf8f063b6b705b22f8963730e9d",
    "model.safetensors": "1e8e96d4b9ba3c326e1536238af569a963854106c7e1e60a28cb58de2b71a27c",
}


def source() -> dict[str, Any]:
    """The expected digests: another head is another asset."""
    return {"sha256": FILES}


def build_into(folder: Path, report: Report) -> None:
    """Copies config, weights and card; raises `AssetError` when a file is missing or damaged."""
    report("copying the head")
    shipped = resources.files("speculators_ext.assets").joinpath(FOLDER)
    for name in (*FILES, "README.md"):
        part = shipped.joinpath(name)
        if not part.is_file():
            raise AssetError(f"the package lacks assets/{FOLDER}/{name}: reinstall it")
        (folder / name).write_bytes(part.read_bytes())
    for name, digest in FILES.items():
        if sha256(folder / name) != digest:
            raise AssetError(f"assets/{FOLDER}/{name} is damaged: reinstall the package")
