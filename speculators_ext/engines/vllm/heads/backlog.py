"""A model state that keeps the rows which the target has kept and the head has not yet run over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.vllm.request_options import with_request_options
from speculators_ext.proposers.head_rounds import Backlog

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.model_states.interface import ModelState

__all__ = ["with_backlog"]


class _BacklogMixin:
    backlog: Backlog[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.backlog = Backlog()

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """A new owner of the slot: the head owes nothing to the last one."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        self.backlog.drop(req_index)


def with_backlog(state_cls: type[ModelState]) -> type[ModelState]:
    """A subclass of ``state_cls`` that keeps a head's backlog and each request's options."""
    if issubclass(state_cls, _BacklogMixin):
        return state_cls
    base = with_request_options(state_cls)
    return type(f"{state_cls.__name__}WithBacklog", (_BacklogMixin, base), {})
