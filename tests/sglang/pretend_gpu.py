"""A device that is not there: tensors which say they are on a GPU, computed on the CPU.

Torch's rule holds among them: an operation takes tensors of one device, but for indices and single
numbers, which may be on the CPU. What breaks the rule on a GPU raises `MixedDevices` here.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

if TYPE_CHECKING:
    from collections.abc import Iterator

# A device with no memory of its own: builds of torch for CPUs know it, and know no GPU.
GPU = torch.device("meta")
_aten = torch.ops.aten
# Moves between devices are what these are for; and both take indices that are on the CPU.
_MOVES = {_aten.copy_.default, _aten._to_copy.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}


class MixedDevices(RuntimeError):
    """An operation that no GPU would do."""


class OnGPU(torch.Tensor):
    """A tensor of the device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnGPU:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=GPU,
        )  # fmt: skip
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **kwargs: Any) -> str:
        return f"OnGPU({self.inner!r})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        _check(func, args, kwargs)
        stays = torch.device(kwargs.get("device") or GPU).type == GPU.type
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        if func is _aten.copy_.default and not isinstance(args[0], OnGPU):
            return args[0].copy_(_inner(args[1]))
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if func._schema.is_mutable and isinstance(args[0], OnGPU):
            return args[0]
        return tree_map(_wrap, out) if stays else out


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnGPU) else value


def _wrap(value: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, OnGPU)
    return OnGPU(value) if plain else value


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if func in _MOVES:
        return
    looked_at = (args[0], *args[2:]) if func in _INDEXED else args
    for value in tree_flatten((looked_at, kwargs))[0]:
        on_cpu = isinstance(value, torch.Tensor) and not isinstance(value, OnGPU)
        if on_cpu and value.device.type == GPU.type:
            raise NotImplementedError(f"{func}: torch made a tensor of the device past us")
        if on_cpu and value.dim() > 0:
            raise MixedDevices(f"{func}: a tensor {tuple(value.shape)} is on the CPU")
    if func in _INDEXED and not isinstance(args[0], OnGPU):
        raise MixedDevices(f"{func}: indices on the GPU of a tensor that is not")


class _Factories(TorchDispatchMode):
    """What makes a tensor of the device, or moves one there."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        theirs = any(isinstance(value, OnGPU) for value in tree_flatten((args, kwargs))[0])
        if theirs or torch.device(kwargs.get("device") or "cpu").type != GPU.type:
            return func(*args, **kwargs)
        return _wrap(func(*args, **kwargs | {"device": torch.device("cpu")}).clone())


class _PastTheDispatcher(TorchFunctionMode):
    """What reads or makes a tensor without telling torch's dispatcher."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.tolist:
            return _inner(args[0]).tolist()
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], tree_map(_as_index, args[1], is_leaf=_is_list), *args[2:])
        kwargs = dict(kwargs or {})
        made = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor)
        if made and torch.device(kwargs.get("device") or "cpu").type == GPU.type:
            return _wrap(func(*args, **kwargs | {"device": torch.device("cpu")}))
        return func(*args, **kwargs)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _as_index(value: Any) -> Any:
    return torch.tensor(value) if isinstance(value, list) else value


@contextlib.contextmanager
def pretend_gpu() -> Iterator[None]:
    """Within, the device is there."""
    with _PastTheDispatcher(), _Factories():
        yield


def to_gpu(value: torch.Tensor) -> torch.Tensor:
    """A copy of it on the device."""
    return OnGPU(value.clone())


def value_of(value: torch.Tensor) -> torch.Tensor:
    """What a tensor of the device holds.

    Raises:
        MixedDevices: it is not there.
    """
    if not isinstance(value, OnGPU):
        raise MixedDevices(f"a tensor {tuple(value.shape)} is on {value.device}")
    return value.inner
