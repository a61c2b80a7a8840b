"""Chain acceptance against exact enumeration: the output law is the target's, to the last digit.

The rule under test is called on floats, but only at points in the middle of the cells on which it
is constant; the measures of those cells are exact fractions, and so are the sums compared.
"""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
import torch

from speculators_ext.proposers.drafting import clamp_ids
from speculators_ext.verification.chain import (
    PADDING,
    accept_greedy,
    accept_sampled,
    residual,
)

VOCAB = 3
DEPTH = 2


def _law(rng, zeros):
    weights = [rng.randint(0 if zeros else 1, 4) for _ in range(VOCAB)]
    if not any(weights):
        weights[rng.randrange(VOCAB)] = 1
    return [Fraction(w, sum(weights)) for w in weights]


def _model(seed, zeros=True):
    """A distribution for every prefix of at most DEPTH tokens."""
    rng = random.Random(seed)
    prefixes = [p for n in range(DEPTH + 1) for p in itertools.product(range(VOCAB), repeat=n)]
    return {prefix: _law(rng, zeros) for prefix in prefixes}


def _cells(points):
    """Cut [0, 1) at `points`: (middle, length) of each piece."""
    cuts = sorted({Fraction(0), Fraction(1), *(p for p in points if 0 < p < 1)})
    return [(float((a + b) / 2), b - a) for a, b in itertools.pairwise(cuts)]


def _rest(p, q):
    rest = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return [x / sum(rest) for x in rest] if sum(rest) else p


def _one_hot(token):
    return [Fraction(int(token == x)) for x in range(VOCAB)]


def _cases(target, draft, drafts, weight):
    """Every cell of the random numbers for one chain of drafts: rows of one batch."""
    p = [target[drafts[:k]] for k in range(len(drafts) + 1)]
    q = [draft(drafts, k) for k in range(len(drafts))]
    accept_cells = [_cells([p[k][x] / q[k][x]] if q[k][x] else []) for k, x in enumerate(drafts)]
    laws = [p[-1], *(_rest(p[k], q[k]) for k in range(len(drafts)))]
    token_cells = _cells([sum(law[: i + 1]) for law in laws for i in range(VOCAB)])
    for *accepts, token in itertools.product(*accept_cells, token_cells):
        measure = weight * token[1]
        for cell in accepts:
            measure *= cell[1]
        yield drafts, p, q, [cell[0] for cell in accepts], token[0], measure


def _run(cases, one_hot):
    counts = torch.tensor([len(case[0]) for case in cases])
    cu_drafts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    flat = [x for case in cases for x in case[0]]

    def rows(parts):
        return torch.tensor(
            [[float(v) for v in row] for part in parts for row in part], dtype=torch.float64
        ).reshape(-1, VOCAB)

    result = accept_sampled(
        torch.tensor(flat, dtype=torch.long),
        cu_drafts,
        rows(case[1] for case in cases),
        None if one_hot else rows(case[2] for case in cases),
        torch.tensor([u for case in cases for u in case[3]], dtype=torch.float64),
        torch.tensor([case[4] for case in cases], dtype=torch.float64),
    )
    starts = (cu_drafts[:-1] + torch.arange(len(cases))).tolist()
    tokens = result.tokens.tolist()
    for start, case, accepted in zip(starts, cases, result.num_accepted.tolist(), strict=True):
        assert all(t == PADDING for t in tokens[start + accepted + 1 : start + len(case[0]) + 1])
        yield tuple(tokens[start : start + accepted + 1]), case[-1]


def _joint(target, emitted_laws, length):
    """Law of the first `length` tokens when the target continues what was emitted."""
    joint = dict.fromkeys(itertools.product(range(VOCAB), repeat=length), Fraction(0))
    for emitted, measure in emitted_laws:
        for tail in itertools.product(range(VOCAB), repeat=length - len(emitted)):
            chance, prefix = measure, emitted
            for token in tail:
                chance *= target[prefix][token]
                prefix = (*prefix, token)
            joint[prefix] += chance
    return joint


def _target_joint(target, length):
    return _joint(target, [((), Fraction(1))], length)


