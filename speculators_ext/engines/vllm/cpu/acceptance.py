"""Overrides of the kernels that accept drafts and resample where the first one falls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from speculators_ext.engines.vllm.cpu.arrays import DECLINED, flat, jit, override, rows
from speculators_ext.engines.vllm.cpu.noise import gumbel_argmax, philox_uniforms, scratch
from speculators_ext.engines.vllm.cpu.rejection import draft_row, ratios
from speculators_ext.engines.vllm.cpu.sampling import seeds_are_per_step

if TYPE_CHECKING:
    from speculators_ext.engines.vllm.cpu.arrays import Args, Grid

_NEG_INF = np.float32(-np.inf)
_NO_RATES = np.zeros(0, np.float32)


@jit
def _verify_greedy(
    first: int,
    count: int,
    drafts: np.ndarray,
    argmax: np.ndarray,
    uniforms: np.ndarray,
    rates: np.ndarray,
    out: np.ndarray,
) -> int:
    """Accept drafts that are the target's best; the first that is not becomes that best."""
    accepted = 0
    for i in range(count):
        at = first + i
        token = drafts[at + 1]
        good = uniforms[at] < rates[i] if rates.shape[0] > 0 else argmax[at] == token
        if not (good and token >= 0):
            out[i] = argmax[at]
            break
        out[i] = token
        accepted += 1
    return accepted


@jit
def _verify_sampled(
    first: int,
    count: int,
    drafts: np.ndarray,
    uniforms: np.ndarray,
    log_u: np.ndarray,
    log_p: np.ndarray,
    log_q: np.ndarray,
    rates: np.ndarray,
    out: np.ndarray,
) -> tuple[int, int]:
    """Accept while p > u q (Leviathan et al. 2023); returns accepted and the last row tested."""
    accepted, last = 0, -1
    for i in range(count):
        at = first + i
        if drafts[at + 1] < 0:
            break
        last = at
        out[i] = drafts[at + 1]
        forced = rates.shape[0] > 0
        if not (uniforms[at] < rates[i] if forced else log_p[at] > log_u[at] + log_q[at]):
            break
        accepted += 1
    return accepted, last


@jit
def _verify_block(
    first: int,
    count: int,
    drafts: np.ndarray,
    uniforms: np.ndarray,
    ratio: np.ndarray,
    mass: np.ndarray,
    out: np.ndarray,
) -> int:
    """Accept the longest prefix whose u <= h (block verification, arXiv 2403.10444)."""
    accepted = 0
    one = np.float32(1.0)
    for i in range(count):
        at = first + i
        if drafts[at + 1] < 0:
            break
        h = ratio[at]
        if i < count - 1 and drafts[at + 2] >= 0:
            denom = mass[at + 1] + one - ratio[at]
            h = mass[at + 1] / denom if denom > 0 else one
        if uniforms[at] <= h:
            accepted = i + 1
        out[i] = drafts[at + 1]
    return accepted


def _uniforms(a: Args, firsts: np.ndarray, ends: np.ndarray, per_step: bool) -> np.ndarray:
    """Draw one uniform for every logits row, from its request's seed at its position."""
    positions = flat(a["pos_ptr"])
    seeds = np.zeros(positions.shape[0], np.int64)
    request_seeds = flat(a["seed_ptr"])[flat(a["idx_mapping_ptr"])[: firsts.shape[0]]]
    for seed, first, end in zip(request_seeds, firsts, ends, strict=True):
        steps = np.arange(end - first, dtype=np.int64)
        seeds[first:end] = seed ^ (steps << 32) if per_step else seed
    return philox_uniforms(seeds, positions.astype(np.int64))


def _block_mass(a: Args, ratio: np.ndarray, target_lse: np.ndarray) -> np.ndarray:
    """Return, per logits row, the residual mass that block verification looks ahead to."""
    if a["HAS_DRAFT_LOGITS"]:
        partials = a["local_residual_mass_ptr"].numpy()
        padded = np.zeros((partials.shape[0], a["PADDED_VOCAB_NUM_BLOCKS"]), np.float32)
        padded[:, : a["vocab_num_blocks"]] = partials[:, : a["vocab_num_blocks"]]
        return padded.sum(axis=1)
    drafts, target = flat(a["draft_sampled_ptr"]), a["target_logits_ptr"]
    mass = np.zeros(ratio.shape[0], np.float32)
    for at in range(1, ratio.shape[0] - 1):
        if drafts[at + 1] >= 0:
            logit = np.float32(target[at, int(drafts[at + 1])].item())
            mass[at] = ratio[at - 1] * (np.float32(1.0) - np.exp(logit - target_lse[at]))
    return mass


