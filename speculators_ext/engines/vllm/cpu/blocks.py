"""Overrides of the block-table kernels, and of the update after sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from speculators_ext.engines.vllm.cpu.arrays import DECLINED, flat, int32_at, jit, override

if TYPE_CHECKING:
    import torch

    from speculators_ext.engines.vllm.cpu.arrays import Args, Grid

_EMPTY_COUNTS = np.zeros((0, 0), np.int32)
_EMPTY_DRAFTS = np.zeros((0, 0), np.int64)
_EMPTY_STARTS = np.zeros(0, np.int32)


@jit
def _gather_block_tables(
    num_rows: int,
    num_reqs: int,
    idx_mapping: np.ndarray,
    sources: np.ndarray,
    targets: np.ndarray,
    strides: np.ndarray,
    num_blocks: np.ndarray,
    num_null: np.ndarray,
) -> None:
    for group in range(sources.shape[0]):
        width = np.int64(strides[group])
        for i in range(num_rows):
            target = int32_at(np.int64(targets[group]) + 4 * i * width, width)
            if i >= num_reqs:
                target[:] = 0
                continue
            row = np.int64(idx_mapping[i])
            source = int32_at(np.int64(sources[group]) + 4 * row * width, width)
            for j in range(num_blocks[group, row]):
                target[j] = source[j] if j >= num_null[group, i] else 0


def _gather(grid: Grid, a: Args, num_null: np.ndarray) -> None:
    _gather_block_tables(
        grid[1],
        a["num_reqs"],
        flat(a["batch_idx_to_req_idx"]),
        flat(a["src_block_table_ptrs"]),
        flat(a["dst_block_table_ptrs"]),
        flat(a["block_table_strides"]),
        a["num_blocks_ptr"].numpy(),
        num_null,
    )


@override(
    "worker.gpu.block_table._gather_block_tables_kernel",
    "batch_idx_to_req_idx src_block_table_ptrs dst_block_table_ptrs block_table_strides"
    " num_blocks_ptr num_blocks_stride num_reqs BLOCK_SIZE",
)
def gather_block_tables(grid: Grid, a: Args) -> None:
    """Copy the batch's block-table rows; zero the rows that only pad it (vLLM 0.32)."""
    _gather(grid, a, np.zeros((grid[0], grid[1]), np.int32))


@override(
    "worker.gpu.block_table._gather_block_tables_kernel",
    "batch_idx_to_req_idx src_block_table_ptrs dst_block_table_ptrs block_table_strides"
    " num_blocks_ptr num_blocks_stride num_reqs num_computed_tokens_ptr"
    " sliding_window_reach_ptr block_sizes_ptr MASK_SLIDING_WINDOW BLOCK_SIZE",
)
def gather_block_tables_sliding(grid: Grid, a: Args) -> None:
    """Copy as above, with the null block in place of those below a sliding window (0.33)."""
    num_null = np.zeros((grid[0], grid[1]), np.int32)
    if a["MASK_SLIDING_WINDOW"]:
        reach = flat(a["sliding_window_reach_ptr"])[: grid[0], None]
        size = flat(a["block_sizes_ptr"])[: grid[0], None]
        requests = flat(a["batch_idx_to_req_idx"])[: a["num_reqs"]]
        first = flat(a["num_computed_tokens_ptr"])[requests][None, :]
        below = np.maximum(first - reach, 0) // size
        num_null[:, : a["num_reqs"]] = np.where(reach > 0, below, 0)
    _gather(grid, a, num_null)


