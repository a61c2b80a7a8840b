"""What SGLang captures CUDA graphs of verification with, for algorithms it does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from speculators_ext.engines.sglang.algorithm import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["create_dummy_verify_input", "get_spec_info"]


def get_spec_info(original: Callable[..., Any], graphs: Any, num_tokens: int) -> Any:
    """Around ``DecodeCudaGraphRunner.get_spec_info``: what a graph of verification reads.

    SGLang makes one of its own where an algorithm has a head; a chain of the target's own drafts
    is verified as EAGLE's chains are.
    """
    found = original(graphs, num_tokens)
    if found is not None or not is_ours(graphs.model_runner.spec_algorithm):
        return found
    return _chain(graphs.buffers.custom_mask)


def create_dummy_verify_input(
    original: Callable[..., Any], spec_algorithm: Any, custom_mask: torch.Tensor, *args: Any
) -> Any:
    """Around SGLang's function of that name: the same, of the forwards that warm it up."""
    found = original(spec_algorithm, custom_mask, *args)
    return _chain(custom_mask) if found is None and is_ours(spec_algorithm) else found


def _chain(custom_mask: torch.Tensor) -> EagleVerifyInput:
    spec = get_spec()
    return EagleVerifyInput(
        draft_token=None,
        custom_mask=custom_mask,
        positions=None,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=spec.speculative_num_steps,
        topk=spec.speculative_eagle_topk,
        draft_token_num=spec.speculative_num_draft_tokens,
        # As `eagle_prepare_for_verify` asks for: a graph gives no more than it was captured with.
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )
