r"""Attention of packed rows, in torch: the definition of the operation and its CPU path.

The W rows of a request are alternatives for the same position p: each attends to the request's
prefix (positions below p, in the KV cache) and to itself, never to a sibling, and writes nothing:

    out_w = softmax([q_w K_prefix^T, q_w . k_w] / sqrt-scale) [V_prefix; v_w]

This is the layer search of CLaSp (arXiv 2505.24196, section 3.4, "sequence parallelism"): all
states of a layer in one call, under a diagonal mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["DequantScales", "packed_attention_paged_ref", "packed_attention_ref"]


class DequantScales(NamedTuple):
    """What fp8 values are multiplied by, each [1] float32 on their device; None: not quantized."""

    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None


def packed_attention_ref(
    query: torch.Tensor,  # [W, num_heads, head_size]
    key: torch.Tensor,  # [W, num_kv_heads, head_size]
    value: torch.Tensor,  # [W, num_kv_heads, head_size_v]
    prefix_key: torch.Tensor,  # [num_kv_heads, prefix_len, head_size]
    prefix_value: torch.Tensor,  # [num_kv_heads, prefix_len, head_size_v]
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attend each packed row to the prefix and itself.

    Args:
        query: [W, num_heads, head_size], any floating dtype.
        key: [W, num_kv_heads, head_size], the rows' own keys.
        value: [W, num_kv_heads, head_size_v], the rows' own values.
        prefix_key: [num_kv_heads, prefix_len, head_size]; ``prefix_len`` may be 0.
        prefix_value: [num_kv_heads, prefix_len, head_size_v].
        scale: multiplies the scores.
        soft_cap: scores become ``cap * tanh(score / cap)``; 0 leaves them.

    Returns:
        [W, num_heads, head_size_v] in the query's dtype. Scores and softmax are float32.
    """
    width, num_heads, head_size = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    rows = query.view(width, num_kv_heads, group, head_size).permute(1, 2, 0, 3)
    own_key = key.transpose(0, 1).unsqueeze(1)  # [num_kv_heads, 1, W, head_size]
    own_scores = (rows.float() * own_key.float()).sum(-1, keepdim=True)
    flat_rows = rows.reshape(num_kv_heads, group * width, head_size)
    prefix_scores = torch.bmm(flat_rows, prefix_key.transpose(1, 2)).float()
    own_scores = own_scores.reshape(num_kv_heads, group * width, 1)
    scores = torch.cat([prefix_scores, own_scores], dim=-1).mul_(scale)
    if soft_cap > 0:
        scores = torch.tanh(scores.div_(soft_cap)).mul_(soft_cap)
    weights = torch.softmax(scores, dim=-1)
    from_prefix = torch.bmm(weights[..., :-1].to(prefix_value.dtype), prefix_value)
    from_prefix = from_prefix.view(num_kv_heads, group, width, -1)
    own_weight = weights[..., -1:].view(num_kv_heads, group, width, 1)
    own_value = value.transpose(0, 1).unsqueeze(1)
    out = from_prefix.float() + own_weight * own_value.float()
    return out.permute(2, 0, 1, 3).reshape(width, num_heads, -1).to(query.dtype)


def packed_attention_paged_ref(
    query: torch.Tensor,  # [R * W, num_heads, head_size]
    key: torch.Tensor,  # [R * W, num_kv_heads, head_size]
    value: torch.Tensor,  # [R * W, num_kv_heads, head_size]
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    block_table: torch.Tensor,  # [R, max_blocks]
    prefix_lens: torch.Tensor,  # [R]
    *,
    scale: float,
    soft_cap: float = 0.0,
    sliding_window: int = 0,
    dequant: DequantScales = DequantScales(),  # noqa: B008 (immutable)
    out: torch.Tensor | None = None,  # [R * W, num_heads, head_size]
) -> torch.Tensor:
    """The same over a paged cache: gather each request's prefix, then ``packed_attention_ref``.

    Arguments and result are those of ``packed_attention.packed_attention``. The prefix lengths
    are read back to the host. fp8 is computed in float32.
    """
    if out is None:
        out = torch.empty(query.shape, dtype=key.dtype, device=query.device)
    block_size = key_cache.shape[1]
    width = query.shape[0] // prefix_lens.shape[0]
    for request, prefix_len in enumerate(prefix_lens.tolist()):
        own = slice(request * width, (request + 1) * width)
        start = max(0, prefix_len + 1 - sliding_window) if sliding_window > 0 else 0
        positions = torch.arange(start, prefix_len, device=query.device)
        blocks = block_table[request, positions // block_size].long()
        offsets = positions % block_size
        prefix_key = _dequantize(key_cache[blocks, offsets], dequant.key)
        prefix_value = _dequantize(value_cache[blocks, offsets], dequant.value)
        rows = _dequantize(query[own], dequant.query)
        exact = torch.promote_types(torch.promote_types(rows.dtype, prefix_key.dtype), key.dtype)
        out[own] = packed_attention_ref(
            rows.to(exact),
            key[own],
            value[own],
            prefix_key.to(exact).transpose(0, 1),
            prefix_value.to(exact).transpose(0, 1),
            scale,
            soft_cap,
        )
    return out


def _dequantize(stored: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    if factor is not None:
        return stored.float() * factor
    return stored if stored.element_size() > 1 else stored.float()
