"""Tree acceptance against exact enumeration: the output law is the target's, to the last digit.

Rules are called on floats, at both ends of every cell of the noise on which they ought to be
constant; the measures of those cells are exact fractions, and so are the sums compared. A threshold
that is off by more than a billionth changes what an end says, and with it the law.
"""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
import torch

from speculators_ext.kernels.accept_block_ref import accept_block_ref
from speculators_ext.kernels.accept_drawn_tree_ref import accept_drawn_tree_ref
from speculators_ext.kernels.accept_tree_ref import accept_tree_lazily_ref, accept_tree_ref

VOCAB, DEPTH = 3, 2
ENDS = ("low", "high")
both_ends = pytest.mark.parametrize("end", ENDS)


def make_law(rng, zeros):
    weights = [rng.randint(0 if zeros else 1, 4) for _ in range(VOCAB)]
    if not any(weights):
        weights[rng.randrange(VOCAB)] = 1
    return [Fraction(w, sum(weights)) for w in weights]


def make_model(seed, zeros=True):
    """A law for every context of at most DEPTH tokens."""
    rng = random.Random(seed)
    contexts = [c for n in range(DEPTH + 1) for c in itertools.product(range(VOCAB), repeat=n)]
    return {context: make_law(rng, zeros) for context in contexts}


def joint(model, emitted):
    """Law of the first DEPTH + 1 tokens when the model continues what was emitted."""
    law = dict.fromkeys(itertools.product(range(VOCAB), repeat=DEPTH + 1), Fraction(0))
    for tokens, measure in emitted:
        for tail in itertools.product(range(VOCAB), repeat=DEPTH + 1 - len(tokens)):
            chance, context = measure, tuple(tokens)
            for token in tail:
                chance *= model[context][token]
                context = (*context, token)
            law[context] += chance
    return law


def target_joint(model):
    return joint(model, [((), Fraction(1))])


class Tree:
    """Nodes of a draft tree, their contexts being the drafts on the way from the root."""

    def __init__(self, nodes):
        self.tokens = [0] + [token for _, token in nodes]
        self.parents = [-1] + [parent for parent, _ in nodes]
        self.contexts = [()]
        for parent, token in nodes:
            self.contexts.append((*self.contexts[parent], token))

    def __len__(self):
        return len(self.tokens)

    def children(self, row):
        return [child for child in range(len(self)) if self.parents[child] == row]


TREES = {
    "root only": Tree([]),
    "one child": Tree([(0, 1)]),
    "chain": Tree([(0, 2), (1, 0)]),
    "fan": Tree([(0, 1), (0, 0), (0, 2)]),
    "two levels": Tree([(0, 1), (0, 2), (2, 1), (1, 0)]),
    "interleaved": Tree([(0, 2), (1, 1), (0, 0), (3, 0), (1, 2)]),
    "twins": Tree([(0, 1), (0, 1), (2, 0), (1, 2)]),
    "a token that is none": Tree([(0, -1), (0, 1), (2, VOCAB)]),
}
trees = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


def batch_of(cases):
    """(tokens, parents, cu_nodes) of trees, one a case."""
    tokens = torch.tensor([token for tree in cases for token in tree.tokens])
    parents = torch.tensor([p for tree in cases for p in tree.parents], dtype=torch.int32)
    cu_nodes = torch.tensor([0, *itertools.accumulate(map(len, cases))], dtype=torch.int32)
    return tokens, parents, cu_nodes


def emitted(cases, result, measures):
    """(tokens, measure) of each case; checks that a path is one."""
    accepted, bonus = result.num_accepted.tolist(), result.bonus.tolist()
    for tree, path, count, last, measure in zip(
        cases, result.path.tolist(), accepted, bonus, measures, strict=True
    ):
        assert path[0] == 0
        assert path[count + 1 :] == [-1] * (len(path) - count - 1)
        rows = path[: count + 1]
        assert all(tree.parents[b] == a for a, b in itertools.pairwise(rows))
        yield (*(tree.tokens[row] for row in rows[1:]), last), measure


