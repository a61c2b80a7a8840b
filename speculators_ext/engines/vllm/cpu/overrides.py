"""Registers the overrides with vLLM, when its worker asks its platform for them."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from speculators_ext.engines.vllm.cpu.host import INTERPRETED, SWITCH, status
from speculators_ext.engines.vllm.cpu.interpreter import repair_comparisons

if TYPE_CHECKING:
    from collections.abc import Callable

    from speculators_ext.engines.vllm.cpu.arrays import Impl, Override

logger = logging.getLogger("vllm.speculators_ext")

_HOOK = "register_triton_kernel_overrides"
_MODULES = (
    "acceptance",
    "batch",
    "blocks",
    "drafting",
    "logits",
    "rejection",
    "sampling",
    "truncation",
    "writes",
)
# Options of a launch that are no arguments of the kernel.
_LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"})


def install_overrides() -> bool:
    """Arrange for V2's hot kernels to run as Numba; call it from the plugin, any number of times.

    vLLM calls `register_triton_kernel_overrides` of its platform in the worker process, before
    any kernel is launched; that method of the CPU platform does nothing while Triton counts as
    available. Registering there instead of here keeps the frontend processes free of the worker's
    modules, and lets `cpu.shm` patch torch first, as vLLM's CPU worker insists.

    Returns:
        Whether the hook is set. Never raises: what can not be overridden stays interpreted.
    """
    if not status().active or os.environ.get(SWITCH) == INTERPRETED:
        return False
    try:
        from vllm.platforms import current_platform

        platform = type(current_platform)
        original = getattr(platform, _HOOK, None)
        if not current_platform.is_cpu() or original is None:
            logger.warning("speculators-ext: this vLLM has no %s; kernels stay interpreted", _HOOK)
            return False
        if not getattr(original, "speculators_ext", False):
            setattr(platform, _HOOK, _worker_hook(original))
    except Exception:  # an exception in a plugin kills vLLM
        logger.warning("speculators-ext: kernels stay interpreted", exc_info=True)
        return False
    return True


def _worker_hook(original: Callable[[], None]) -> Any:
    def register_triton_kernel_overrides(cls: type) -> None:
        try:
            if not _DONE:
                _DONE.append(True)
                _import_worker_first()
                with contextlib.suppress(AttributeError):  # the same trip over llvmlite
                    _register_stock(original)
                register_all()
        except Exception:  # slow kernels beat a worker that does not start
            logger.warning("speculators-ext: kernels stay interpreted", exc_info=True)

    register_triton_kernel_overrides.speculators_ext = True  # type: ignore[attr-defined]
    return classmethod(register_triton_kernel_overrides)


def register_all() -> list[str]:
    """Replace every known kernel of the installed vLLM; returns the names of those replaced."""
    _import_worker_first()
    package = __package__ or ""
    for name in _MODULES:
        importlib.import_module(f"{package}.{name}")
    from speculators_ext.engines.vllm.cpu.arrays import OVERRIDES

    fitting: dict[str, Impl] = {}
    unknown: dict[str, str] = {}
    for item in OVERRIDES:
        reason = _misfit(item)
        if reason is None:
            fitting[item.kernel] = item.impl
        elif reason:
            unknown[item.kernel] = reason
    for kernel, reason in unknown.items():
        if kernel not in fitting:
            logger.warning("speculators-ext: %s stays interpreted (%s)", kernel, reason)
    _bind(fitting)
    repair_comparisons()
    logger.info("speculators-ext: %d Triton kernels run as Numba on this CPU", len(fitting))
    return sorted(fitting)


def _import_worker_first() -> None:
    # vLLM's CPU worker imports this before any other worker module: it patches torch's CUDA
    # events and the buffers that those modules bind by name.
    importlib.import_module("vllm.v1.worker.cpu.shm")


def _misfit(item: Override) -> str | None:
    """Say why a kernel can not be overridden; "" when it already is, None when it fits."""
    module_name, _, name = item.kernel.rpartition(".")
    try:
        kernel = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError):
        return "this vLLM has no such kernel"
    if isinstance(kernel, _override_class()):
        return ""
    names = tuple(getattr(kernel, "arg_names", ()))
    return None if names == item.signature else f"its arguments are now {', '.join(names)}"


def _bind(fitting: dict[str, Impl]) -> None:
    """Put our wrapper wherever vLLM holds one of these kernels.

    `dispatcher.register_kernels` does this with vLLM's wrapper, which drops the launch grid, by
    looking into every attribute of every module, where it trips over llvmlite's (Numba's)
    lazy ones. So its wrapper class and its record are kept, and the search stays within vLLM.
    """
    from vllm.triton_utils import dispatcher

    wrappers: dict[int, Any] = {}
    for name, impl in fitting.items():
        module_name, _, attribute = name.rpartition(".")
        original = getattr(sys.modules[module_name], attribute)
        wrapper = wrappers[id(original)] = _override_class()(original, impl)
        wrapper.original = original
        dispatcher._registry[name] = (original, impl)
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("vllm."):
            continue
        for attribute, value in list(vars(module).items()):
            if (wrapper := wrappers.get(id(value))) is not None:
                setattr(module, attribute, wrapper)
                continue
            owned = getattr(value, "__dict__", None)
            if type(owned) is dict and (wrapper := wrappers.get(id(owned.get("kernel")))):
                value.kernel = wrapper
                owned.pop("_kernel_arg_names", None)


def _register_stock(original: Callable[[], None]) -> None:
    """Let the platform register its C++ kernels for V1, which pooling and such still take.

    It skips them where Triton is available, trusting Triton to compile; here it interprets.
    """
    from vllm import triton_utils

    available = triton_utils.HAS_TRITON
    try:
        triton_utils.HAS_TRITON = False
        original()
    finally:
        triton_utils.HAS_TRITON = available


_CLASSES: list[type] = []
_DONE: list[bool] = []


def _override_class() -> type:
    """Build, once, the wrapper class; its base lives in a module that imports vLLM."""
    if not _CLASSES:
        from vllm.triton_utils.dispatcher import KernelOverride

        class GridOverride(KernelOverride):
            """vLLM's wrapper drops the grid; this one hands it on, and can go back."""

            original: Any

            def __getitem__(self, grid: Any) -> Callable[..., Any]:
                return partial(self._launch_on, grid)

            def _launch_on(self, grid: Any, *args: Any, **kwargs: Any) -> None:
                from speculators_ext.engines.vllm.cpu.arrays import DECLINED

                named = dict(zip(self.arg_names, args, strict=False))
                named.update((k, v) for k, v in kwargs.items() if k not in _LAUNCH_OPTIONS)
                if self._impl(grid, named) is DECLINED:
                    self.original[grid](*args, **kwargs)

        _CLASSES.append(GridOverride)
    return _CLASSES[0]
