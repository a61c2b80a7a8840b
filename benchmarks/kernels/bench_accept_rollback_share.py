"""What acceptance and rollback take of an engine's step: the goal is below 1 % at batch 64.

    python benchmarks/kernels/bench_accept_rollback_share.py [--json PATH]

Accepting a path, moving its keys and values to the front in all layers, and gathering its hidden
states, one after another. The rest of the step is taken at its least: the target's weights, read
once at the bandwidth a copy reaches here. A real step also reads KV and drafts, so its share is
smaller than what is told.

Torch and Triton suffice. Without a GPU a tiny model's kernels are checked, and no share is told.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import triton
import typer

sys.path.insert(0, str(Path(__file__).parent))

import kernel_bench
from bench_compact_kv import PREFIX_LEN, make_caches

from speculators_ext.kernels.accept_tree import accept_tree
from speculators_ext.kernels.accept_tree_ref import accept_tree_ref
from speculators_ext.kernels.compact_kv import compact_kv
from speculators_ext.kernels.compact_kv_ref import compact_kv_ref
from speculators_ext.kernels.gather_rows import gather_rows
from speculators_ext.kernels.gather_rows_ref import gather_rows_ref

MAX_DEPTH = 6


class Shape(NamedTuple):
    name: str
    num_reqs: int
    layers: int
    heads: int
    head_size: int
    hidden_size: int
    weights: int  # of the target
    num_nodes: int
    branches: int  # children of a node; 1: a chain, of which nothing moves


LLAMA = (32, 8, 128, 4096, 8_030_261_248)  # Llama-3.1-8B
SHAPES = (
    Shape("tiny, 2 requests", 2, 2, 2, 16, 24, 10**6, 13, 3),
    *(
        Shape(f"Llama-3.1-8B, {num_reqs} x {num_nodes} nodes", num_reqs, *LLAMA, num_nodes, 3)
        for num_reqs, num_nodes in ((1, 61), (16, 61), (64, 13), (64, 61))
    ),
    Shape("Llama-3.1-8B, 64 chains of 4", 64, *LLAMA, 5, 1),
)


def weights_ms(shape: Shape, device: str) -> float:
    """How long reading bfloat16 weights takes at the bandwidth of a copy; 0 without a GPU."""
    if device != "cuda":
        return 0.0
    source, target = torch.empty(2, 2**30, dtype=torch.uint8, device=device).unbind()
    copy_ms = triton.testing.do_bench(lambda: target.copy_(source))
    return 2 * shape.weights / (2 * source.numel()) * copy_ms


def make_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    """The target names the last child at every node: each accepted row moves, and far."""
    torch.manual_seed(0)
    num_reqs, num_nodes = shape.num_reqs, shape.num_nodes
    layers, table, block_table = make_caches(shape, device)
    row = torch.arange(num_nodes, device=device)
    tokens = row.repeat(num_reqs)
    parents = torch.where(row > 0, (row - 1) // shape.branches, -1).int().repeat(num_reqs)
    cu_nodes = (torch.arange(num_reqs + 1, device=device) * num_nodes).int()
    chosen = ((row + 1) * shape.branches).repeat(num_reqs)
    prefix_lens = torch.full((num_reqs,), PREFIX_LEN, device=device)
    hidden = torch.randn(len(tokens), shape.hidden_size, device=device).bfloat16()
    positions = PREFIX_LEN + row.repeat(num_reqs)

    def run(accept: Any, compact: Any, gather: Any) -> tuple[Any, Any]:
        accepted = accept(
            tokens, parents, cu_nodes, chosen, max_nodes=num_nodes, max_depth=MAX_DEPTH
        )
        compact(table, block_table, prefix_lens, accepted.path, accepted.num_accepted)
        return accepted, gather(hidden, tokens, positions, cu_nodes, *accepted)

    def by_kernels() -> tuple[Any, Any]:
        return run(accept_tree, compact_kv, gather_rows)

    def by_torch() -> tuple[Any, Any]:
        return run(accept_tree_ref, compact_kv_ref, gather_rows_ref)

    def fault() -> str:
        before = [layer.clone() for layer in layers]
        accepted, gathered = by_kernels()
        moved = [layer.clone() for layer in layers]
        for layer, old in zip(layers, before, strict=True):
            layer.copy_(old)
        expected, rows = by_torch()
        kept = int(rows.cu_rows[-1])
        names = [*expected._fields, *rows._fields, *(f"layer {i}" for i in range(len(layers)))]
        return kernel_bench.difference(
            names,
            [*accepted, *(part[:kept] for part in gathered[:4]), gathered.cu_rows, *moved],
            [*expected, *(part[:kept] for part in rows[:4]), rows.cu_rows, *layers],
        )

    return kernel_bench.Trial(by_torch, by_kernels, fault, step_ms=weights_ms(shape, device))


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    shapes = SHAPES if kernel_bench.DEVICE == "cuda" else SHAPES[:1]
    kernel_bench.run("accept_rollback_share", shapes, make_trial, json_path)


if __name__ == "__main__":
    typer.run(main)
