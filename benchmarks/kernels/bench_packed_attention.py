"""Time packed attention, kernel against torch reference; a wrong kernel is not timed.

    python benchmarks/kernels/bench_packed_attention.py [--json PATH]

Without a GPU there is nothing to time: the smallest shape is checked in Triton's interpreter, and
its row says so.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton

from speculators_ext.kernels.packed_attention import packed_attention
from speculators_ext.kernels.packed_attention_ref import packed_attention_paged_ref

PROVIDERS = {"ref": packed_attention_paged_ref, "triton": packed_attention}
# Absolute, for values of order 1; both sides round weights and output to the dtype.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BLOCK_SIZE = 16


class Shape(NamedTuple):
    name: str
    num_reqs: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    prefix_len: int


SHAPES = (
    Shape("SmolLM2-135M, short", 2, 14, 9, 3, 64, 100),
    Shape("SmolLM2-135M", 1, 14, 9, 3, 64, 2048),
    Shape("Llama-3.1-8B", 1, 15, 32, 8, 128, 2048),
    Shape("Llama-3.1-8B, batch", 16, 15, 32, 8, 128, 2048),
    Shape("Llama-3.1-8B, long", 1, 15, 32, 8, 128, 32768),
)


def make_call(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Arguments of both providers: vLLM's cache layout, blocks in random order."""
    torch.manual_seed(0)
    rows = shape.num_reqs * shape.width
    per_req = -(-shape.prefix_len // BLOCK_SIZE)
    inner = (shape.num_kv_heads, BLOCK_SIZE, 2 * shape.head_size)
    cache = torch.randn(shape.num_reqs * per_req, *inner, device=device, dtype=dtype)
    key_cache, value_cache = cache.transpose(1, 2).split(shape.head_size, dim=-1)
    table = torch.randperm(shape.num_reqs * per_req, device=device).to(torch.int32)

    def random_rows(heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, shape.head_size, device=device, dtype=dtype)

    return {
        "query": random_rows(shape.num_heads),
        "key": random_rows(shape.num_kv_heads),
        "value": random_rows(shape.num_kv_heads),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": table.view(shape.num_reqs, per_req),
        "prefix_lens": torch.full((shape.num_reqs,), shape.prefix_len, device=device),
        "scale": shape.head_size**-0.5,
    }


def largest_error(call: dict[str, Any]) -> float:
    return (
        (packed_attention(**call).float() - packed_attention_paged_ref(**call).float())
        .abs()
        .max()
        .item()
    )


def provenance() -> dict[str, str]:
    command = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none (interpreted)"
    return {
        "gpu": gpu,
        "git": done.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def measure(shape: Shape, dtype: torch.dtype, device: str) -> list[dict[str, Any]]:
    call = make_call(shape, dtype, device)
    error = largest_error(call)
    if not error <= TOLERANCES[dtype]:
        raise SystemExit(
            f"{shape.name}, {dtype}: the kernel is {error:.1e} off the reference (at most "
            f"{TOLERANCES[dtype]:.0e} is rounding); not timed"
        )
    rows = []
    for name, provider in PROVIDERS.items():
        row = {"op": "packed_attention", "provider": name, **shape._asdict(), "dtype": str(dtype)}
        row |= {"largest_error": error}
        if device == "cuda":
            quantiles = triton.testing.do_bench(
                lambda provider=provider: provider(**call), quantiles=[0.5, 0.1, 0.9]
            )
            row |= dict(zip(("median_ms", "p10_ms", "p90_ms"), quantiles, strict=True))
        else:
            row |= {"note": "smoke test: checked in the interpreter, not timed"}
        rows.append(row)
    return rows


def main(json_path: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    on_gpu = torch.cuda.is_available()
    device, dtypes = ("cuda", list(TOLERANCES)) if on_gpu else ("cpu", [torch.float32])
    rows = [
        {**row, **provenance()}
        for shape in (SHAPES if on_gpu else SHAPES[:1])
        for dtype in dtypes
        for row in measure(shape, dtype, device)
    ]
    table = Table("shape", "dtype", "provider", "median ms", "largest error")
    for row in rows:
        time = f"{row['median_ms']:.3f}" if on_gpu else "not timed"
        error = f"{row['largest_error']:.1e}"
        table.add_row(row["name"], row["dtype"], row["provider"], time, error)
    Console().print(table)
    if not on_gpu:
        Console().print(
            "No GPU: the kernel was checked in Triton's interpreter, nothing was timed."
        )
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
