"""Hook 5 for ``eagle2``: draft trees, and the rows the head has yet to run over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculators_ext.engines.vllm.heads.backlog import with_backlog
from speculators_ext.engines.vllm.trees.model_state import with_trees

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_states.interface import ModelState

    from speculators_ext.config import Eagle2Config

__all__ = ["extend_model_state"]


def extend_model_state(state_cls: type[ModelState], options: Eagle2Config) -> type[ModelState]:
    """A subclass of ``state_cls`` that knows trees, the backlog and each request's options."""
    return with_backlog(with_trees(state_cls))
