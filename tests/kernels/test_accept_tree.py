"""Acceptance against the target's tokens: kernel against reference, bit for bit, and the law.

That the reference is lossless is proved in tests/verification/test_tree.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from speculators_ext.kernels.accept_tree import accept_tree, accept_tree_lazily
from speculators_ext.kernels.accept_tree_ref import accept_tree_lazily_ref, accept_tree_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRIALS = 20_000 if DEVICE == "cuda" else 200  # the interpreter takes 50 ms for each
CHOSEN = {"ref": accept_tree_ref, "triton": accept_tree}
LAZY = {"ref": accept_tree_lazily_ref, "triton": accept_tree_lazily}

COUNTS = {
    "root only": [1],
    "nothing": [0],
    "empty ones first, between, last": [0, 5, 0, 0, 9, 1, 0],
    "odd": [33, 7, 100],
    "256 nodes": [256, 1],
}
counts_of = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


def make_trees(counts, vocab_size=3, seed=0):
    """(tokens, parents, cu_nodes) of random trees; small vocabularies make twins among siblings."""
    rng = random.Random(seed)
    parents = [rng.randrange(i) if i else -1 for count in counts for i in range(count)]
    tokens = [rng.randrange(vocab_size) for _ in parents]
    cu_nodes = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    return (
        torch.tensor(tokens, dtype=torch.int64, device=DEVICE),
        torch.tensor(parents, dtype=torch.int32, device=DEVICE),
        cu_nodes,
    )


def on_device(*tensors):
    return [tensor.to(DEVICE) for tensor in tensors]


def assert_same(got, expected):
    for name, ours, theirs in zip(expected._fields, got, expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours.cpu(), theirs.cpu()), name


@counts_of
@pytest.mark.parametrize("max_depth", [0, 1, 4, 9])
def test_accept_tree(counts, max_depth):
    """Catches a child of another node or request, a wrong twin, and a path that runs too deep."""
    trees = make_trees(counts)
    torch.manual_seed(0)
    (chosen,) = on_device(torch.randint(0, 3, (sum(counts),)))
    limits = {"max_nodes": max(*counts, 1), "max_depth": max_depth}
    expected = accept_tree_ref(*trees, chosen, **limits)
    if counts == [256, 1] and max_depth > 1:
        assert expected.num_accepted.max() > 1, "a test of paths has none"
    assert_same(accept_tree(*trees, chosen, **limits), expected)


@pytest.mark.parametrize("accept", CHOSEN.values(), ids=CHOSEN)
def test_a_path_by_hand(accept):
    """Catches a reference and a kernel that are wrong alike: here the answer is written out."""
    #      0 -> 1 (5), 2 (6);  2 -> 3 (7), 4 (8);  4 -> 5 (7)
    tokens = torch.tensor([1, 5, 6, 7, 8, 7])
    parents = torch.tensor([-1, 0, 0, 2, 2, 4], dtype=torch.int32)
    cu_nodes = torch.tensor([0, 6], dtype=torch.int32)
    chosen = torch.tensor([6, 0, 8, 0, 7, 9])
    found = accept(*on_device(tokens, parents, cu_nodes, chosen), max_nodes=6, max_depth=5)
    assert found.path.tolist() == [[0, 2, 4, 5, -1, -1]]
    assert (found.num_accepted.tolist(), found.bonus.tolist()) == ([3], [9])


def lazy_problem(counts, vocab_size, dtype=torch.float32):
    torch.manual_seed(1)
    logits = torch.randn(sum(counts), vocab_size)
    logits[:, :3] += 8  # the ids of the drafts, so that there are paths
    logits[:, vocab_size // 2 :: 7] = -torch.inf
    greedy = torch.arange(len(counts)) % 2 == 0
    uniform = torch.rand(sum(counts))
    return make_trees(counts), on_device(logits.to(dtype), uniform, greedy)


@counts_of
@pytest.mark.parametrize("vocab_size", [5, 2048, 5001])
def test_accept_tree_lazily(counts, vocab_size):
    """Catches a tile edge of the vocabulary, and greedy and drawn requests mixed up."""
    trees, (logits, uniform, greedy) = lazy_problem(counts, vocab_size)
    limits = {"max_nodes": max(*counts, 1), "max_depth": 6}
    expected = accept_tree_lazily_ref(*trees, logits, uniform, greedy, **limits)
    assert_same(accept_tree_lazily(*trees, logits, uniform, greedy, **limits), expected)


def test_lazy_and_chosen_agree_on_greedy_requests():
    """Catches a largest logit that is not argmax's, ties and half precision included."""
    counts = [33, 20, 40]
    trees, (logits, uniform, greedy) = lazy_problem(counts, 3000, torch.float16)
    limits = {"max_nodes": 40, "max_depth": 6}
    expected = accept_tree_ref(*trees, logits.argmax(-1), **limits)
    all_greedy = torch.ones_like(greedy)
    assert_same(accept_tree_lazily(*trees, logits, uniform, all_greedy, **limits), expected)


