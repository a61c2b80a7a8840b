"""Walk a loaded target layer by layer, past its compiled forward, with any of its units left out.

A unit is a decoder layer, or half of one: unit 2i the attention and unit 2i+1 the MLP of layer i.
Skipping a unit is not calling it: the state between units is ``hidden + residual``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["LayerWalk"]


class LayerWalk:
    """The decoder layers of one target, callable one by one inside a forward context.

    Args:
        model: a ``...ForCausalLM`` of vLLM, possibly with compiled inner model or LoRA layers.
        sublayers: walk attention and MLP as units of their own.
    """

    def __init__(self, model: Any, *, sublayers: bool) -> None:
        self._decoder = model.model
        self._layers: list[Any] = list(self._decoder.layers)
        self._sublayers = sublayers
        self.num_units = len(self._layers) * (2 if sublayers else 1)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings as the target's first layer gets them: [n] int -> [n, H]."""
        return self._decoder.embed_input_ids(input_ids)

    def run(
        self, units: Sequence[int], positions: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Run ``units`` in order and the final norm.

        Args:
            units: unit numbers to call, ascending; the others are skipped.
            positions: [n] int64.
            hidden: [n, H], what ``embed`` returned.

        Returns:
            [n, H], ready for ``compute_logits``.
        """
        if self._sublayers:
            for unit in units:
                hidden = self.apply(unit, positions, hidden)
            return self._decoder.norm(hidden)
        residual = None
        for unit in units:
            hidden, residual = self._layers[unit](positions, hidden, residual)
        return self.finish(hidden, residual)

    def finish(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The final norm over ``hidden`` [n, H] (+ ``residual``)."""
        if residual is None:
            return self._decoder.norm(hidden)
        return self._decoder.norm(hidden, residual)[0]

    def apply(self, unit: int, positions: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """One unit over a state, [n, H] -> [n, H]; ``state`` itself is left as it is."""
        if self._sublayers:
            return self._apply_sublayer(unit, positions, state)
        # vLLM's fused add-and-norm writes into the residual, which here would be the caller's.
        hidden, residual = self._layers[unit](positions, state.clone(), None)
        return hidden + residual

    def _apply_sublayer(
        self, unit: int, positions: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        layer = self._layers[unit // 2]
        if unit % 2 == 0:
            normed = layer.input_layernorm(state)
            return state + layer.self_attn(positions=positions, hidden_states=normed)
        return state + layer.mlp(layer.post_attention_layernorm(state))
