"""Overrides of the kernels that verify drafts: statistics, acceptance, resampling.

Sums over the vocabulary follow the kernels' blocks and numpy's order (Triton's interpreter
calls numpy), so that a seeded request gives the same tokens either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from speculators_ext.engines.vllm.cpu.arrays import flat, jit, override, rows
from speculators_ext.engines.vllm.cpu.noise import best_token, scratch

if TYPE_CHECKING:
    from speculators_ext.engines.vllm.cpu.arrays import Args, Grid

_NEG_INF = np.float32(-np.inf)


def _blocked(row: np.ndarray, block: int) -> np.ndarray:
    """Reshape [V] to [blocks, block], the last one padded with -inf."""
    count = -(-row.size // block)
    if row.size == count * block:
        return row.reshape(count, block)
    padded = scratch("padded", count * block)
    padded[: row.size] = row
    padded[row.size :] = _NEG_INF
    return padded.reshape(count, block)


def _max_and_sumexp(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each block's maximum and its sum of exp(x - maximum), 0 where nothing is finite."""
    top = np.fmax.reduce(blocks, axis=1)
    exps = scratch("exps", blocks.size).reshape(blocks.shape)
    with np.errstate(invalid="ignore"):
        np.exp(np.subtract(blocks, top[:, None], out=exps), out=exps)
    return top, np.where(top > _NEG_INF, exps.sum(axis=1), np.float32(0.0))


def draft_row(a: Args, request: int, step: int, temp: np.float32, vocab: int) -> np.ndarray:
    """Return a draft's logits, temperature applied (they are cached before it)."""
    row = rows(a["draft_logits_ptr"][request, step, :vocab])
    return np.divide(row, temp, out=scratch("drafted", vocab))


def _local_stats(a: Args, logit_rows: np.ndarray) -> None:
    target = rows(a["target_logits_ptr"])
    mapping, steps = flat(a["expanded_idx_mapping_ptr"]), flat(a["expanded_local_pos_ptr"])
    temps = flat(a["temp_ptr"])
    argmax, top = a["target_local_argmax_ptr"].numpy(), a["target_local_max_ptr"].numpy()
    sums = a["target_local_sumexp_ptr"].numpy()
    draft_top, draft_sums = a["draft_local_max_ptr"].numpy(), a["draft_local_sumexp_ptr"].numpy()
    size, vocab = a["BLOCK_SIZE"], a["vocab_size"]
    starts = np.arange(argmax.shape[1]) * size
    for i in logit_rows:
        temp = temps[mapping[i]]
        blocks = _blocked(target[i, :vocab], size)
        if temp == 0.0:
            best = [best_token(block) for block in blocks]
            argmax[i] = starts + best
            top[i] = blocks[np.arange(len(best)), best]
            continue
        top[i], sums[i] = _max_and_sumexp(blocks)
        if a["HAS_DRAFT_LOGITS"]:
            drafted = draft_row(a, int(mapping[i]), int(steps[i]), temp, vocab)
            draft_top[i], draft_sums[i] = _max_and_sumexp(_blocked(drafted, size))


_STATS = (
    "target_local_argmax_ptr target_local_argmax_stride target_local_max_ptr"
    " target_local_max_stride target_local_sumexp_ptr target_local_sumexp_stride"
    " draft_local_max_ptr draft_local_max_stride draft_local_sumexp_ptr draft_local_sumexp_stride"
    " target_logits_ptr target_logits_stride draft_logits_ptr draft_logits_stride_0"
    " draft_logits_stride_1 expanded_idx_mapping_ptr expanded_local_pos_ptr temp_ptr vocab_size"
)


@override(
    "worker.gpu.spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel",
    _STATS + " num_speculative_steps BLOCK_SIZE HAS_DRAFT_LOGITS",
)
def compute_local_logits_stats(grid: Grid, a: Args) -> None:
    """Reduce the logits of every draft position by block; the bonus row needs none (0.32)."""
    steps = flat(a["expanded_local_pos_ptr"])[: grid[0]]
    _local_stats(a, np.flatnonzero(steps < a["num_speculative_steps"]))


