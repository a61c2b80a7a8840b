"""The mask of draft trees, both implementations, against walking every row's parents."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from speculators_ext.kernels.tree_mask import build_tree_mask
from speculators_ext.kernels.tree_mask_ref import TreeMask, build_tree_mask_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = {"ref": build_tree_mask_ref, "triton": build_tree_mask}

both = pytest.mark.parametrize("build", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def random_tree(size: int, reach: int) -> list[int]:
    """Parents of a tree whose nodes hang at most ``reach`` rows before themselves."""
    return [-1 if row == 0 else random.randint(max(0, row - reach), row - 1) for row in range(size)]


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def flatten(trees: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    cu_nodes = [0]
    for tree in trees:
        cu_nodes.append(cu_nodes[-1] + len(tree))
    return ints([parent for tree in trees for parent in tree]), ints(cu_nodes)


def check(mask: TreeMask, trees: list[list[int]], prefix_lens: list[int], limit: int) -> None:
    flat = 0
    words = mask.words.tolist()
    for tree, prefix_len in zip(trees, prefix_lens, strict=True):
        for row in range(len(tree)):
            seen, cursor = [], row
            while cursor >= 0:
                seen.append(cursor)
                cursor = tree[cursor]
            got = [
                32 * place + bit
                for place, word in enumerate(words[flat])
                for bit in range(32)
                if word >> bit & 1
            ]
            assert got == sorted(seen)
            assert mask.depths[flat].item() == len(seen) - 1
            assert mask.positions[flat].item() == min(prefix_len + len(seen) - 1, limit - 1)
            flat += 1


SHAPES = {  # rows of each tree, words, how far back a parent may lie
    "one tree": ([20], 1, 8),
    "root only": ([1], 1, 1),
    "no rows at all": ([0, 0], 1, 1),
    "ragged": ([5, 0, 1, 33, 0, 64, 2], 2, 20),
    "chains": ([34, 3], 2, 1),
    "256 rows": ([256, 200], 8, 1000),
    "words no power of two": ([70, 96], 3, 100),
    "more words than rows": ([7, 3], 4, 3),
    "full words": ([32, 64], 2, 30),
}


@both
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tree_mask(build: Any, shape: tuple[list[int], int, int]) -> None:
    """Catches a bit of a sibling, of another request or of the wrong word; bit 31 is the sign."""
    random.seed(0)
    sizes, num_words, reach = shape
    trees = [random_tree(size, reach) for size in sizes]
    prefix_lens = [random.randint(0, 500) for _ in sizes]
    parents, cu_nodes = flatten(trees)
    mask = build(
        parents, cu_nodes, ints(prefix_lens, torch.int64), max_model_len=450, num_words=num_words
    )
    assert mask.words.shape == (sum(sizes), num_words)
    check(mask, trees, prefix_lens, 450)


@both
def test_rows_past_the_last_tree_are_left_alone(build: Any) -> None:
    """Catches a static buffer whose causal default a smaller batch wipes out."""
    trees = [[-1, 0, 0], [-1]]
    parents, cu_nodes = flatten(trees)
    parents = torch.cat([parents, ints([7, 7])])
    out = TreeMask(ints([9] * 12).view(6, 2), ints([9] * 6), ints([9] * 6, torch.int64))
    got = build(parents, cu_nodes, ints([4, 5]), max_model_len=99, num_words=2, out=out)
    assert got is out
    check(got, trees, [4, 5], 99)
    for part in out:
        assert part[4:].unique().tolist() == [9]


@both
def test_a_tree_of_the_padded_form_flattens_into_it(build: Any) -> None:
    """Catches parents taken for flat rows: they count from the request's own root."""
    trees = [[-1, 0, 1], [-1, 0, 1, 1]]
    parents, cu_nodes = flatten(trees)
    mask = build(parents, cu_nodes, ints([0, 0]), max_model_len=9, num_words=1)
    assert mask.words.flatten().tolist() == [1, 3, 7, 1, 3, 7, 11]


def test_garbage_parents_end() -> None:
    """Catches a walk that a parent at or behind its child makes endless."""
    parents, cu_nodes = ints([0, 3, 2, 1]), ints([0, 4])
    mask = build_tree_mask(parents, cu_nodes, ints([0]), max_model_len=9, num_words=1)
    assert mask.words.flatten().tolist() == [1, 2, 4, 10]


def test_the_reference_refuses_a_tree_of_more_rows_than_bits() -> None:
    """Catches a mask cut off without a word."""
    parents, cu_nodes = flatten([random_tree(33, 1)])
    with pytest.raises(ValueError, match="rows of a tree: expected 32, got 33"):
        build_tree_mask_ref(parents, cu_nodes, ints([0]), max_model_len=99, num_words=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parents": ints([-1], torch.int64)}, "parents dtype"),
        ({"cu_nodes": ints([0])}, r"cu_nodes shape: expected \(2,\)"),
        ({"parents": ints([-1])[:, None]}, "parents shape"),
        ({"prefix_lens": ints([0]).float()}, "prefix_lens dtype"),
        ({"num_words": 0}, "num_words: expected at least 1"),
        ({"prefix_lens": ints([0]).to("meta")}, "prefix_lens device"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict, message: str) -> None:
    """Catches an argument the kernel would read past, or in the wrong dtype, without a word."""
    call = {"parents": ints([-1]), "cu_nodes": ints([0, 1]), "prefix_lens": ints([0])}
    with pytest.raises(ValueError, match=message):
        build_tree_mask(**{**call, "max_model_len": 9, "num_words": 1, **changes})