@jit
def _slot_mappings(
    num_reqs: int,
    max_num_tokens: int,
    idx_mapping: np.ndarray,
    query_start: np.ndarray,
    pos: np.ndarray,
    tables: np.ndarray,
    strides: np.ndarray,
    block_sizes: np.ndarray,
    enabled: np.ndarray,
    slots: np.ndarray,
    pad: int,
) -> None:
    for group in range(tables.shape[0]):
        slots[group, query_start[num_reqs] : max_num_tokens] = pad
        width = np.int64(strides[group])
        size = np.int64(block_sizes[group])
        for i in range(num_reqs):
            row = np.int64(idx_mapping[i])
            start, end = query_start[i], query_start[i + 1]
            if row < 0 or not enabled[group]:
                slots[group, start:end] = pad
                continue
            table = int32_at(np.int64(tables[group]) + 4 * row * width, width)
            for token in range(start, end):
                at = np.int64(pos[token])
                slots[group, token] = np.int64(table[at // size]) * size + at % size


@override(
    "worker.gpu.block_table._compute_slot_mappings_kernel",
    "max_num_tokens idx_mapping query_start_loc pos block_table_ptrs block_table_strides"
    " block_sizes slot_mapping_enabled dcp_sharded slot_mappings_ptr slot_mappings_stride"
    " cp_rank CP_SIZE CP_INTERLEAVE PAD_ID TRITON_BLOCK_SIZE",
)
def compute_slot_mappings(grid: Grid, a: Args) -> object:
    """Find the KV slot of every token; context parallelism is left to the kernel."""
    if a["CP_SIZE"] != 1:
        return DECLINED
    _slot_mappings(
        grid[1] - 1,
        a["max_num_tokens"],
        flat(a["idx_mapping"]),
        flat(a["query_start_loc"]),
        flat(a["pos"]),
        flat(a["block_table_ptrs"]),
        flat(a["block_table_strides"]),
        flat(a["block_sizes"]),
        flat(a["slot_mapping_enabled"]),
        a["slot_mappings_ptr"].numpy(),
        a["PAD_ID"],
    )
    return None


@jit
def _post_update(
    num_reqs: int,
    idx_mapping: np.ndarray,
    num_computed: np.ndarray,
    last_sampled: np.ndarray,
    counts: np.ndarray,
    drafts: np.ndarray,
    drafts_out: np.ndarray,
    sampled: np.ndarray,
    num_sampled: np.ndarray,
    num_rejected: np.ndarray,
    query_start: np.ndarray,
    all_ids: np.ndarray,
    total_len: np.ndarray,
) -> None:
    for i in range(num_reqs):
        row = idx_mapping[i]
        if row < 0:
            continue
        for j in range(drafts.shape[1]):
            drafts_out[row, j] = drafts[i, j]
        length = total_len[row]
        count = num_sampled[i]
        if count > 0:
            last_sampled[row] = sampled[i, count - 1]
            total_len[row] = length + count
        for j in range(count):
            all_ids[row, length + j] = sampled[i, j]
            if counts.shape[0] > 0:
                counts[row, sampled[i, j]] += 1
        query_len = query_start[i + 1] - query_start[i] if query_start.shape[0] > 0 else 0
        num_computed[row] += query_len - num_rejected[i]


def _update(num_reqs: int, a: Args, drafts: np.ndarray, drafts_out: np.ndarray) -> None:
    counts: torch.Tensor | None = a["output_bin_counts_ptr"]
    starts: torch.Tensor | None = a["query_start_loc_ptr"]
    _post_update(
        num_reqs,
        flat(a["idx_mapping_ptr"]),
        flat(a["num_computed_tokens_ptr"]),
        flat(a["last_sampled_tokens_ptr"]),
        _EMPTY_COUNTS if counts is None else counts.numpy(),
        drafts,
        drafts_out,
        a["sampled_tokens_ptr"].numpy(),
        flat(a["num_sampled_ptr"]),
        flat(a["num_rejected_ptr"]),
        _EMPTY_STARTS if starts is None else flat(starts),
        a["all_token_ids_ptr"].numpy(),
        flat(a["total_len_ptr"]),
    )


@override(
    "worker.gpu.input_batch._post_update_kernel",
    "idx_mapping_ptr num_computed_tokens_ptr last_sampled_tokens_ptr output_bin_counts_ptr"
    " output_bin_counts_stride sampled_tokens_ptr sampled_tokens_stride num_sampled_ptr"
    " num_rejected_ptr query_start_loc_ptr all_token_ids_ptr all_token_ids_stride total_len_ptr",
)
def post_update(grid: Grid, a: Args) -> None:
    """Append what was sampled to each request and advance it (vLLM 0.32)."""
    _update(grid[0], a, _EMPTY_DRAFTS, _EMPTY_DRAFTS)


@override(
    "worker.gpu.input_batch._post_update_kernel",
    "idx_mapping_ptr num_computed_tokens_ptr last_sampled_tokens_ptr output_bin_counts_ptr"
    " output_bin_counts_stride sampled_tokens_ptr sampled_tokens_stride num_sampled_ptr"
    " num_rejected_ptr query_start_loc_ptr all_token_ids_ptr all_token_ids_stride total_len_ptr"
    " draft_tokens_ptr draft_tokens_out_ptr num_draft_tokens",
)
def post_update_with_drafts(grid: Grid, a: Args) -> None:
    """Do the same, and scatter the new drafts to their requests (vLLM 0.33)."""
    if a["draft_tokens_ptr"] is None:
        _update(grid[0], a, _EMPTY_DRAFTS, _EMPTY_DRAFTS)
    else:
        _update(grid[0], a, a["draft_tokens_ptr"].numpy(), a["draft_tokens_out_ptr"].numpy())
