"""Compile the kernels for GPUs that need not be here, and report what they take.

Run it by itself (the interpreter must be off when Triton is imported, so not inside pytest):

    SPECULATORS_EXT_CPU_V2=0 python tests/kernels/compile_table.py [--json PATH] [OP ...]

OP is a file of `kernels/`; without one, all. A kernel is listed by `cases_OP.py` beside this file,
whose `cases(target)` gives its `Case`s (`kernel_case.py`).
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import triton
import typer
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

HERE = Path(__file__).parent
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def resources(compiled: CompiledKernel) -> dict[str, int]:
    """Registers a thread, what spills to memory (0 in either unit), shared memory in bytes."""
    if "amdgcn" in compiled.asm:
        found = dict(re.findall(r"\.(\w+):\s+(\d+)", compiled.asm["amdgcn"]))
        # Scalar registers overflow into lanes of vector registers, which is no memory.
        spilled = int(found["vgpr_spill_count"]) + int(found["private_segment_fixed_size"])
        registers = int(found["vgpr_count"])
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            Path(cubin.name).write_bytes(compiled.asm["cubin"])
            tool = triton.knobs.nvidia.cuobjdump.path
            command = [tool, "--dump-resource-usage", cubin.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        used = dict(re.findall(r"(\w+):(\d+)", done.stdout))
        registers, spilled = int(used["REG"]), int(used["STACK"]) + int(used["LOCAL"])
    return {"registers": registers, "spilled": spilled, "shared": compiled.metadata.shared}


def report(op: str) -> list[dict[str, Any]]:
    rows = []
    cases = importlib.import_module(f"cases_{op}").cases
    for name, target in TARGETS.items():
        for case in cases(name):
            options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
            compiled = triton.compile(case.source(), target=target, options=options)
            label = {"op": op, "case": case.label, "target": name}
            rows.append({**label, **resources(compiled)})
    return rows


def main(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP ...]")] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    sys.path.insert(0, str(HERE))  # the lists are scripts' data, no package
    known = sorted(path.stem.removeprefix("cases_") for path in HERE.glob("cases_*.py"))
    rows = [row for op in ops or known for row in report(op)]
    table = Table(*rows[0], title=f"Triton {triton.__version__}")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=110).print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(rows))


if __name__ == "__main__":
    typer.run(main)
