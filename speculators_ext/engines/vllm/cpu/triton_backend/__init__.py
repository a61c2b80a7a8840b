"""Triton backend `cpu`: every kernel runs in Triton's interpreter, nothing is compiled.

Triton imports this package while it discovers backends, which is the first line of its own
import and before any `@triton.jit` is applied (its own library functions included). The
variable that selects the interpreter is read at each of those, so here it is set in time,
whoever imports Triton first.

Where the backend must not act, it takes itself out of Triton's table again: vLLM asks whether
the name `cpu` is in that table, so a backend that merely reports itself inactive would
still count.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from speculators_ext.engines.vllm.cpu.host import rival_backend, status
from speculators_ext.engines.vllm.cpu.metadata_alias import answer_for_vllm


class _Withdrawing(ModuleType):
    """`triton.backends` until its table is first read; drops our entry and is gone."""

    @property
    def backends(self) -> dict[str, Any]:
        try:
            table = self.__dict__["backends"]
        except KeyError:
            raise AttributeError("backends") from None
        self.__class__ = ModuleType  # type: ignore[assignment]
        table.pop("cpu", None)
        return table


def _withdraw() -> None:
    # Triton adds each entry after importing it, so it cannot be removed from here directly.
    discovering = sys.modules.get("triton.backends")
    if type(discovering) is ModuleType:
        discovering.__class__ = _Withdrawing


if status().active:
    os.environ["TRITON_INTERPRET"] = "1"
    answer_for_vllm()
elif rival_backend() is None:
    _withdraw()
