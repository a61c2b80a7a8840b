"""Time the compaction of accepted nodes' keys and values, kernel against torch reference.

    python benchmarks/kernels/bench_compact_kv.py [--json PATH]

The worst case and the best: every accepted row moves, or the path is a prefix and none does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

import kernel_bench

from speculators_ext.kernels.compact_kv import compact_kv
from speculators_ext.kernels.compact_kv_ref import CacheTable, compact_kv_ref

ACCEPTED, PREFIX_LEN, BLOCK_SIZE = 3, 1000, 16


class Shape(NamedTuple):
    name: str
    num_reqs: int
    layers: int
    heads: int
    head_size: int
    moves: bool = True


SHAPES = (
    Shape("SmolLM2-135M, 1", 1, 30, 3, 64),
    Shape("SmolLM2-135M, 1, nothing moves", 1, 30, 3, 64, moves=False),
    Shape("SmolLM2-135M, 8", 8, 30, 3, 64),
    Shape("SmolLM2-135M, 64", 64, 30, 3, 64),
    Shape("Llama-3.1-8B, 1", 1, 32, 8, 128),
    Shape("Llama-3.1-8B, 64", 64, 32, 8, 128),
    Shape("Llama-3.1-8B, 64, nothing moves", 64, 32, 8, 128, moves=False),
)


def make_caches(shape: Any, device: str) -> tuple[list[torch.Tensor], CacheTable, torch.Tensor]:
    """A [2, blocks, block, heads, head_size] a layer, their table, and the requests' blocks.

    A request has 8 blocks; those of its prefix are never touched, and any stand for them.
    """
    per_request = 8
    inner = (shape.num_reqs * per_request, BLOCK_SIZE, shape.heads, shape.head_size)
    layers = [torch.randn(2, *inner, device=device).bfloat16() for _ in range(shape.layers)]
    blocks = torch.randperm(inner[0], device=device).to(torch.int32).view(shape.num_reqs, -1)
    last = PREFIX_LEN // BLOCK_SIZE + per_request
    table = CacheTable.of([view for layer in layers for view in layer])
    return layers, table, blocks.repeat(1, -(-last // per_request))


def make_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    """Every request accepts three nodes."""
    torch.manual_seed(0)
    layers, table, block_table = make_caches(shape, device)
    path = [0, 2, 5, 11] if shape.moves else [0, 1, 2, 3]
    call = {
        "block_table": block_table,
        "prefix_lens": torch.full((shape.num_reqs,), PREFIX_LEN, device=device),
        "path": torch.tensor([path] * shape.num_reqs, dtype=torch.int32, device=device),
        "num_accepted": torch.full((shape.num_reqs,), ACCEPTED, dtype=torch.int32, device=device),
    }

    def run(compact: Any) -> None:
        compact(table, **call)

    def fault() -> str:
        before = [layer.clone() for layer in layers]
        run(compact_kv)
        got = [layer.clone() for layer in layers]
        for layer, old in zip(layers, before, strict=True):
            layer.copy_(old)
        run(compact_kv_ref)
        names = [f"layer {number}" for number in range(shape.layers)]
        return kernel_bench.difference(names, got, layers)

    row_bytes = 2 * shape.layers * shape.heads * shape.head_size * 2
    num_bytes = 2 * shape.num_reqs * ACCEPTED * row_bytes if shape.moves else 0
    return kernel_bench.Trial(
        lambda: run(compact_kv_ref), lambda: run(compact_kv), fault, num_bytes
    )


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    kernel_bench.run("compact_kv", SHAPES, make_trial, json_path)


if __name__ == "__main__":
    typer.run(main)
