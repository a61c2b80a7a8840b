"""The torch stand-ins for ``sgl_kernel``'s tree operations, against SGLang's own Triton kernels."""

from __future__ import annotations

import pytest
import torch
from sglang.kernels.ops.speculative import spec_tree
from sglang.kernels.ops.speculative.reconstruct_tree import (
    reconstruct_indices_from_tree_mask_triton,
)

from speculators_ext.engines.sglang.cpu import tree_ops

NEVER = -7


def candidates(num_reqs: int, topk: int, depth: int, rows: int, seed: int):
    """Parents and selections as EAGLE's drafter hands them over, from random scores."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((num_reqs, 1 + (depth - 1) * topk), -1, dtype=torch.int64)
    scores = torch.rand(num_reqs, topk, generator=generator)
    every = [scores]
    for step in range(1, depth):
        values, chosen = scores.topk(topk, dim=-1)
        base = 0 if step == 1 else topk + (step - 2) * topk**2
        parents[:, 1 + (step - 1) * topk : 1 + step * topk] = chosen + base
        scores = (
            values.unsqueeze(-1) * torch.rand(num_reqs, topk, topk, generator=generator)
        ).flatten(1)
        every.append(scores)
    selected = torch.cat(every, dim=1).topk(rows - 1, dim=-1).indices.sort(dim=-1).values
    return parents, selected


def outputs(num_reqs: int, rows: int, mask_size: int):
    mask = torch.zeros(mask_size, dtype=torch.bool)
    return [
        mask,
        torch.full((num_reqs * rows,), NEVER),
        *(torch.full((num_reqs, rows), -1) for _ in range(3)),
    ]


@pytest.mark.parametrize("mode", [0, 1], ids=["full-mask", "rows-only"])
@pytest.mark.parametrize(("topk", "depth", "rows"), [(1, 4, 5), (2, 2, 3), (3, 3, 8), (4, 4, 13)])
def test_trees_are_built_alike(mode, topk, depth, rows):
    """Catches a wrong parent, link order, position, or mask cell."""
    lengths = torch.tensor([5, 1, 9])
    parents, selected = candidates(3, topk, depth, rows, seed=topk)
    size = rows * (rows * 3 + (int(lengths.sum()) if mode == 0 else 0))
    ours, theirs = outputs(3, rows, size), outputs(3, rows, size)
    tree_ops.build_tree_kernel_efficient_cpu(
        parents, selected, lengths, *ours, topk, depth, rows, mode
    )
    spec_tree.sgl_build_tree_kernel_triton(
        parents, selected, lengths, *theirs, topk, depth, rows, spec_tree.TreeMaskMode(mode)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    assert ours[3].max() > 0


def a_tree(topk: int, rows: int, seed: int):
    """Links of random trees, and tokens of which siblings never share one."""
    parents, selected = candidates(2, topk, 3, rows, seed)
    mask, positions, index, child, sibling = outputs(2, rows, 2 * rows * rows)
    tree_ops.build_tree_kernel_efficient_cpu(
        parents, selected, torch.tensor([4, 7]), mask, positions, index, child, sibling,
        topk, 3, rows, 1,
    )  # fmt: skip
    tokens = torch.randperm(50, generator=torch.Generator().manual_seed(seed))[: 2 * rows]
    return tokens.view(2, rows), mask, positions, index, child, sibling


@pytest.mark.parametrize("seed", range(6))
def test_greedy_verification_follows_the_same_path(seed):
    """Catches a wrong sibling taken, a path one short, or predictions at rejected rows."""
    rows, topk = 9, 3
    tokens, _, _, index, child, sibling = a_tree(topk, rows, seed)
    # Make the target agree down to a random row, and disagree elsewhere.
    wanted = torch.full((2, rows), 99)
    generator = torch.Generator().manual_seed(seed)
    for request in range(2):
        row = 0
        while child[request, row] != -1:
            nxt = int(child[request, row])
            while sibling[request, nxt] != -1 and torch.rand((), generator=generator) < 0.5:
                nxt = int(sibling[request, nxt])
            wanted[request, row] = tokens[request, nxt]
            row = nxt
        if torch.rand((), generator=generator) < 0.3:
            wanted[request, 0] = 98
    results = []
    for verify in (tree_ops.verify_tree_greedy_cpu, spec_tree.verify_tree_greedy_triton):
        prefix = "retrive" if verify is tree_ops.verify_tree_greedy_cpu else "retrieve"
        predicts = torch.full((2 * rows,), NEVER, dtype=torch.int32)
        accepted = torch.full((2, 4), -1, dtype=torch.int32)
        counts = torch.full((2,), NEVER, dtype=torch.int32)
        links = {f"{prefix}_index": index, f"{prefix}_next_token": child}
        links[f"{prefix}_next_sibling"] = sibling
        verify(
            predicts=predicts, accept_index=accepted, accept_token_num=counts,
            candidates=tokens, target_predict=wanted, **links,
        )  # fmt: skip
        results.append((predicts, accepted, counts))
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(("topk", "rows"), [(1, 4), (2, 7), (3, 9)])
def test_links_are_read_off_a_mask_alike(topk, rows):
    """Catches a parent that is not the nearest ancestor, or siblings in another order."""
    _, mask, _, _, _, _ = a_tree(topk, rows, seed=3)
    lengths = torch.tensor([4, 7])
    results = []
    for reconstruct in (
        tree_ops.reconstruct_indices_from_tree_mask,
        reconstruct_indices_from_tree_mask_triton,
    ):
        out = [torch.full((2 * rows,), NEVER), *(torch.full((2, rows), NEVER) for _ in range(3))]
        reconstruct(mask, lengths, *out, 2, rows)
        results.append(out)
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)


def test_a_packed_mask_is_refused():
    """Catches bits written as bools where another backend's layout is asked for."""
    with pytest.raises(NotImplementedError, match="tree_mask_mode"):
        tree_ops.build_tree_kernel_efficient_cpu(
            *(torch.zeros(1, 1, dtype=torch.int64),) * 2, torch.ones(1),
            *outputs(1, 2, 4), 1, 1, 2, 2,
        )  # fmt: skip
