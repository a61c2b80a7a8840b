"""Drafting with the target's own layers, on its own KV pool."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from speculators_ext.engines.sglang.attention import PackedRowsBackend
from speculators_ext.engines.sglang.verify_shape import runs_kernels
from speculators_ext.proposers.clasp import best_set, solve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from speculators_ext.engines.sglang.skipping.target_layers import TargetLayers
    from speculators_ext.proposers.skip_sets import SkipPlan, SkipSet

__all__ = ["draft_logits", "search_set"]


def draft_logits(
    layers: TargetLayers, runner: Any, kept: tuple[int, ...], step: ForwardBatch
) -> torch.Tensor:
    """One draft step through the layers ``kept``: [n, V]."""
    with layers.only(kept), _launched(runner):
        return runner.forward(step).logits_output.next_token_logits


@contextmanager
def _launched(runner: Any) -> Iterator[None]:
    """Within, ``runner`` launches decode steps kernel by kernel.

    A captured graph holds all layers: replayed, it would draft with the whole target.
    """
    captured, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
    try:
        yield
    finally:
        runner.decode_cuda_graph_runner = captured


class _PackedStack:
    """The target's layers as the search calls them: [R, W, H] in one packed call."""

    def __init__(self, layers: TargetLayers, positions: torch.Tensor, step: ForwardBatch) -> None:
        self.num_units = layers.num_layers
        self._layers = layers
        self._positions = positions
        self._step = step

    def apply(self, unit: int, states: torch.Tensor) -> torch.Tensor:
        num_rows, width, hidden_size = states.shape
        positions = self._positions.repeat_interleave(width)
        packed = states.reshape(num_rows * width, hidden_size)
        packed = self._layers.apply(unit, positions, packed, self._step)
        return packed.view(num_rows, width, hidden_size)


def _backend(runner: Any) -> type[PackedRowsBackend]:
    """By our kernel where the target's attention is by kernels too."""
    if not runs_kernels(runner):
        return PackedRowsBackend
    from speculators_ext.engines.sglang.attention_gpu import KernelPackedRowsBackend, reads_pool

    return KernelPackedRowsBackend if reads_pool(runner.token_to_kv_pool) else PackedRowsBackend


def search_set(
    layers: TargetLayers,
    runner: Any,
    step: ForwardBatch,
    plan: SkipPlan,
    candidates: Sequence[SkipSet],
) -> SkipSet:
    """Find the skip set for the tokens of ``step``, a decode step of theirs; nothing is written."""
    table = runner.req_to_token_pool.req_to_token
    indices, positions = step.req_pool_indices.tolist(), step.positions.long()
    slots = [
        table[index, :length].long()
        for index, length in zip(indices, positions.tolist(), strict=True)
    ]
    backend = _backend(runner)(runner.token_to_kv_pool, slots)
    with forward_context(ForwardContext(attn_backend=backend), forward_batch=step):
        result = solve(
            _PackedStack(layers, positions, step),
            layers.embed(step.input_ids),
            plan.num_skip,
            plan.pinned,
            candidates=candidates,
        )
    return best_set(result, plan.num_skip, candidates)[0]
