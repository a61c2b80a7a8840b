"""Helpers for tests of this package and of what is built on it; no engine is imported here."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import platformdirs

__all__ = ["SourcesUnavailable", "wheel_sources"]

_PLATFORM = "manylinux_2_28_x86_64"


class SourcesUnavailable(RuntimeError):
    """A wheel could not be had; the message is one line and says why."""


def wheel_sources(package: str, version: str) -> Path:
    """The Python sources of a released wheel, downloaded once and never installed.

    They are kept below ``$SPECULATORS_EXT_CACHE/wheels`` (default: the user's cache folder). A
    wheel that already lies there is used as it is.

    Returns:
        The folder that holds ``package``'s folder.

    Raises:
        SourcesUnavailable: offline, or no such version.
    """
    override = os.environ.get("SPECULATORS_EXT_CACHE")
    root = override or platformdirs.user_cache_dir("speculators-ext", appauthor=False)
    wheels = Path(root).expanduser().absolute() / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    sources = wheels / f"{package}-{version}"
    with (wheels / f"{package}-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not sources.is_dir():
            _extract(_find_wheel(wheels, package, version), package, sources)
    return sources


def _find_wheel(wheels: Path, package: str, version: str) -> Path:
    pattern = f"{package}-{version}-*.whl"
    if not any(wheels.glob(pattern)):
        _download(wheels, f"{package}=={version}")
    return next(wheels.glob(pattern))


def _download(wheels: Path, requirement: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--platform", _PLATFORM]
    with TemporaryDirectory(dir=wheels) as folder:
        done = subprocess.run(
            [*command, "--dest", folder, requirement], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise SourcesUnavailable(f"pip could not download {requirement}: {reason}")
        for wheel in Path(folder).glob("*.whl"):
            wheel.rename(wheels / wheel.name)


def _extract(wheel: Path, package: str, sources: Path) -> None:
    with TemporaryDirectory(dir=sources.parent) as folder, zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith(f"{package}/") and n.endswith(".py")]
        archive.extractall(folder, names)
        shutil.copytree(folder, sources)
    wheel.unlink()
