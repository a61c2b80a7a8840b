"""Acceptance of drawn trees: kernel (closed form) against reference (rule by rule), and the law.

That the reference is lossless is proved in tests/verification/test_tree.py.
"""

from __future__ import annotations

import pytest
import torch

from speculators_ext.kernels.accept_drawn_tree import accept_drawn_tree
from speculators_ext.kernels.accept_drawn_tree_ref import accept_drawn_tree_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRIALS = 20_000 if DEVICE == "cuda" else 200  # the interpreter takes 50 ms for each
IMPLEMENTATIONS = {"ref": accept_drawn_tree_ref, "triton": accept_drawn_tree}
WIDTHS = {"root only": (), "child": (1,), "fan": (4,), "chain": (1, 1, 1), "tree": (3, 2, 2)}


def draw_trees(widths, vocab_size, num_reqs, sharpness, seed=0):
    """Arguments: trees whose every node drew ``widths[depth]`` children from its law."""
    torch.manual_seed(seed)
    parents, levels = [-1], [[0]]
    for width in widths:
        level = [len(parents) + i for i in range(width * len(levels[-1]))]
        parents += [row for row in levels[-1] for _ in range(width)]
        levels.append(level)
    size = len(parents)
    logits, noise = torch.randn(2, num_reqs, size, vocab_size).unbind()
    target = torch.softmax(logits * sharpness, -1)
    draft = torch.softmax((logits + noise) * sharpness, -1)
    tokens = torch.zeros(num_reqs, size, dtype=torch.int64)
    for depth, width in enumerate(widths):
        for row in levels[depth]:
            children = [child for child in range(size) if parents[child] == row]
            tokens[:, children] = torch.multinomial(draft[:, row], width)
    given = (
        tokens.flatten(),
        torch.tensor(parents, dtype=torch.int32).repeat(num_reqs),
        torch.arange(num_reqs + 1, dtype=torch.int32) * size,
        target.view(-1, vocab_size),
        draft.view(-1, vocab_size),
        torch.rand(num_reqs * size),
        torch.rand(num_reqs),
    )
    return [tensor.to(DEVICE) for tensor in given], {"max_nodes": size, "max_depth": len(widths)}


def assert_same(got, expected):
    for name, ours, theirs in zip(expected._fields, got, expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours.cpu(), theirs.cpu()), name


@pytest.mark.parametrize("vocab_size", [6, 2051])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_accept_drawn_tree(widths, vocab_size):
    """Catches a closed form that is not the rule: a multiple, a sum or a strike-out gone wrong."""
    given, limits = draw_trees(widths, vocab_size, num_reqs=20, sharpness=1.0)
    expected = accept_drawn_tree_ref(*given, **limits)
    if len(widths) > 1:
        assert len(expected.num_accepted.unique()) > 2, "a test of acceptance has one outcome"
    assert_same(accept_drawn_tree(*given, **limits), expected)


@pytest.mark.parametrize("accept", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_a_draft_law_that_is_the_targets_is_accepted_whole(accept):
    """Catches a coin that is lost where p = q: 0 / 0, or a comparison that is not strict."""
    given, limits = draw_trees((1, 1, 1), 50, num_reqs=20, sharpness=2.0)
    given[4] = given[3]
    assert accept(*given, **limits).num_accepted.tolist() == [3] * 20


@pytest.mark.parametrize("accept", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_a_one_hot_target_is_followed(accept):
    """Catches temperature 0: of all children only the target's may pass, and it must be emitted."""
    given, limits = draw_trees((4,), 6, num_reqs=40, sharpness=1.0)
    wanted = given[3].argmax(-1)
    given[3] = torch.zeros_like(given[3]).scatter_(1, wanted[:, None], 1.0)
    found, size = accept(*given, **limits), limits["max_nodes"]
    tokens, wanted = given[0].view(-1, size).cpu(), wanted.view(-1, size).cpu()
    for request, (path, bonus) in enumerate(zip(found.path, found.bonus, strict=True)):
        first = int(tokens[request, path[1]]) if path[1] > 0 else int(bonus)
        assert first == wanted[request, 0]


@pytest.mark.parametrize("accept", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_a_child_that_was_not_drawn_is_passed_over(accept):
    """Catches p / 0, which would accept a child that its law cannot have given."""
    tokens = torch.tensor([0, 2, 1])
    parents = torch.tensor([-1, 0, 0], dtype=torch.int32)
    cu_nodes = torch.tensor([0, 3], dtype=torch.int32)
    target = torch.tensor([[0.0, 0.5, 0.5]] * 3)
    draft = torch.tensor([[0.5, 0.5, 0.0]] * 3)
    noise = (torch.zeros(3), torch.tensor([0.9]))
    given = [t.to(DEVICE) for t in (tokens, parents, cu_nodes, target, draft, *noise)]
    found = accept(*given, max_nodes=3, max_depth=1)
    assert (found.path.tolist(), found.bonus.tolist()) == ([[0, 2]], [2])


@pytest.mark.parametrize("accept", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_rows_behind_leaves_are_not_read(accept):
    """Catches a law of a leaf's children, which nobody computes, in the bonus; and empty trees."""
    given, limits = draw_trees((2,), 6, num_reqs=20, sharpness=1.0)
    leaves = torch.arange(60) % 3 != 0
    given[4][leaves.to(DEVICE)] = torch.nan
    starts = given[2].tolist()
    given[2] = torch.tensor([0, *starts, starts[-1]], dtype=torch.int32, device=DEVICE)
    given[6] = torch.nn.functional.pad(given[6], (1, 1))
    found = accept(*given, **limits)
    assert found.bonus[[0, -1]].tolist() == [-1, -1]
    assert ((found.bonus[1:-1] >= 0) & (found.bonus[1:-1] < 6)).all()


@pytest.mark.statistical
def test_the_law_of_the_first_token():
    """Catches a bias of the kernel: trees of three children, 6 tokens, one target law.

    The threshold is the mean of a chi-square of 5 degrees plus 5 deviations; with q not
    renormalised behind a rejected child the statistic is above 100.
    """
    trials, vocab_size = TRIALS, 6
    given, limits = draw_trees((3,), vocab_size, trials, sharpness=3.0)
    given[3] = given[3][:4].repeat(trials, 1)
    found = accept_drawn_tree(*given, **limits)
    tokens, path = given[0].view(trials, 4), found.path[:, 1].long()
    first = torch.where(path > 0, tokens.gather(1, path.clamp(min=0)[:, None])[:, 0], found.bonus)
    seen = torch.bincount(first.cpu(), minlength=vocab_size).double()
    expected = given[3][0].cpu().double() * trials
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert statistic < 5 + 5 * 10**0.5


def test_vocabularies_that_differ_are_refused():
    """Catches a reduced draft vocabulary that was not scattered into the target's."""
    given, limits = draw_trees((2,), 6, num_reqs=2, sharpness=1.0)
    given[4] = given[4][:, :5].contiguous()
    with pytest.raises(ValueError, match="vocabulary of target_probs and draft_probs"):
        accept_drawn_tree(*given, **limits)
