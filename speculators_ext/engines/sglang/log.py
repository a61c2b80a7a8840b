"""The logger of everything below ``engines.sglang``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculators_ext.config import MethodConfig

__all__ = ["log_method", "logger"]

logger = logging.getLogger("sglang.speculators_ext")


def log_method(name: str, num_drafts: int, options: MethodConfig) -> None:
    """Say that an algorithm is on, with its settings."""
    logger.warning(
        "Speculative algorithm %s (speculators-ext) is on, up to %d drafts a round, %s. "
        "It is experimental on SGLang: compare its text with plain decoding before you rely "
        "on it.",
        name,
        num_drafts,
        options.describe(),
    )