def laws_of(tree, model):
    """The model's law at each node; any at contexts that cannot be."""
    anything = [Fraction(1), *[Fraction(0)] * (VOCAB - 1)]
    return [model.get(context, anything) for context in tree.contexts]


def cells_of(law):
    """(interval, measure) of each index possible, in the order of inversion."""
    edges = [Fraction(0), *itertools.accumulate(law)]
    return [((a, b), b - a) for a, b in itertools.pairwise(edges) if b > a]


def point(interval, end):
    low, high = map(float, interval)
    return low + 1e-9 if end == "low" else high - 1e-9


def product(measures):
    total = Fraction(1)
    for measure in measures:
        total *= measure
    return total


def rows_of(laws):
    rows = [[float(x) for x in law] for law in laws]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, VOCAB)


@trees
@pytest.mark.parametrize("max_depth", range(DEPTH + 1))
@pytest.mark.parametrize("seed", range(4))
def test_one_draw_a_node_leaves_the_law_of_the_target(tree, max_depth, seed):
    """Catches a walk that skips a child, follows a wrong one or emits another node's draw."""
    model = make_model(seed)
    laws = laws_of(tree, model)
    draws = list(itertools.product(range(VOCAB), repeat=len(tree)))
    measures = [product(law[x] for law, x in zip(laws, draw, strict=True)) for draw in draws]
    cases = [tree] * len(draws)
    chosen = torch.tensor(draws).flatten()
    result = accept_tree_ref(*batch_of(cases), chosen, max_nodes=len(tree), max_depth=max_depth)
    assert joint(model, emitted(cases, result, measures)) == target_joint(model)


@trees
@both_ends
@pytest.mark.parametrize("seed", range(4))
def test_lazy_draws_leave_the_law_of_the_target(tree, end, seed):
    """Catches an inversion of the wrong row or noise, and noise that is used twice."""
    model = make_model(seed)
    laws = laws_of(tree, model)
    cells = list(itertools.product(*map(cells_of, laws)))
    measures = [product(measure for _, measure in combination) for combination in cells]
    points = [point(at, end) for combination in cells for at, _ in combination]
    cases = [tree] * len(cells)
    result = accept_tree_lazily_ref(
        *batch_of(cases),
        rows_of(laws).log().repeat(len(cells), 1),
        torch.tensor(points, dtype=torch.float64),
        torch.zeros(len(cells), dtype=torch.bool),
        max_nodes=len(tree),
        max_depth=DEPTH,
    )
    assert joint(model, emitted(cases, result, measures)) == target_joint(model)


@trees
@pytest.mark.parametrize("seed", range(4))
def test_noise_shared_by_a_depth_gives_what_plain_decoding_gives(tree, seed):
    """Catches a draw that is not the target's own at that position: seeds would not reproduce."""
    model, rng = make_model(seed), random.Random(seed)
    logits = rows_of(laws_of(tree, model)).log()
    for _ in range(100):
        noise = [rng.random() for _ in range(DEPTH + 1)]
        plain = ()
        for u in noise:
            edges = itertools.accumulate(model[plain])
            plain = (*plain, next(x for x, edge in enumerate(edges) if u < edge))
        depths = [min(len(context), DEPTH) for context in tree.contexts]
        uniform = torch.tensor([noise[depth] for depth in depths], dtype=torch.float64)
        result = accept_tree_lazily_ref(
            *batch_of([tree]), logits, uniform, torch.tensor([False]), max_nodes=9, max_depth=DEPTH
        )
        ((tokens, _),) = emitted([tree], result, [1])
        assert tokens == plain[: len(tokens)]


