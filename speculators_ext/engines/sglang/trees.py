"""Draft trees as SGLang's speculative inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from speculators_ext.engines.sglang.verify_shape import AS_NEEDED, VerifyShape, lay_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculators_ext.tree import DraftTree

__all__ = ["common_width", "tree_verify_input"]


def common_width(trees: Sequence[DraftTree], floor: float) -> int:
    """Rows that every tree of a batch is verified with, the root included.

    SGLang verifies one width, so a row more costs every request one. Rows stand likeliest first,
    and the width grows while the next row's chance of acceptance, on average over the batch, is at
    least ``floor``.

    Args:
        trees: with scores, or of their root alone.
        floor: what one more row costs a request, in tokens.
    """
    widest = max(len(tree) for tree in trees)
    chances = np.zeros(widest)
    for tree in trees:
        chances[: len(tree)] += 1.0 if tree.scores is None else np.exp(tree.scores)
    enough = chances[1:] / len(trees) >= floor
    return 1 + (widest - 1 if enough.all() else int(enough.argmin()))


def tree_verify_input(
    trees: Sequence[DraftTree],
    lengths: Sequence[int],
    last: int,
    shape: VerifyShape = AS_NEEDED,
) -> EagleVerifyInput:
    """Lay the trees of a batch out for verification, all of one width.

    Rows behind a tree's end are linked to nothing and see themselves only; they carry a valid id
    and position because what reaches the model is embedded unchecked.

    Args:
        trees: of each request, the root first; the root alone where nothing was drafted.
        lengths: tokens with KV, of each request.
        last: greatest position the model has.
        shape: as the attention wants it.
    """
    width, num_reqs = shape.width or max(len(tree) for tree in trees), len(trees)
    tokens = np.zeros((num_reqs, width), dtype=np.int64)
    depths = np.zeros((num_reqs, width), dtype=np.int64)
    sees = np.broadcast_to(np.eye(width, dtype=bool), (num_reqs, width, width)).copy()
    child = np.full((num_reqs, width), -1, dtype=np.int64)
    sibling = np.full((num_reqs, width), -1, dtype=np.int64)
    for row, tree in enumerate(trees):
        n = len(tree)
        tokens[row, :n], depths[row, :n] = tree.tokens, tree.depths()
        sees[row, :n, :n] = tree.ancestors()
        for node in range(n - 1, 0, -1):
            parent = tree.parents[node]
            sibling[row, node] = child[row, parent]
            child[row, parent] = node
    positions = np.minimum(np.asarray(lengths)[:, None] + depths, last)

    def placed(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(shape.device)

    return EagleVerifyInput(
        draft_token=placed(tokens).flatten(),
        custom_mask=lay_mask(placed(sees), lengths, shape),
        positions=placed(positions).flatten(),
        retrieve_index=placed(np.arange(num_reqs * width).reshape(num_reqs, width)),
        retrieve_next_token=placed(child),
        retrieve_next_sibling=placed(sibling),
        retrieve_cum_len=None,
        spec_steps=int(depths.max()),
        topk=-1,
        draft_token_num=width,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )
