r"""The ancestor mask of draft trees as bits, with depths and positions, in one launch.

The definition is ``tree_mask_ref``. A program owns a block of rows of one request and walks from
all of them to the root at once, setting a bit a step; the deepest row says how long. A parent that
does not come before its child ends the walk, so that no garbage can make it endless. Nothing is
read back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speculators_ext.kernels.checks import check_placement, require
from speculators_ext.kernels.tree_mask_ref import TreeMask, new_tree_mask

__all__ = ["build_tree_mask"]

_BLOCK_N = 32


@triton.jit
def _tree_mask_kernel(  # type: ignore[no-untyped-def]
    words_ptr,  # [N, num_words] int32
    words_row_stride,
    depths_ptr,  # [N] int32
    positions_ptr,  # [N] int64
    parents_ptr,  # [N] int32
    cu_nodes_ptr,  # [R + 1] int32
    prefix_lens_ptr,  # [R] int32 or int64
    last_position,
    num_words,
    BLOCK_N: tl.constexpr,  # rows a program
    BLOCK_W: tl.constexpr,  # num_words, padded to a power of two
) -> None:
    request = tl.program_id(0)
    start = tl.load(cu_nodes_ptr + request).to(tl.int64)
    count = (tl.load(cu_nodes_ptr + request + 1) - start).to(tl.int32)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.arange(0, BLOCK_W)[None, :]
    live = row < count
    words = tl.zeros([BLOCK_N, BLOCK_W], tl.int32)
    depth = tl.full([BLOCK_N], -1, tl.int32)
    cursor = tl.where(live, row, -1)
    while tl.max(cursor, axis=0) >= 0:
        walking = cursor >= 0
        bit = tl.where(walking, 1 << (cursor & 31), 0)
        words |= tl.where((cursor >> 5)[:, None] == word, bit[:, None], 0)
        depth += walking.to(tl.int32)
        parent = tl.load(parents_ptr + start + cursor, mask=walking, other=-1)
        cursor = tl.where(parent < cursor, parent, -1)

    at = (start + row)[:, None] * words_row_stride + word
    tl.store(words_ptr + at, words, mask=live[:, None] & (word < num_words))
    tl.store(depths_ptr + start + row, depth, mask=live)
    position = tl.load(prefix_lens_ptr + request).to(tl.int64) + depth
    tl.store(positions_ptr + start + row, tl.minimum(position, last_position), mask=live)


def build_tree_mask(
    parents: torch.Tensor,  # [N]
    cu_nodes: torch.Tensor,  # [R + 1]
    prefix_lens: torch.Tensor,  # [R]
    *,
    max_model_len: int,
    num_words: int,
    out: TreeMask | None = None,
) -> TreeMask:
    """Mask words, depths and positions of every row of every tree; see the module.

    Args:
        parents: [N] int32, row of the parent in its own tree, before the row itself; roots -1.
        cu_nodes: [R + 1] int32, where each request's rows begin; a request may have none.
        prefix_lens: [R] int32 or int64, tokens before the root: its position.
        max_model_len: positions stay below it.
        num_words: W; no tree may have more than ``32 * W`` rows (further ones are not written).
        out: what to write to; rows from ``cu_nodes[R]`` on are left alone. By default zeros.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit; says what was expected.
    """
    if out is None:
        out = new_tree_mask(parents.shape[0], num_words, parents.device)
    _check(parents, cu_nodes, prefix_lens, num_words, out)
    num_reqs = prefix_lens.shape[0]
    if num_reqs > 0:
        _tree_mask_kernel[(num_reqs, triton.cdiv(32 * num_words, _BLOCK_N))](
            out.words, out.words.stride(0), out.depths, out.positions, parents, cu_nodes,
            prefix_lens, max_model_len - 1, num_words, BLOCK_N=_BLOCK_N,
            BLOCK_W=triton.next_power_of_2(num_words), num_warps=1,
        )  # fmt: skip
    return out


def _check(
    parents: torch.Tensor,
    cu_nodes: torch.Tensor,
    prefix_lens: torch.Tensor,
    num_words: int,
    out: TreeMask,
) -> None:
    require(num_words >= 1, "num_words", "at least 1", num_words)
    require(parents.dtype == torch.int32, "parents dtype", torch.int32, parents.dtype)
    require(cu_nodes.dtype == torch.int32, "cu_nodes dtype", torch.int32, cu_nodes.dtype)
    integers = (torch.int32, torch.int64)
    require(prefix_lens.dtype in integers, "prefix_lens dtype", integers, prefix_lens.dtype)
    num_rows, num_reqs = len(parents), len(prefix_lens)
    for name, tensor, length in (
        ("parents", parents, num_rows),
        ("cu_nodes", cu_nodes, num_reqs + 1),
        ("prefix_lens", prefix_lens, num_reqs),
    ):
        require(tensor.shape == (length,), f"{name} shape", (length,), tuple(tensor.shape))
    shapes = ((num_rows, num_words), (num_rows,), (num_rows,))
    dtypes = (torch.int32, torch.int32, torch.int64)
    for (name, tensor), shape, dtype in zip(out._asdict().items(), shapes, dtypes, strict=True):
        expected, got = (shape, dtype), (tuple(tensor.shape), tensor.dtype)
        require(got == expected, f"{name} shape and dtype", expected, got)
    given = {"parents": parents, "cu_nodes": cu_nodes, "prefix_lens": prefix_lens}
    check_placement({**given, **out._asdict()}, parents.device)
