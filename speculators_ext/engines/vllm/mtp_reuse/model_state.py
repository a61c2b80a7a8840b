"""Hook 5 for ``mtp_reuse``: the rows the module has yet to run over, and draft trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.vllm.heads.backlog import with_backlog
from speculators_ext.engines.vllm.trees.model_state import with_trees

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.worker.gpu.model_states.interface import ModelState

    from speculators_ext.config import MtpReuseConfig

__all__ = ["extend_model_state"]


class _ReuseMixin:
    when_cached: Callable[[], None] | None = None
    """What the speculator does once the caches are bound and no request is there yet."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's own, then the speculator's turn."""
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        if self.when_cached is not None:
            self.when_cached()


def extend_model_state(state_cls: type[ModelState], options: MtpReuseConfig) -> type[ModelState]:
    """A subclass of ``state_cls`` that knows the backlog, each request's options, and trees."""
    base = with_backlog(with_trees(state_cls) if options.topk > 1 else state_cls)
    return type(f"{state_cls.__name__}WithReuse", (_ReuseMixin, base), {})
