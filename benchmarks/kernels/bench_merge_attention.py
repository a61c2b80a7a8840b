"""Time the merge of two attentions, kernel against torch reference.

    python benchmarks/kernels/bench_merge_attention.py [--json PATH]

Two outputs are read and one is written: bandwidth is rows x heads x head size x 3 x 4 bytes / time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

import kernel_bench

from speculators_ext.kernels.merge_attention import merge_attention
from speculators_ext.kernels.tree_attention_ref import merge_attention_ref


class Shape(NamedTuple):
    name: str
    num_rows: int
    num_heads: int
    head_size: int


SHAPES = tuple(
    Shape(f"{num_rows} rows, {num_heads} heads of {size}", num_rows, num_heads, size)
    for num_rows, num_heads, size in ((9, 9, 64), (61, 32, 128), (976, 32, 128), (3904, 32, 128))
)


def make_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    torch.manual_seed(0)
    rows = (shape.num_rows, shape.num_heads)
    out_a, out_b = torch.randn(2, *rows, shape.head_size, device=device)
    lse_a, lse_b = torch.randn(2, *rows, device=device)

    def run(merge: Any) -> Any:
        return merge(out_a, lse_a, out_b, lse_b)

    def fault() -> str:
        got, expected = run(merge_attention), run(merge_attention_ref)
        return kernel_bench.difference(("out", "lse"), got, expected)

    num_bytes = shape.num_rows * shape.num_heads * shape.head_size * 3 * 4
    return kernel_bench.Trial(
        lambda: run(merge_attention_ref), lambda: run(merge_attention), fault, num_bytes
    )


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    kernel_bench.run("merge_attention", SHAPES, make_trial, json_path)


if __name__ == "__main__":
    typer.run(main)
