"""The layers of the tiny MTP models in training form: whole sequences, no KV cache.

Module names are the checkpoint's, except that a layer's experts are kept as one stack of rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), not absorbed."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, rank, eps = config["hidden_size"], config["kv_lora_rank"], config["rms_norm_eps"]
        self.heads, self.rank = config["num_attention_heads"], rank
        self.nope, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.v_dim, q_rank = config["v_head_dim"], config["q_lora_rank"]
        self.q_a_proj = nn.Linear(hidden, q_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(q_rank, eps=eps)
        self.q_b_proj = nn.Linear(q_rank, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, rank + self.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(rank, eps=eps)
        self.kv_b_proj = nn.Linear(rank, self.heads * (self.nope + self.v_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v_dim, hidden, bias=False)
        frequencies, scale = yarn(config["rope_parameters"], self.rope)
        self.scale = scale**2 / math.sqrt(self.nope + self.rope)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        batch, length, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, length, self.heads, -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.heads, -1)
        k, v = kv.split([self.nope, self.v_dim], dim=-1)
        angles = torch.outer(torch.arange(length), self.frequencies)
        q_rope = rotate_pairs(q[..., self.nope :], angles)
        k_rope = rotate_pairs(k_rope[:, :, None], angles).expand(-1, -1, self.heads, -1)
        q = torch.cat([q[..., : self.nope], q_rope], dim=-1)
        k = torch.cat([k, k_rope], dim=-1)
        mixed = causal_attention(q, k, v, self.scale)
        return self.o_proj(mixed.reshape(batch, length, -1))


class GroupedAttention(nn.Module):
    """Grouped-query attention as in Qwen2: biased queries, keys and values, rotated halves."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads, self.dim = config["num_key_value_heads"], hidden // self.heads
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        theta = config["rope_parameters"]["rope_theta"]
        frequencies = theta ** -(torch.arange(0, self.dim, 2) / self.dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        batch, length, hidden = x.shape
        angles = torch.outer(torch.arange(length), self.frequencies)
        q = rotate_halves(self.q_proj(x).view(batch, length, self.heads, -1), angles)
        k = rotate_halves(self.k_proj(x).view(batch, length, self.kv_heads, -1), angles)
        v = self.v_proj(x).view(batch, length, self.kv_heads, -1)
        group = self.heads // self.kv_heads
        k, v = (part.repeat_interleave(group, dim=2) for part in (k, v))
        mixed = causal_attention(q, k, v, 1 / math.sqrt(self.dim))
        return self.o_proj(mixed.reshape(batch, length, hidden))


class FeedForward(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Routed experts and a shared one; balanced by a bias on the choice, not by a loss
    (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16; one group of experts).

    All experts are computed, as one wide feed-forward layer, and those not chosen weigh zero: for
    a handful of small experts that is cheaper than sorting tokens. Rows are expert after expert,
    the shared one last.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.inner = config["hidden_size"], config["moe_intermediate_size"]
        self.count, self.chosen = config["n_routed_experts"], config["num_experts_per_tok"]
        self.gate = nn.Linear(hidden, self.count, bias=False)
        self.stack = FeedForward(hidden, (self.count + config["n_shared_experts"]) * self.inner)
        self.shared = config["n_shared_experts"]
        self.register_buffer("bias", torch.zeros(self.count))
        self.register_buffer("load", torch.zeros(self.count), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]; counts in `load` how often each routed expert was chosen."""
        with torch.autocast("cpu", enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.gate.weight))
        picked = torch.topk(scores.detach() + self.bias, self.chosen, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(-1, picked, 1.0)
        if self.training:
            self.load += mask.sum(dim=(0, 1))
        kept = scores * mask
        weights = kept / kept.sum(dim=-1, keepdim=True)
        weights = torch.cat([weights, weights.new_ones(*weights.shape[:-1], self.shared)], dim=-1)
        inner = F.silu(self.stack.gate_proj(x)) * self.stack.up_proj(x)
        inner = inner.unflatten(-1, (-1, self.inner)) * weights[..., None].to(inner.dtype)
        return self.stack.down_proj(inner.flatten(-2))

    def balance(self, rate: float) -> None:
        """Moves the choice's bias towards an even load and starts counting anew."""
        self.bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Block(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config: dict[str, Any], layer: int) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        latent = "kv_lora_rank" in config
        dense = not latent or layer < config["first_k_dense_replace"]
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = LatentAttention(config) if latent else GroupedAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = FeedForward(hidden, config["intermediate_size"]) if dense else Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[B, T, heads, D] each (values may have another D) -> [B, T, heads, D of the values].

    At a few hundred positions three plain operations take half of the fused one's time here.
    """
    batch, length = q.shape[:2]
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
    hidden = torch.full((length, length), -torch.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(hidden.expand(len(q), -1, -1), q, k.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (batch, -1)).transpose(1, 2)


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates (x0, x1), (x2, x3), ... of [B, T, heads, D] by angles [T, D / 2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates (x0, xD/2), (x1, xD/2+1), ... of [B, T, heads, D] by angles [T, D / 2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def yarn(rope: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3): frequencies [D / 2], and the factor of queries and keys.

    Slow rotations are stretched by `factor`, fast ones kept, those between blended; with `mscale`
    equal to `mscale_all_dim` all of the temperature lies in the attention's scale.
    """
    theta, original = rope["rope_theta"], rope["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """The pair that turns so often over the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(rope["beta_fast"])), 0)
    high = min(math.ceil(dimension(rope["beta_slow"])), dim - 1)
    plain = theta ** -(torch.arange(0, dim, 2) / dim)
    stretched = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = plain * (1 - stretched) + plain / rope["factor"] * stretched
    return frequencies, 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
