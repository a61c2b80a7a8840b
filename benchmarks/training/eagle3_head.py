"""The draft head of EAGLE-3 (arXiv 2503.01840), as vLLM computes it, in its training form.

One decoder layer over [norm(embedding of token t + 1), norm(feature t)], with the feature as its
residual stream; feature 0 is a linear map of three of the target's states, the later ones are the
layer's own outputs before the last norm. Training unrolls that feedback ("training-time test"): at
step j the query that started at position t stands at position t + j and sees the keys 0..t of step
0, made of the target's states, and its own keys of the steps 1..j, the diagonal, as in drafting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator


class Eagle3Head(nn.Module):
    """Weights in fp32, products in bf16.

    Args:
        config: the target's; the head takes its sizes, norms and rotary base from it.
        embedding: bf16 [V, H], the target's, shared and not trained.
        draft_ids: int64 [D], the target's ids of the draft vocabulary, ascending.
        scale: float32 [3 * H], by which the target's states are multiplied before `fc`; it is
            folded into `fc` on export, since Adam's steps want inputs of about one.
    """

    def __init__(self, config: Any, embedding: Tensor, draft_ids: Tensor, scale: Tensor) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.rope_theta = config.rope_parameters["rope_theta"]
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("draft_ids", draft_ids)
        self.register_buffer("scale", scale)
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.q_proj = nn.Linear(2 * hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"):
            setattr(self, name, nn.RMSNorm(hidden, eps=self.eps))
        self.lm_head = nn.Linear(hidden, len(draft_ids), bias=False)

    def unroll(
        self, tokens: Tensor, states: Tensor, padding: Tensor, first: int, steps: int
    ) -> Iterator[Tensor]:
        """The features of each step, before the last norm, of the positions from `first` on.

        Positions before `first` only give the keys of step 0.

        Args:
            tokens: int64 [B, T + 1], a sequence a row.
            states: bf16 [B, T, 3 * H], the target's.
            padding: int64 [B], columns in front of a sequence that are not its own.
            first: the first column that drafts.
            steps: how often the layer runs.

        Yields:
            [B, T - first, H]: at step j column t has read the tokens up to t + 1 + j; columns
            for which a sequence has not so many tokens mean nothing.
        """
        feature = F.linear(states, self.fc.weight * self.scale)
        hidden = torch.arange(states.shape[1]) < padding[:, None]
        past: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            begin = 0 if step == 0 else first
            ahead = tokens[:, begin + 1 + step :]
            ahead = F.pad(ahead, (0, feature.shape[1] - ahead.shape[1]))
            x = torch.cat(
                [
                    self.input_layernorm(self.embedding[ahead].float()).bfloat16(),
                    self.hidden_norm(feature.float()).bfloat16(),
                ],
                dim=-1,
            )
            past.append(self._key_value(x, begin + step))
            drafting = slice(first - begin, None)
            query = self._rotate(self._split(self.q_proj(x[:, drafting]), self.heads), first + step)
            feature = feature[:, drafting] + self.o_proj(self._attend(query, past, hidden, first))
            inner = self.post_attention_layernorm(feature.float()).bfloat16()
            inner = F.silu(self.gate_proj(inner)) * self.up_proj(inner)
            feature = feature + self.down_proj(inner)
            yield feature

    def _key_value(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        key = self._rotate(self._split(self.k_proj(x), self.kv_heads), position)
        return key, self._split(self.v_proj(x), self.kv_heads)

    def _attend(
        self, query: Tensor, past: list[tuple[Tensor, Tensor]], hidden: Tensor, first: int
    ) -> Tensor:
        """Causal over step 0, of later steps the query's own column: [B, T', heads * D]."""
        width = query.shape[2]
        # [B, KV, G, T', D]: the G query heads that share a key head
        query = query.unflatten(1, (self.kv_heads, -1)) * self.head_dim**-0.5
        key, value = past[0]
        scores = (query.flatten(2, 3) @ key.transpose(-1, -2)).unflatten(2, (-1, width))
        ahead = torch.ones(width, key.shape[2], dtype=torch.bool).triu(first + 1)
        scores = scores.masked_fill(ahead | hidden[:, None, None, None], -torch.inf)
        own = [(query * k[:, :, None]).sum(-1, keepdim=True) for k, _ in past[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        split = key.shape[2]
        mixed = (weights[..., :split].flatten(2, 3) @ value).unflatten(2, (-1, width))
        for i, (_, v) in enumerate(past[1:]):
            mixed = mixed + weights[..., split + i, None] * v[:, :, None]
        return mixed.flatten(1, 2).transpose(1, 2).flatten(2)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        """Rotary embedding, halves one after the other, at the positions first, first + 1, ..."""
        half = self.head_dim // 2
        rates = self.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = (torch.arange(x.shape[2]) + first)[:, None] * rates
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class SoftCrossEntropy(torch.autograd.Function):
    """sum over rows of weight * (log sum exp(z) - q . z) with z = x W^T, in few passes over z.

    The gradient of a row is weight * (softmax(z) - q). It is made in the forward pass, in place,
    and the weight enters through `x`: the logits are read and written as rarely as can be.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, q: Tensor, top: Tensor, weight: Tensor
    ) -> Tensor:
        """`x` bf16 [N, H], `head` float32 [D, H], `q` bf16 [N, D], `weight` float32 [N].

        `top` int64 [N] is a likely draft id of each row: log sum exp(z) = z_top - log p_top.
        """
        rounded = head.bfloat16()
        z = x @ rounded.T
        p = z.softmax(-1)
        at_top = z.gather(1, top[:, None])[:, 0].float()
        log_sum_exp = at_top - p.gather(1, top[:, None])[:, 0].float().clamp_(min=1e-30).log()
        loss = weight @ (log_sum_exp - z.mul_(q).sum(-1))
        grad = p.sub_(q)
        scale = weight[:, None].bfloat16()
        ctx.save_for_backward((grad @ rounded) * scale, (grad.T @ (x * scale)).float())
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Scales what the forward pass kept."""
        grad_x, grad_head = ctx.saved_tensors
        return grad_x * upstream, grad_head * upstream, None, None, None
