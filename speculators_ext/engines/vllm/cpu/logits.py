"""Overrides of the kernels that change logits token by token: penalties, bias, bad words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from speculators_ext.engines.vllm.cpu.arrays import DECLINED, flat, jit, override

if TYPE_CHECKING:
    import torch

    from speculators_ext.engines.vllm.cpu.arrays import Args, Grid

_NEG_INF = np.float32(-np.inf)


def _is_fp32(logits: torch.Tensor) -> bool:
    return logits.element_size() == 4 and logits.is_floating_point()


@jit
def _penalize(
    logits: np.ndarray,
    mapping: np.ndarray,
    token_ids: np.ndarray,
    local_pos: np.ndarray,
    repetition: np.ndarray,
    frequency: np.ndarray,
    presence: np.ndarray,
    prompt_mask: np.ndarray,
    output_counts: np.ndarray,
) -> None:
    vocab = logits.shape[1]
    counts = np.empty(vocab, np.int32)
    one = np.float32(1.0)
    for i in range(logits.shape[0]):
        request = mapping[i]
        rep, freq, pres = repetition[request], frequency[request], presence[request]
        if rep == 1.0 and freq == 0.0 and pres == 0.0:
            continue
        counts[:] = output_counts[request, :vocab]
        first = i - local_pos[i]
        for j in range(local_pos[i]):
            token = token_ids[first + j + 1]
            if 0 <= token < vocab:
                counts[token] += 1
        for v in range(vocab):
            value = logits[i, v]
            seen = counts[v] > 0
            if rep != 1.0 and (seen or (prompt_mask[request, v >> 5] >> (v & 31)) & 1):
                value = value * (one / rep if value > 0 else rep)
            value = value - freq * np.float32(counts[v])
            logits[i, v] = value - pres * (one if seen else np.float32(0.0))


@override(
    "worker.gpu.sample.penalties._penalties_kernel",
    "logits_ptr logits_stride expanded_idx_mapping_ptr token_ids_ptr expanded_local_pos_ptr"
    " repetition_penalty_ptr frequency_penalty_ptr presence_penalty_ptr prompt_bin_mask_ptr"
    " prompt_bin_mask_stride output_bin_counts_ptr output_bin_counts_stride vocab_size BLOCK_SIZE",
)
def apply_penalties(grid: Grid, a: Args) -> object:
    """Apply repetition, frequency and presence penalties, earlier drafts counted, in place."""
    if not _is_fp32(a["logits_ptr"]):
        return DECLINED
    _penalize(
        a["logits_ptr"].numpy(),
        flat(a["expanded_idx_mapping_ptr"]),
        flat(a["token_ids_ptr"]),
        flat(a["expanded_local_pos_ptr"]),
        flat(a["repetition_penalty_ptr"]),
        flat(a["frequency_penalty_ptr"]),
        flat(a["presence_penalty_ptr"]),
        a["prompt_bin_mask_ptr"].numpy(),
        a["output_bin_counts_ptr"].numpy(),
    )
    return None


@jit
def _bincount(
    mapping: np.ndarray,
    all_ids: np.ndarray,
    prompt_len: np.ndarray,
    prefill_len: np.ndarray,
    prompt_mask: np.ndarray,
    output_counts: np.ndarray,
) -> None:
    for i in range(mapping.shape[0]):
        request = mapping[i]
        for j in range(min(prompt_len[request], prefill_len[request])):
            token = all_ids[request, j]
            bit = np.int32(np.uint32(1) << np.uint32(token & 31))
            prompt_mask[request, token >> 5] |= bit
        for j in range(prompt_len[request], prefill_len[request]):
            output_counts[request, all_ids[request, j]] += 1


@override(
    "worker.gpu.sample.penalties._bincount_kernel",
    "expanded_idx_mapping_ptr all_token_ids_ptr all_token_ids_stride prompt_len_ptr"
    " prefill_len_ptr prompt_bin_mask_ptr prompt_bin_mask_stride output_bin_counts_ptr"
    " output_bin_counts_stride BLOCK_SIZE",
)
def bincount(grid: Grid, a: Args) -> None:
    """Mark a request's prompt tokens and count its earlier output tokens."""
    _bincount(
        flat(a["expanded_idx_mapping_ptr"])[: grid[0]],
        a["all_token_ids_ptr"].numpy(),
        flat(a["prompt_len_ptr"]),
        flat(a["prefill_len_ptr"]),
        a["prompt_bin_mask_ptr"].numpy(),
        a["output_bin_counts_ptr"].numpy(),
    )


@jit
def _mask_stops(row: np.ndarray, stops: np.ndarray, restore: bool) -> None:
    """Mask stop tokens; put them back where that would leave no token at all."""
    saved = np.empty(stops.shape[0], np.float32)
    for j in range(stops.shape[0]):
        saved[j] = row[stops[j]]
    for j in range(stops.shape[0]):
        row[stops[j]] = _NEG_INF
    if not restore:
        return
    for v in range(row.shape[0]):
        if row[v] > _NEG_INF:
            return
    for j in range(stops.shape[0]):
        if np.isfinite(saved[j]):
            row[stops[j]] = saved[j]


