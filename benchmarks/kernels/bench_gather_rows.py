"""Time the gathering of accepted rows, kernel against torch reference.

python benchmarks/kernels/bench_gather_rows.py [--json PATH]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

import kernel_bench

from speculators_ext.kernels.gather_rows import gather_rows
from speculators_ext.kernels.gather_rows_ref import gather_rows_ref

ACCEPTED = 3


class Shape(NamedTuple):
    name: str
    num_reqs: int
    num_rows: int
    hidden_size: int


SHAPES = tuple(
    Shape(f"{num_reqs} x {num_rows} rows of {size}", num_reqs, num_rows, size)
    for num_reqs, num_rows, size in (
        (1, 8, 1728),
        (1, 60, 1728),
        (8, 60, 1728),
        (64, 8, 1728),
        (64, 60, 1728),
        (64, 60, 12_288),
    )
)


def make_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    torch.manual_seed(0)
    num_reqs, size = shape.num_reqs, shape.num_rows
    total = num_reqs * size
    paths = torch.stack([torch.randperm(size - 1)[:ACCEPTED].sort().values + 1] * num_reqs)
    paths = torch.cat([torch.zeros(num_reqs, 1, dtype=torch.int64), paths], dim=1)
    call = {
        "hidden": torch.randn(total, shape.hidden_size, device=device).bfloat16(),
        "tokens": torch.randint(0, 50_000, (total,), device=device),
        "positions": torch.arange(total, device=device),
        "cu_nodes": (torch.arange(num_reqs + 1) * size).to(device, torch.int32),
        "path": paths.to(device, torch.int32),
        "num_accepted": torch.full((num_reqs,), ACCEPTED, dtype=torch.int32, device=device),
        "bonus": torch.randint(0, 50_000, (num_reqs,), device=device),
    }
    kept = num_reqs * (ACCEPTED + 1)

    def run(gather: Any) -> Any:
        return gather(**call)

    def fault() -> str:
        got, ref = run(gather_rows), run(gather_rows_ref)
        parts = [[part[:kept] for part in rows] for rows in (got, ref)]
        return kernel_bench.difference(ref._fields, *parts)

    num_bytes = 2 * kept * shape.hidden_size * 2
    return kernel_bench.Trial(
        lambda: run(gather_rows_ref), lambda: run(gather_rows), fault, num_bytes
    )


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    kernel_bench.run("gather_rows", SHAPES, make_trial, json_path)


if __name__ == "__main__":
    typer.run(main)
