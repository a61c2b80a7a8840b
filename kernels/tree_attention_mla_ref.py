r"""Attention of draft trees over latents (multi-head latent attention), in torch: the CPU path.

A position holds a latent c_j and a rotated key r_j that all heads share, side by side as in an
engine's cache. Queries are absorbed, [q_i W_UK || q^r_i] of each head, and outputs latent: the
head's W_UV comes behind. So nothing is expanded by head, and the rows of all heads meet a position
in one product:

    a_ij = scale [q_i || q^r_i] . [c_j || r_j],  out_i = sum_j softmax(a_i)_j c_j

over the prefix and the tree rows that i sees. DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from speculators_ext.kernels.packed_attention_ref import DequantScales
from speculators_ext.kernels.tree_attention_ref import (
    dequantize,
    row_dtype,
    spans_of,
    unpack_mask,
)

if TYPE_CHECKING:
    from torch import Tensor

    from speculators_ext.kernels.tree_attention_ref import TreeBatch

__all__ = [
    "LocalLatents",
    "gather_latents",
    "tree_attention_mla_gathered_ref",
    "tree_attention_mla_ref",
]


class LocalLatents(NamedTuple):
    """Tree rows that are not in the cache; request r owns cu_rows[r] to cu_rows[r + 1].

    Attributes:
        rows: [L, latent + rope].
        cu_rows: int32 [R + 1].
    """

    rows: Tensor
    cu_rows: Tensor


def gather_latents(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first ``length`` positions of a request, a copy.

    Args:
        cache: [num_blocks, block_size, latent + rope], any dtype.
        block_table: int32 [max_blocks], of the request.
        length: positions.

    Returns:
        [length, latent + rope].
    """
    blocks = block_table[: -(-length // cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)[:length]


def tree_attention_mla_gathered_ref(
    query: Tensor,  # [n, num_heads, latent + rope]
    latents: Tensor,  # [P + L, latent + rope]
    sees: Tensor,  # [n, L]
    scale: float,
    latent: int = 512,
) -> Tensor:
    """Attend the rows of one request to its gathered prefix and tree, in float32 at least.

    Args:
        query: [n, num_heads, latent + rope], any floating dtype, absorbed.
        latents: [P + L, latent + rope], the prefix, then the tree rows.
        sees: bool [n, L], which tree rows each row attends to; every row sees the prefix.
        scale: multiplies the scores.
        latent: numbers of the latent, which come first.

    Returns:
        [n, num_heads, latent] in the query's dtype; 0 for a row that sees nothing.
    """
    out, _ = _attend(dequantize(query, None), dequantize(latents, None), sees, scale, latent)
    return out.to(query.dtype)


def tree_attention_mla_ref(
    query: Tensor,  # [N, num_heads, latent + rope]
    cache: Tensor,  # [num_blocks, block_size, latent + rope]
    trees: TreeBatch,
    *,
    scale: float,
    latent: int = 512,
    local: LocalLatents | None = None,
    with_prefix: bool = True,
    dequant: DequantScales = DequantScales(),  # noqa: B008 (immutable)
    out: Tensor | None = None,  # [N, num_heads, latent]
    lse: Tensor | None = None,  # [N, num_heads]
) -> Tensor:
    """The same over a paged cache, a request at a time.

    Arguments and result are those of ``tree_attention_mla.tree_attention_mla``. Lengths are read
    back to the host.
    """
    rows, cu_rows = (None, None) if local is None else local
    if out is None:
        dtype = row_dtype(rows, query, cache)
        out = torch.empty((*query.shape[:2], latent), dtype=dtype, device=query.device)
    prefix_lens = trees.prefix_lens.tolist()
    for request, (first, stop, first_row, stop_row) in enumerate(spans_of(trees, cu_rows)):
        if first == stop:
            continue
        prefix_len, num_rows = prefix_lens[request], stop_row - first_row
        cached = prefix_len + (num_rows if rows is None else 0)
        latents = gather_latents(cache, trees.block_table[request], cached)
        latents = dequantize(latents[0 if with_prefix else prefix_len :], dequant.key)
        if rows is not None:
            latents = torch.cat([latents, rows[first_row:stop_row].to(latents.dtype)])
        sees = unpack_mask(trees.mask_words[first:stop], num_rows)
        own = dequantize(query[first:stop], dequant.query)
        out[first:stop], log_sum = _attend(own, latents, sees, scale, latent)
        if lse is not None:
            lse[first:stop] = log_sum
    return out


def _attend(
    query: Tensor, latents: Tensor, sees: Tensor, scale: float, latent: int
) -> tuple[Tensor, Tensor]:
    """(out [n, heads, latent], lse [n, heads]) of rows over [P + L, latent + rope], one dtype."""
    scores = torch.mm((query * scale).flatten(0, 1), latents.T).unflatten(0, query.shape[:2])
    scores[..., latents.shape[0] - sees.shape[1] :].masked_fill_(~sees[:, None], -torch.inf)
    log_sum = torch.logsumexp(scores, dim=-1)
    # A row that sees nothing has no weights, and -inf - -inf is no number.
    finite = log_sum.clamp(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(finite[..., None]).exp_()
    out = torch.mm(weights.flatten(0, 1), latents[:, :latent])
    return out.unflatten(0, query.shape[:2]), log_sum
