"""Time a level's expansion and the rerank, kernel against torch reference.

python benchmarks/kernels/bench_tree_build.py [--json PATH]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

import kernel_bench

from speculators_ext.kernels.tree_build import expand_frontier
from speculators_ext.kernels.tree_build_ref import (
    Candidates,
    expand_frontier_ref,
    make_candidates,
    rerank_candidates_ref,
)
from speculators_ext.kernels.tree_rerank import rerank_candidates

DEPTH = 5


class Shape(NamedTuple):
    name: str
    step: str  # "expand": one level below the first; "rerank": all of them
    num_reqs: int
    topk: int
    num_rows: int
    vocab_size: int = 0


SHAPES = (
    Shape("expand, 1 x 4, V 8k", "expand", 1, 4, 0, 8192),
    Shape("expand, 8 x 4, V 8k", "expand", 8, 4, 0, 8192),
    Shape("expand, 64 x 4, V 8k", "expand", 64, 4, 0, 8192),
    Shape("expand, 1 x 10, V 128k", "expand", 1, 10, 0, 128_256),
    Shape("expand, 8 x 10, V 32k", "expand", 8, 10, 0, 32_000),
    Shape("rerank, 1 x 8 rows", "rerank", 1, 4, 8),
    Shape("rerank, 1 x 128 rows", "rerank", 1, 10, 128),
    Shape("rerank, 8 x 60 rows", "rerank", 8, 10, 60),
    Shape("rerank, 64 x 8 rows", "rerank", 64, 4, 8),
    Shape("rerank, 64 x 128 rows", "rerank", 64, 10, 128),
)


def grown(num_reqs: int, topk: int, device: str) -> Candidates:
    """A pool whose scores fall with the level, as growing leaves it."""
    candidates = make_candidates(num_reqs, DEPTH, topk, device)
    frontier = None
    for level in range(DEPTH):
        logits = torch.randn(num_reqs * (topk if level else 1), 64, device=device)
        frontier = expand_frontier_ref(logits, candidates, frontier, topk=topk, level=level)
    return candidates


def make_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    torch.manual_seed(0)
    return (expand_trial if shape.step == "expand" else rerank_trial)(shape, device)


def expand_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    num_reqs, topk = shape.num_reqs, shape.topk
    root = torch.randn(num_reqs, 64, device=device)
    logits = torch.randn(num_reqs * topk, shape.vocab_size, device=device)
    offsets = torch.arange(shape.vocab_size, device=device)
    candidates = make_candidates(num_reqs, 2, topk, device)
    frontier = expand_frontier_ref(root, candidates, None, topk=topk, level=0)

    def call(expand: Any) -> Any:
        options = {"topk": topk, "level": 1, "draft_to_target": offsets}
        return expand(logits, candidates, frontier, **options)

    def fault() -> str:
        got = (*call(expand_frontier), *(part.clone() for part in candidates))
        ref = (*call(expand_frontier_ref), *candidates)
        return kernel_bench.difference((*frontier._fields, *candidates._fields), got, ref)

    num_bytes = logits.numel() * logits.element_size()
    return kernel_bench.Trial(
        lambda: call(expand_frontier_ref), lambda: call(expand_frontier), fault, num_bytes
    )


def rerank_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    candidates = grown(shape.num_reqs, shape.topk, device)
    roots = torch.arange(shape.num_reqs, device=device)
    limits = torch.full_like(roots, shape.num_rows, dtype=torch.int32)

    def call(rerank: Any) -> Any:
        return rerank(candidates, roots, limits, topk=shape.topk, num_rows=shape.num_rows)

    def fault() -> str:
        got, ref = call(rerank_candidates), call(rerank_candidates_ref)
        return kernel_bench.difference(ref._fields, got, ref)

    return kernel_bench.Trial(
        lambda: call(rerank_candidates_ref), lambda: call(rerank_candidates), fault
    )


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    kernel_bench.run("tree_build", SHAPES, make_trial, json_path)


if __name__ == "__main__":
    typer.run(main)