def drawn_trees(drafter, widths):
    """(tree, measure) of all trees whose nodes draw ``widths[depth]`` children from the drafter."""

    def grow(nodes, frontier, measure):
        if not frontier:
            yield Tree(nodes), measure
            return
        (row, context), *others = frontier
        width = widths[len(context)] if len(context) < len(widths) else 0
        for drawn in itertools.permutations(range(VOCAB), width):
            chance, left = measure, Fraction(1)
            for x in drawn:
                chance *= drafter[context][x] / left
                left -= drafter[context][x]
            rows = range(len(nodes) + 1, len(nodes) + 1 + width)
            new = [(r, (*context, x)) for r, x in zip(rows, drawn, strict=True)]
            yield from grow(nodes + [(row, x) for x in drawn], others + new, chance)

    return grow([], [(0, ())], Fraction(1))


def without_replacement(tree, target, drafter):
    """(coins, bonus interval, measure) of every cell of the noise, the rule done in fractions."""

    def judge(row, children, law, draft, coins, measure):
        if not children:
            for interval, chance in cells_of(law):
                yield coins, interval, measure * chance
            return
        child, *others = children
        x = tree.tokens[child]
        chance = min(Fraction(1), law[x] / draft[x])
        if chance:
            fresh = tree.contexts[child]
            below = judge(
                child, tree.children(child), target[fresh], drafter[fresh],
                {**coins, child: (0, chance)}, measure * chance,
            )  # fmt: skip
            yield from below
        if chance < 1:
            rest = [max(p - q, Fraction(0)) for p, q in zip(law, draft, strict=True)]
            left = [q if i != x else Fraction(0) for i, q in enumerate(draft)]
            yield from judge(
                row, others, [r / sum(rest) for r in rest],
                [q / sum(left) for q in left] if sum(left) else left,
                {**coins, child: (chance, 1)}, measure * (1 - chance),
            )  # fmt: skip

    yield from judge(0, tree.children(0), target[()], drafter[()], {}, Fraction(1))


def run_drawn(target, drafter, declared, widths, end, max_depth=DEPTH):
    cases, coins, bonus, measures = [], [], [], []
    for tree, weight in drawn_trees(drafter, widths):
        for met, interval, measure in without_replacement(tree, target, declared):
            cases.append(tree)
            coins += [point(met.get(row, (0, 1)), end) for row in range(len(tree))]
            bonus.append(point(interval, end))
            measures.append(weight * measure)
    result = accept_drawn_tree_ref(
        *batch_of(cases),
        rows_of(law for tree in cases for law in laws_of(tree, target)),
        rows_of(law for tree in cases for law in laws_of(tree, declared)),
        torch.tensor(coins, dtype=torch.float64),
        torch.tensor(bonus, dtype=torch.float64),
        max_nodes=max(map(len, cases)),
        max_depth=max_depth,
    )
    return joint(target, emitted(cases, result, measures))