@override(
    "worker.gpu.spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel",
    _STATS + " num_logits BLOCK_SIZE HAS_DRAFT_LOGITS",
)
def compute_local_logits_stats_by_row(grid: Grid, a: Args) -> None:
    """Do the same where a row is a bonus row because its request ends there (0.33)."""
    steps = flat(a["expanded_local_pos_ptr"])[: grid[0]]
    _local_stats(a, np.flatnonzero(np.append(steps[1:], 0) != 0))


def _logsumexp(top: np.ndarray, sums: np.ndarray, count: int, padded: int) -> np.ndarray:
    """Merge [n, blocks] block statistics to [n], over `padded` lanes as the kernels do."""
    wide_top = np.full((top.shape[0], padded), _NEG_INF)
    wide_sums = np.zeros((top.shape[0], padded), np.float32)
    wide_top[:, :count] = top[:, :count]
    wide_sums[:, :count] = sums[:, :count]
    # The rows of greedy requests and bonus tokens are unset memory; their result is unused.
    with np.errstate(all="ignore"):
        best = wide_top.max(axis=1)
        return best + np.log((wide_sums * np.exp(wide_top - best[:, None])).sum(axis=1))


def _lse(a: Args, which: str) -> np.ndarray:
    return _logsumexp(
        a[f"{which}_local_max_ptr"].numpy(),
        a[f"{which}_local_sumexp_ptr"].numpy(),
        a["vocab_num_blocks"],
        a["PADDED_VOCAB_NUM_BLOCKS"],
    )


def ratios(a: Args) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return, per logits row, log p and log q of the draft verified there, and both lse.

    Rows without a draft, or with a placeholder (-1), hold -inf.
    """
    target = a["target_logits_ptr"]
    count = target.shape[0]
    drafts = flat(a["draft_sampled_ptr"])
    log_p = np.full(count, _NEG_INF)
    log_q = np.zeros(count, np.float32)
    target_lse = _lse(a, "target")
    draft_lse = _lse(a, "draft") if a["HAS_DRAFT_LOGITS"] else np.zeros(count, np.float32)
    cu_num_logits, requests = flat(a["cu_num_logits_ptr"]), flat(a["idx_mapping_ptr"])
    temps = flat(a["temp_ptr"])
    with np.errstate(invalid="ignore"):
        for i in range(cu_num_logits.shape[0] - 1):
            request = int(requests[i])
            if temps[request] == 0.0:
                continue
            first, end = int(cu_num_logits[i]), int(cu_num_logits[i + 1])
            for step, at in enumerate(range(first, end - 1)):
                token = int(drafts[at + 1])
                if token < 0:
                    continue
                log_p[at] = np.float32(target[at, token].item()) - target_lse[at]
                if a["HAS_DRAFT_LOGITS"]:
                    logit = np.float32(a["draft_logits_ptr"][request, step, token].item())
                    log_q[at] = logit / temps[request] - draft_lse[at]
    return log_p, log_q, target_lse, draft_lse


@jit
def _accumulate(
    num_reqs: int,
    out: np.ndarray,
    log_p: np.ndarray,
    log_q: np.ndarray,
    drafts: np.ndarray,
    cu_num_logits: np.ndarray,
    requests: np.ndarray,
    temps: np.ndarray,
) -> None:
    for i in range(num_reqs):
        if temps[requests[i]] == 0.0:
            continue
        total = np.float32(0.0)
        for at in range(cu_num_logits[i], cu_num_logits[i + 1] - 1):
            if drafts[at + 1] >= 0:
                total = min(total + (log_p[at] - log_q[at]), np.float32(0.0))
            out[at] = total


@override(
    "worker.gpu.spec_decode.rejection_sampler_utils._compute_cumulative_log_p_kernel",
    "cumulative_log_p_ptr target_logits_ptr target_logits_stride target_local_max_ptr"
    " target_local_max_stride target_local_sumexp_ptr target_local_sumexp_stride"
    " draft_sampled_ptr draft_logits_ptr draft_logits_stride_0 draft_logits_stride_1"
    " draft_local_max_ptr draft_local_max_stride draft_local_sumexp_ptr"
    " draft_local_sumexp_stride cu_num_logits_ptr idx_mapping_ptr temp_ptr vocab_num_blocks"
    " PADDED_VOCAB_NUM_BLOCKS HAS_DRAFT_LOGITS",
)
def compute_cumulative_log_p(grid: Grid, a: Args) -> None:
    """Accumulate log(p/q), capped at 0, along each request's drafts (block verification)."""
    log_p, log_q, _, _ = ratios(a)
    _accumulate(
        grid[0],
        flat(a["cumulative_log_p_ptr"]),
        log_p,
        log_q,
        flat(a["draft_sampled_ptr"]),
        flat(a["cu_num_logits_ptr"]),
        flat(a["idx_mapping_ptr"]),
        flat(a["temp_ptr"]),
    )