def _reject(grid: Grid, a: Args, *, per_step: bool) -> None:
    cu_num_logits = flat(a["cu_num_logits_ptr"])[: grid[0] + 1].astype(np.int64)
    firsts, ends = cu_num_logits[:-1], cu_num_logits[1:]
    requests, temps = flat(a["idx_mapping_ptr"]), flat(a["temp_ptr"])
    drafts, sampled = flat(a["draft_sampled_ptr"]), a["sampled_ptr"].numpy()
    accepted, target_out = flat(a["rejected_steps_ptr"]), flat(a["target_rejected_logsumexp_ptr"])
    draft_out = flat(a["draft_rejected_logsumexp_ptr"])
    uniforms = _uniforms(a, firsts, ends, per_step and a["USE_BLOCK_VERIFICATION"])
    rates = flat(a["synthetic_conditional_rates_ptr"]) if a["SYNTHETIC_MODE"] else _NO_RATES
    top = a["target_local_max_ptr"].numpy()
    best = np.where(np.isnan(top), _NEG_INF, top).argmax(axis=1)
    argmax = a["target_local_argmax_ptr"].numpy()[np.arange(top.shape[0]), best]
    with np.errstate(all="ignore"):
        log_p, log_q, target_lse, draft_lse = ratios(a)
        if a["USE_BLOCK_VERIFICATION"]:
            ratio = np.exp(flat(a["cumulative_log_p_ptr"]))
            mass = _block_mass(a, ratio, target_lse)
    log_u = np.log(uniforms)
    for i in range(grid[0]):
        first, count = int(firsts[i]), int(ends[i] - firsts[i]) - 1
        last, out = -1, sampled[i]
        if temps[requests[i]] == 0.0:
            kept = _verify_greedy(first, count, drafts, argmax, uniforms, rates, out)
        elif a["USE_BLOCK_VERIFICATION"]:
            kept = _verify_block(first, count, drafts, uniforms, ratio, mass, out)
            last = first + kept if kept < count else -1
        else:
            kept, last = _verify_sampled(
                first, count, drafts, uniforms, log_u, log_p, log_q, rates, out
            )
        accepted[i] = kept
        target_out[i] = target_lse[last] if last >= 0 else 0.0
        draft_out[i] = draft_lse[last] if last >= 0 else 0.0


_REJECTION = (
    "sampled_ptr sampled_stride rejected_steps_ptr target_rejected_logsumexp_ptr"
    " draft_rejected_logsumexp_ptr target_logits_ptr target_logits_stride"
    " target_local_argmax_ptr target_local_argmax_stride target_local_max_ptr"
    " target_local_max_stride target_local_sumexp_ptr target_local_sumexp_stride"
    " draft_sampled_ptr draft_logits_ptr draft_logits_stride_0 draft_logits_stride_1"
    " draft_local_max_ptr draft_local_max_stride draft_local_sumexp_ptr"
    " draft_local_sumexp_stride cu_num_logits_ptr idx_mapping_ptr temp_ptr seed_ptr pos_ptr"
    " synthetic_conditional_rates_ptr cumulative_log_p_ptr local_residual_mass_ptr"
    " local_residual_mass_stride"
)
_REJECTION_MODES = (
    " vocab_num_blocks PADDED_VOCAB_NUM_BLOCKS HAS_DRAFT_LOGITS SYNTHETIC_MODE"
    " USE_BLOCK_VERIFICATION"
)


@override(
    "worker.gpu.spec_decode.rejection_sampler_utils._rejection_kernel",
    _REJECTION + _REJECTION_MODES,
)
def rejection(grid: Grid, a: Args) -> None:
    """Decide how many drafts of each request stand (vLLM 0.32)."""
    _reject(grid, a, per_step=False)


@override(
    "worker.gpu.spec_decode.rejection_sampler_utils._rejection_kernel",
    _REJECTION + " fly_entropy_ptr fly_entropy_threshold" + _REJECTION_MODES + " FLY_WINDOW_SIZE",
)
def rejection_with_fly(grid: Grid, a: Args) -> object:
    """Do the same in 0.33; its lossy `fly` mode is left to the kernel."""
    if a["FLY_WINDOW_SIZE"] != 0:
        return DECLINED
    _reject(grid, a, per_step=seeds_are_per_step())
    return None


