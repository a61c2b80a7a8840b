"""The draft trees of an engine, by request slot, from drafting to the end of verification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from speculators_ext.engines.vllm.attention.prefix_shadow import PrefixShadow
from speculators_ext.engines.vllm.trees.metadata import TreeRows, Verification

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from speculators_ext.tree import DraftTree

__all__ = ["TreeStore"]


class TreeStore:
    """Shapes of the drafts each request slot waits to have verified.

    The scheduler may cut a tree to a prefix of its rows, which is a tree again; so shapes are kept
    by slot and cut to what was scheduled.

    Args:
        num_slots: request slots of the engine.
        num_rows: most rows of a tree, the root included.
        max_depth: most drafts on a path.
        device: of the shapes the sampler reads.
    """

    def __init__(self, num_slots: int, num_rows: int, max_depth: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.max_depth = max_depth
        self._chain = np.arange(-1, num_rows - 1, dtype=np.int32)
        chain = torch.from_numpy(self._chain).to(device)
        self.parents = chain.repeat(num_slots, 1)
        self.depths = (chain + 1).repeat(num_slots, 1)
        self._trees: dict[int, DraftTree] = {}
        self.shadow = PrefixShadow()
        self.step = Verification([], (), self.shadow)

    def reset(self, slot: int) -> None:
        """The slot has a new owner, or its drafts are a chain."""
        if self._trees.pop(slot, None) is not None:
            self.parents[slot] = self.parents.new_tensor(self._chain)
            self.depths[slot] = self.parents[slot] + 1

    def put(self, slot: int, tree: DraftTree) -> None:
        """Remember the shape of the drafts handed to the scheduler for this slot."""
        self.reset(slot)
        if not tree.is_chain:
            self._trees[slot] = tree
            self.parents[slot, : len(tree)] = torch.from_numpy(tree.parents)
            self.depths[slot, : len(tree)] = torch.from_numpy(tree.depths())

    def begin(self, batch: InputBatch, block_tables: tuple[torch.Tensor, ...]) -> Verification:
        """A step verifies this batch: find its trees."""
        self.shadow.keep_only(batch.req_ids)
        trees = []
        drafts = batch.num_draft_tokens_per_req
        if drafts is not None and self._trees:
            for request, slot in enumerate(batch.idx_mapping_np.tolist()):
                tree = self._trees.get(slot)
                if tree is None or drafts[request] == 0 or batch.is_prefilling_np[request]:
                    continue
                tree = tree.cut(int(drafts[request]) + 1)
                stop = int(batch.query_start_loc_np[request + 1])
                rows = slice(stop - len(tree), stop)
                prefix_len = int(batch.num_computed_tokens_np[request])
                if not tree.is_chain:
                    sees = torch.from_numpy(tree.ancestors())
                    depths = torch.from_numpy(tree.depths().astype(np.int64))
                    trees.append(
                        TreeRows(batch.req_ids[request], request, rows, prefix_len, sees, depths)
                    )
        self.step = Verification(trees, block_tables, self.shadow)
        return self.step
