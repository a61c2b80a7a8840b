"""Every kernel compiles for four GPUs that need not be here, within limits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# A file of steps that kernels share has no kernel of its own: they are compiled inside those.
KERNELS = sorted(
    path.stem
    for path in (HERE.parents[1] / "kernels").glob("*.py")
    if re.search(r"^@triton\.jit\ndef _\w+_kernel\(", path.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("op", KERNELS)
def test_compiles_for_every_gpu_without_spills(op: str, tmp_path: Path) -> None:
    """Catches what the interpreter lets pass (types that change in a loop) and a tile too large."""
    report = tmp_path / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"SPECULATORS_EXT_CPU_V2": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "compile_table.py", "--json", report, op],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())
    assert {row["target"] for row in rows} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert [row for row in rows if row["spilled"]] == [], done.stdout
    assert max(row["shared"] for row in rows) <= 64 * 1024, done.stdout


@pytest.mark.parametrize("op", KERNELS)
def test_every_kernel_of_an_op_is_listed(op: str) -> None:
    """Catches a kernel that no line of the table compiles."""
    source = (HERE.parents[1] / "kernels" / f"{op}.py").read_text()
    kernels = re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE)
    listed = (HERE / f"cases_{op}.py").read_text()
    assert kernels
    assert [name for name in kernels if name not in listed] == []
