"""Attention of draft trees, in torch: the definition of the operation and its CPU path.

A request's query row i attends to its prefix, positions j < p of the cache, and to the tree rows
whose bit is set in its mask (its ancestors and itself):

    out_i = softmax_j(cap(scale q_i . k_j)) v_j,  j over the prefix and the rows that i sees
    lse_i = log sum_j exp(cap(scale q_i . k_j))

with cap(a) = c tanh(a / c) where there is a soft cap c. Row i of depth d_i stands at position
p + d_i; a sliding window of w positions hides what stands at p + d_i - w or before.

Parts over disjoint keys merge exactly (Milakov and Gimelshein, arXiv 1805.02867):

    lse = log(exp lse_a + exp lse_b),  out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from speculators_ext.kernels.packed_attention_ref import DequantScales

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = [
    "LocalRows",
    "TreeBatch",
    "dequantize",
    "merge_attention_ref",
    "pack_words",
    "row_dtype",
    "spans_of",
    "tree_attention_gathered_ref",
    "tree_attention_paged_ref",
    "tree_attention_ref",
    "tree_bias",
    "unpack_mask",
]


class TreeBatch(NamedTuple):
    """Draft trees of a batch: R requests, whose N query rows stand one request after another.

    Attributes:
        block_table: int32 [R, max_blocks]; request r reads the entries of its prefix, and of its
            tree where the tree's rows are in the cache.
        prefix_lens: int32 or int64 [R], positions each request has before its tree; may be 0.
        cu_nodes: int32 [R + 1], request r owns query rows cu_nodes[r] to cu_nodes[r + 1].
        mask_words: int32 [N, W]; bit j of word k: the row sees tree row 32 k + j of its request.
            W words have a bit for every tree row; unchecked where these are not the query rows.
        max_nodes: the most query rows of a request, known to the host.
        depths: int32 [N], needed with a sliding window: a row's position less its request's prefix.
    """

    block_table: Tensor
    prefix_lens: Tensor
    cu_nodes: Tensor
    mask_words: Tensor
    max_nodes: int
    depths: Tensor | None = None


class LocalRows(NamedTuple):
    """Tree rows that are not in the cache; request r owns cu_rows[r] to cu_rows[r + 1].

    Attributes:
        key: [L, num_kv_heads, head_size].
        value: likewise.
        cu_rows: int32 [R + 1].
        depths: int32 [L], needed with a sliding window.
    """

    key: Tensor
    value: Tensor
    cu_rows: Tensor
    depths: Tensor | None = None


def tree_bias(mask: Tensor, group: int, prefix_len: int, dtype: torch.dtype) -> Tensor:
    """What ``tree_attention_gathered_ref`` adds to scores; one serves all layers of a step.

    Args:
        mask: bool [n, L], row i sees tree row j.
        group: query heads a KV head.
        prefix_len: cached positions before the tree, all visible.
        dtype: the query's.

    Returns:
        [group * n, prefix_len + L], 0 where visible and -inf elsewhere.
    """
    bias = torch.zeros(group, *mask.shape, dtype=dtype, device=mask.device)
    bias.masked_fill_(~mask, -torch.inf)
    return torch.nn.functional.pad(bias.flatten(0, 1), (prefix_len, 0))


def tree_attention_gathered_ref(
    query: Tensor,  # [n, num_heads, head_size]
    keys: Tensor,  # [num_kv_heads, P + L, head_size]
    values: Tensor,  # [num_kv_heads, P + L, head_size_v]
    bias: Tensor,  # [group * n, P + L]
    scale: float,
    soft_cap: float = 0.0,
) -> Tensor:
    """Attend the rows of one request to its gathered prefix and tree.

    Keys want their head dimension last in memory: torch's kernel is many times slower otherwise.

    Args:
        query: [n, num_heads, head_size], any floating dtype.
        keys: [num_kv_heads, P + L, head_size], the prefix, then the tree rows.
        values: [num_kv_heads, P + L, head_size_v].
        bias: [group * n, P + L] of ``tree_bias``.
        scale: multiplies the scores.
        soft_cap: scores become ``cap * tanh(score / cap)``; 0 leaves them.

    Returns:
        [n, num_heads, head_size_v] in the query's dtype.
    """
    num_rows, num_heads, head_size = query.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    # The query heads of a group are rows like others, so a key is read once for all of them.
    rows = query.view(num_rows, num_kv_heads, group, head_size).permute(1, 2, 0, 3)
    rows = rows.reshape(num_kv_heads, group * num_rows, head_size)
    if soft_cap > 0:
        scores = torch.bmm(rows.float(), keys.float().transpose(1, 2)).mul_(scale / soft_cap)
        scores = scores.tanh_().mul_(soft_cap).add_(bias)
        out = torch.bmm(torch.softmax(scores, dim=-1), values.float()).to(query.dtype)
    else:
        out = scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=bias, scale=scale
        )[0]
    out = out.unflatten(1, (group, num_rows)).permute(2, 0, 1, 3)
    return out.flatten(1, 2)


def tree_attention_ref(
    query: Tensor,  # [n, num_heads, head_size]
    key: Tensor,  # [L, num_kv_heads, head_size]
    value: Tensor,  # [L, num_kv_heads, head_size_v]
    prefix_key: Tensor,  # [num_kv_heads, P, head_size]
    prefix_value: Tensor,  # [num_kv_heads, P, head_size_v]
    mask: Tensor,  # [n, L]
    scale: float,
    soft_cap: float = 0.0,
) -> Tensor:
    """Attend the rows of one request to a gathered prefix and the tree rows they see.

    Args:
        query: [n, num_heads, head_size], any floating dtype.
        key: [L, num_kv_heads, head_size], the tree rows' own; L is n where they are the queries'.
        value: [L, num_kv_heads, head_size_v].
        prefix_key: [num_kv_heads, P, head_size]; P may be 0.
        prefix_value: [num_kv_heads, P, head_size_v].
        mask: bool [n, L], row i sees tree row j; each row sees one at least, or P > 0.
        scale: multiplies the scores.
        soft_cap: scores become ``cap * tanh(score / cap)``; 0 leaves them.

    Returns:
        [n, num_heads, head_size_v] in the query's dtype.
    """
    keys = torch.cat([prefix_key, key.transpose(0, 1)], dim=1)
    values = torch.cat([prefix_value, value.transpose(0, 1)], dim=1)
    group = query.shape[1] // key.shape[1]
    bias = tree_bias(mask, group, prefix_key.shape[1], query.dtype)
    return tree_attention_gathered_ref(query, keys, values, bias, scale, soft_cap)


def pack_words(sees: Tensor) -> Tensor:
    """Masks as bits: bool [n, L] -> int32 [n, ceil(L / 32)]."""
    num_words = -(-sees.shape[1] // 32)
    bits = torch.nn.functional.pad(sees, (0, 32 * num_words - sees.shape[1])).long()
    shifts = torch.arange(32, device=sees.device)
    words = (bits.view(len(sees), num_words, 32) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def unpack_mask(words: Tensor, num_rows: int) -> Tensor:
    """Bool [n, num_rows] of int32 [n, W]: bit j of word k stands for row 32 k + j."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).flatten(1)[:, :num_rows].bool()


