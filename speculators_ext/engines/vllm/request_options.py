"""Hook 5: per-request options, read when the worker learns of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.vllm.log import logger
from speculators_ext.request_options import RequestOptions, read_options

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.model_states.interface import ModelState

__all__ = ["DEFAULT_OPTIONS", "with_request_options"]

DEFAULT_OPTIONS = RequestOptions()


class _RequestOptionsMixin:
    """Adds ``request_options`` (request slot -> RequestOptions) to any of vLLM's model states."""

    request_options: dict[int, RequestOptions]
    least_threshold: float | None = None
    """Of a lossy method, the least that a request may set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request_options = {}

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Remember the options of the request that now owns slot ``req_index``."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        params = new_req_data.sampling_params
        given = params.extra_args if params else None
        options, warning = read_options(given, "extra_args", self.least_threshold)
        if warning is not None:
            logger.warning(warning)
        self.request_options[req_index] = options


def with_request_options(state_cls: type[ModelState]) -> type[ModelState]:
    """A subclass of ``state_cls`` (any of vLLM's, or a model's own) that keeps our options."""
    if issubclass(state_cls, _RequestOptionsMixin):
        return state_cls
    return type(f"{state_cls.__name__}WithOptions", (_RequestOptionsMixin, state_cls), {})
