"""Growth by the kernels equals growth by the references, and reads nothing back to the host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from speculators_ext.kernels.growth_ops import KERNELS, REFERENCES, GrowthOps, growth_ops
from speculators_ext.method_configs import Eagle2Config
from speculators_ext.proposers.eagle2 import GrowthLimits, Level, grow_trees

if TYPE_CHECKING:
    from speculators_ext.kernels.tree_build_ref import PaddedTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEPTH, HIDDEN = 3, 8


class LawHead:
    """Logits of a node are a row of a table, named by its parent's row and its own token."""

    def __init__(self, table: torch.Tensor, draft_to_target: torch.Tensor | None = None) -> None:
        self.table = table.to(DEVICE)
        self.draft_to_target = draft_to_target
        self.levels: list[Level] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden[:, 0].long()]

    def step(self, level: Level) -> tuple[torch.Tensor, torch.Tensor]:
        self.levels.append(level)
        row = (level.features[:, 0].long() * 7 + level.tokens + 1) % len(self.table)
        features = row[:, None].float().expand(-1, HIDDEN)
        return features, features


def random_law(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(31, vocab_size, generator=generator) * 2


def grow(
    ops: GrowthOps, head: LawHead, topk: int, rows: int, limits: dict[str, list], floor: float = 0.0
) -> PaddedTree:
    count = len(limits["max_rows"])
    roots = torch.arange(count, device=DEVICE)
    hidden = roots[:, None].float().expand(-1, HIDDEN)
    return grow_trees(
        head, hidden, hidden, roots,
        GrowthLimits(
            torch.tensor(limits["max_rows"], dtype=torch.int32, device=DEVICE),
            torch.tensor(limits.get("depths", [DEPTH] * count), device=DEVICE),
            torch.tensor(limits.get("chains", [False] * count), device=DEVICE),
        ),
        Eagle2Config(depth=DEPTH, topk=topk, min_path_probability=floor),
        num_rows=rows, ops=ops,
    )  # fmt: skip


def nowhere_to_go(vocab_size: int) -> torch.Tensor:
    """Rows that have fewer children than asked for: three, one, or none at all."""
    table = random_law(vocab_size)
    table[::2, 3:] = -math.inf
    table[1::4, 1:] = -math.inf
    table[5::6] = -math.inf
    return table


RAGGED = {"max_rows": [20, 1, 0, 7, 20], "depths": [3, 3, 3, 2, 1]}
CASES: dict[str, tuple[torch.Tensor, int, dict[str, list], float]] = {
    "random": (random_law(300), 3, {"max_rows": [20, 20]}, 0.0),
    "one request": (random_law(100), 8, {"max_rows": [20]}, 0.0),
    "ragged budgets and depths": (random_law(100), 3, RAGGED, 0.0),
    "chains among trees": (
        random_law(100), 3, {"max_rows": [20, 20], "chains": [True, False]}, 0.0,
    ),
    "a floor": (random_law(100), 4, {"max_rows": [20, 20]}, 0.05),
    "topk beyond the vocabulary": (random_law(3), 5, {"max_rows": [20, 20]}, 0.0),
    "children missing": (nowhere_to_go(50), 4, {"max_rows": [20] * 4}, 0.0),
    "all tied": (torch.zeros(31, 64), 4, {"max_rows": [20, 9]}, 0.0),
    "a chain": (random_law(100), 1, {"max_rows": [20, 3]}, 0.0),
}  # fmt: skip


@pytest.mark.parametrize(("table", "topk", "limits", "floor"), CASES.values(), ids=CASES)
def test_kernels_grow_the_references_trees(
    table: torch.Tensor, topk: int, limits: dict[str, list], floor: float
) -> None:
    """Catches a step whose kernel and reference part: what one leaves, the next one takes up."""
    got = grow(KERNELS, LawHead(table), topk, 20, limits, floor)
    expected = grow(REFERENCES, LawHead(table), topk, 20, limits, floor)
    for name in ("tokens", "parents", "depths", "counts"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    torch.testing.assert_close(got.scores, expected.scores, atol=1e-5, rtol=1e-5)


def test_trees_of_a_reduced_vocabulary() -> None:
    """Catches a head fed draft ids where it wants the target's."""
    offsets = torch.arange(100, device=DEVICE) * 3
    grown = [
        grow(ops, LawHead(random_law(100), offsets), 3, 20, {"max_rows": [20, 20]})
        for ops in (KERNELS, REFERENCES)
    ]
    assert torch.equal(grown[0].tokens, grown[1].tokens)
    assert (grown[0].tokens[:, 1:] % 4 == 0).all()


def test_levels_have_shapes_that_depend_on_no_value() -> None:
    """Catches levels as wide as there are live nodes: a captured graph would replay the wrong."""
    shapes = []
    for table in (random_law(50), nowhere_to_go(50)):
        head = LawHead(table)
        grow(KERNELS, head, 4, 20, {"max_rows": [20, 2], "depths": [3, 1]})
        assert [level.each for level in head.levels] == [4] * (DEPTH - 1)
        shapes.append([tuple(part.shape) for level in head.levels for part in level[1:6]])
    assert shapes[0] == shapes[1]


class Synchronisations(TorchDispatchMode):
    """Operators that make the host wait for a GPU: they ask for a value, or for how many there are.

    An index by bools is a ``nonzero`` inside.
    """

    WAIT = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indexed = name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple)
        by_bools = indexed and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if by_bools or name.startswith(self.WAIT):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ops", [KERNELS, REFERENCES], ids=["kernels", "references"])
def test_a_round_by_kernels_reads_nothing_back(ops: GrowthOps) -> None:
    """Catches a wait for the GPU inside a round; the references, which may wait, show its power."""
    head = LawHead(random_law(100))
    with Synchronisations() as waits:
        grow(ops, head, 3, 20, {"max_rows": [20, 5], "depths": [3, 2]}, floor=0.01)
    assert (waits.seen == []) == (ops is KERNELS)


def test_a_gpu_takes_the_kernels_and_a_cpu_the_references() -> None:
    """Catches growth in torch on a GPU, and in Triton's interpreter on a CPU."""
    assert growth_ops(torch.device("cpu")) is REFERENCES
    assert growth_ops(torch.device("cuda")) is KERNELS
