"""The driver half of the `cpu` backend: reports a CPU target, launches nothing itself."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from speculators_ext.engines.vllm.cpu.host import rival_backend, status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class InterpretedDriver(DriverBase):
    """Active only where V2 is meant to run interpreted; see `host.status`."""

    @classmethod
    def is_active(cls) -> bool:
        """Say whether Triton's own driver choice may take this backend."""
        return status().active

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Refuse: C++ types are wanted by a compiled launcher only.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the interpreter compiles no launcher")

    def get_current_target(self) -> GPUTarget:
        """Return the CPU target (no architecture, warps of one lane)."""
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        """Return torch's CPU device."""
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return torch's CPU namespace in place of torch.cuda."""
        import torch

        return torch.cpu

    def get_current_device(self) -> int:
        """Return the only device index there is."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Accept any index: there is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the null stream: the interpreter is synchronous."""
        return 0

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a one-shot timer in milliseconds, for autotuners that ask."""

        def bench(call: Callable[[], Any], *, quantiles: Sequence[float], **_: Any) -> list[float]:
            start = time.perf_counter()
            call()
            return [(time.perf_counter() - start) * 1e3] * len(quantiles)

        return bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Return an empty buffer: there is no device cache to flush."""
        import torch

        return torch.empty(0)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Do nothing: there is no device cache to flush."""


# The same adoption as in `compiler`: a real triton-cpu wins whatever the order.
if (_rival := rival_backend()) is not None:
    from triton.backends import _find_concrete_subclasses

    globals()["InterpretedDriver"] = _find_concrete_subclasses(
        importlib.import_module(f"{_rival.value}.driver"), DriverBase
    )
