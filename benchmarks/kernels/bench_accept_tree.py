"""Time the acceptance of trees against the target's tokens, kernel against torch reference.

    python benchmarks/kernels/bench_accept_tree.py [--json PATH]

"chosen": the target's token is given at every node. "logits": it is found at the nodes visited,
whose rows have to be read once: requests x nodes visited x vocabulary x 4 bytes / time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

import kernel_bench

from speculators_ext.kernels.accept_tree import accept_tree, accept_tree_lazily
from speculators_ext.kernels.accept_tree_ref import accept_tree_lazily_ref, accept_tree_ref

BRANCHES, MAX_DEPTH = 3, 6


class Shape(NamedTuple):
    name: str
    num_reqs: int
    num_nodes: int
    vocab_size: int = 0  # 0: the tokens are given


SHAPES = (
    *(
        Shape(f"chosen, {num_reqs} x {num_nodes} nodes", num_reqs, num_nodes)
        for num_reqs, num_nodes in ((1, 9), (1, 61), (8, 61), (64, 9), (64, 61), (64, 256))
    ),
    *(
        Shape(f"logits, {num_reqs} x 9 nodes, {vocab_size}", num_reqs, 9, vocab_size)
        for num_reqs, vocab_size in ((1, 49_152), (8, 49_152), (64, 128_256))
    ),
)


def make_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    """Trees in which row i hangs from (i - 1) // 3; the target follows the first child."""
    torch.manual_seed(0)
    num_reqs, num_nodes = shape.num_reqs, shape.num_nodes
    rows = torch.arange(num_nodes)
    parents = torch.where(rows > 0, (rows - 1) // BRANCHES, -1).int().repeat(num_reqs)
    tokens = (rows % 97).repeat(num_reqs)
    wanted = (rows * BRANCHES + 1) % 97
    trees = {
        "tokens": tokens.to(device),
        "parents": parents.to(device),
        "cu_nodes": (torch.arange(num_reqs + 1) * num_nodes).int().to(device),
    }
    limits = {"max_nodes": num_nodes, "max_depth": MAX_DEPTH}
    chosen = wanted.repeat(num_reqs).to(device)
    visited = int(accept_tree_ref(**trees, chosen=chosen, **limits).num_accepted[0]) + 1
    if shape.vocab_size == 0:
        call = {**trees, **limits, "chosen": chosen}
        kernel, ref, num_bytes = accept_tree, accept_tree_ref, 0
    else:
        logits = torch.randn(tokens.shape[0], shape.vocab_size, device=device)
        logits.scatter_(1, chosen[:, None], 30.0)
        noise = torch.rand(tokens.shape[0], device=device)
        greedy = torch.arange(num_reqs, device=device) % 2 == 0
        call = {**trees, **limits, "logits": logits, "uniform": noise, "greedy": greedy}
        kernel, ref = accept_tree_lazily, accept_tree_lazily_ref
        num_bytes = num_reqs * visited * shape.vocab_size * 4

    def fault() -> str:
        got, expected = run(kernel), run(ref)
        return kernel_bench.difference(expected._fields, got, expected)

    def run(accept: Any) -> Any:
        return accept(**call)

    return kernel_bench.Trial(lambda: run(ref), lambda: run(kernel), fault, num_bytes)


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    kernel_bench.run("accept_tree", SHAPES, make_trial, json_path)


if __name__ == "__main__":
    typer.run(main)
