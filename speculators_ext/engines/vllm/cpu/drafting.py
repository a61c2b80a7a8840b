"""Overrides of the kernels around drafters: their inputs, the drafts' layout, n-gram lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from speculators_ext.engines.vllm.cpu.arrays import flat, jit, override

if TYPE_CHECKING:
    from speculators_ext.engines.vllm.cpu.arrays import Args, Grid


@override(
    "worker.gpu.spec_decode.rejection_sampler._flatten_sampled_kernel",
    "flat_sampled_ptr sampled_ptr sampled_stride num_sampled_ptr cu_num_logits_ptr",
)
def flatten_sampled(grid: Grid, a: Args) -> None:
    """Lay each request's sampled tokens along its logits rows."""
    out, sampled = flat(a["flat_sampled_ptr"]), a["sampled_ptr"].numpy()
    counts, cu_num_logits = flat(a["num_sampled_ptr"]), flat(a["cu_num_logits_ptr"])
    for i in range(grid[0]):
        start, count = cu_num_logits[i], counts[i]
        out[start : start + count] = sampled[i, :count]


@override(
    "worker.gpu.spec_decode.rejection_sampler._gather_draft_sampled_kernel",
    "draft_sampled_ptr pos_ptr input_ids_ptr positions_ptr logits_indices_ptr"
    " expanded_idx_mapping_ptr expanded_local_pos_ptr prefill_len_ptr num_logits BLOCK_SIZE",
)
def gather_draft_sampled(grid: Grid, a: Args) -> None:
    """Gather the token and position of each logits row; drafts inside a prompt become -1."""
    count = a["num_logits"]
    where = flat(a["logits_indices_ptr"])[:count]
    positions = flat(a["positions_ptr"])[where]
    local = flat(a["expanded_local_pos_ptr"])[:count]
    prefill = flat(a["prefill_len_ptr"])[flat(a["expanded_idx_mapping_ptr"])[:count]]
    placeholder = (local > 0) & (positions - local < prefill)
    tokens = flat(a["input_ids_ptr"])[where]
    flat(a["draft_sampled_ptr"])[:count] = np.where(placeholder, -1, tokens)
    flat(a["pos_ptr"])[:count] = positions


@jit
def _standalone_prefill(
    num_reqs: int,
    input_ids: np.ndarray,
    positions: np.ndarray,
    last_sampled: np.ndarray,
    idx_mapping: np.ndarray,
    out_ids: np.ndarray,
    out_positions: np.ndarray,
    last_indices: np.ndarray,
    out_starts: np.ndarray,
    out_lens: np.ndarray,
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    num_rejected: np.ndarray,
    max_num_reqs: int,
    max_model_len: int,
) -> None:
    for i in range(num_reqs):
        start = query_start[i]
        length = query_start[i + 1] - start
        valid = length - num_rejected[i]
        out = start + i
        for j in range(length + 1):
            token = input_ids[start + j] if j < valid else 0
            out_ids[out + j] = last_sampled[idx_mapping[i]] if j == valid else token
            out_positions[out + j] = min(positions[start] + j, max_model_len - 1)
        last_indices[i] = out + valid
        out_starts[i] = out
        out_lens[i] = min(seq_lens[i] + 1, max_model_len)
    out_starts[num_reqs : max_num_reqs + 1] = query_start[num_reqs] + num_reqs
    out_lens[num_reqs:max_num_reqs] = 0
    last_indices[num_reqs:max_num_reqs] = 0


@override(
    "worker.gpu.spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel",
    "target_input_ids_ptr target_positions_ptr last_sampled_ptr idx_mapping_ptr"
    " out_input_ids_ptr out_positions_ptr last_token_indices_ptr out_query_start_loc_ptr"
    " out_seq_lens_ptr query_start_loc_ptr seq_lens_ptr num_rejected_ptr max_num_reqs"
    " max_model_len BLOCK_SIZE",
)
def prepare_standalone_inputs(grid: Grid, a: Args) -> None:
    """Give a draft model the accepted tokens and the new one, one slot more a request."""
    _standalone_prefill(
        grid[0],
        flat(a["target_input_ids_ptr"]),
        flat(a["target_positions_ptr"]),
        flat(a["last_sampled_ptr"]),
        flat(a["idx_mapping_ptr"]),
        flat(a["out_input_ids_ptr"]),
        flat(a["out_positions_ptr"]),
        flat(a["last_token_indices_ptr"]),
        flat(a["out_query_start_loc_ptr"]),
        flat(a["out_seq_lens_ptr"]),
        flat(a["query_start_loc_ptr"]),
        flat(a["seq_lens_ptr"]),
        flat(a["num_rejected_ptr"]),
        a["max_num_reqs"],
        a["max_model_len"],
    )


