r"""Who sees whom in a draft tree, and where its rows stand: the definition and the CPU path.

Row i of a tree attends to the row j of the same tree if j is i or one of its ancestors; all rows
see the request's prefix. The mask is bits, 32 rows a word, so that a tree has no size limit:

    words[i][j // 32] >> (j % 32) & 1 = [j is an ancestor of i, or i]
    depth(root) = 0, depth(i) = depth(parent(i)) + 1
    position(i) = min(prefix_len + depth(i), max_model_len - 1)

Siblings share a position (EAGLE-2, arXiv 2406.16858, section 4; the mask is SpecInfer's,
arXiv 2305.09781, section 4.2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from speculators_ext.kernels.checks import require

__all__ = ["TreeMask", "build_tree_mask_ref", "new_tree_mask"]


class TreeMask(NamedTuple):
    """What attention and rotary embedding want of N flat rows; W words of 32 rows."""

    words: torch.Tensor  # int32 [N, W], bit j of row i: i sees row j of its tree
    depths: torch.Tensor  # int32 [N]
    positions: torch.Tensor  # int64 [N]


def new_tree_mask(num_rows: int, num_words: int, device: torch.device) -> TreeMask:
    """Zeros for ``num_rows`` rows of trees of at most ``32 * num_words``."""
    return TreeMask(
        torch.zeros(num_rows, num_words, dtype=torch.int32, device=device),
        torch.zeros(num_rows, dtype=torch.int32, device=device),
        torch.zeros(num_rows, dtype=torch.int64, device=device),
    )


def build_tree_mask_ref(
    parents: torch.Tensor,  # [N]
    cu_nodes: torch.Tensor,  # [R + 1]
    prefix_lens: torch.Tensor,  # [R]
    *,
    max_model_len: int,
    num_words: int,
    out: TreeMask | None = None,
) -> TreeMask:
    """The mask of all trees; arguments and result are those of ``tree_mask.build_tree_mask``.

    The arrays are read back. A tree of more than ``32 * num_words`` rows is a ``ValueError``.
    """
    if out is None:
        out = new_tree_mask(parents.shape[0], num_words, parents.device)
    offsets, all_parents = cu_nodes.tolist(), parents.tolist()
    masks: list[int] = []
    depths: list[int] = []
    positions: list[int] = []
    for start, stop, prefix_len in zip(offsets, offsets[1:], prefix_lens.tolist(), strict=False):
        require(stop - start <= 32 * num_words, "rows of a tree", 32 * num_words, stop - start)
        for row, parent in enumerate(all_parents[start:stop]):
            is_root = parent < 0
            # An int of any size holds a row's bits; a list is quicker than tensors of some rows.
            masks.append(1 << row | (0 if is_root else masks[start + parent]))
            depths.append(0 if is_root else depths[start + parent] + 1)
            positions.append(min(prefix_len + depths[-1], max_model_len - 1))
    if masks:
        packed = b"".join(mask.to_bytes(4 * num_words, "little") for mask in masks)
        words = torch.frombuffer(bytearray(packed), dtype=torch.int32)
        out.words[: len(masks)] = words.view(-1, num_words)
        out.depths[: len(masks)] = torch.tensor(depths, dtype=torch.int32)
        out.positions[: len(masks)] = torch.tensor(positions)
    return out
