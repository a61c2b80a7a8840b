"""The GPU backends' trees and draft levels, in Triton's interpreter where there is no GPU.

The judge is plain torch over the keys and values that vLLM's own writer put into the cache.
"""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("vllm")

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.ops import triton_reshape_and_cache_flash as writer

from speculators_ext.engines.vllm.attention.packed_rows_gpu import key_value_views
from speculators_ext.engines.vllm.attention.prefix_shadow import PrefixShadow
from speculators_ext.engines.vllm.trees.attention_flash import TreeFlashBackend
from speculators_ext.engines.vllm.trees.attention_triton import TreeTritonBackend
from speculators_ext.engines.vllm.trees.compaction_gpu import CompactorGPU
from speculators_ext.engines.vllm.trees.metadata import (
    TREES,
    DraftLevel,
    TreeRows,
    Verification,
    pack_words,
)
from speculators_ext.tree import DraftTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_HEADS, NUM_KV_HEADS, SIZE, BLOCK = 4, 2, 32, 16
PREFIX_LENS = (21, 5, 30)
PARENTS = ([-1, 0, 0, 1, 2, 1], None, [-1, 0, 1, 0])  # None: a chain of two rows, vLLM's own
ROWS = tuple(2 if parents is None else len(parents) for parents in PARENTS)
TOLERANCE = 1e-5 if DEVICE == "cpu" else 1e-2


