"""Overrides of the sampling kernels that turn logits into tokens and log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from speculators_ext.engines.vllm.cpu.arrays import DECLINED, flat, jit, override, rows
from speculators_ext.engines.vllm.cpu.noise import DRAFT_SALT, gumbel_argmax

if TYPE_CHECKING:
    import torch

    from speculators_ext.engines.vllm.cpu.arrays import Args, Grid


def _cache_row(a: Args, token: int, row: int) -> int:
    """Store a token's logits before temperature for the verifier; returns the column."""
    cols: torch.Tensor = a["logits_cache_col_ptr"]
    col = int(cols[token]) if a["PER_TOKEN_COL"] else int(cols)
    if row >= 0:
        cache: torch.Tensor = a["logits_cache_ptr"]
        vocab = a["vocab_size"]
        cache[row, col, :vocab] = a["logits_cache_source_ptr"][token, :vocab]
    return col


def step_seed(seed: int, col: int, per_step: bool) -> int:
    """Return the seed of one speculative step: vLLM 0.33 mixes the step in, 0.32 does not."""
    return seed ^ (col << 32) if per_step else seed


def seeds_are_per_step() -> bool:
    """Say whether the installed vLLM gives every speculative step a seed of its own (0.33)."""
    from vllm.v1.worker.gpu.sample import gumbel

    return hasattr(gumbel, "spec_step_seed")


@override(
    "worker.gpu.sample.gumbel._gumbel_sample_kernel",
    "local_argmax_ptr local_argmax_stride local_max_ptr local_max_stride logits_cache_ptr"
    " logits_cache_stride_0 logits_cache_stride_1 logits_cache_col_ptr logits_cache_source_ptr"
    " logits_cache_source_stride logits_ptr logits_stride expanded_idx_mapping_ptr seeds_ptr"
    " pos_ptr temp_ptr vocab_size BLOCK_SIZE IS_DRAFTING APPLY_TEMPERATURE USE_FP64 PER_TOKEN_COL",
)
def gumbel_sample(grid: Grid, a: Args) -> None:
    """Draw one token a row.

    The kernel leaves one candidate for every vocabulary block; here the first block holds the
    winner and the others can not win.
    """
    logits = rows(a["logits_ptr"])
    mapping = flat(a["expanded_idx_mapping_ptr"])
    temps, seeds, positions = flat(a["temp_ptr"]), flat(a["seeds_ptr"]), flat(a["pos_ptr"])
    argmax, maxima = a["local_argmax_ptr"].numpy(), a["local_max_ptr"].numpy()
    maxima.fill(-np.inf)
    argmax.fill(0)
    per_step = a["logits_cache_ptr"] is not None and seeds_are_per_step()
    for i in range(grid[0]):
        request = int(mapping[i])
        temp, seed = (temps[request], int(seeds[request])) if request >= 0 else (np.float32(0), 0)
        if a["logits_cache_ptr"] is not None:
            seed = step_seed(seed, _cache_row(a, i, request), per_step)
        row = logits[i]
        if temp != 0.0 and a["APPLY_TEMPERATURE"]:
            row = row / temp
        pos = int(positions[i]) + (DRAFT_SALT if a["IS_DRAFTING"] else 0)
        token, value = gumbel_argmax(row, seed, pos, temp, fp64=a["USE_FP64"])
        argmax[i, 0] = token
        maxima[i, 0] = value


@override(
    "worker.gpu.sample.gumbel._temperature_kernel",
    "logits_ptr logits_stride expanded_idx_mapping_ptr temperature_ptr vocab_size BLOCK_SIZE",
)
def apply_temperature(grid: Grid, a: Args) -> object:
    """Divide each row by its temperature, in place."""
    if not _is_fp32(a["logits_ptr"]):
        return DECLINED
    logits, temps = a["logits_ptr"].numpy(), flat(a["temperature_ptr"])
    for i, request in enumerate(flat(a["expanded_idx_mapping_ptr"])):
        if temps[request] not in (0.0, 1.0):
            logits[i] /= temps[request]
    return None


@override(
    "worker.gpu.sample.min_p._min_p_kernel",
    "logits_ptr logits_stride expanded_idx_mapping_ptr min_p_ptr vocab_size BLOCK_SIZE",
)
def apply_min_p(grid: Grid, a: Args) -> object:
    """Mask tokens less likely than min_p times the likeliest, in place."""
    if not _is_fp32(a["logits_ptr"]):
        return DECLINED
    logits, min_p = a["logits_ptr"].numpy(), flat(a["min_p_ptr"])
    for i, request in enumerate(flat(a["expanded_idx_mapping_ptr"])):
        if min_p[request] != 0.0:
            row = logits[i]
            row[row < np.nanmax(row) + np.log(min_p[request])] = -np.inf
    return None


