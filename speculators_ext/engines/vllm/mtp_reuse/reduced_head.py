"""The target's output head, of the reduced draft vocabulary's tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from speculators_ext.proposers.mtp_vocab import DraftVocabulary

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["ReducedHead", "make_reduced_head", "mtp_layers"]


def make_reduced_head(model: Any, vllm_config: VllmConfig, size: int) -> ReducedHead:
    """A head of ``size`` tokens for an MTP model.

    Raises:
        ValueError: one line, where rows of the target's head cannot be copied.
    """
    inner = model.model
    shared = getattr(next(iter(mtp_layers(inner)), None), "shared_head", None)
    head: Any = getattr(shared, "head", None) or getattr(model, "lm_head", None)
    processor: Any = getattr(inner, "logits_processor", None) or getattr(
        model, "logits_processor", None
    )
    plain = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
    obstacle = None
    if head is None or processor is None:
        obstacle = f"the output head of {type(model).__name__} was not found"
    elif not isinstance(head.quant_method, plain):
        obstacle = f"the output head is quantised ({type(head.quant_method).__name__})"
    if obstacle is not None:
        raise ValueError(
            f"speculative method_config: draft_vocab_size is not possible, {obstacle}; leave it out"
        )
    config = vllm_config.model_config
    ends = getattr(config.hf_config, "eos_token_id", None)
    always = [ends] if isinstance(ends, int) else list(ends or ())
    vocabulary = DraftVocabulary(config.get_vocab_size(), size, always, head.weight.device)
    return ReducedHead(head, processor, vocabulary)


def mtp_layers(inner: Any) -> list[Any]:
    """The MTP layers of a model of vLLM's, whatever holds them."""
    layers = getattr(inner, "layers", None) or getattr(inner, "mtp_layers", None) or []
    return list(layers.values() if hasattr(layers, "values") else layers)


class ReducedHead:
    """Logits of the draft vocabulary: [n, H] -> [n, size].

    Args:
        head: the target's, whole or this rank's part of the vocabulary.
        processor: scales and caps the logits.
        vocabulary: which tokens; ``size`` divides by the number of ranks.
    """

    def __init__(self, head: Any, processor: Any, vocabulary: DraftVocabulary) -> None:
        self.vocabulary = vocabulary
        self._head, self._processor = head, processor
        self._ranks = get_tensor_model_parallel_world_size()
        size, hidden = len(vocabulary.ids), head.weight.shape[1]
        self._rows = head.weight.new_empty(size, hidden)
        bias = getattr(head, "bias", None)
        self._bias = None if bias is None else bias.new_empty(size)
        share = size // self._ranks
        start = share * get_tensor_model_parallel_rank()
        self._own = slice(start, start + share)
        self._copy(torch.arange(size, device=self._rows.device))

    def update(self) -> None:
        """Choose the vocabulary anew where enough traffic has passed."""
        if self.vocabulary.due:
            slots = self.vocabulary.choose()
            if len(slots):
                self._copy(slots)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of every token of the vocabulary, by slot."""
        bias = None if self._bias is None else self._bias[self._own]
        logits = torch.nn.functional.linear(hidden, self._rows[self._own], bias)
        if self._ranks > 1:
            logits = tensor_model_parallel_all_gather(logits)
        if self._processor.soft_cap is not None:
            logits = torch.tanh(logits / self._processor.soft_cap) * self._processor.soft_cap
        return logits * self._processor.scale

    def _copy(self, slots: torch.Tensor) -> None:
        """Take the head's rows of these slots' tokens."""
        tokens = self.vocabulary.ids[slots]
        self._rows[slots] = self._of_all_ranks(self._head.weight, tokens)
        if self._bias is not None:
            self._bias[slots] = self._of_all_ranks(self._head.bias, tokens)

    def _of_all_ranks(self, values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Entries of a tensor that is split over the vocabulary: [n] tokens -> [n, ...]."""
        if self._ranks == 1:
            return values[tokens]
        part = self._head.shard_indices
        start, stop = part.org_vocab_start_index, part.org_vocab_end_index
        here = (tokens >= start) & (tokens < stop)
        own = values[torch.where(here, tokens - start, 0)]
        own[~here] = 0
        return tensor_model_parallel_all_reduce(own)