def tree_attention_paged_ref(
    query: Tensor,  # [N, num_heads, head_size]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size_v]
    trees: TreeBatch,
    *,
    scale: float,
    soft_cap: float = 0.0,
    sliding_window: int = 0,
    local: LocalRows | None = None,
    with_prefix: bool = True,
    num_splits: int = 1,
    dequant: DequantScales = DequantScales(),  # noqa: B008 (immutable)
    out: Tensor | None = None,  # [N, num_heads, head_size_v]
    lse: Tensor | None = None,  # [N, num_heads]
) -> Tensor:
    """The same over a paged cache, a request at a time, in float32 at least.

    Arguments and result are those of ``tree_attention.tree_attention``. Lengths are read back to
    the host.
    """
    if out is None:
        own = None if local is None else local.key
        shape = (*query.shape[:2], value_cache.shape[-1])
        out = torch.empty(shape, dtype=row_dtype(own, query, key_cache), device=query.device)
    cu_rows, block_size = None if local is None else local.cu_rows, key_cache.shape[1]
    for request, (first, stop, first_row, stop_row) in enumerate(spans_of(trees, cu_rows)):
        if first == stop:
            continue
        prefix_len, num_rows = int(trees.prefix_lens[request]), stop_row - first_row
        cached = prefix_len + (num_rows if local is None else 0)
        at = torch.arange(0 if with_prefix else prefix_len, cached, device=query.device)
        if not with_prefix and local is not None:
            at = at[:0]
        blocks = trees.block_table[request, at // block_size].long()
        keys = dequantize(key_cache[blocks, at % block_size], dequant.key)
        values = dequantize(value_cache[blocks, at % block_size], dequant.value)
        if local is not None:
            keys = torch.cat([keys, local.key[first_row:stop_row].to(keys.dtype)])
            values = torch.cat([values, local.value[first_row:stop_row].to(values.dtype)])
        seen = unpack_mask(trees.mask_words[first:stop], num_rows)
        seen = torch.nn.functional.pad(seen, (keys.shape[0] - num_rows, 0), value=True)
        if sliding_window > 0:
            row_depths = trees.depths if local is None else local.depths
            assert trees.depths is not None
            assert row_depths is not None
            stands = torch.cat([at[at < prefix_len], prefix_len + row_depths[first_row:stop_row]])
            seen &= stands > prefix_len + trees.depths[first:stop, None] - sliding_window
        rows = dequantize(query[first:stop], dequant.query)
        out[first:stop], log_sum = _attend(rows, keys, values, seen, scale, soft_cap)
        if lse is not None:
            lse[first:stop] = log_sum
    return out


def spans_of(trees: TreeBatch, cu_rows: Tensor | None) -> Iterator[tuple[int, int, int, int]]:
    """(first query row, its end, first tree row, its end) of each request."""
    queries = trees.cu_nodes.tolist()
    rows = queries if cu_rows is None else cu_rows.tolist()
    return zip(queries, queries[1:], rows, rows[1:], strict=False)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, soft_cap: float
) -> tuple[Tensor, Tensor]:
    """(out [n, heads, head_size_v], lse [n, heads]) of rows over keys [P + L, kv_heads, size]."""
    grouped = query.unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("nhgd,khd->nhgk", grouped, keys) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
    log_sum = torch.logsumexp(scores, dim=-1)
    # A row that sees nothing has no weights, and -inf - -inf is no number.
    weights = torch.exp(scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)[..., None])
    out = torch.einsum("nhgk,khd->nhgd", weights, values)
    return out.flatten(1, 2), log_sum.flatten(1, 2)


def merge_attention_ref(
    out_a: Tensor,  # [N, num_heads, head_size]
    lse_a: Tensor,  # [N, num_heads]
    out_b: Tensor,  # [N, num_heads, head_size]
    lse_b: Tensor,  # [N, num_heads]
) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of both parts, which share none.

    A part that saw nothing has lse -inf and counts nothing, whatever its output holds.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    total = lse.clamp(min=torch.finfo(torch.float32).min)
    merged = torch.zeros_like(out_a, dtype=torch.float32)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.exp(part_lse - total)[..., None]
        merged += torch.where(weight > 0, weight * part.float(), 0.0)
    return merged.to(out_a.dtype), lse


def row_dtype(*given: Tensor | None) -> torch.dtype:
    """The first dtype of more than a byte: local rows', the query's, or the cache's."""
    dtypes = (tensor.dtype for tensor in given if tensor is not None)
    return next((dtype for dtype in dtypes if dtype.itemsize > 1), torch.bfloat16)


def dequantize(stored: Tensor, factor: Tensor | None) -> Tensor:
    """The numbers in float32 at least."""
    numbers = stored if stored.dtype == torch.float64 else stored.float()
    return numbers if factor is None else numbers * factor
