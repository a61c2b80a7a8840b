"""The loaded target as something whose layers can be left out, or called one by one."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["TargetLayers"]


class TargetLayers:
    """The decoder layers of one target.

    Args:
        model: a ``...ForCausalLM`` of SGLang.

    Raises:
        TypeError: its layers are not called as those of ``LAYERED_TARGETS`` are.
    """

    def __init__(self, model: Any) -> None:
        self._decoder = model.model
        self._all = self._decoder.layers
        self.num_layers = len(self._all)
        self._kept: dict[tuple[int, ...], nn.ModuleList] = {}
        wanted = ["positions", "hidden_states", "forward_batch"]
        takes = list(inspect.signature(type(self._all[0]).forward).parameters)[1:4]
        if takes != wanted or not hasattr(self._decoder, "end_layer"):
            raise TypeError(f"a layer takes ({', '.join(takes)}), expected ({', '.join(wanted)})")

    @contextmanager
    def only(self, kept: tuple[int, ...]) -> Iterator[None]:
        """Within, the target consists of the layers ``kept``, ascending."""
        if kept not in self._kept:
            self._kept = {kept: nn.ModuleList(self._all[layer] for layer in kept)}
        self._decoder.layers, self._decoder.end_layer = self._kept[kept], len(kept)
        try:
            yield
        finally:
            self._decoder.layers, self._decoder.end_layer = self._all, self.num_layers

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings as the first layer gets them: [n] int64 -> [n, H]."""
        return self._decoder.embed_tokens(input_ids)

    def apply(
        self, layer: int, positions: torch.Tensor, state: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        """One layer over a state (hidden + residual), [n, H] -> [n, H]; ``state`` is left alone."""
        state = residual_batch.set_written(state.clone(), forward_batch)
        hidden = self._all[layer](positions, state, forward_batch)
        out = residual_batch.fold(hidden, forward_batch)
        residual_batch.clear(forward_batch)
        return out
