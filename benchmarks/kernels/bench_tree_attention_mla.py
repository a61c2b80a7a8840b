"""Time tree attention over latents, kernel against torch reference.

    python benchmarks/kernels/bench_tree_attention_mla.py [--json PATH]

A latent has to be read once: requests x (prefix + nodes) x 576 x bytes a number / time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

import kernel_bench
from bench_tree_attention import TOLERANCES, tree_batch

from speculators_ext.kernels.tree_attention_mla import tree_attention_mla
from speculators_ext.kernels.tree_attention_mla_ref import tree_attention_mla_ref

BLOCK_SIZE, LATENT, WIDTH = 64, 512, 576


class Shape(NamedTuple):
    name: str
    num_reqs: int
    num_nodes: int
    num_heads: int
    prefix_len: int


SHAPES = (
    Shape("16 heads, short", 1, 5, 16, 60),
    Shape("16 heads, 17 nodes", 1, 17, 16, 1024),
    Shape("16 heads, 61 nodes", 1, 61, 16, 1024),
    Shape("128 heads, 17 nodes", 1, 17, 128, 1024),
    Shape("16 heads, batch", 16, 17, 16, 1024),
)


def make_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    num_reqs, num_nodes = shape.num_reqs, shape.num_nodes
    per_req = -(-(shape.prefix_len + num_nodes) // BLOCK_SIZE)
    rows = (num_reqs * num_nodes, shape.num_heads, WIDTH)
    call: dict[str, Any] = {
        "query": torch.randn(rows, device=device, dtype=dtype),
        "cache": torch.randn(num_reqs * per_req, BLOCK_SIZE, WIDTH, device=device, dtype=dtype),
        "trees": tree_batch(num_reqs, num_nodes, shape.prefix_len, per_req, device),
        "scale": WIDTH**-0.5,
    }

    def fault() -> str:
        got, ref = tree_attention_mla(**call), tree_attention_mla_ref(**call)
        error = (got.float() - ref.float()).abs().max().item()
        allowed = TOLERANCES[dtype]
        return "" if error <= allowed else f"{error:.1e} off the reference, {allowed:.0e} allowed"

    num_bytes = num_reqs * (shape.prefix_len + num_nodes) * WIDTH * dtype.itemsize
    return kernel_bench.Trial(
        lambda: tree_attention_mla_ref(**call), lambda: tree_attention_mla(**call), fault, num_bytes
    )


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    kernel_bench.run("tree_attention_mla", SHAPES, make_trial, json_path)


if __name__ == "__main__":
    typer.run(main)