_HEAD = "worker.gpu.spec_decode.target_dependent_ar.speculator."


@override(
    _HEAD + "_prepare_prefill_inputs_kernel",
    "last_token_indices_ptr draft_current_step_ptr draft_input_ids_ptr draft_positions_ptr"
    " draft_query_start_loc_ptr draft_seq_lens_ptr target_input_ids_ptr target_positions_ptr"
    " idx_mapping_ptr last_sampled_ptr next_prefill_tokens_ptr num_sampled_ptr num_rejected_ptr"
    " query_start_loc_ptr seq_lens_ptr max_num_reqs BLOCK_SIZE",
)
def prepare_head_prefill(grid: Grid, a: Args) -> None:
    """Shift each request's accepted tokens by one for an EAGLE or MTP head."""
    count, limit = grid[0], a["max_num_reqs"]
    last, starts = flat(a["last_token_indices_ptr"]), flat(a["draft_query_start_loc_ptr"])
    ids, positions = flat(a["draft_input_ids_ptr"]), flat(a["draft_positions_ptr"])
    source, source_positions = flat(a["target_input_ids_ptr"]), flat(a["target_positions_ptr"])
    query_start, rejected = flat(a["query_start_loc_ptr"]), flat(a["num_rejected_ptr"])
    sampled, next_prefill = flat(a["last_sampled_ptr"]), flat(a["next_prefill_tokens_ptr"])
    for i, request in enumerate(flat(a["idx_mapping_ptr"])[:count]):
        start = int(query_start[i])
        end = int(query_start[i + 1]) - int(rejected[i])
        ids[start : end - 1] = source[start + 1 : end]
        token = sampled[request] if a["num_sampled_ptr"][i] > 0 else next_prefill[request]
        ids[end - 1] = token
        positions[start:end] = source_positions[start:end]
        last[i] = end - 1
    starts[:count] = query_start[:count]
    starts[count : limit + 1] = query_start[count]
    lens = flat(a["draft_seq_lens_ptr"])
    lens[:count] = flat(a["seq_lens_ptr"])[:count]
    lens[count:limit] = 0
    last[count:limit] = 0
    a["draft_current_step_ptr"].zero_()


def _advance(a: Args, count: int) -> None:
    positions = flat(a["positions_ptr"])[:count]
    np.minimum(positions + 1, a["max_model_len"] - 1, out=positions)


@override(
    _HEAD + "_prepare_decode_inputs_kernel",
    "draft_tokens_ptr draft_tokens_stride target_seq_lens_ptr num_rejected_ptr input_ids_ptr"
    " positions_ptr sample_src_positions_ptr query_start_loc_ptr seq_lens_ptr max_model_len"
    " max_num_reqs BLOCK_SIZE ADVANCE_DRAFT_POSITIONS",
)
def prepare_head_decode(grid: Grid, a: Args) -> None:
    """Feed the first draft back: one token a request."""
    count, limit = grid[0] - 1, a["max_num_reqs"]
    drafts = a["draft_tokens_ptr"]
    flat(a["input_ids_ptr"])[:count] = (drafts if drafts.dim() == 1 else drafts[:, 0])[:count]
    flat(a["sample_src_positions_ptr"])[:count] += 1
    flat(a["query_start_loc_ptr"])[: limit + 1] = np.minimum(np.arange(limit + 1), count)
    lens = flat(a["seq_lens_ptr"])
    length = flat(a["target_seq_lens_ptr"])[:count] - flat(a["num_rejected_ptr"])[:count]
    if a["ADVANCE_DRAFT_POSITIONS"]:
        _advance(a, count)
        length = np.minimum(length + 1, a["max_model_len"])
    lens[:count] = length
    lens[count:limit] = 0