@pytest.fixture(autouse=True)
def _capability(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(writer, "_is_supported_kv_cache_dtype", lambda dtype: True)


def make_impl(backend: Any = TreeTritonBackend, window: int | None = None) -> Any:
    impl = backend.get_impl_cls()
    return impl(NUM_HEADS, SIZE, SIZE**-0.5, NUM_KV_HEADS, None, window, "auto", None)


class Batch:
    """Three requests in one cache, keys and values of all positions known."""

    def __init__(self, window: int | None) -> None:
        torch.manual_seed(0)
        one = torch.tensor(1.0, device=DEVICE)
        self.layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one, layer_name="layer")
        self.window = window
        self.impl = make_impl(window=window)
        blocks = 4 * len(PREFIX_LENS) + 1
        shape = (blocks, NUM_KV_HEADS, BLOCK, 2 * SIZE)
        self.cache = torch.zeros(shape, device=DEVICE)
        self.table = (torch.randperm(blocks - 1) + 1).view(-1, 4).int().to(DEVICE)
        self.known = [torch.randn(2, p + n, NUM_KV_HEADS, SIZE) for p, n in zip(
            PREFIX_LENS, ROWS, strict=True
        )]  # fmt: skip
        for request, pair in enumerate(self.known):
            at = torch.arange(pair.shape[1])
            slots = self.table[request].cpu()[at // BLOCK].long() * BLOCK + at % BLOCK
            self.impl.do_kv_cache_update(self.layer, *pair.to(DEVICE), self.cache, slots.to(DEVICE))
        self.query = torch.randn(sum(ROWS), NUM_HEADS, SIZE, device=DEVICE)
        self.key = torch.cat([pair[0, p:] for pair, p in zip(self.known, PREFIX_LENS, strict=True)])
        self.value = torch.cat(
            [pair[1, p:] for pair, p in zip(self.known, PREFIX_LENS, strict=True)]
        )

    def judge(self, query: torch.Tensor, pair: torch.Tensor, places: list[int], at: list[int],
              position: int) -> torch.Tensor:  # fmt: skip
        """[heads, SIZE] of one row that sees ``places`` of a request, standing at ``at``."""
        seen = [
            place
            for place, where in zip(places, at, strict=True)
            if self.window is None or position - where < self.window
        ]
        group = NUM_HEADS // NUM_KV_HEADS
        keys, values = pair[:, seen].repeat_interleave(group, dim=2)
        scores = torch.einsum("hd,khd->hk", query.cpu(), keys) * SIZE**-0.5
        return torch.einsum("hk,khd->hd", scores.softmax(-1), values)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def metadata_of(batch: Batch) -> Any:
    unused = torch.empty(0, device=DEVICE)
    starts = torch.tensor([0, *ROWS]).cumsum(0).tolist()
    return triton_attn.TritonAttentionMetadata(
        num_actual_tokens=sum(ROWS),
        max_query_len=max(ROWS),
        query_start_loc=ints(*starts),
        max_seq_len=max(p + n for p, n in zip(PREFIX_LENS, ROWS, strict=True)),
        seq_lens=ints(*(p + n for p, n in zip(PREFIX_LENS, ROWS, strict=True))),
        block_table=batch.table,
        slot_mapping=unused,
        seq_threshold_3D=0,
        num_par_softmax_segments=16,
        softmax_segm_output=unused,
        softmax_segm_max=unused,
        softmax_segm_expsum=unused,
        causal=True,
    )


def verification() -> Verification:
    trees, start = [], 0
    for request, (parents, count) in enumerate(zip(PARENTS, ROWS, strict=True)):
        if parents is not None:
            tree = DraftTree.of([0] * count, parents)
            trees.append(
                TreeRows(
                    str(request), request, slice(start, start + count), PREFIX_LENS[request],
                    torch.from_numpy(tree.ancestors()),
                    torch.from_numpy(tree.depths()).long(),
                )
            )  # fmt: skip
        start += count
    return Verification(trees, (), PrefixShadow())


@pytest.mark.parametrize("window", [None, 12])
def test_trees_and_chains_in_one_batch(window: int | None) -> None:
    """Catches a mask read by another tree's rows, and chains that vLLM should have attended."""
    batch, step = Batch(window), verification()
    metadata = metadata_of(batch)
    setattr(metadata, TREES, step)
    out = torch.full_like(batch.query, math.nan)
    batch.impl.forward(
        batch.layer, batch.query, batch.key.to(DEVICE), batch.value.to(DEVICE), batch.cache,
        metadata, out,
    )  # fmt: skip
    start = 0
    for request, (parents, count) in enumerate(zip(PARENTS, ROWS, strict=True)):
        prefix = PREFIX_LENS[request]
        tree = DraftTree.of([0] * count, parents or [*range(-1, count - 1)])
        sees, depths = tree.ancestors(), tree.depths()
        for row in range(count):
            own = [j for j in range(count) if sees[row, j]]
            places = [*range(prefix), *(prefix + j for j in own)]
            at = [*range(prefix), *(prefix + int(depths[j]) for j in own)]
            expected = batch.judge(
                batch.query[start + row], batch.known[request], places, at,
                prefix + int(depths[row]),
            )  # fmt: skip
            torch.testing.assert_close(
                out[start + row].cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE
            )
        start += count


@pytest.mark.parametrize("window", [None, 12])
def test_draft_levels_keep_their_own_keys(window: int | None) -> None:
    """Catches a level that forgets the one before, or reads the cache past its prefix."""
    batch, topk, places = Batch(window), 2, 4
    memory: dict[str, Any] = {}
    pairs = torch.randn(2, 3, places, NUM_KV_HEADS, SIZE)
    parents = [[1, 0], [0, 0], [1, 1]]  # of the second level's nodes
    for depth in (1, 2):
        requests = torch.arange(3).repeat_interleave(topk)
        place = (depth - 1) * topk + torch.arange(topk).repeat(3)
        sees = torch.zeros(6, depth * topk, dtype=torch.bool)
        sees[torch.arange(6), place] = True
        if depth == 2:
            sees[torch.arange(6), torch.tensor(parents).flatten()] = True
        level = DraftLevel(
            owners=["0", "1", "2"], block_table=batch.table, prefix_lens=PREFIX_LENS,
            prefix=torch.tensor(PREFIX_LENS, device=DEVICE), depth=depth, topk=topk,
            requests=requests.to(DEVICE),
            rows=[slice(i * topk, (i + 1) * topk) for i in range(3)], places=place.to(DEVICE),
            sees=sees.to(DEVICE), max_places=places, shadow=PrefixShadow(), memory=memory,
        )  # fmt: skip
        query = torch.randn(6, NUM_HEADS, SIZE, device=DEVICE)
        key, value = pairs[:, requests, place].to(DEVICE)
        out = torch.full_like(query, math.nan)
        batch.impl.forward(batch.layer, query, key, value, batch.cache, level, out)
        for row in range(6):
            request, prefix = int(requests[row]), PREFIX_LENS[int(requests[row])]
            pair = torch.cat([batch.known[request][:, :prefix], pairs[:, request]], dim=1)
            own = sees[row].nonzero().flatten().tolist()
            seen = [*range(prefix), *(prefix + j for j in own)]
            at = [*range(prefix), *(prefix + j // topk for j in own)]
            expected = batch.judge(query[row], pair, seen, at, prefix + depth - 1)
            torch.testing.assert_close(out[row].cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_accepted_rows_move_to_the_front() -> None:
    """Catches keys moved without their values, and a request without a tree moved as well."""
    batch, step = Batch(None), verification()
    step.block_tables = (batch.table,)
    step.paths = torch.tensor([[0, 2, 4, -1], [0, 1, -1, -1], [0, 3, -1, -1]], dtype=torch.int32)
    step.paths = step.paths.to(DEVICE)
    layer = SimpleNamespace(kv_cache=batch.cache, impl=SimpleNamespace(head_size=SIZE))
    CompactorGPU({"layer": layer}, {"layer": 0})(step, ints(3, 2, 2))
    moved = {0: [0, 2, 4], 1: [0, 1], 2: [0, 3]}
    for request, path in moved.items():
        at = torch.arange(PREFIX_LENS[request] + len(path))
        blocks = batch.table[request].cpu()[at // BLOCK].long()
        sides = key_value_views(batch.cache.cpu(), SIZE)
        for side, known in zip(sides, batch.known[request], strict=True):
            got = side[blocks, at % BLOCK]
            prefix = PREFIX_LENS[request]
            expected = torch.cat([known[:prefix], known[[prefix + row for row in path]]])
            assert torch.equal(got, expected)


def test_masks_as_words() -> None:
    """Catches the sign bit, and a second word that is lost."""
    sees = torch.zeros(2, 40, dtype=torch.bool)
    sees[0, [0, 31, 32]] = True
    sees[1, 39] = True
    assert pack_words(sees).tolist() == [[1 - (1 << 31), 1], [0, 1 << 7]]


@pytest.mark.parametrize("backend", [TreeTritonBackend, TreeFlashBackend])
def test_no_graph_holds_a_tree(backend: Any) -> None:
    """Catches attention captured with one step's trees and replayed with another's."""
    builder = backend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    assert make_impl(backend).obstacle(
        SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
    ) is None  # fmt: skip
