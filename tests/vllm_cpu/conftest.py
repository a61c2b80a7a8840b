"""Runs vLLM's own V2 launchers twice: with our overrides, and in Triton's interpreter."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Launchers:
    """`interpreted()` is a block in which every overridden kernel is vLLM's own again."""

    def __init__(self, wrapper: type, names: list[str]) -> None:
        self._wrapper = wrapper
        self.names = names

    @contextmanager
    def interpreted(self) -> Iterator[None]:
        kept = self._wrapper.__getitem__
        self._wrapper.__getitem__ = lambda wrapped, grid: wrapped.original[grid]
        try:
            yield
        finally:
            self._wrapper.__getitem__ = kept

    def both(self, make: Callable[[], object], run: Callable[[object], object]) -> tuple:
        """Run on two equal sets of inputs; returns (ours, theirs)."""
        ours = run(make())
        with self.interpreted():
            theirs = run(make())
        return ours, theirs


@pytest.fixture(scope="session")
def launchers() -> Launchers:
    pytest.importorskip("vllm")
    from speculators_ext.engines.vllm.cpu import status

    state = status()
    if not state.active:
        pytest.skip(f"no interpreted Triton here: {state.reason}")
    from speculators_ext.engines.vllm.cpu import overrides

    names = overrides.register_all()
    return Launchers(overrides._override_class(), names)
