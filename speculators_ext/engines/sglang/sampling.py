"""Sampling in verification as plain decoding samples, on CPUs and GPUs.

The target's token behind every row is drawn as plain decoding draws it, and a draft is accepted
where it is that token. For drafts that were chosen, not drawn, that is the standard rule: draft x
is accepted with probability p(x), and what replaces it follows p without x. Of siblings in a tree,
which are distinct, one at most is that token.

SGLang takes the likeliest token on CPUs. On GPUs it samples, but leaves ``min_p`` out, and takes
``top_p`` of what ``top_k`` has left where plain decoding takes both of the whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.sampler import (
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)

from speculators_ext.engines.sglang.algorithm import is_ours
from speculators_ext.engines.sglang.choices import final_choice

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["eagle_sample", "verify_tree_greedy", "verify_uses_greedy"]


class _Verification(NamedTuple):
    info: Any
    logits: torch.Tensor
    positions: torch.Tensor


# The verification under way. Set only inside `eagle_sample`, which calls `verify_tree_greedy`;
# SGLang's scheduler is one thread.
_under_way: list[_Verification] = []


def eagle_sample(
    original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Around SGLang's function of that name: keeps at hand what sampling needs."""
    info = batch.sampling_info
    if not is_ours(batch.spec_algorithm) or batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, *args, **kwargs)
    _under_way.append(_Verification(info, logits_output.next_token_logits, verify_input.positions))
    try:
        return original(verify_input, batch, logits_output, *args, **kwargs)
    finally:
        _under_way.pop()


def verify_uses_greedy(original: Callable[..., bool], **kwargs: Any) -> bool:
    """Around SGLang's choice of a rule: drafts of ours are compared with the target's tokens."""
    return bool(_under_way) or original(**kwargs)


def verify_tree_greedy(
    original: Callable[..., Any], *args: Any, candidates: torch.Tensor,
    target_predict: torch.Tensor, **kwargs: Any,
) -> Any:  # fmt: skip
    """Around SGLang's acceptance: the target's choices become draws where that is asked for, and
    a method may choose otherwise.
    """
    if _under_way:
        # By now penalties, biases and grammar masks are in the logits.
        verification = _under_way[-1]
        if not verification.info.is_all_greedy:
            drawn = _draw(*verification)
            target_predict = drawn.view_as(target_predict).to(target_predict.dtype)
        target_predict = final_choice(verification.logits, candidates, target_predict)
    return original(*args, candidates=candidates, target_predict=target_predict, **kwargs)


def _draw(info: Any, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token a row, int [rows], from the law plain decoding samples from."""
    width = logits.shape[0] // info.temperatures.shape[0]

    def each(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.repeat_interleave(width, dim=0)

    temperatures = info.temperatures.repeat_interleave(width, dim=0)
    probs = torch.softmax(logits.float() / temperatures, dim=-1)
    seeds = each(info.sampling_seed)
    if not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling):
        return sampling_from_probs_torch(probs, sampling_seed=seeds, positions=positions)
    return top_k_top_p_min_p_sampling_from_probs_torch(
        probs, each(info.top_ks), each(info.top_ps), each(info.min_ps),
        info.need_min_p_sampling, seeds, positions,
    )  # fmt: skip
