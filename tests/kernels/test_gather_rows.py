"""Rows in path order, both implementations, against lists put together in plain Python."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from speculators_ext.kernels.gather_rows import gather_rows
from speculators_ext.kernels.gather_rows_ref import GatheredRows, gather_rows_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = {"ref": gather_rows_ref, "triton": gather_rows}

both = pytest.mark.parametrize("gather", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


@dataclass
class Problem:
    sizes: list[int]  # rows of each request
    paths: list[list[int]]  # rows each keeps; [] without rows
    call: dict[str, Any]


def make_problem(
    sizes: list[int],
    paths: list[list[int]],
    *,
    hidden_size: int = 40,
    width: int = 6,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
) -> Problem:
    torch.manual_seed(0)
    num_rows = sum(sizes) + padding
    cu_nodes = [sum(sizes[:request]) for request in range(len(sizes) + 1)]
    table = [(path + [-1] * width)[:width] for path in paths]
    call = {
        "hidden": torch.randn(num_rows, hidden_size).to(DEVICE, dtype),
        "tokens": torch.randint(0, 50_000, (num_rows,), device=DEVICE),
        "positions": torch.randint(0, 9_000, (num_rows,), device=DEVICE),
        "cu_nodes": torch.tensor(cu_nodes, dtype=torch.int32, device=DEVICE),
        "path": torch.tensor(table, dtype=torch.int32, device=DEVICE),
        "num_accepted": torch.tensor([max(len(path) - 1, 0) for path in paths]).to(
            DEVICE, torch.int32
        ),
        "bonus": torch.randint(50_000, 60_000, (len(sizes),), device=DEVICE),
    }
    return Problem(sizes, paths, call)


def check(problem: Problem, got: GatheredRows) -> None:
    call = problem.call
    starts, tokens = call["cu_nodes"].tolist(), call["tokens"].tolist()
    rows, following, cu_rows = [], [], [0]
    for request, path in enumerate(problem.paths):
        rows += [starts[request] + step for step in path]
        following += [tokens[starts[request] + step] for step in path[1:]]
        following += [call["bonus"][request].item()] if path else []
        cu_rows.append(len(rows))
    count = len(rows)
    assert got.cu_rows.tolist() == cu_rows
    assert got.rows.tolist() == rows + [0] * (len(tokens) - count)
    assert got.tokens[:count].tolist() == following
    assert got.positions[:count].tolist() == [call["positions"][row].item() for row in rows]
    assert got.hidden.dtype == call["hidden"].dtype
    assert torch.equal(got.hidden[:count], call["hidden"][rows])


SHAPES = {
    "one path": ([9], [[0, 2, 5]]),
    "root only": ([1], [[0]]),
    "nothing accepted": ([8, 8], [[0], [0]]),
    "ragged": ([5, 0, 1, 9, 0], [[0, 1, 4], [], [0], [0, 3, 4, 8], []]),
    "all rows": ([4, 3], [[0, 1, 2, 3], [0, 1, 2]]),
    "no rows at all": ([0, 0], [[], []]),
    "a prompt beside a tree": ([20, 7], [list(range(20)), [0, 2]]),
}


@both
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gather_rows(gather: Any, shape: tuple[list[int], list[list[int]]]) -> None:
    """Catches a token not shifted, a row of a neighbour, a request without rows that gets one."""
    problem = make_problem(*shape)
    check(problem, gather(**problem.call))


@both
def test_many_random_trees(gather: Any) -> None:
    """Catches what a hand-made case does not think of; rows behind the last tree are padding."""
    random.seed(0)
    sizes = [random.choice([0, 1, 5, 30]) for _ in range(21)]
    paths = [
        [0, *sorted(random.sample(range(1, size), random.randint(0, min(5, size - 1))))]
        if size
        else []
        for size in sizes
    ]
    problem = make_problem(sizes, paths, hidden_size=3, padding=2)
    check(problem, gather(**problem.call))


@both
def test_a_path_of_minus_ones_is_rows_in_order(gather: Any) -> None:
    """Catches a prompt's rows read backwards: acceptance knows the root of a prompt only."""
    problem = make_problem([4, 3], [[0, 1, 2, 3], [0, 2]])
    problem.call["path"][0, 1:] = -1
    check(problem, gather(**problem.call))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8], ids=str)
def test_hidden_states_of_any_dtype(gather: Any, dtype: torch.dtype) -> None:
    """Catches arithmetic on what is only moved."""
    problem = make_problem([5, 2], [[0, 2, 3], [0, 1]], dtype=dtype)
    check(problem, gather(**problem.call))


@both
def test_wide_rows_of_a_larger_buffer(gather: Any) -> None:
    """Catches a tile edge, and hidden states taken for contiguous."""
    problem = make_problem([5, 2], [[0, 2, 3], [0, 1]], hidden_size=4500)
    problem.call["hidden"] = problem.call["hidden"][:, :4200]
    check(problem, gather(**problem.call))


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("tokens", lambda t: t[:-1], r"tokens shape: expected \(9,\), got \(8,\)"),
        ("tokens", lambda t: t[:, None].repeat(1, 2)[:, :1], "tokens shape"),  # stride 2
        ("path", lambda t: t.long(), "path dtype"),
        ("cu_nodes", lambda t: t[:-1], r"cu_nodes shape: expected \(2,\)"),
        ("bonus", lambda t: t.to("meta"), "bonus device"),
    ],
)
def test_arguments_that_do_not_fit(name: str, spoil: Any, message: str) -> None:
    """Catches an argument the kernel would read past, or in the wrong dtype, without a word."""
    call = make_problem([9], [[0, 2]]).call
    with pytest.raises(ValueError, match=message):
        gather_rows(**{**call, name: spoil(call[name])})
