"""Time block verification of chains, kernel against torch reference.

    python benchmarks/kernels/bench_accept_block.py [--json PATH]

Rows of the target and the draft behind all drafts but the last have to be read, and those behind
the accepted one once more: bandwidth is requests x 2 x drafts x vocabulary x 4 bytes / time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

import kernel_bench

from speculators_ext.kernels.accept_block import accept_block
from speculators_ext.kernels.accept_block_ref import accept_block_ref


class Shape(NamedTuple):
    name: str
    num_reqs: int
    drafts: int
    vocab_size: int


SHAPES = tuple(
    Shape(f"{num_reqs} x {drafts} drafts, {vocab_size}", num_reqs, drafts, vocab_size)
    for num_reqs, drafts, vocab_size in (
        (1, 4, 49_152),
        (8, 4, 49_152),
        (64, 4, 49_152),
        (64, 8, 128_256),
    )
)


def make_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    torch.manual_seed(0)
    num_reqs, size, vocab_size = shape.num_reqs, shape.drafts + 1, shape.vocab_size
    logits = torch.randn(size, vocab_size, device=device) * 3
    target = torch.softmax(logits, -1)
    draft = torch.softmax(logits + torch.randn_like(logits) * 0.3, -1)
    drawn = torch.multinomial(draft, num_reqs, replacement=True).T.roll(1, dims=1)
    call = {
        "tokens": drawn.flatten(),
        "cu_nodes": (torch.arange(num_reqs + 1) * size).int().to(device),
        "target_probs": target.repeat(num_reqs, 1),
        "draft_probs": draft.repeat(num_reqs, 1),
        "accept_uniform": torch.rand(num_reqs * size, device=device),
        "token_uniform": torch.rand(num_reqs, device=device),
    }

    def run(accept: Any) -> Any:
        return accept(**call, max_depth=shape.drafts)

    def fault() -> str:
        got, expected = run(accept_block), run(accept_block_ref)
        return kernel_bench.difference(expected._fields, got, expected)

    num_bytes = num_reqs * 2 * shape.drafts * vocab_size * 4
    return kernel_bench.Trial(
        lambda: run(accept_block_ref), lambda: run(accept_block), fault, num_bytes
    )


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    kernel_bench.run("accept_block", SHAPES, make_trial, json_path)


if __name__ == "__main__":
    typer.run(main)