@pytest.mark.parametrize("num_drafts", [0, 1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_drawn_drafts_leave_the_law_of_the_target(seed, num_drafts):
    """Catches a residual or an acceptance that is off by any amount, and a wrong bonus row."""
    target, drafter = _model(seed), _model(1000 + seed)
    cases = []
    for drafts in itertools.product(range(VOCAB), repeat=num_drafts):
        weight = Fraction(1)
        for k, x in enumerate(drafts):
            weight *= drafter[drafts[:k]][x]
        if weight:
            cases += _cases(target, lambda d, k: drafter[d[:k]], drafts, weight)
    law = _joint(target, _run(cases, one_hot=False), DEPTH + 1)
    assert law == _target_joint(target, DEPTH + 1)


@pytest.mark.parametrize("raw", [(), (0,), (2, 1), (1, 1), (-1, 2), (VOCAB, 0), (1, VOCAB + 7)])
@pytest.mark.parametrize("seed", range(8))
def test_chosen_and_clamped_drafts_leave_the_law_of_the_target(seed, raw):
    """A one-hot draft of any valid id is lossless, so clamping a wrong id is too."""
    target = _model(seed)
    drafts = tuple(clamp_ids(torch.tensor(raw, dtype=torch.long), VOCAB).tolist())
    cases = list(_cases(target, lambda d, k: _one_hot(d[k]), drafts, Fraction(1)))
    law = _joint(target, _run(cases, one_hot=True), DEPTH + 1)
    assert law == _target_joint(target, DEPTH + 1)


def test_the_enumeration_sees_a_drafter_whose_distribution_is_misreported():
    """The proof has power: drafts drawn from one law and declared as another break equality."""
    target, drafter, other = _model(3), _model(1003, zeros=False), _model(2003, zeros=False)
    cases = []
    for x in range(VOCAB):
        cases += _cases(target, lambda d, k: other[d[:k]], (x,), drafter[()][x])
    assert _joint(target, _run(cases, one_hot=False), 2) != _target_joint(target, 2)


def test_rows_of_a_batch_do_not_see_each_other():
    """Ragged offsets: a batch of chains of 0 to 2 drafts gives what each gives alone."""
    target = _model(5)
    chains = [(), (1, 2), (0,), (), (2, 2), (1,)]
    cases = [
        case
        for chain in chains
        for case in _cases(target, lambda d, k: _one_hot(d[k]), chain, Fraction(1))
    ]
    random.Random(0).shuffle(cases)
    alone = [next(iter(_run([case], one_hot=True))) for case in cases]
    assert list(_run(cases, one_hot=True)) == alone


def test_greedy_takes_the_longest_matching_prefix_and_one_more():
    """Matches after a mismatch do not count, and empty rows still emit the target's token."""
    drafts = torch.tensor([7, 8, 9, 5, 4, 4])
    cu_drafts = torch.tensor([0, 3, 3, 4, 6])
    target = torch.tensor([7, 1, 9, 2, 3, 5, 6, 4, 4, 8])
    result = accept_greedy(drafts, cu_drafts, target)
    assert result.num_accepted.tolist() == [1, 0, 1, 2]
    assert result.tokens.tolist() == [7, 1, PADDING, PADDING, 3, 5, 6, 4, 4, 8]


def test_greedy_equals_a_loop_on_random_ragged_batches():
    """Catches offsets that hold only for the hand-made shapes."""
    rng = random.Random(1)
    for _ in range(50):
        counts = [rng.randint(0, 4) for _ in range(rng.randint(1, 6))]
        drafts = [[rng.randint(0, 1) for _ in range(n)] for n in counts]
        chosen = [[rng.randint(0, 1) for _ in range(n + 1)] for n in counts]
        accepted, tokens = [], []
        for mine, theirs in zip(drafts, chosen, strict=True):
            n = 0
            while n < len(mine) and mine[n] == theirs[n]:
                n += 1
            accepted.append(n)
            tokens += theirs[: n + 1] + [PADDING] * (len(mine) - n)
        cu_drafts = torch.tensor([0, *itertools.accumulate(counts)])
        result = accept_greedy(
            torch.tensor([*itertools.chain(*drafts)], dtype=torch.long),
            cu_drafts,
            torch.tensor([*itertools.chain(*chosen)]),
        )
        assert result.num_accepted.tolist() == accepted
        assert result.tokens.tolist() == tokens


def test_an_impossible_id_is_never_drawn():
    """The largest float32 below 1, times a total, may round up to the total."""
    law = torch.tensor([[0.3, 0.3, 0.1, 0.0]])
    top = torch.tensor([1.0]).nextafter(torch.tensor(0.0))
    empty = torch.zeros(0, dtype=torch.long)
    for scale in torch.linspace(0.9, 1.1, 201):
        result = accept_sampled(empty, torch.tensor([0, 0]), law * scale, None, torch.zeros(0), top)
        assert result.tokens.item() != 3


def test_residual_of_equal_laws_is_the_law():
    """0 / 0 would give NaN where the draft's law is the target's."""
    law = torch.tensor([[0.25, 0.75, 0.0]])
    assert torch.equal(residual(law, law), law)
