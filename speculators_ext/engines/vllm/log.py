"""The logger: below ``vllm``, the only hierarchy vLLM configures."""

from __future__ import annotations

import logging

__all__ = ["logger"]

logger = logging.getLogger("vllm.speculators_ext")
