"""Compile the packed-attention kernel for GPUs that need not be here, and report its resources.

Run it by itself (the interpreter must be off when Triton is imported, so not inside pytest):

    SPECULATORS_EXT_CPU_V2=0 python tests/kernels/compile_packed_attention.py [--json PATH]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from speculators_ext.kernels import packed_attention as op

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TRITON_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
FP8_NAMES = {"sm_90": "fp8e4nv", "sm_100": "fp8e4nv", "gfx942": "fp8e4b8"}  # none on sm_80
NUM_PAIRS = 42  # 14 rows of 3 query heads: SmolLM2-135M with the default number of skips


class Case(NamedTuple):
    dtype: torch.dtype
    head_size: int
    fp8_cache: bool = False
    window: int = 0
    soft_cap: float = 0.0


CASES = (
    Case(torch.float16, 64),
    Case(torch.bfloat16, 128),
    Case(torch.bfloat16, 256),
    Case(torch.bfloat16, 80, window=1024, soft_cap=50.0),
    Case(torch.bfloat16, 128, fp8_cache=True),
    Case(torch.float32, 64),
    Case(torch.float32, 128),
)


def source(case: Case, target: str) -> ASTSource:
    """The kernel as a launch would specialise it: aligned pointers and strides, 32-bit strides."""
    kernel = op._packed_attention_kernel
    block_m, block_n = op._choose_tiles(NUM_PAIRS, case.head_size, case.dtype)
    rows = TRITON_NAMES[case.dtype]
    cache = FP8_NAMES[target] if case.fp8_cache else rows
    constants: dict[str, Any] = {
        "GROUP": 3,
        "HEAD_SIZE": case.head_size,
        "BLOCK_SIZE": 16,
        "WINDOW": case.window,
        "SOFT_CAP": case.soft_cap,
        "DOT_DTYPE": op._ROW_DTYPES[case.dtype],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": triton.next_power_of_2(case.head_size),
        "q_scale_ptr": None,
    }
    if not case.fp8_cache:
        constants.update(k_scale_ptr=None, v_scale_ptr=None)
    types = {"scale": "fp32", "width": "i32", "prefix_lens_ptr": "*i64", "block_table_ptr": "*i32"}
    types |= {"k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
    types |= {"key_cache_ptr": f"*{cache}", "value_cache_ptr": f"*{cache}"}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        default = f"*{rows}" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, default)
        if name.endswith(("_ptr", "_stride")) and name not in constants:
            attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return ASTSource(kernel, signature, places, attributes)


def resources(compiled: CompiledKernel) -> dict[str, int]:
    """Registers a thread, spilled bytes (NVIDIA) or registers (AMD), shared memory in bytes."""
    if "amdgcn" in compiled.asm:
        found = dict(re.findall(r"\.(\w+):\s+(\d+)", compiled.asm["amdgcn"]))
        spilled = int(found["vgpr_spill_count"]) + int(found["sgpr_spill_count"])
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


def report() -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        for name, target in TARGETS.items():
            if case.fp8_cache and name not in FP8_NAMES:
                continue
            options = {"num_warps": 4, "num_stages": 2}
            compiled = triton.compile(source(case, name), target=target, options=options)
            label = TRITON_NAMES[case.dtype] + (", fp8 cache" if case.fp8_cache else "")
            label += f", head {case.head_size}" + (", window, cap" if case.window else "")
            rows.append({"case": label, "target": name, **resources(compiled)})
    return rows


def main() -> None:
    rows = report()
    table = Table(*rows[0], title=f"packed_attention, Triton {triton.__version__}")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=100).print(table)
    if sys.argv[1:2] == ["--json"]:
        Path(sys.argv[2]).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