@both_ends
@pytest.mark.parametrize("widths", [(1,), (2,), (3,), (1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_drawn_trees_leave_the_law_of_the_target(seed, widths, end):
    """Catches a residual, a strike-out or a coin that is off by any amount."""
    # Without zeros in the draft's laws, which could not fill the widest trees.
    target, drafter = make_model(seed), make_model(1000 + seed, zeros=False)
    assert run_drawn(target, drafter, drafter, widths, end) == target_joint(target)


def test_the_enumeration_sees_a_misreported_draft_law():
    """The proof has power: trees drawn from one law and declared as another break equality."""
    target, drafter = make_model(3, zeros=False), make_model(1003, zeros=False)
    other = make_model(2003, zeros=False)
    assert run_drawn(target, drafter, other, (2,), "low") != target_joint(target)


def chains(drafter, length):
    for tokens in itertools.product(range(VOCAB), repeat=length):
        measure = product(drafter[tokens[:i]][tokens[i]] for i in range(length))
        if measure:
            yield Tree(list(enumerate(tokens))), measure


def block_cells(tree, target, drafter):
    """(coins, bonus interval, measure) of every cell of the noise, the rule done in fractions."""
    length = len(tree) - 1
    weight, weights, chances = Fraction(1), [Fraction(1)], []
    for i in range(1, length + 1):
        x, before = tree.tokens[i], tree.contexts[i - 1]
        weight = min(Fraction(1), weight * target[before][x] / drafter[before][x])
        left = sum(rest_of(tree, i, weight, target, drafter))
        chances.append(weight if i == length else left / (left + 1 - weight) if left else 0)
        weights.append(weight)
    for passed in itertools.product((True, False), repeat=length):
        judged = list(zip(passed, chances, strict=True))
        measure = product(h if passes else 1 - h for passes, h in judged)
        accepted = max((i + 1 for i, passes in enumerate(passed) if passes), default=0)
        if measure:
            rest = rest_of(tree, accepted, weights[accepted], target, drafter)
            for interval, chance in cells_of([x / sum(rest) for x in rest]):
                coins = [(0, 1), *((0, h) if passes else (h, 1) for passes, h in judged)]
                yield coins, interval, measure * chance


def rest_of(tree, row, weight, target, drafter):
    law = target[tree.contexts[row]]
    if row == len(tree) - 1:
        return law
    draft = drafter[tree.contexts[row]]
    return [max(weight * p - q, Fraction(0)) for p, q in zip(law, draft, strict=True)]


def run_block(target, drafter, length, end):
    cases, coins, bonus, measures = [], [], [], []
    for tree, weight in chains(drafter, length):
        for met, interval, measure in block_cells(tree, target, drafter):
            cases.append(tree)
            coins += [point(at, end) for at in met]
            bonus.append(point(interval, end))
            measures.append(weight * measure)
    tokens, _, cu_nodes = batch_of(cases)
    result = accept_block_ref(
        tokens,
        cu_nodes,
        rows_of(law for tree in cases for law in laws_of(tree, target)),
        rows_of(law for tree in cases for law in laws_of(tree, drafter)),
        torch.tensor(coins, dtype=torch.float64),
        torch.tensor(bonus, dtype=torch.float64),
        max_depth=DEPTH,
    )
    drafts = sum(
        measure * int(count)
        for measure, count in zip(measures, result.num_accepted.tolist(), strict=True)
    )
    return joint(target, emitted(cases, result, measures)), drafts


@both_ends
@pytest.mark.parametrize("length", range(DEPTH + 1))
@pytest.mark.parametrize("seed", range(8))
def test_blocks_leave_the_law_of_the_target(seed, length, end):
    """Catches a weight, a chance or a residual that is off by any amount."""
    target, drafter = make_model(seed), make_model(1000 + seed)
    assert run_block(target, drafter, length, end)[0] == target_joint(target)


def test_blocks_accept_more_than_tokens_alone():
    """Catches token-wise verification under the name of the block's."""
    target, drafter = make_model(3, zeros=False), make_model(1003, zeros=False)
    _, drafts = run_block(target, drafter, DEPTH, "low")
    alone = Fraction(0)
    for tree, weight in chains(drafter, DEPTH):
        reached = weight
        for i in range(1, DEPTH + 1):
            x, before = tree.tokens[i], tree.contexts[i - 1]
            reached *= min(Fraction(1), target[before][x] / drafter[before][x])
            alone += reached
    assert drafts > alone


def test_a_request_without_rows_emits_nothing():
    """Catches offsets that are off by one behind an empty request, first and last ones included."""
    cases = [TREES["fan"], TREES["chain"]]
    tokens, parents, cu_nodes = batch_of(cases)
    padded = torch.tensor([0, 0, *cu_nodes[1:2], *cu_nodes[1:], cu_nodes[-1]], dtype=torch.int32)
    chosen = torch.tensor([0, 1, 2, 2, 2, 0, 1])
    result = accept_tree_ref(tokens, parents, padded, chosen, max_nodes=4, max_depth=2)
    assert result.path.tolist() == [[-1] * 3, [0, 2, -1], [-1] * 3, [0, 1, 2], [-1] * 3]
    assert result.num_accepted.tolist() == [0, 1, 0, 2, 0]
    assert result.bonus.tolist() == [-1, 2, -1, 1, -1]