@override(
    _HEAD + "_update_draft_inputs_kernel",
    "output_draft_tokens_ptr output_draft_tokens_stride next_input_hidden_states_ptr"
    " next_input_hidden_states_stride input_ids_ptr positions_ptr sample_src_positions_ptr"
    " seq_lens_ptr draft_tokens_ptr current_draft_step_ptr hidden_states_ptr"
    " hidden_states_stride hidden_size max_model_len num_speculative_steps BLOCK_SIZE"
    " ADVANCE_DRAFT_POSITIONS",
)
def update_head_inputs(grid: Grid, a: Args) -> None:
    """Record a draft step and prepare the next: token, hidden state, position, length."""
    count, width = grid[0], a["hidden_size"]
    step = int(a["current_draft_step_ptr"].item())
    drafts = a["draft_tokens_ptr"].view(-1)[:count]
    a["output_draft_tokens_ptr"][:count, step] = drafts
    if step >= a["num_speculative_steps"] - 1:
        return
    flat(a["sample_src_positions_ptr"])[:count] += 1
    a["input_ids_ptr"][:count] = drafts
    a["next_input_hidden_states_ptr"][:count, :width] = a["hidden_states_ptr"][:count, :width]
    if a["ADVANCE_DRAFT_POSITIONS"]:
        _advance(a, count)
        lens = flat(a["seq_lens_ptr"])[:count]
        np.minimum(lens + 1, a["max_model_len"], out=lens)


@jit
def _ngram_scores(
    scratch: np.ndarray,
    idx_mapping: np.ndarray,
    token_ids: np.ndarray,
    total_len: np.ndarray,
    num_sampled: np.ndarray,
    max_len: int,
    min_n: int,
    max_n: int,
    block: int,
    num_blocks: int,
) -> None:
    for i in range(num_sampled.shape[0]):
        row = idx_mapping[i]
        length = int(total_len[row])
        scratch[i, :num_blocks] = 0
        if num_sampled[i] <= 0 or length < min_n:
            continue
        for at in range(min(length - min_n, num_blocks * block)):
            size = 0
            for n in range(min_n, min(max_n, length - 1 - at) + 1):
                same = True
                for j in range(n):
                    if token_ids[row, at + j] != token_ids[row, length - n + j]:
                        same = False
                        break
                if same:
                    size = n
            if size > 0:
                score = size * (np.int64(max_len) + 1) + at + 1
                scratch[i, at // block] = max(scratch[i, at // block], score)


@override(
    "worker.gpu.spec_decode.ngram.speculator._ngram_scan_kernel",
    "token_ids_ptr token_ids_stride idx_mapping_ptr total_len_ptr num_sampled_ptr scratch_ptr"
    " scratch_stride L MIN_N MAX_N MAX_N_PO2 BLOCK_L",
)
def ngram_scan(grid: Grid, a: Args) -> None:
    """Score, block by block, the longest and latest earlier match of a request's suffix."""
    _ngram_scores(
        a["scratch_ptr"].numpy(),
        flat(a["idx_mapping_ptr"]),
        a["token_ids_ptr"].numpy(),
        flat(a["total_len_ptr"]),
        flat(a["num_sampled_ptr"])[: grid[0]],
        a["L"],
        a["MIN_N"],
        a["MAX_N"],
        a["BLOCK_L"],
        grid[1],
    )


@override(
    "worker.gpu.spec_decode.ngram.speculator._ngram_finalize_kernel",
    "token_ids_ptr token_ids_stride idx_mapping_ptr total_len_ptr num_sampled_ptr"
    " last_sampled_ptr scratch_ptr scratch_stride drafts_ptr L N_BLOCKS K K_PO2 N_BLOCKS_PO2",
)
def ngram_finalize(grid: Grid, a: Args) -> None:
    """Copy the tokens after the best match; the last sampled token fills what is missing."""
    tokens, drafts = a["token_ids_ptr"].numpy(), a["drafts_ptr"].numpy()
    scratch, lengths = a["scratch_ptr"].numpy(), flat(a["total_len_ptr"])
    sampled, last = flat(a["num_sampled_ptr"]), flat(a["last_sampled_ptr"])
    for i, request in enumerate(flat(a["idx_mapping_ptr"])[: grid[0]]):
        drafts[i] = last[request]
        score = int(scratch[i, : a["N_BLOCKS"]].max())
        if score <= 0 or sampled[i] <= 0:
            continue
        size, at = divmod(score - 1, a["L"] + 1)
        found = tokens[request, at + size : min(at + size + a["K"], int(lengths[request]))]
        drafts[i, : found.size] = found
