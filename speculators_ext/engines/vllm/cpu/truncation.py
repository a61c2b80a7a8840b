"""Override of vLLM's combined top-k and top-p kernel.

The kernel searches a pivot; this finds the same cut-off by partial sorting. Both keep exactly k
tokens, and of tokens tied at the top-p boundary only as many as p needs, lower ids first.
They can differ where the kernel's search stops after 18 halvings before it has separated
neighbouring probabilities (a mass of about 1e-5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from speculators_ext.engines.vllm.cpu.arrays import flat, override
from speculators_ext.engines.vllm.cpu.noise import scratch

if TYPE_CHECKING:
    from speculators_ext.engines.vllm.cpu.arrays import Args, Grid

# Widths (in logits below the best) tried until their mass reaches p: sorting the whole
# vocabulary is the last resort.
_WIDTHS = (4.0, 8.0, 16.0, np.inf)


def _first_ties(row: np.ndarray, cutoff: np.float32, count: int) -> np.ndarray:
    """Return which entries exceed `cutoff`, plus the first `count` that equal it."""
    keep = row > cutoff
    keep[np.flatnonzero(row == cutoff)[:count]] = True
    return keep


def _keep_top_k(row: np.ndarray, k: int) -> np.ndarray | None:
    """Return the mask of the k best, or None where no finite logit would be dropped."""
    if np.count_nonzero(row > -np.inf) <= k:
        return None
    ordered = scratch("ordered", row.size)
    np.copyto(ordered, row)
    ordered.partition(row.size - k)
    cutoff = ordered[row.size - k]
    return _first_ties(row, cutoff, k - int(np.count_nonzero(row > cutoff)))


def _keep_top_p(row: np.ndarray, p: float) -> np.ndarray | None:
    """Return the mask of the smallest set of likeliest tokens whose probability reaches p."""
    top = row.max()
    if not np.isfinite(top):
        return None
    exps = scratch("exps", row.size)
    total = np.exp(np.subtract(row, top, out=exps), out=exps).sum(dtype=np.float64)
    for width in _WIDTHS:
        near = np.sort(row[row >= top - np.float32(width)])[::-1]
        mass = np.exp(near - top) / total
        cumulative = np.cumsum(mass, dtype=np.float64)
        if cumulative[-1] >= p:
            break
    else:
        return None
    cutoff = near[np.searchsorted(cumulative, p)]
    last = int(np.searchsorted(-near, -cutoff, side="right")) - 1
    ties = last + 1 - int(np.searchsorted(-near, -cutoff, side="left"))
    surplus = int((cumulative[last] - p) / mass[last])
    return _first_ties(row, cutoff, ties - surplus)


def _masked(row: np.ndarray, keep: np.ndarray) -> np.ndarray:
    out = scratch("masked", row.size)
    out.fill(-np.inf)
    np.copyto(out, row, where=keep)
    return out


def truncate(row: np.ndarray, k: int | None, p: float | None, fill: float) -> None:
    """Mask all but the top-k, and of those all but the top-p, of one row in place.

    Args:
        row: [V] float32 logits.
        k: tokens to keep; None or >= V keeps all.
        p: probability to keep; None or >= 1 keeps all.
        fill: what masked entries become.
    """
    keep = _keep_top_k(row, k) if k is not None and k < row.size else None
    if p is not None and p < 1.0:
        kept = _keep_top_p(row if keep is None else _masked(row, keep), p)
        keep = keep if kept is None else kept
    if keep is not None:
        np.putmask(row, ~keep, fill)


@override(
    "sample.ops.topk_topp_triton._topk_topp_kernel",
    "LOGITS LOGITS_STRIDE_0 BUFFER PERCENTILE_TO_STD_TABLE NORMAL_CDF_TO_SIGMA_TABLE K P"
    " BATCH_SIZE VOCAB_SIZE MASK_VALUE BLOCK_SIZE BLOCK_SIZE_TRUNC TOPK_ENABLED TOPP_ENABLED"
    " SPLIT_COVERS_PONLY",
)
def topk_topp(grid: Grid, a: Args) -> None:
    """Mask the rows of a batch, each by its own k and p."""
    logits = a["LOGITS"].numpy()
    ks = flat(a["K"]) if a["TOPK_ENABLED"] else None
    ps = flat(a["P"]) if a["TOPP_ENABLED"] else None
    for i in range(a["BATCH_SIZE"]):
        k = None if ks is None else int(ks[i])
        p = None if ps is None else float(ps[i])
        truncate(logits[i], k, p, a["MASK_VALUE"])
