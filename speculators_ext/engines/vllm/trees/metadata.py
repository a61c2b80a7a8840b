"""What attention is told of draft trees: those a step verifies, and a level of one that grows."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from speculators_ext.kernels.tree_attention_ref import pack_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from speculators_ext.engines.vllm.attention.prefix_shadow import PrefixShadow

__all__ = [
    "TREES",
    "DraftLevel",
    "FlatTrees",
    "TreeRows",
    "Verification",
    "pack_words",
]

TREES = "speculators_ext_trees"
"""Attribute of vLLM's attention metadata that holds the step's `Verification`."""


class TreeRows(NamedTuple):
    """One request's tree in a verified batch.

    Attributes:
        owner: the request's id.
        request: its row in the batch's tables.
        rows: where its nodes stand among the batch's tokens, the root first.
        prefix_len: tokens before the root, all of them with KV.
        sees: bool [n, n], which rows of the tree each row attends to.
        depths: int64 [n], rows above each.
    """

    owner: str
    request: int
    rows: slice
    prefix_len: int
    sees: torch.Tensor
    depths: torch.Tensor


class FlatTrees(NamedTuple):
    """The trees of a step as kernels take them, on the device.

    Attributes:
        rows: int64 [N], the nodes among the batch's tokens, tree after tree.
        requests: int64 [T], each tree's row in the batch's tables.
        prefix_lens: int32 [T].
        cu_nodes: int32 [T + 1], where each tree's nodes begin among the N.
        words: int32 [N, W], bit j of word k: the node sees row 32 k + j of its tree.
        depths: int32 [N].
        max_nodes: of the largest tree.
    """

    rows: torch.Tensor
    requests: torch.Tensor
    prefix_lens: torch.Tensor
    cu_nodes: torch.Tensor
    words: torch.Tensor
    depths: torch.Tensor
    max_nodes: int


@dataclass
class Verification:
    """What one step verifies, and after sampling the path it accepted.

    Attributes:
        trees: the requests whose rows branch; all others are chains in plain order.
        block_tables: one [num_reqs, max_blocks] int32 a cache group.
        shadow: plain copies of the prefixes, which attention reads.
        paths: int32 [num_reqs, depth + 1], local rows accepted, -1 behind the last; None where the
            batch held no drafts.
    """

    trees: list[TreeRows]
    block_tables: tuple[torch.Tensor, ...]
    shadow: PrefixShadow
    paths: torch.Tensor | None = None
    path_chunks: list[torch.Tensor] = field(default_factory=list)
    biases: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)
    """Masks of trees, built by the first layer that needs one."""

    def __post_init__(self) -> None:
        """Count the rows of the batch that are tree nodes."""
        self.num_rows = sum(len(tree.depths) for tree in self.trees)
        self._flat: FlatTrees | None = None

    def flat(self, device: torch.device) -> FlatTrees:
        """The trees as kernels take them, made by the first layer that asks."""
        if self._flat is None:
            sizes = [len(tree.depths) for tree in self.trees]
            width = max(sizes)
            pad = torch.nn.functional.pad
            sees = torch.cat([pad(tree.sees, (0, width - len(tree.sees))) for tree in self.trees])
            places = [torch.arange(tree.rows.start, tree.rows.stop) for tree in self.trees]
            self._flat = FlatTrees(
                torch.cat(places).to(device),
                torch.tensor([tree.request for tree in self.trees], device=device),
                torch.tensor([t.prefix_len for t in self.trees], dtype=torch.int32, device=device),
                torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device),
                pack_words(sees).to(device),
                torch.cat([tree.depths for tree in self.trees]).int().to(device),
                width,
            )
        return self._flat


@dataclass(frozen=True)
class DraftLevel:
    """Attention metadata of one level of draft nodes.

    Attributes:
        owners: ids of the requests that draft.
        block_table: [num_reqs, max_blocks] int32 of the head's cache group.
        prefix_lens: tokens each request has in the head's cache.
        prefix: int64 [num_reqs], the same on the device.
        depth: of all these nodes in their trees.
        topk: nodes a level has at most.
        requests: int64 [n], whose node each is, by row of the tables above.
        rows: where each request's nodes stand among the level's rows.
        places: int64 [n], each node's place among all nodes its request may run in a round.
        sees: bool [n, places so far], which nodes each node attends to, itself included.
        max_places: nodes a request may run in a round.
        shadow: on CPUs, plain copies of the prefixes; behind each stand this round's nodes.
        memory: elsewhere, keys and values of this round's nodes by layer name.
    """

    owners: Sequence[str]
    block_table: torch.Tensor
    prefix_lens: Sequence[int]
    prefix: torch.Tensor
    depth: int
    topk: int
    requests: torch.Tensor
    rows: Sequence[slice]
    places: torch.Tensor
    sees: torch.Tensor
    max_places: int
    shadow: PrefixShadow
    memory: dict[str, tuple[torch.Tensor, torch.Tensor]]

    # vLLM's MLA layer asks its metadata which tokens decode from latents: none of ours do.
    num_actual_tokens: ClassVar[int] = sys.maxsize
    num_decodes: ClassVar[int] = 0
    num_decode_tokens: ClassVar[int] = 0
    num_prefills: ClassVar[int] = 1
