"""Entry point of the ``sglang.srt.plugins`` group: probes, sets the hooks, or stands aside."""

from __future__ import annotations

from speculators_ext.engines.sglang.log import logger

__all__ = ["register"]


def register() -> None:
    """Make our algorithms known to this SGLang if it has what they need. Never raises."""
    try:
        _register()
    except Exception:  # noqa: BLE001 - those who never use us must not be bothered
        logger.exception("speculators-ext could not register; its algorithms are unavailable")


def _register() -> None:
    from speculators_ext.engines.sglang import hooks

    problem = hooks.find_problem()
    if problem is not None:
        logger.error("speculators-ext stands aside: %s", problem)
        return
    hooks.install()
