"""Tree growth against an exhaustive search: the same best nodes, whatever is pruned on the way."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from speculators_ext.method_configs import Eagle2Config
from speculators_ext.proposers.eagle2 import GrowthLimits, Level, grow_trees

VOCAB = 11


class TableHead:
    """A head whose law depends on the last two tokens, so that siblings' children differ.

    A node's feature is its parent's token and its own; ``hidden`` is the same pair.
    """

    draft_to_target = None

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * 2
        self.levels: list[Level] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        before, last = hidden.long().unbind(1)
        return self.table[before, last]

    def step(self, level: Level) -> tuple[torch.Tensor, torch.Tensor]:
        self.levels.append(level)
        pair = torch.stack([level.features[:, 1], level.tokens.float()], dim=1)
        return pair, pair

    def log_probs(self, before: int, last: int) -> list[float]:
        return torch.log_softmax(self.table[before, last], dim=-1).tolist()


class Node(NamedTuple):
    score: float
    path: tuple[int, ...]


def best_nodes(head: TableHead, before: int, root: int, topk: int, depth: int) -> list[Node]:
    """Every node of the beam of width ``topk``, best first: EAGLE-2's candidates."""
    found: list[Node] = []
    level = [Node(0.0, ())]
    for _ in range(depth):
        children = []
        for node in level:
            text = (before, root, *node.path)
            law = head.log_probs(text[-2], text[-1])
            likely = sorted(range(VOCAB), key=lambda t: (-law[t], t))[:topk]
            children += [Node(node.score + law[t], (*node.path, t)) for t in likely]
        found += children
        level = sorted(children, key=lambda node: -node.score)[:topk]
    return sorted(found, key=lambda node: -node.score)


def grow(head: TableHead, roots: list[tuple[int, int]], config: Eagle2Config, rows: int, **limit):
    count = len(roots)
    limits = GrowthLimits(
        torch.tensor(limit.get("max_rows", [rows] * count), dtype=torch.int32),
        torch.tensor(limit.get("depths", [config.depth] * count)),
        torch.tensor(limit.get("chains", [False] * count)),
    )
    pairs = torch.tensor(roots, dtype=torch.float32)
    return grow_trees(
        head, pairs, pairs, pairs[:, 1].long(), limits, config,
        num_rows=rows, depth=limit.get("depth"), prune=limit.get("prune", False),
    )  # fmt: skip


def paths(tree, request: int) -> list[tuple[int, ...]]:
    """The tokens on the way to every row but the root, row by row."""
    found: list[tuple[int, ...]] = [()]
    for row in range(1, int(tree.counts[request])):
        parent = int(tree.parents[request, row])
        assert parent < row
        found.append((*found[parent], int(tree.tokens[request, row])))
    return found[1:]


@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize(("topk", "depth", "rows"), [(3, 4, 13), (2, 3, 5), (4, 5, 60), (1, 4, 5)])
def test_the_best_nodes_are_grown(topk: int, depth: int, rows: int, prune: bool) -> None:
    """Catches a child scored by the wrong parent, and pruning that loses a node."""
    head = TableHead(seed=topk)
    roots = [(1, 2), (3, 4), (5, 6)]
    config = Eagle2Config(depth=depth, topk=topk)
    tree = grow(head, roots, config, rows, prune=prune)
    for request, (before, root) in enumerate(roots):
        expected = best_nodes(head, before, root, topk, depth)[: rows - 1]
        assert set(paths(tree, request)) == {node.path for node in expected}
        scores = tree.scores[request, 1 : len(expected) + 1].tolist()
        assert scores == pytest.approx([node.score for node in expected], abs=1e-5)


def test_pruning_saves_forwards() -> None:
    """Catches levels run although nothing of theirs can enter the tree."""
    config = Eagle2Config(depth=6, topk=4)
    rows = {}
    for prune in (False, True):
        head = TableHead(seed=1)
        grow(head, [(1, 2)], config, rows=4, prune=prune)
        rows[prune] = sum(len(level.tokens) for level in head.levels)
    assert rows[False] == 5 * 4
    assert rows[True] <= rows[False] // 2


