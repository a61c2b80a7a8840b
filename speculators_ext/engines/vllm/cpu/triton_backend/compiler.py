"""The compiler half of the `cpu` backend: it exists so that Triton can be asked for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from triton.backends.compiler import BaseBackend, GPUTarget

from speculators_ext.engines.vllm.cpu.host import rival_backend

if TYPE_CHECKING:
    from types import ModuleType


class InterpretedCompiler(BaseBackend):
    """Stands where a compiler would; a kernel that reaches it was not interpreted."""

    binary_ext = "none"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Accept the target that `InterpretedDriver` reports."""
        return target.backend == "cpu"

    def hash(self) -> str:
        """Return the constant cache key: there is nothing to cache."""
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> object:
        """Return the launch options unread: the interpreter ignores them."""
        return options

    def add_stages(self, stages: dict[str, Any], options: object, language: Any = None) -> None:
        """Refuse to compile.

        Raises:
            RuntimeError: always; Triton was imported without the interpreter.
        """
        raise RuntimeError(
            "Triton's interpreter is off, and this machine has no Triton compiler: "
            "unset TRITON_INTERPRET or set it to 1 before Python starts"
        )

    def load_dialects(self, context: Any) -> None:
        """Load nothing."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """Return no device library: the interpreter brings its own."""
        return {}


# Entries of one name overwrite each other in the order of sys.path. A real triton-cpu must win
# in either order, so its class is offered under our name.
if (_rival := rival_backend()) is not None:
    from triton.backends import _find_concrete_subclasses

    globals()["InterpretedCompiler"] = _find_concrete_subclasses(
        importlib.import_module(f"{_rival.value}.compiler"), BaseBackend
    )
