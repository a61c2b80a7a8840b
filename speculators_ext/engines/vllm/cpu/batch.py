"""Overrides of the kernels that lay out a batch and write its results back.

Each repeats the Triton kernel of the same name in `vllm/v1/worker/gpu` as plain loops; shapes
are those kernels' own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculators_ext.engines.vllm.cpu.arrays import flat, jit, override

if TYPE_CHECKING:
    import numpy as np

    from speculators_ext.engines.vllm.cpu.arrays import Args, Grid


@jit
def _prefill_inputs(
    num_reqs: int,
    input_ids: np.ndarray,
    next_tokens: np.ndarray,
    idx_mapping: np.ndarray,
    query_start: np.ndarray,
    all_ids: np.ndarray,
    prefill_lens: np.ndarray,
    num_computed: np.ndarray,
) -> None:
    for i in range(num_reqs):
        row = idx_mapping[i]
        done = num_computed[row]
        if done >= prefill_lens[row]:
            continue
        start = query_start[i]
        length = query_start[i + 1] - start
        for j in range(length):
            input_ids[start + j] = all_ids[row, done + j]
        for j in range(next_tokens.shape[0]):
            at = done + length + j
            next_tokens[j, row] = all_ids[row, at] if at < prefill_lens[row] else 0


@override(
    "worker.gpu.input_batch._prepare_prefill_inputs_kernel",
    "input_ids_ptr next_prefill_tokens_ptr next_prefill_tokens_stride num_lookahead"
    " idx_mapping_ptr query_start_loc_ptr all_token_ids_ptr all_token_ids_stride"
    " prefill_lens_ptr num_computed_tokens_ptr BLOCK_SIZE LOOKAHEAD_BLOCK",
)
def prepare_prefill_inputs(grid: Grid, a: Args) -> None:
    """Copy each prefilling request's next chunk, and its look-ahead tokens."""
    _prefill_inputs(
        grid[0],
        flat(a["input_ids_ptr"]),
        a["next_prefill_tokens_ptr"].numpy(),
        flat(a["idx_mapping_ptr"]),
        flat(a["query_start_loc_ptr"]),
        a["all_token_ids_ptr"].numpy(),
        flat(a["prefill_lens_ptr"]),
        flat(a["num_computed_tokens_ptr"]),
    )


@jit
def _pos_seq_lens(
    num_reqs: int,
    pos: np.ndarray,
    seq_lens: np.ndarray,
    idx_mapping: np.ndarray,
    query_start: np.ndarray,
    num_computed: np.ndarray,
    max_num_reqs: int,
) -> None:
    seq_lens[num_reqs:max_num_reqs] = 0
    for i in range(num_reqs):
        done = num_computed[idx_mapping[i]]
        start = query_start[i]
        length = query_start[i + 1] - start
        seq_lens[i] = done + length
        for j in range(length):
            pos[start + j] = done + j


@override(
    "worker.gpu.input_batch._prepare_pos_seq_lens_kernel",
    "pos_ptr seq_lens_ptr idx_mapping_ptr query_start_loc_ptr num_computed_tokens_ptr"
    " max_num_reqs BLOCK_SIZE",
)
def prepare_pos_seq_lens(grid: Grid, a: Args) -> None:
    """Number every scheduled token and give each request its length after this step."""
    _pos_seq_lens(
        grid[0] - 1,
        flat(a["pos_ptr"]),
        flat(a["seq_lens_ptr"]),
        flat(a["idx_mapping_ptr"]),
        flat(a["query_start_loc_ptr"]),
        flat(a["num_computed_tokens_ptr"]),
        a["max_num_reqs"],
    )


@jit
def _combine(
    num_reqs: int,
    input_ids: np.ndarray,
    idx_mapping: np.ndarray,
    last_sampled: np.ndarray,
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    prefill_len: np.ndarray,
    drafts: np.ndarray,
    cu_num_logits: np.ndarray,
    logits_indices: np.ndarray,
    num_new: int,
) -> None:
    for i in range(num_reqs):
        row = idx_mapping[i]
        first = cu_num_logits[i]
        num_logits = cu_num_logits[i + 1] - first
        query_end = query_start[i + 1]
        start = query_end - num_logits
        for j in range(num_logits):
            logits_indices[first + j] = start + j
        if seq_lens[i] <= prefill_len[row]:
            continue
        if num_new > 0 and seq_lens[i] - num_logits >= prefill_len[row]:
            input_ids[start] = last_sampled[row]
        num_drafts = num_logits - num_new
        for j in range(num_drafts):
            input_ids[query_end - num_drafts + j] = drafts[row, j]


