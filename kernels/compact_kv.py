r"""Moving accepted nodes' keys and values to the front of the tree, all layers in one launch.

The definition is ``compact_kv_ref``. A program owns a request, a cache of the table (a layer's keys
or values) and a tile of a slot's bytes. It reads ``_BLOCK_P`` rows of the path, waits for all its
threads, and writes them: a slot may be one row's target and another's source. Paths go up, so the
targets of one such group are no later group's sources, and no other program touches these bytes. A
group in which every row is in its place is passed over.

Caches are found by address, so their number and place do not matter, only that layouts are alike.
Nothing is read back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from speculators_ext.kernels.checks import check_placement, require

if TYPE_CHECKING:
    from speculators_ext.kernels.compact_kv_ref import CacheTable

__all__ = ["compact_kv"]

_BLOCK_P = 8  # rows of a path a program moves at a time
_MAX_BLOCK_U = 256
_TRITON_UNITS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _locate(  # type: ignore[no-untyped-def]
    block_table_ptr,  # of one request: [max_blocks]
    position,  # [BLOCK_P]
    mask,
    block_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:  # [BLOCK_P, 1], where each slot begins
    block = tl.load(block_table_ptr + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    slot = (position % BLOCK_SIZE).to(tl.int64)
    return (block * block_stride + slot * slot_stride)[:, None]


@triton.jit
def _compact_kv_kernel(  # type: ignore[no-untyped-def]
    pointers_ptr,  # [caches] int64, each of [num_blocks, BLOCK_SIZE, heads, head_units]
    block_stride,
    slot_stride,
    head_stride,
    block_table_ptr,  # [R, max_blocks] int32
    block_table_stride,
    prefix_lens_ptr,  # [R] int32 or int64
    path_ptr,  # [R, path_width] int32
    path_stride,
    num_accepted_ptr,  # [R] int32
    path_width,
    head_units,
    slot_units,  # heads * head_units
    UNIT: tl.constexpr,  # integer that is moved
    BLOCK_SIZE: tl.constexpr,  # slots a block
    BLOCK_P: tl.constexpr,
    BLOCK_U: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    cache_ptr = tl.load(pointers_ptr + tl.program_id(1)).to(tl.pointer_type(UNIT))
    unit = tl.program_id(2) * BLOCK_U + tl.arange(0, BLOCK_U)
    inner = (unit // head_units).to(tl.int64) * head_stride + unit % head_units
    prefix_len = tl.load(prefix_lens_ptr + request).to(tl.int32)
    stop = tl.minimum(tl.load(num_accepted_ptr + request) + 1, path_width)
    block_table_ptr += request * block_table_stride
    path_ptr += request * path_stride
    for start in range(1, stop, BLOCK_P):
        row = start + tl.arange(0, BLOCK_P)
        step = tl.load(path_ptr + row, mask=row < stop, other=-1)
        moves = (step >= 0) & (step != row)
        if tl.max(moves.to(tl.int32), axis=0) > 0:
            mask = moves[:, None] & (unit < slot_units)[None, :]
            source = _locate(
                block_table_ptr, prefix_len + step, moves, block_stride, slot_stride, BLOCK_SIZE
            )
            target = _locate(
                block_table_ptr, prefix_len + row, moves, block_stride, slot_stride, BLOCK_SIZE
            )
            moved = tl.load(cache_ptr + source + inner[None, :], mask=mask)
            tl.debug_barrier()
            tl.store(cache_ptr + target + inner[None, :], moved, mask=mask)
            tl.debug_barrier()


def compact_kv(
    table: CacheTable,
    block_table: torch.Tensor,  # [R, max_blocks]
    prefix_lens: torch.Tensor,  # [R]
    path: torch.Tensor,  # [R, P]
    num_accepted: torch.Tensor,  # [R]
) -> None:
    """Move the accepted rows of every request and cache to the front of its tree, in place.

    Args:
        table: the caches, of one shape, dtype and layout, each head's elements side by side.
        block_table: [R, max_blocks] int32; entries are unchecked.
        prefix_lens: [R] int32 or int64, slots before the root's: its position.
        path: [R, P] int32, accepted rows, root first, going up. Entries of -1, and rows behind the
            path's end, stay where they are.
        num_accepted: [R] int32, rows of the path without the root.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    _check(table, block_table, prefix_lens, path, num_accepted)
    view, num_reqs = table.views[0], path.shape[0]
    _, block_size, heads, head_units = view.shape
    block_u = min(triton.next_power_of_2(heads * head_units), _MAX_BLOCK_U)
    if num_reqs > 0:
        grid = (num_reqs, len(table.views), triton.cdiv(heads * head_units, block_u))
        _compact_kv_kernel[grid](
            table.pointers, *view.stride()[:3], block_table, block_table.stride(0), prefix_lens,
            path, path.stride(0), num_accepted, path.shape[1], head_units, heads * head_units,
            UNIT=_TRITON_UNITS[view.element_size()], BLOCK_SIZE=block_size, BLOCK_P=_BLOCK_P,
            BLOCK_U=block_u, num_warps=4,
        )  # fmt: skip


def _check(
    table: CacheTable,
    block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    layout, got = table.layouts
    require(got == layout, "dtype, shape and strides of a cache", layout, got)
    require(layout[2][3] == 1, "last stride of the caches", 1, layout[2][3])
    num_reqs, i32 = path.shape[0], (torch.int32,)
    given = {
        "block_table": (block_table, 2, i32),
        "prefix_lens": (prefix_lens, 1, (torch.int32, torch.int64)),
        "path": (path, 2, i32),
        "num_accepted": (num_accepted, 1, i32),
    }
    for name, (tensor, dims, dtypes) in given.items():
        require(tensor.dim() == dims, f"dims of {name}", dims, tensor.dim())
        require(tensor.dtype in dtypes, f"{name} dtype", dtypes, tensor.dtype)
        require(tensor.shape[0] == num_reqs, f"{name} rows", num_reqs, tensor.shape[0])
    placed = {name: tensor for name, (tensor, _, _) in given.items()}
    check_placement(placed, table.views[0].device)
