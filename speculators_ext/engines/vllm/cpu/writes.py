"""Override of the kernel that applies staged writes to request state and block tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from speculators_ext.engines.vllm.cpu.arrays import DECLINED, flat, int32_at, jit, override

if TYPE_CHECKING:
    from speculators_ext.engines.vllm.cpu.arrays import Args, Grid


@jit
def _apply_write(
    output: np.ndarray,
    stride: int,
    indices: np.ndarray,
    starts: np.ndarray,
    contents: np.ndarray,
    cu_lens: np.ndarray,
) -> None:
    begin = 0
    for i in range(indices.shape[0]):
        at = np.int64(indices[i]) * stride + starts[i]
        for j in range(cu_lens[i] - begin):
            output[at + j] = contents[begin + j]
        begin = cu_lens[i]


@jit
def _apply_write_grouped(
    addresses: np.ndarray,
    strides: np.ndarray,
    indices: np.ndarray,
    starts: np.ndarray,
    contents: np.ndarray,
    cu_lens: np.ndarray,
    groups: np.ndarray,
) -> None:
    begin = 0
    for i in range(indices.shape[0]):
        group = groups[i]
        at = np.int64(indices[i]) * np.int64(strides[group]) + starts[i]
        length = cu_lens[i] - begin
        output = int32_at(np.int64(addresses[group]) + 4 * at, length)
        for j in range(length):
            output[j] = contents[begin + j]
        begin = cu_lens[i]


@override(
    "worker.gpu.buffer_utils._apply_write_kernel",
    "output_ptr output_stride write_indices_ptr write_starts_ptr write_contents_ptr"
    " write_cu_lens_ptr write_group_ids_ptr BLOCK_SIZE MULTI_GROUP",
)
def apply_write(grid: Grid, a: Args) -> object:
    """Apply staged row writes to one tensor, or to several given by address."""
    names = ("write_indices_ptr", "write_starts_ptr", "write_contents_ptr", "write_cu_lens_ptr")
    indices, starts, contents, cu_lens = (flat(a[name]) for name in names)
    count = grid[0]
    if a["MULTI_GROUP"]:
        _apply_write_grouped(
            flat(a["output_ptr"]),
            flat(a["output_stride"]),
            indices[:count],
            starts,
            contents,
            cu_lens,
            flat(a["write_group_ids_ptr"]),
        )
        return None
    if not a["output_ptr"].is_contiguous():
        return DECLINED
    _apply_write(
        flat(a["output_ptr"]), a["output_stride"], indices[:count], starts, contents, cu_lens
    )
    return None
