"""The test bed is switched on by one command, and never where a GPU is."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from speculators_ext.assets import build
from speculators_ext.cli import app
from speculators_ext.engines.sglang.cpu import environment

run = CliRunner().invoke


def test_a_shell_takes_what_is_printed(tmp_path):
    """Catches quoting that loses a PYTHONPATH which is there already."""
    printed = run(app, ["sglang-cpu-env"]).stdout
    script = f"{printed}\necho $SGLANG_USE_CPU_ENGINE $OMP_NUM_THREADS $PYTHONPATH"
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-ec", script], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "1", f"{environment.SHIMS}:{tmp_path}"]


def test_nothing_is_printed_where_a_gpu_is(monkeypatch):
    """Catches a GPU server that runs on torch stand-ins."""
    monkeypatch.setattr(environment, "find_gpu", lambda: "an AMD GPU")
    result = run(app, ["sglang-cpu-env"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "an AMD GPU is here" in result.stderr


def test_the_stand_in_refuses_a_gpu_host():
    """Catches a stand-in left on PYTHONPATH that shadows the real sgl_kernel on a GPU."""
    code = (
        "from speculators_ext.engines import devices\n"
        "devices.find_gpu = lambda: 'an NVIDIA GPU'\n"
        "import sgl_kernel\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(environment.SHIMS)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "an NVIDIA GPU is here" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["convert_weight_packed"])
def test_sglang_does_not_take_the_stand_in_for_amx(name):
    """Catches a name whose presence switches SGLang to packed AMX weights."""
    import sgl_kernel
    import torch

    assert not hasattr(sgl_kernel, name)
    assert not hasattr(torch.ops.sgl_kernel, name)


def test_doctor_knows_what_sglang_can_do(monkeypatch):
    """Catches an adapter that doctor does not know of, or one called usable on a GPU host."""
    from speculators_ext.cli.checkup import examine
    from speculators_ext.engines import devices

    report = examine(str(build("mimo-tiny-mtp")), 6)
    found = report["engines"][-1]
    assert found["ok"], found
    assert "experimental" in found["detail"]
    engines = {method["name"]: method["engines"] for method in report["methods"]}
    assert engines["mtp_reuse"] == engines["eagle2"] == ["sglang"]
    assert engines["clasp"] == []  # no target whose layers can be left out
    monkeypatch.setattr(devices, "find_gpu", lambda: "an AMD GPU")
    report = examine(None, 6)
    assert not report["engines"][-1]["ok"]
    assert not report["works"]
