"""SGLang's CPU operations on KV slots, in torch: no CPU build of ``sgl_kernel`` is on PyPI.

Names, argument orders and effects are ``sgl_kernel``'s; SGLang's own Triton kernels of the same
purpose are what each is tested against.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
]


def _cells(owners: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the cells [owners[i], start[i]:end[i]], all requests in a row."""
    lengths = (end - start).long()
    rows = owners.long().repeat_interleave(lengths)
    skip = start.long() - (lengths.cumsum(0) - lengths)
    return rows, torch.arange(rows.shape[0]) + skip.repeat_interleave(lengths)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write consecutive slots into ``req_to_token[request, start:end]`` of each request."""
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: rows.shape[0]].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read ``req_to_token[request, start:end]`` of each request into ``out_cache_loc``."""
    cells = _cells(req_pool_indices, start_offset, end_offset)
    slots = req_to_token[cells]
    out_cache_loc[: slots.shape[0]] = slots.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` slots behind each request's length into ``out_cache_loc``."""
    assign_extend_cache_locs_cpu(
        req_pool_indices,
        req_to_token,
        seq_lens,
        seq_lens + topk * num_steps,
        out_cache_loc,
        pool_len,
    )


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Write each request's last accepted token to ``bonus_tokens``; ``accept_lens`` count it."""
    last = torch.arange(accept_lens.shape[0]) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Gather the slots of accepted rows to the front; -1 in ``accept_index`` is padding."""
    accepted = accept_index.reshape(-1)
    slots = out_cache_loc[accepted[accepted > -1].long()]
    accept_out_cache_loc[: slots.shape[0]] = slots


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Move rows of every cache buffer at once; a target may be another move's source.

    Args:
        data_ptrs: uint64 [buffers], their addresses.
        strides: [buffers], bytes of a row.
        tgt_loc: int [moves], rows to write.
        src_loc: int [moves], rows to read, all before anything is written.
    """
    if tgt_loc.shape[0] == 0:
        return
    rows = int(torch.maximum(tgt_loc.max(), src_loc.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[tgt_loc.long()] = buffer[src_loc.long()]


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None,
) -> None:
    """Shift each request's ids left by one and put its new token last, or at ``select_index``."""
    new_tokens = topk_index.reshape(-1).to(input_ids.dtype)
    spans = zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    for request, (start, length) in enumerate(spans):
        if length == 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = start + length - 1 if select_index is None else int(select_index[request])
        input_ids[last] = new_tokens[request]
