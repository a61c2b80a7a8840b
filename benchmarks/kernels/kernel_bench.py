"""What the benchmarks of the tree kernels share: a wrong kernel is not timed.

On a GPU kernel and torch reference are both timed. Without one the reference is, which is then the
path that serves, and the kernel is only checked, in Triton's interpreter, on the first shape.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECONDS = 0.2  # a shape and provider


class Trial(NamedTuple):
    ref: Callable[[], Any]
    triton: Callable[[], Any]
    fault: Callable[[], str]  # what the kernel gets wrong; "" if nothing
    num_bytes: int = 0  # that have to be read and written; 0: not a matter of bandwidth
    step_ms: float = 0.0  # what the rest of an engine's step takes at least; 0: not known


def difference(
    names: Sequence[str], got: Sequence[torch.Tensor], ref: Sequence[torch.Tensor]
) -> str:
    """Which of the named tensors differ; floats by more than rounding, NaN included."""
    wrong = [
        name
        for name, mine, theirs in zip(names, got, ref, strict=True)
        if not (
            torch.allclose(mine, theirs, atol=1e-4)
            if mine.is_floating_point()
            else torch.equal(mine, theirs)
        )
    ]
    return f"{', '.join(wrong)} differ from the reference's" if wrong else ""


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
        "threads": str(torch.get_num_threads()),
    }


def quantiles_ms(call: Callable[[], Any]) -> dict[str, float]:
    names = ("median_ms", "p10_ms", "p90_ms")
    if torch.cuda.is_available():
        return dict(
            zip(names, triton.testing.do_bench(call, quantiles=[0.5, 0.1, 0.9]), strict=True)
        )
    call()
    times, stop = [], time.perf_counter() + SECONDS
    while len(times) < 10 or time.perf_counter() < stop:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    tenths = statistics.quantiles(times, n=10)
    return dict(zip(names, (tenths[4], tenths[0], tenths[8]), strict=True))


def measure(op: str, shape: Any, trial: Trial, *, check: bool) -> list[dict[str, Any]]:
    """Rows of one shape; ends the run if the kernel is wrong."""
    on_gpu = torch.cuda.is_available()
    fault = trial.fault() if check or on_gpu else ""
    if fault:
        raise SystemExit(f"{op}, {shape.name}: {fault}; not timed")
    shared = {"op": op, **shape._asdict()}
    rows = []
    for provider, call in (("ref", trial.ref), ("triton", trial.triton)):
        if provider == "ref" or on_gpu:
            row = {**shared, "provider": provider, **quantiles_ms(call)}
            if trial.num_bytes:
                row["gigabytes_per_s"] = trial.num_bytes / row["median_ms"] / 1e6
            if trial.step_ms:
                row["share_of_step"] = row["median_ms"] / (row["median_ms"] + trial.step_ms)
            rows.append(row)
        elif check:
            note = "smoke test: checked in the interpreter, not timed"
            rows.append({**shared, "provider": provider, "note": note})
    return rows


def run(
    op: str,
    shapes: Sequence[Any],
    make_trial: Callable[[Any, str], Trial],
    json_path: Path | None = None,
) -> None:
    """Measure every shape (a NamedTuple with a ``name``), show the table, write the rows."""
    rows = [
        {**row, **provenance()}
        for place, shape in enumerate(shapes)
        for row in measure(op, shape, make_trial(shape, DEVICE), check=place == 0)
    ]
    table = Table("shape", "provider", "median ms", "p90 ms", "GB/s", "of a step", title=op)
    for row in rows:
        times = [
            f"{row[key]:.3f}" if key in row else "not timed" for key in ("median_ms", "p90_ms")
        ]
        speed = f"{row['gigabytes_per_s']:.1f}" if "gigabytes_per_s" in row else ""
        share = f"{row['share_of_step']:.2%}" if "share_of_step" in row else ""
        table.add_row(row["name"], row["provider"], *times, speed, share)
    Console().print(table)
    if not torch.cuda.is_available():
        Console().print("No GPU: ref is the CPU path, timed; the kernel was only checked.")
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1))
