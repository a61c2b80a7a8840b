"""The EAGLE-3 head for SmolLM2-135M-Instruct that the package carries, copied into the cache.

The files are the output of ``benchmarks/training``; their card (``smollm2_eagle3/README.md``) says
how they were made and what was measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.assets.shipped import copy_shipped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Report = Callable[[str], None]

FOLDER = "smollm2_eagle3"
# What the card describes.
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
    copy_shipped(FILES, folder, FOLDER)
