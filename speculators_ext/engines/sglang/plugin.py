"""Entry point of the ``sglang.srt.plugins`` group: stands aside until the adapter is in."""

from __future__ import annotations

import logging

__all__ = ["register"]


def register() -> None:
    """Say once that this version of the package adds nothing to SGLang. Never raises."""
    logging.getLogger("sglang.speculators_ext").info(
        "speculators-ext has no SGLang adapter in this version; its methods run on vLLM"
    )
