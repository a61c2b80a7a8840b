"""Block verification: kernel against reference, and the law.

That the reference is lossless is proved in tests/verification/test_tree.py.
"""

from __future__ import annotations

import pytest
import torch

from speculators_ext.kernels.accept_block import accept_block
from speculators_ext.kernels.accept_block_ref import accept_block_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRIALS = 20_000 if DEVICE == "cuda" else 200  # the interpreter takes 50 ms for each
IMPLEMENTATIONS = {"ref": accept_block_ref, "triton": accept_block}
COUNTS = {
    "roots": [1] * 3,
    "one draft": [2] * 20,
    "ragged, empty ones": [0, 4, 0, 6, 1, 2, 9, 0] * 6,
}


def draw_chains(counts, vocab_size, seed=0):
    """Arguments: chains whose row i > 0 was drawn from the draft's law in row i - 1."""
    torch.manual_seed(seed)
    num_nodes = sum(counts)
    target, noise = torch.randn(2, num_nodes, vocab_size)
    laws = torch.softmax(target * 2, -1)
    drafts = torch.softmax(target * 2 + noise * 0.7, -1)
    tokens = torch.multinomial(drafts, 1)[:, 0].roll(1)
    cu_nodes = torch.tensor([0, *counts]).cumsum(0).int()
    noise = (torch.rand(num_nodes), torch.rand(len(counts)))
    return [t.to(DEVICE) for t in (tokens, cu_nodes, laws, drafts, *noise)]


def assert_same(got, expected):
    for name, ours, theirs in zip(expected._fields, got, expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours.cpu(), theirs.cpu()), name


@pytest.mark.parametrize("max_depth", [0, 1, 3, 8])
@pytest.mark.parametrize("vocab_size", [6, 2051])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_accept_block(counts, vocab_size, max_depth):
    """Catches a wrong row, weight or end of the chain, and a search that stops at a rejection."""
    given = draw_chains(counts, vocab_size)
    expected = accept_block_ref(*given, max_depth=max_depth)
    if len(counts) > 40 and max_depth > 1:
        assert len(expected.num_accepted.unique()) > 2, "a test of acceptance has one outcome"
    assert_same(accept_block(*given, max_depth=max_depth), expected)


@pytest.mark.parametrize("accept", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_a_draft_law_that_is_the_targets_is_accepted_whole(accept):
    """Catches 0 / 0 where nothing is left of p - q."""
    tokens, cu_nodes, laws, _, *noise = draw_chains([5] * 10, 40)
    tokens = torch.multinomial(laws, 1)[:, 0].roll(1)
    found = accept(tokens, cu_nodes, laws, laws, *noise, max_depth=4)
    assert found.num_accepted.tolist() == [4] * 10


@pytest.mark.parametrize("accept", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_the_last_row_of_a_chain_needs_no_draft_law(accept):
    """Catches a residual of a law that nobody computed in the bonus of a whole chain."""
    given = draw_chains([3] * 30, 6)
    given[3][2::3] = torch.nan
    bonus = accept(*given, max_depth=2).bonus
    assert ((bonus >= 0) & (bonus < 6)).all()


@pytest.mark.statistical
def test_the_law_of_the_first_token():
    """Catches a bias of the kernel: chains of three drafts, 5 tokens, one model of each law.

    The threshold is the mean of a chi-square of 4 degrees plus 5 deviations; with the bonus drawn
    from p, or from (p - q)+, a statistic is above 25.
    """
    trials, vocab_size = TRIALS, 5
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, vocab_size, generator=generator) * 1.5
    laws, drafts = torch.softmax(logits, -1).unbind()
    tokens = torch.multinomial(drafts, 4 * trials, replacement=True, generator=generator)
    cu_nodes = torch.arange(trials + 1, dtype=torch.int32) * 4
    noise = (torch.rand(4 * trials, generator=generator), torch.rand(trials, generator=generator))
    rows = [law.repeat(4 * trials, 1) for law in (laws, drafts)]
    given = [t.to(DEVICE) for t in (tokens, cu_nodes, *rows, *noise)]
    found = accept_block(*given, max_depth=3)
    drawn, count, bonus = tokens.view(trials, 4), found.num_accepted.cpu(), found.bonus.cpu()
    first = torch.where(count > 0, drawn[:, 1], bonus)
    # Laws are the same in every context, so the second token follows the target's law as well.
    second = torch.where(count > 1, drawn[:, 2], bonus)[count > 0]
    for seen, many in ((first, trials), (second, int((count > 0).sum()))):
        expected = laws.double() * many
        found_counts = torch.bincount(seen, minlength=vocab_size).double()
        assert float(((found_counts - expected) ** 2 / expected).sum()) < 4 + 5 * 8**0.5
