"""Hook 5 for ``reasoning_step``: the book of its requests, and the sampler that reads it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.tokenizers import cached_tokenizer_from_config

from speculators_ext.engines.vllm.reasoning_step.book import StepBook
from speculators_ext.engines.vllm.reasoning_step.counts_page import CountsWriter
from speculators_ext.engines.vllm.reasoning_step.requested import reasoning_tokens
from speculators_ext.engines.vllm.reasoning_step.sampler import StepRejectionSampler
from speculators_ext.engines.vllm.request_options import DEFAULT_OPTIONS, with_request_options
from speculators_ext.proposers.reasoning_step import StepRules, StepSplitter
from speculators_ext.proposers.step_tokens import find_span, token_texts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.model_states.interface import ModelState

    from speculators_ext.config import ReasoningStepConfig

__all__ = ["extend_model_state"]


def extend_model_state(
    state_cls: type[ModelState], options: ReasoningStepConfig
) -> type[ModelState]:
    """A subclass of ``state_cls`` that knows where each request's steps end."""
    if issubclass(state_cls, _StepsMixin):
        return state_cls
    base = with_request_options(state_cls)
    return type(f"{state_cls.__name__}WithSteps", (_StepsMixin, base), {})


class _StepsMixin:
    book: StepBook

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        state: Any = self
        spec = vllm_config.speculative_config
        options = spec.method_config
        always_exact = bool(state.model_config.logits_processors)
        rules = _rules(vllm_config, options)
        self.book = StepBook(rules, options, always_exact, spec.num_speculative_tokens)
        self.book.max_model_len = state.max_model_len
        self.book.page = _counts_page(vllm_config)

    @property
    def least_threshold(self) -> float:
        """The least that a request may set."""
        return self.book.least_threshold

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """A new owner of the slot."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        state: Any = self
        self.book.admit(req_index, new_req_data, exact=state.request_options[req_index].exact)

    def remove_request(self, req_id: str) -> None:
        """The request has ended, or waits without a slot."""
        super().remove_request(req_id)  # type: ignore[misc]
        self.book.dismiss(req_id)

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """vLLM's sampler, and our rejection sampler around it."""
        state: Any = self
        spec = state.vllm_config.speculative_config
        options = functools.partial(_options_of, state.request_options)
        return sampler, StepRejectionSampler(sampler, spec, state.device, self.book, options)


def _counts_page(vllm_config: Any) -> CountsWriter | None:
    """This engine's row of the metrics page; other ranks and other machines have none."""
    path = vllm_config.speculative_config.counts_file
    if get_tensor_model_parallel_rank() or not Path(path).is_file():
        return None
    return CountsWriter(path, vllm_config.parallel_config.data_parallel_rank)


def _options_of(known: dict[int, Any], slot: int) -> Any:
    return known.get(slot, DEFAULT_OPTIONS)


def _rules(vllm_config: Any, options: ReasoningStepConfig) -> StepRules:
    tokenizer: Any = cached_tokenizer_from_config(vllm_config.model_config)
    start, end = reasoning_tokens(options, vllm_config, tokenizer)
    eos = getattr(tokenizer, "eos_token_id", None)
    return StepRules(
        StepSplitter(options.delimiter, token_texts(tokenizer)),
        find_span(tokenizer, start, end),
        options.first_exact,
        options.min_step_tokens,
        frozenset(() if eos is None else (eos,)),
    )