def _is_fp32(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.dtype == torch.float32


_LOGPROB_BLOCK = 1024


@override(
    "worker.gpu.sample.logprob._topk_log_softmax_kernel",
    "output_ptr logits_ptr logits_stride topk_ids_ptr topk_ids_stride topk vocab_size"
    " BLOCK_SIZE TOPK_BLOCK_SIZE",
)
def topk_log_softmax(grid: Grid, a: Args) -> None:
    """Write the log-probabilities of chosen tokens, summed block by block as the kernel does."""
    logits = rows(a["logits_ptr"])
    ids, output = a["topk_ids_ptr"].numpy(), a["output_ptr"].numpy()
    block = a["BLOCK_SIZE"]
    whole = logits.shape[1] // block * block
    for i in range(grid[0]):
        row = logits[i]
        top = np.nanmax(row)
        exps = np.exp(row - top)
        sums = list(exps[:whole].reshape(-1, block).sum(axis=1))
        if whole < row.size:
            tail = np.zeros(block, np.float32)
            tail[: row.size - whole] = exps[whole:]
            sums.append(tail.sum())
        total = np.float32(0.0)
        for part in sums:
            total = total + part
        output[i] = row[ids[i, : a["topk"]]] - top - np.log(total)


@override(
    "worker.gpu.sample.logprob._ranks_kernel",
    "output_ptr logits_ptr logits_stride token_ids_ptr vocab_size BLOCK_SIZE",
)
def ranks(grid: Grid, a: Args) -> None:
    """Count, per row, the tokens at least as likely as the given one."""
    logits, tokens, output = rows(a["logits_ptr"]), flat(a["token_ids_ptr"]), flat(a["output_ptr"])
    for i in range(grid[0]):
        output[i] = np.count_nonzero(logits[i] >= logits[i, tokens[i]])


@override(
    "worker.gpu.sample.logprob._fill_logprob_token_ids_kernel",
    "out_token_ids_ptr out_token_ids_stride out_valid_mask_ptr out_valid_mask_stride"
    " sampled_token_ids_ptr topk_indices_ptr topk_indices_stride expanded_idx_mapping_ptr"
    " num_per_req_token_ids_ptr per_req_token_ids_ptr per_req_token_ids_stride NUM_TOPK"
    " PADDED_COLS",
)
def fill_logprob_token_ids(grid: Grid, a: Args) -> None:
    """Choose whose log-probabilities to return: the request's own list, else the top ones."""
    out, valid = a["out_token_ids_ptr"].numpy(), a["out_valid_mask_ptr"].numpy()
    sampled, top = flat(a["sampled_token_ids_ptr"]), a["topk_indices_ptr"].numpy()
    counts, wanted = flat(a["num_per_req_token_ids_ptr"]), a["per_req_token_ids_ptr"].numpy()
    for i, request in enumerate(flat(a["expanded_idx_mapping_ptr"])):
        out[i, 0] = sampled[i]
        custom = int(counts[request])
        chosen = wanted[request, :custom] if custom > 0 else top[i, : a["NUM_TOPK"]]
        out[i, 1 : 1 + chosen.size] = chosen
        valid[i, : 1 + chosen.size] = True


@jit
def _prompt_logprob_ids(
    num_reqs: int,
    out: np.ndarray,
    query_start: np.ndarray,
    idx_mapping: np.ndarray,
    num_computed: np.ndarray,
    all_ids: np.ndarray,
) -> None:
    width = all_ids.shape[1]
    for i in range(num_reqs):
        row = idx_mapping[i]
        start = query_start[i]
        for j in range(query_start[i + 1] - start):
            at = num_computed[row] + 1 + j
            out[start + j] = all_ids[row, at] if at < width else 0


@override(
    "worker.gpu.sample.prompt_logprob._prompt_logprobs_token_ids_kernel",
    "prompt_logprobs_token_ids_ptr query_start_loc_ptr idx_mapping_ptr num_computed_tokens_ptr"
    " all_token_ids_ptr all_token_ids_stride BLOCK_SIZE",
)
def prompt_logprobs_token_ids(grid: Grid, a: Args) -> None:
    """Find the token that follows each prompt position."""
    _prompt_logprob_ids(
        grid[0],
        flat(a["prompt_logprobs_token_ids_ptr"]),
        flat(a["query_start_loc_ptr"]),
        flat(a["idx_mapping_ptr"]),
        flat(a["num_computed_tokens_ptr"]),
        a["all_token_ids_ptr"].numpy(),
    )


@override(
    "worker.gpu.structured_outputs._apply_grammar_bitmask_kernel",
    "logits_ptr logits_stride logits_indices_ptr cu_num_logits_ptr bitmask_ptr bitmask_stride"
    " vocab_size MASK_STRIDE BLOCK_SIZE",
)
def apply_grammar_bitmask(grid: Grid, a: Args) -> None:
    """Mask the tokens a grammar forbids, in place and in the logits' own dtype."""
    import torch

    logits: Any = a["logits_ptr"]
    masks = a["bitmask_ptr"].numpy()
    cu_num_logits = flat(a["cu_num_logits_ptr"])
    for i, where in enumerate(flat(a["logits_indices_ptr"])[: grid[0]]):
        request, position = divmod(int(where), a["MASK_STRIDE"])
        first = int(cu_num_logits[request])
        if position < cu_num_logits[request + 1] - first:
            bits = np.unpackbits(masks[i].view(np.uint8), count=a["vocab_size"], bitorder="little")
            logits[first + position].masked_fill_(torch.from_numpy(bits == 0), float("-inf"))
