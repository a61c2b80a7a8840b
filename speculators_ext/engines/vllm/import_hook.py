"""Run a callback once a module has been imported, without importing it ourselves.

vLLM's worker modules must be imported in vLLM's own order (on a CPU its shims patch torch first),
so the hooks on them are set right after vLLM's own import, whenever that comes.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["when_imported"]

_callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}


class _CallbackLoader(importlib.abc.Loader):
    """Delegates to the real loader, then runs the callbacks of that module."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for callback in _callbacks.pop(module.__name__, []):
            callback(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


class _CallbackFinder(importlib.abc.MetaPathFinder):
    """Wraps the loader of watched modules; every other import passes by untouched."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in _callbacks or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallbackLoader(spec.loader)
        return spec


_finder = _CallbackFinder()


def when_imported(module_name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call ``callback(module)`` right after ``module_name`` is imported, or now if it already is.

    The callback runs inside somebody else's import statement, so it must not raise.
    """
    module = sys.modules.get(module_name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
        return
    _callbacks.setdefault(module_name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