@pytest.mark.parametrize("accept", LAZY.values(), ids=LAZY)
def test_what_is_not_visited_is_not_read(accept):
    """Catches a row of the vocabulary read in vain: unvisited ones are NaN here, and would win."""
    tokens = torch.tensor([0, 1, 2, 0, 1])
    parents = torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32)
    logits = torch.full((5, 4), torch.nan)
    logits[0] = torch.tensor([0.0, 0, 9, 0])
    logits[2] = torch.tensor([9.0, 0, 0, 0])
    cu_nodes = torch.tensor([0, 5], dtype=torch.int32)
    noise = (torch.full((5,), 0.5), torch.tensor([True]))
    given = on_device(tokens, parents, cu_nodes, logits, *noise)
    found = accept(*given, max_nodes=5, max_depth=3)
    assert (found.path.tolist(), found.bonus.tolist()) == ([[0, 2, -1, -1]], [0])


@pytest.mark.parametrize("accept", LAZY.values(), ids=LAZY)
def test_an_impossible_token_is_never_drawn(accept):
    """Catches both ends of inversion: u = 0 before the first id, u = 1 - 2**-24 past the last."""
    logits = torch.tensor([[-torch.inf, 0.3, 0.1, -torch.inf, 0.2, -torch.inf]]).repeat(20, 1)
    top = torch.tensor(1.0).nextafter(torch.tensor(0.0))
    logits += torch.linspace(-50, 50, 20)[:, None]
    roots = (torch.zeros(20).long(), torch.full((20,), -1).int(), torch.arange(21).int())
    for uniform, expected in ((0.0, 1), (float(top), 4)):
        noise = (torch.full((20,), uniform), torch.zeros(20).bool())
        found = accept(*on_device(*roots, logits, *noise), max_nodes=1, max_depth=1)
        assert found.bonus.unique().tolist() == [expected]


def test_the_same_noise_gives_the_same_path():
    """Catches state between launches: ranks that hold the same logits must agree."""
    trees, given = lazy_problem([33, 7, 100], 5001)
    limits = {"max_nodes": 100, "max_depth": 6}
    first = accept_tree_lazily(*trees, *given, **limits)
    assert_same(accept_tree_lazily(*trees, *given, **limits), first)


@pytest.mark.statistical
def test_the_law_of_the_first_two_tokens():
    """Catches a draw that is biased in the kernel only.

    A request draws 1 of 3 tokens at the root and at one child: 9 pairs. The threshold is
    the mean of a chi-square of 8 degrees plus 5 deviations; with the root's noise at the child the
    statistic is above 200.
    """
    trials, vocab_size = TRIALS, 3
    generator = torch.Generator().manual_seed(5)
    laws = torch.rand(4, vocab_size, generator=generator) + 0.1
    laws /= laws.sum(-1, keepdim=True)
    tokens = torch.arange(-1, 3).clamp(min=0).repeat(trials)  # a root and its three children
    parents = torch.tensor([-1, 0, 0, 0], dtype=torch.int32).repeat(trials)
    cu_nodes = torch.arange(trials + 1, dtype=torch.int32) * 4
    uniform = torch.rand(4 * trials, generator=generator)
    given = (laws.log().repeat(trials, 1), uniform, torch.zeros(trials, dtype=torch.bool))
    trees = on_device(tokens, parents, cu_nodes, *given)
    found = accept_tree_lazily(*trees, max_nodes=4, max_depth=1)
    pairs = (found.path[:, 1].cpu() - 1) * vocab_size + found.bonus.cpu()
    seen = torch.bincount(pairs, minlength=vocab_size**2).double()
    expected = (laws[0, :, None] * laws[1:]).flatten().double() * trials
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert statistic < 8 + 5 * 16**0.5


BROKEN = {
    "parents too short": (1, lambda t: t[:-1], "parents shape"),
    "tokens dtype": (0, lambda t: t.int(), "tokens dtype"),
    "offsets dtype": (2, lambda t: t.long(), "cu_nodes dtype"),
    "chosen too short": (3, lambda t: t[:-1], "chosen shape"),
    "device": (3, lambda t: t.to("meta"), "chosen device"),
}


@pytest.mark.parametrize(("index", "spoil", "message"), BROKEN.values(), ids=BROKEN)
def test_arguments_that_do_not_fit(index, spoil, message):
    """Catches an argument the kernel would read past, or in the wrong dtype, without a word."""
    given = [*make_trees([5]), torch.zeros(5, dtype=torch.int64, device=DEVICE)]
    given[index] = spoil(given[index])
    with pytest.raises(ValueError, match=message):
        accept_tree(*given, max_nodes=5, max_depth=3)
