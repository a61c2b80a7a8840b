"""A name -> item table that refuses duplicates and knows near misses."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Items by name, in the order they were added.

    Args:
        noun: what one item is, for error messages ("method").
    """

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> None:
        """Add `item`; a name that is taken raises `ValueError`."""
        if name in self._items:
            raise ValueError(f"{self._noun} {name!r} is registered twice")
        self._items[name] = item

    def __getitem__(self, name: str) -> T:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def near_miss(given: str, accepted: Mapping[str, object] | tuple[str, ...]) -> str | None:
    """Return the accepted name closest to a mistyped one, or None when none is close."""
    close = difflib.get_close_matches(given.lower(), list(accepted), n=1, cutoff=0.6)
    return close[0] if close else None