@override(
    "worker.gpu.input_batch._combine_sampled_and_draft_tokens_kernel",
    "input_ids_ptr idx_mapping_ptr last_sampled_tokens_ptr query_start_loc_ptr seq_lens_ptr"
    " prefill_len_ptr draft_tokens_ptr draft_tokens_stride cu_num_logits_ptr"
    " logits_indices_ptr BLOCK_SIZE NUM_NEW_SAMPLED_TOKENS",
)
def combine_sampled_and_draft_tokens(grid: Grid, a: Args) -> None:
    """Put the last sampled token and its drafts into the input, and index their logits."""
    _combine(
        grid[0],
        flat(a["input_ids_ptr"]),
        flat(a["idx_mapping_ptr"]),
        flat(a["last_sampled_tokens_ptr"]),
        flat(a["query_start_loc_ptr"]),
        flat(a["seq_lens_ptr"]),
        flat(a["prefill_len_ptr"]),
        a["draft_tokens_ptr"].numpy(),
        flat(a["cu_num_logits_ptr"]),
        flat(a["logits_indices_ptr"]),
        a.get("NUM_NEW_SAMPLED_TOKENS", 1),
    )


@jit
def _num_sampled_and_rejected(
    num_reqs: int,
    num_sampled: np.ndarray,
    num_rejected: np.ndarray,
    seq_lens: np.ndarray,
    cu_num_logits: np.ndarray,
    idx_mapping: np.ndarray,
    prefill_len: np.ndarray,
) -> None:
    for i in range(num_reqs):
        if seq_lens[i] < prefill_len[idx_mapping[i]]:
            num_sampled[i] = 0
            num_rejected[i] = 0
        else:
            num_rejected[i] = cu_num_logits[i + 1] - cu_num_logits[i] - num_sampled[i]


@override(
    "worker.gpu.input_batch._get_num_sampled_and_rejected_kernel",
    "num_sampled_ptr num_rejected_ptr seq_lens_ptr cu_num_logits_ptr idx_mapping_ptr"
    " prefill_len_ptr",
)
def get_num_sampled_and_rejected(grid: Grid, a: Args) -> None:
    """Count the tokens each request keeps and loses; a request still prefilling has none."""
    _num_sampled_and_rejected(
        grid[0],
        flat(a["num_sampled_ptr"]),
        flat(a["num_rejected_ptr"]),
        flat(a["seq_lens_ptr"]),
        flat(a["cu_num_logits_ptr"]),
        flat(a["idx_mapping_ptr"]),
        flat(a["prefill_len_ptr"]),
    )


@jit
def _expand_idx_mapping(
    num_reqs: int,
    idx_mapping: np.ndarray,
    expanded: np.ndarray,
    local_pos: np.ndarray,
    cu_num_logits: np.ndarray,
) -> None:
    for i in range(num_reqs):
        start = cu_num_logits[i]
        for j in range(cu_num_logits[i + 1] - start):
            expanded[start + j] = idx_mapping[i]
            local_pos[start + j] = j


@override(
    "worker.gpu.input_batch._expand_idx_mapping_kernel",
    "idx_mapping_ptr expanded_idx_mapping_ptr expanded_local_pos_ptr cu_num_logits_ptr BLOCK_SIZE",
)
def expand_idx_mapping(grid: Grid, a: Args) -> None:
    """Repeat each request's row number for every logits row it has."""
    _expand_idx_mapping(
        grid[0],
        flat(a["idx_mapping_ptr"]),
        flat(a["expanded_idx_mapping_ptr"]),
        flat(a["expanded_local_pos_ptr"]),
        flat(a["cu_num_logits_ptr"]),
    )


@jit
def _add_query_lens(
    num_reqs: int, idx_mapping: np.ndarray, num_computed: np.ndarray, query_start: np.ndarray
) -> None:
    for i in range(num_reqs):
        num_computed[idx_mapping[i]] += query_start[i + 1] - query_start[i]


@override(
    "worker.gpu.input_batch._post_update_num_computed_tokens_kernel",
    "idx_mapping_ptr num_computed_tokens_ptr query_start_loc_ptr",
)
def post_update_num_computed_tokens(grid: Grid, a: Args) -> None:
    """Advance each request by what was scheduled (steps without sampling)."""
    _add_query_lens(
        grid[0],
        flat(a["idx_mapping_ptr"]),
        flat(a["num_computed_tokens_ptr"]),
        flat(a["query_start_loc_ptr"]),
    )