def _residual_row(a: Args, target: np.ndarray, i: int, at: int, step: int) -> np.ndarray:
    """Return log max(p - q, 0) up to a constant, for the draft rejected at row `at`."""
    request = int(flat(a["expanded_idx_mapping_ptr"])[at])
    rejected = int(flat(a["draft_sampled_ptr"])[at + 1])
    if rejected < 0:
        return target
    residual = scratch("residual", target.size)
    if not a["HAS_DRAFT_LOGITS"]:
        np.copyto(residual, target)
        residual[rejected] = _NEG_INF
        return residual
    log_p = np.subtract(target, flat(a["target_rejected_logsumexp_ptr"])[i], out=residual)
    if a["USE_BLOCK_VERIFICATION"] and step > 0:
        log_p += flat(a["cumulative_log_p_ptr"])[at - 1]
    ratio = draft_row(a, request, step, flat(a["temp_ptr"])[request], a["vocab_size"])
    ratio -= flat(a["draft_rejected_logsumexp_ptr"])[i]
    with np.errstate(all="ignore"):
        np.exp(np.subtract(ratio, log_p, out=ratio), out=ratio)
        hopeless = ~(ratio < 1.0)
        log_p += np.log1p(np.negative(ratio, out=ratio), out=ratio)
    np.putmask(log_p, hopeless, _NEG_INF)
    return log_p


@override(
    "worker.gpu.spec_decode.rejection_sampler_utils._resample_kernel",
    "resampled_local_argmax_ptr resampled_local_argmax_stride resampled_local_max_ptr"
    " resampled_local_max_stride target_logits_ptr target_logits_stride"
    " target_rejected_logsumexp_ptr draft_logits_ptr draft_logits_stride_0 draft_logits_stride_1"
    " draft_rejected_logsumexp_ptr rejected_step_ptr cu_num_logits_ptr expanded_idx_mapping_ptr"
    " draft_sampled_ptr temp_ptr seed_ptr pos_ptr cumulative_log_p_ptr contexts_ptr"
    " contexts_stride watermarking_ptr watermarking_skip_mask_ptr watermark_key_0"
    " watermark_key_1 vocab_size BLOCK_SIZE HAS_DRAFT_LOGITS USE_FP64 USE_BLOCK_VERIFICATION"
    " CONTEXT_WIDTH WATERMARK DEDUPLICATE_CONTEXTS",
)
def resample(grid: Grid, a: Args) -> object:
    """Draw the token after the last accepted draft; watermarking is left to the kernel.

    As in `sampling.gumbel_sample`, the first vocabulary block holds the winner.
    """
    if a["WATERMARK"]:
        return DECLINED
    cu_num_logits, steps = flat(a["cu_num_logits_ptr"]), flat(a["rejected_step_ptr"])
    mapping, temps = flat(a["expanded_idx_mapping_ptr"]), flat(a["temp_ptr"])
    seeds, positions = flat(a["seed_ptr"]), flat(a["pos_ptr"])
    argmax = a["resampled_local_argmax_ptr"].numpy()
    maxima = a["resampled_local_max_ptr"].numpy()
    for i in range(grid[0]):
        step = int(steps[i])
        at = int(cu_num_logits[i]) + step
        temp = temps[mapping[at]]
        is_bonus = at == cu_num_logits[i + 1] - 1
        if temp == 0.0 and not is_bonus:
            continue
        row = rows(a["target_logits_ptr"][at, : a["vocab_size"]])
        if not is_bonus:
            row = _residual_row(a, row, i, at, step)
        argmax[i], maxima[i] = 0, _NEG_INF
        argmax[i, 0], maxima[i, 0] = gumbel_argmax(
            row, int(seeds[mapping[at]]), int(positions[at]), temp, fp64=a["USE_FP64"]
        )
    return None


@override(
    "worker.gpu.spec_decode.rejection_sampler_utils._insert_resampled_kernel",
    "sampled_ptr sampled_stride num_sampled_ptr resampled_local_argmax_ptr"
    " resampled_local_argmax_stride resampled_local_max_ptr resampled_local_max_stride"
    " resample_num_blocks cu_num_logits_ptr expanded_idx_mapping_ptr temp_ptr"
    " PADDED_RESAMPLE_NUM_BLOCKS",
)
def insert_resampled(grid: Grid, a: Args) -> None:
    """Append the resampled token to each request's accepted drafts."""
    sampled, num_sampled = a["sampled_ptr"].numpy(), flat(a["num_sampled_ptr"])
    cu_num_logits, temps = flat(a["cu_num_logits_ptr"]), flat(a["temp_ptr"])
    mapping = flat(a["expanded_idx_mapping_ptr"])
    argmax = a["resampled_local_argmax_ptr"].numpy()
    maxima = a["resampled_local_max_ptr"].numpy()
    for i in range(grid[0]):
        step = int(num_sampled[i])
        at = int(cu_num_logits[i]) + step
        num_sampled[i] = step + 1
        if temps[mapping[at]] == 0.0 and at != cu_num_logits[i + 1] - 1:
            continue
        scores = maxima[i, : a["resample_num_blocks"]]
        block = int(np.where(np.isnan(scores), -np.inf, scores).argmax())
        sampled[i, step] = argmax[i, block]
