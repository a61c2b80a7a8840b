"""Shared tools of the CPU overrides: tensors as numpy arrays, the Numba decorator, the registry.

An override is a function `f(grid, a)`: `grid` is the launch grid, `a` maps the Triton kernel's
argument names to what was passed. It returns `DECLINED` to leave a rare mode to the
interpreted kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    Args = Mapping[str, Any]
    Grid = tuple[int, ...]
    Impl = Callable[[Grid, Args], object]

DECLINED = object()

_OPTIONS = {"nogil": True, "error_model": "numpy"}
# No cache of its own: an inlined function lives in the caches of its callers.
inline = numba.njit(inline="always", error_model="numpy")


def jit(function: Callable[..., Any]) -> Any:
    """Compile on first use, a second or so once a machine; later processes load it from disk.

    `error_model="numpy"`: a division by zero gives inf or nan, as on the device. No fastmath:
    the order and rounding of float operations decide tokens.
    """
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:
        # Neither the package's folder nor the user's cache can be written.
        return numba.njit(**_OPTIONS)(function)


@dataclass(frozen=True)
class Override:
    """One kernel, by module under `vllm.v1.` and name, with every argument name it may have."""

    kernel: str
    signature: tuple[str, ...]
    impl: Impl


OVERRIDES: list[Override] = []


def override(kernel: str, signature: str) -> Callable[[Impl], Impl]:
    """Register `impl` for `kernel` as long as its argument names are exactly `signature`.

    A kernel whose arguments differ between vLLM versions is registered once for each.
    """

    def register(impl: Impl) -> Impl:
        OVERRIDES.append(Override(f"vllm.v1.{kernel}", tuple(signature.split()), impl))
        return impl

    return register


def flat(tensor: torch.Tensor) -> np.ndarray:
    """View a contiguous tensor of any rank as one row; writes reach the tensor."""
    return tensor.numpy() if tensor.dim() == 1 else tensor.view(-1).numpy()


def rows(tensor: torch.Tensor) -> np.ndarray:
    """Return a float tensor as fp32 numpy rows to read: a view of fp32, a copy of the rest."""
    return tensor.float().numpy()


@intrinsic
def _address_to_pointer(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@jit
def int32_at(address: int, length: int) -> np.ndarray:
    """View `length` int32 values at a raw address (vLLM passes block tables that way)."""
    return numba.carray(_address_to_pointer(np.int64(address)), length, np.int32)
