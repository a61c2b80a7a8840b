"""The logger of everything below ``engines.sglang``."""

from __future__ import annotations

import logging

__all__ = ["logger"]

logger = logging.getLogger("sglang.speculators_ext")