def test_a_node_sees_its_ancestors_and_itself() -> None:
    """Catches a mask that follows places in a level and not parents."""
    head = TableHead(seed=2)
    config = Eagle2Config(depth=4, topk=3)
    grow(head, [(1, 2), (7, 8)], config, rows=20, prune=True)
    place_of: dict[tuple[int, int], tuple[int, ...]] = {}
    for level in head.levels:
        assert level.sees.shape[1] == level.depth * config.topk
        for index, request in enumerate(level.requests.tolist()):
            seen = level.sees[index].nonzero().flatten().tolist()
            place, token = int(level.places[index]), int(level.tokens[index])
            assert place in seen
            assert len(seen) == level.depth
            above = [place_of[request, p] for p in seen if p != place]
            text = max(above, key=len, default=())
            assert all(text[: len(one)] == one for one in above)
            place_of[request, place] = (*text, token)
            if text:
                assert int(level.features[index, 1]) == text[-1]


def test_limits_of_each_request() -> None:
    """Catches a limit of one request applied to another, and chains that branch."""
    head = TableHead(seed=3)
    config = Eagle2Config(depth=4, topk=3)
    roots = [(1, 2)] * 4
    tree = grow(
        head, roots, config, rows=13, prune=True,
        max_rows=[13, 5, 13, 1], depths=[4, 4, 2, 4], chains=[False, False, False, False],
    )  # fmt: skip
    everything = best_nodes(head, 1, 2, 3, 4)
    assert tree.counts.tolist() == [13, 5, 13, 1]
    assert len(paths(tree, 1)) == 4
    assert max(map(len, paths(tree, 2))) == 2
    assert set(paths(tree, 0)) == {node.path for node in everything[:12]}
    chain = grow(head, roots[:2], config, rows=13, prune=True, chains=[True, False])
    greedy, text = [], [1, 2]
    for _ in range(4):
        law = head.log_probs(text[-2], text[-1])
        text.append(max(range(VOCAB), key=law.__getitem__))
        greedy.append(tuple(text[2:]))
    assert paths(chain, 0) == greedy
    assert set(paths(chain, 1)) == {node.path for node in everything[:12]}


def test_the_floor_under_a_path() -> None:
    """Catches improbable nodes verified, and the floor taken for a step's and not a path's."""
    head = TableHead(seed=4)
    tree = grow(head, [(1, 2)], Eagle2Config(depth=4, topk=3, min_path_probability=0.1), rows=13)
    expected = [n for n in best_nodes(head, 1, 2, 3, 4) if math.exp(n.score) >= 0.1]
    assert 0 < len(expected) < 12
    assert set(paths(tree, 0)) == {node.path for node in expected}


def test_fewer_levels_this_round() -> None:
    """Catches a round that grows past the depth it was given."""
    head = TableHead(seed=5)
    tree = grow(head, [(1, 2)], Eagle2Config(depth=5, topk=3), rows=10, depth=2)
    assert len(head.levels) == 1
    assert {len(path) for path in paths(tree, 0)} <= {1, 2}


def test_a_level_few_reach_is_not_grown() -> None:
    """Catches a forward spent on nodes that are hardly ever reached, or one saved too early."""
    head = TableHead(seed=6)
    levels = {}
    for least in (0.0, 0.3, 1.0):
        head.levels.clear()
        config = Eagle2Config(depth=5, topk=3, min_level_probability=least)
        grow(head, [(1, 2)], config, rows=13, prune=True)
        levels[least] = len(head.levels)
        frontier = best_nodes(head, 1, 2, 3, 1)
        reach = sum(math.exp(node.score) for node in frontier)
        assert levels[least] >= (reach >= least)
    assert levels[0.0] > levels[0.3] > levels[1.0] == 0