@jit
def _bias(
    logits: np.ndarray,
    mapping: np.ndarray,
    num_allowed: np.ndarray,
    allowed: np.ndarray,
    num_bias: np.ndarray,
    bias_ids: np.ndarray,
    bias: np.ndarray,
    pos: np.ndarray,
    min_lens: np.ndarray,
    num_stops: np.ndarray,
    restore: np.ndarray,
    stops: np.ndarray,
    check_rows: bool,
) -> None:
    for i in range(logits.shape[0]):
        request = mapping[i]
        row = logits[i]
        if num_allowed[request] > 0:
            kept = allowed[request, : num_allowed[request]]
            saved = np.empty(kept.shape[0], np.float32)
            for j in range(kept.shape[0]):
                saved[j] = row[kept[j]]
            row[:] = _NEG_INF
            for j in range(kept.shape[0]):
                row[kept[j]] = saved[j]
        for j in range(num_bias[request]):
            row[bias_ids[request, j]] += bias[request, j]
        if num_stops[request] > 0 and pos[i] + 1 < min_lens[request]:
            _mask_stops(
                row, stops[request, : num_stops[request]], check_rows and restore[request] != 0
            )


@override(
    "worker.gpu.sample.logit_bias._bias_kernel",
    "logits_ptr logits_stride vocab_size expanded_idx_mapping_ptr num_allowed_token_ids_ptr"
    " allowed_token_ids_ptr allowed_token_ids_stride num_logit_bias_ptr bias_token_ids_ptr"
    " bias_token_ids_stride bias_ptr bias_stride pos_ptr min_lens_ptr num_stop_token_ids_ptr"
    " restore_when_all_masked_ptr stop_token_ids_ptr stop_token_ids_stride BLOCK_SIZE"
    " LOGITS_BLOCK_SIZE CHECK_ALL_MASKED_ROWS",
)
def apply_logit_bias(grid: Grid, a: Args) -> object:
    """Apply allowed tokens, logit bias and min_tokens, in that order, in place."""
    if not _is_fp32(a["logits_ptr"]):
        return DECLINED
    _bias(
        a["logits_ptr"].numpy(),
        flat(a["expanded_idx_mapping_ptr"]),
        flat(a["num_allowed_token_ids_ptr"]),
        a["allowed_token_ids_ptr"].numpy(),
        flat(a["num_logit_bias_ptr"]),
        a["bias_token_ids_ptr"].numpy(),
        a["bias_ptr"].numpy(),
        flat(a["pos_ptr"]),
        flat(a["min_lens_ptr"]),
        flat(a["num_stop_token_ids_ptr"]),
        flat(a["restore_when_all_masked_ptr"]),
        a["stop_token_ids_ptr"].numpy(),
        a["CHECK_ALL_MASKED_ROWS"],
    )
    return None


@jit
def _bad_words(
    logits: np.ndarray,
    mapping: np.ndarray,
    tokens: np.ndarray,
    offsets: np.ndarray,
    num_words: np.ndarray,
    all_ids: np.ndarray,
    prompt_len: np.ndarray,
    total_len: np.ndarray,
    input_ids: np.ndarray,
    local_pos: np.ndarray,
) -> None:
    for i in range(logits.shape[0]):
        request = mapping[i]
        first = i - local_pos[i]
        prompt = prompt_len[request]
        committed = total_len[request] - prompt
        length = committed + local_pos[i]
        for word in range(num_words[request]):
            start, end = offsets[request, word], offsets[request, word + 1]
            prefix = end - start - 1
            matched = prefix <= length
            for j in range(prefix):
                if not matched:
                    break
                at = length - prefix + j
                if at >= committed:
                    actual = input_ids[first + at - committed + 1]
                else:
                    actual = all_ids[request, prompt + at]
                matched = actual == tokens[request, start + j]
            if matched:
                logits[i, tokens[request, end - 1]] = _NEG_INF


@override(
    "worker.gpu.sample.bad_words._bad_words_kernel",
    "logits_ptr logits_stride expanded_idx_mapping_ptr bad_word_token_ids_ptr"
    " bad_word_token_ids_stride bad_word_offsets_ptr bad_word_offsets_stride num_bad_words_ptr"
    " all_token_ids_ptr all_token_ids_stride prompt_len_ptr total_len_ptr input_ids_ptr"
    " expanded_local_pos_ptr",
)
def apply_bad_words(grid: Grid, a: Args) -> object:
    """Mask the last token of every bad word whose beginning was just written."""
    if not _is_fp32(a["logits_ptr"]):
        return DECLINED
    _bad_words(
        a["logits_ptr"].numpy(),
        flat(a["expanded_idx_mapping_ptr"]),
        a["bad_word_token_ids_ptr"].numpy(),
        a["bad_word_offsets_ptr"].numpy(),
        flat(a["num_bad_words_ptr"]),
        a["all_token_ids_ptr"].numpy(),
        flat(a["prompt_len_ptr"]),
        flat(a["total_len_ptr"]),
        flat(a["input_ids_ptr"]),
        flat(a["expanded_local_pos_ptr"]),
    )
    return None
