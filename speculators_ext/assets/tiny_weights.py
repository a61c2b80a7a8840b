"""Random weights that behave: varied text, clear winners, and layers of unequal importance.

Plain small-variance initialisation gives models whose greedy text is one token for ever and whose
best two logits are a rounding error apart: useless for tests that compare text. Here every tensor
gets the scale its role needs, so that with a residual stream of unit size

- layer l adds about ``layer_gain(l)`` of it in each half, attention looks at few tokens, and
  skipping some layers changes some of the greedy tokens, but not all (drafts get accepted and
  rejected);
- logits have a standard deviation of about ``LOGIT_SCALE``, so the best of 512 leads by about one;
- tokens that are not printable ASCII alone seldom win, so the text can be read and compared.

Values come from a generator seeded by model and tensor name: order and other tensors do not matter.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from speculators_ext.assets.tiny_tokenizer import readable_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

LOGIT_SCALE = 4.0
ATTENTION_LOGIT_SCALE = 2.5
UNREADABLE = 0.3
_LAYER_GAINS = (0.5, 0.25, 0.1, 0.35, 0.15, 0.4, 0.1, 0.3)
_ACTIVATION_RMS = 0.6  # of silu(g) * u for standard normal g and u
_NORM_NOISE = 0.1


def layer_gain(layer: int) -> float:
    """How much a half of this layer adds to the residual stream, relative to the embedding."""
    return _LAYER_GAINS[layer % len(_LAYER_GAINS)]


def tensor_noise(model: str, seed: int, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal values, fp32, of this shape: a function of model, seed and tensor name."""
    import torch

    digest = hashlib.sha256(f"{seed}/{model}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(tuple(shape), generator=generator)


class Initializer:
    """Gives the values of one model's tensors, by name.

    Args:
        model, seed: what the values are drawn from, with the tensor's name.
        hidden: width of the residual stream.
        gemma: norms are stored as ``weight - 1``, embeddings are scaled by sqrt(hidden) in the
            model and tied to the output, and a layer's outputs pass a norm of their own.
    """

    def __init__(self, model: str, seed: int, hidden: int, *, gemma: bool = False) -> None:
        self.model = model
        self.seed = seed
        self.hidden = hidden
        self.gemma = gemma

    def __call__(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Values for the tensor `name` of the checkpoint: `shape`, fp32."""
        noise = tensor_noise(self.model, self.seed, name, shape)
        part = name.removesuffix(".weight").rpartition(".")[2]
        if "norm" in part:
            return self._norm(name, part, noise)
        if part in ("embed_tokens", "lm_head", "head"):
            return self._vocabulary(part, noise)
        if part == "e_score_correction_bias" or name.endswith(".bias"):
            return noise * _NORM_NOISE
        return self._linear(name, part, noise / shape[-1] ** 0.5)

    def _norm(self, name: str, part: str, noise: torch.Tensor) -> torch.Tensor:
        weight = 1 + _NORM_NOISE * noise
        if part in ("q_norm", "k_norm"):
            weight = weight * ATTENTION_LOGIT_SCALE**0.5
        if self.gemma and part in ("post_attention_layernorm", "post_feedforward_layernorm"):
            weight = weight * layer_gain(_layer(name))
        if self.gemma and name == "model.norm.weight":
            # Output rows are the input rows: without random signs a token would predict itself.
            weight = noise.sign() * LOGIT_SCALE
        return weight - 1 if self.gemma else weight

    def _vocabulary(self, part: str, noise: torch.Tensor) -> torch.Tensor:
        import torch

        if part == "embed_tokens" and not self.gemma:
            return noise
        scale = 1.0 if self.gemma else LOGIT_SCALE
        rows = torch.full((noise.shape[0], 1), UNREADABLE)
        rows[readable_ids()] = 1.0
        return noise * rows * scale / self.hidden**0.5

    def _linear(self, name: str, part: str, unit: torch.Tensor) -> torch.Tensor:
        if part in ("q_proj", "k_proj", "q_b_proj"):
            return unit * ATTENTION_LOGIT_SCALE**0.5
        if part == "o_proj":
            return unit * layer_gain(_layer(name))
        if part in ("down_proj", "w2"):
            return unit * layer_gain(_layer(name)) / _ACTIVATION_RMS
        if part == "qkv_proj":
            queries_and_keys = unit.shape[0] * 3 // 4  # heads : KV heads = 2 : 1
            unit[:queries_and_keys] *= ATTENTION_LOGIT_SCALE**0.5
        return unit


def _layer(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())