_RESIDUAL = (
    "local_residual_mass_ptr local_residual_mass_stride cumulative_log_p_ptr target_logits_ptr"
    " target_logits_stride target_local_max_ptr target_local_max_stride target_local_sumexp_ptr"
    " target_local_sumexp_stride draft_logits_ptr draft_logits_stride_0 draft_logits_stride_1"
    " draft_local_max_ptr draft_local_max_stride draft_local_sumexp_ptr draft_local_sumexp_stride"
    " draft_sampled_ptr expanded_idx_mapping_ptr expanded_local_pos_ptr temp_ptr vocab_size"
)


def _residual_mass(a: Args, logit_rows: np.ndarray) -> None:
    out, cumulative = a["local_residual_mass_ptr"].numpy(), flat(a["cumulative_log_p_ptr"])
    target, mapping = rows(a["target_logits_ptr"]), flat(a["expanded_idx_mapping_ptr"])
    steps, temps = flat(a["expanded_local_pos_ptr"]), flat(a["temp_ptr"])
    drafts = flat(a["draft_sampled_ptr"])
    target_lse, draft_lse = _lse(a, "target"), _lse(a, "draft")
    size, vocab = a["BLOCK_SIZE"], a["vocab_size"]
    for i in logit_rows:
        temp = temps[mapping[i]]
        if temp == 0.0 or drafts[i + 1] < 0:
            continue
        drafted = draft_row(a, int(mapping[i]), int(steps[i]), temp, vocab)
        p = np.exp(cumulative[i - 1])
        draft = np.exp(_blocked(drafted, size) - draft_lse[i])
        model = np.exp(_blocked(target[i, :vocab], size) - target_lse[i])
        out[i] = np.maximum(p * model - draft, np.float32(0.0)).sum(axis=1)


@override(
    "worker.gpu.spec_decode.rejection_sampler_utils._compute_local_residual_mass_kernel",
    _RESIDUAL + " num_speculative_steps vocab_num_blocks BLOCK_SIZE PADDED_VOCAB_NUM_BLOCKS",
)
def compute_local_residual_mass(grid: Grid, a: Args) -> None:
    """Sum max(p M_b - M_s, 0) by block at each inner draft position (0.32)."""
    steps = flat(a["expanded_local_pos_ptr"])[: grid[0] - 1]
    _residual_mass(a, np.flatnonzero((steps > 0) & (steps < a["num_speculative_steps"])))


@override(
    "worker.gpu.spec_decode.rejection_sampler_utils._compute_local_residual_mass_kernel",
    _RESIDUAL + " num_logits vocab_num_blocks BLOCK_SIZE PADDED_VOCAB_NUM_BLOCKS",
)
def compute_local_residual_mass_by_row(grid: Grid, a: Args) -> None:
    """Do the same where a row is a bonus row because its request ends there (0.33)."""
    steps = flat(a["expanded_local_pos_ptr"])[: grid[0]]
    _residual_mass(a, np.flatnonzero((steps > 0) & (np.append(steps[1:], 0) != 0)))
