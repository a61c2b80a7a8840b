"""Time the ancestor mask of draft trees, kernel against torch reference.

python benchmarks/kernels/bench_tree_mask.py [--json PATH]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

import kernel_bench

from speculators_ext.kernels.tree_mask import build_tree_mask
from speculators_ext.kernels.tree_mask_ref import build_tree_mask_ref


class Shape(NamedTuple):
    name: str
    num_reqs: int
    num_rows: int


SHAPES = tuple(
    Shape(f"{num_reqs} x {num_rows} rows", num_reqs, num_rows)
    for num_reqs, num_rows in ((1, 8), (1, 60), (1, 128), (8, 60), (64, 8), (64, 60), (64, 128))
)


def make_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    """Trees in which a node's parent is one of the eight rows before it."""
    torch.manual_seed(0)
    row = torch.arange(shape.num_rows)
    reach = torch.randint(1, 9, (shape.num_reqs, shape.num_rows))
    parents = (row - reach).clamp(min=0)
    parents[:, 0] = -1
    call = {
        "parents": parents.flatten().to(device, torch.int32),
        "cu_nodes": (torch.arange(shape.num_reqs + 1) * shape.num_rows).to(device, torch.int32),
        "prefix_lens": torch.full((shape.num_reqs,), 1000, device=device),
    }
    options = {"max_model_len": 4096, "num_words": -(-shape.num_rows // 32)}

    def run(build: Any) -> Any:
        return build(**call, **options)

    def fault() -> str:
        got, ref = run(build_tree_mask), run(build_tree_mask_ref)
        return kernel_bench.difference(ref._fields, got, ref)

    return kernel_bench.Trial(lambda: run(build_tree_mask_ref), lambda: run(build_tree_mask), fault)


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    kernel_bench.run("tree_mask", SHAPES, make_trial, json_path)


if __name__ == "__main__":
    typer.run(main)
