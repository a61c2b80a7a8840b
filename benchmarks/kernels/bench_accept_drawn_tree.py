"""Time the acceptance of drawn trees (RRSw), kernel against torch reference.

    python benchmarks/kernels/bench_accept_drawn_tree.py [--json PATH]

One root with children drawn without replacement. Where all are rejected, the target's and the
draft's row are read once a child and twice for the bonus; a row that stays in the cache is read
from memory once. Bandwidth counts that: requests x 2 rows x vocabulary x 4 bytes / time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

import kernel_bench

from speculators_ext.kernels.accept_drawn_tree import accept_drawn_tree
from speculators_ext.kernels.accept_drawn_tree_ref import accept_drawn_tree_ref


class Shape(NamedTuple):
    name: str
    num_reqs: int
    children: int
    vocab_size: int


SHAPES = tuple(
    Shape(f"{num_reqs} x {children} children, {vocab_size}", num_reqs, children, vocab_size)
    for num_reqs, children, vocab_size in (
        (1, 4, 49_152),
        (8, 4, 49_152),
        (8, 1, 49_152),
        (64, 4, 49_152),
        (64, 4, 128_256),
    )
)


def make_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    torch.manual_seed(0)
    num_reqs, size, vocab_size = shape.num_reqs, shape.children + 1, shape.vocab_size
    # Rows behind leaves are not read by draft_probs; of the target's only accepted ones are.
    target, draft = torch.softmax(torch.randn(2, size, vocab_size) * 2, -1).to(device)
    parents = torch.tensor([-1] + [0] * shape.children, dtype=torch.int32)
    drawn = torch.multinomial(draft[0].repeat(num_reqs, 1), shape.children)
    tokens = torch.nn.functional.pad(drawn, (1, 0))
    call = {
        "tokens": tokens.flatten(),
        "parents": parents.repeat(num_reqs).to(device),
        "cu_nodes": (torch.arange(num_reqs + 1) * size).int().to(device),
        "target_probs": target.repeat(num_reqs, 1),
        "draft_probs": draft.repeat(num_reqs, 1),
        # Coins that nearly always reject: the longest way through the rule.
        "accept_uniform": torch.full((num_reqs * size,), 0.999, device=device),
        "token_uniform": torch.rand(num_reqs, device=device),
    }

    def run(accept: Any) -> Any:
        return accept(**call, max_nodes=size, max_depth=1)

    def fault() -> str:
        got, expected = run(accept_drawn_tree), run(accept_drawn_tree_ref)
        return kernel_bench.difference(expected._fields, got, expected)

    num_bytes = num_reqs * 2 * vocab_size * 4
    return kernel_bench.Trial(
        lambda: run(accept_drawn_tree_ref), lambda: run(accept_drawn_tree), fault, num_bytes
    )


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    kernel_bench.run("accept_drawn_tree", SHAPES, make_trial, json_path)


if __name__ == "__main__":
    typer.run(main)
