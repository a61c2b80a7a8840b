"""The logger: below ``vllm``, the only hierarchy vLLM configures."""

from __future__ import annotations

import logging

__all__ = ["logger", "warn_untried_on_gpus"]

logger = logging.getLogger("vllm.speculators_ext")


def warn_untried_on_gpus(method: str) -> None:
    """Say what the README says, where a GPU's user looks."""
    logger.warning(
        "%s: its code for GPUs has been checked in Triton's interpreter only and has never run on "
        "a GPU; compare its text and speed with plain decoding before you rely on it",
        method,
    )
