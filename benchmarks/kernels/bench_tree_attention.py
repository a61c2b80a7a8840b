"""Time tree attention, kernel against torch reference.

    python benchmarks/kernels/bench_tree_attention.py [--json PATH]

Keys and values have to be read once: bandwidth is requests x (prefix + nodes) x 2 x KV heads x
head size x bytes a number / time. On a CPU the reference timed is the path that serves there:
bfloat16, the prefix gathered, one bias for all layers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

import kernel_bench

from speculators_ext.kernels.tree_attention import tree_attention
from speculators_ext.kernels.tree_attention_ref import (
    TreeBatch,
    tree_attention_gathered_ref,
    tree_attention_paged_ref,
    tree_bias,
)

BLOCK_SIZE = 16
# Absolute, for values of order 1; both sides round weights and output to the dtype.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Shape(NamedTuple):
    name: str
    num_reqs: int
    num_nodes: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    prefix_len: int


SHAPES = (
    Shape("SmolLM2-135M, short", 1, 9, 9, 3, 64, 100),
    Shape("SmolLM2-135M, 17 nodes", 1, 17, 9, 3, 64, 1024),
    Shape("SmolLM2-135M, 61 nodes", 1, 61, 9, 3, 64, 1024),
    Shape("Llama-3.1-8B", 1, 61, 32, 8, 128, 2048),
    Shape("Llama-3.1-8B, batch", 16, 61, 32, 8, 128, 2048),
    Shape("Llama-3.1-8B, long", 1, 61, 32, 8, 128, 32768),
)


def tree_masks(num_nodes: int) -> torch.Tensor:
    """Bool [n, n] of a tree in which row i hangs from (i - 1) // 3."""
    seen = torch.eye(num_nodes, dtype=torch.bool)
    for row in range(1, num_nodes):
        seen[row] |= seen[(row - 1) // 3]
    return seen


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Int32 words [n, W] of a mask [n, n]."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 32)).unflatten(1, (-1, 32))
    words = (padded.long() << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def tree_batch(
    num_reqs: int, num_nodes: int, prefix_len: int, per_req: int, device: str
) -> TreeBatch:
    """Trees of one size behind prefixes of one length, blocks in random order."""
    table = torch.randperm(num_reqs * per_req, device=device).to(torch.int32)
    return TreeBatch(
        table.view(num_reqs, per_req),
        torch.full((num_reqs,), prefix_len, device=device),
        (torch.arange(num_reqs + 1) * num_nodes).int().to(device),
        pack(tree_masks(num_nodes)).repeat(num_reqs, 1).to(device),
        num_nodes,
    )


def make_call(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Arguments of kernel and paged reference: vLLM's cache layout."""
    torch.manual_seed(0)
    per_req = -(-(shape.prefix_len + shape.num_nodes) // BLOCK_SIZE)
    inner = (shape.num_kv_heads, BLOCK_SIZE, 2 * shape.head_size)
    cache = torch.randn(shape.num_reqs * per_req, *inner, device=device, dtype=dtype)
    key_cache, value_cache = cache.transpose(1, 2).split(shape.head_size, dim=-1)
    rows = shape.num_reqs * shape.num_nodes
    return {
        "query": torch.randn(rows, shape.num_heads, shape.head_size, device=device, dtype=dtype),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "trees": tree_batch(shape.num_reqs, shape.num_nodes, shape.prefix_len, per_req, device),
        "scale": shape.head_size**-0.5,
    }


def serve_on_cpu(shape: Shape) -> Any:
    """The CPU's call of one layer: keys and values [kv_heads, prefix + nodes, head_size]."""
    length, group = shape.prefix_len + shape.num_nodes, shape.num_heads // shape.num_kv_heads
    bias = tree_bias(tree_masks(shape.num_nodes), group, shape.prefix_len, torch.bfloat16)
    keys, values = torch.randn(2, shape.num_kv_heads, length, shape.head_size).bfloat16()
    query = torch.randn(shape.num_nodes, shape.num_heads, shape.head_size).bfloat16()
    scale = shape.head_size**-0.5

    def run() -> None:
        for _ in range(shape.num_reqs):
            tree_attention_gathered_ref(query, keys, values, bias, scale)

    return run


def make_trial(shape: Shape, device: str) -> kernel_bench.Trial:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    call = make_call(shape, dtype, device)

    def fault() -> str:
        got, ref = tree_attention(**call), tree_attention_paged_ref(**call)
        error = (got.float() - ref.float()).abs().max().item()
        allowed = TOLERANCES[dtype]
        return "" if error <= allowed else f"{error:.1e} off the reference, {allowed:.0e} allowed"

    length = shape.prefix_len + shape.num_nodes
    num_bytes = shape.num_reqs * length * 2 * shape.num_kv_heads * shape.head_size * 2
    on_gpu = device == "cuda"
    ref = (lambda: tree_attention_paged_ref(**call)) if on_gpu else serve_on_cpu(shape)
    return kernel_bench.Trial(ref, lambda: tree_attention(**call), fault, num_bytes)


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    kernel_bench.run("tree_attention", SHAPES, make_trial, json_path)


if __name__ == "__main__":
    typer.run(main)
