"""Hook 5 for ``clasp``: per-request options and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculators_ext.engines.vllm.request_options import with_request_options

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_states.interface import ModelState

    from speculators_ext.config import ClaspConfig

__all__ = ["extend_model_state"]


def extend_model_state(state_cls: type[ModelState], options: ClaspConfig) -> type[ModelState]:
    """A subclass of ``state_cls`` that keeps each request's options."""
    return with_request_options(state_cls)
