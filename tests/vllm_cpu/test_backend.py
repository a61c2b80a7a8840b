"""The `cpu` Triton backend acts where it should, and is gone where it should not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest

PROBE = """
import json, os, sys
import triton
from triton.backends import backends
from speculators_ext.engines.vllm.cpu import status
print("PROBE " + json.dumps({
    "backend": "cpu" in backends,
    "module": type(sys.modules["triton.backends"]).__name__,
    "driver_active": "cpu" in backends and backends["cpu"].driver.is_active(),
    "interpreted": type(triton.language.standard.cdiv).__name__ == "InterpretedFunction",
    "user_kernels": bool(triton.knobs.runtime.interpret),
    "active": status().active,
    "reason": status().reason,
}))
"""


def _probe(code: str = PROBE, **env: str) -> dict[str, object]:
    pytest.importorskip("triton")
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET",)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.rpartition("PROBE ")[2])


@pytest.fixture(scope="module")
def acting() -> dict[str, object]:
    found = _probe()
    if not found["active"]:
        pytest.skip(str(found["reason"]))
    return found


def test_backend_acts_before_the_first_kernel(acting):
    """Catches the interpreter switched on too late for Triton's own library functions."""
    assert acting["backend"]
    assert acting["driver_active"]
    assert acting["interpreted"]
    assert acting["user_kernels"]
    assert acting["module"] == "module"


@pytest.mark.parametrize(
    ("env", "word"),
    [
        ({"SPECULATORS_EXT_CPU_V2": "0"}, "SPECULATORS_EXT_CPU_V2=0"),
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"TRITON_INTERPRET": "0"}, "TRITON_INTERPRET=0"),
    ],
)
def test_backend_is_gone_when_refused(acting, env, word):
    """Catches an entry that stays in Triton's table, which vLLM takes for a working Triton."""
    found = _probe(**env)
    assert not found["backend"]
    assert not found["interpreted"]
    assert not found["active"]
    assert word in found["reason"]
    # The stand-in that removed the entry must have removed itself too.
    assert found["module"] == "module"


def _on(host: str) -> str:
    return (
        f"""
import pathlib
from speculators_ext.engines import devices
from speculators_ext.engines.vllm.cpu import host
{host}
"""
        + PROBE
    )


@pytest.mark.parametrize(
    ("host", "word"),
    [
        ("devices._NVIDIA_GLOBS = (('/dev', 'nul[l]'),)", "NVIDIA"),
        ("devices._NVIDIA_WSL_DRIVER = pathlib.Path('/dev/null')", "NVIDIA"),
        ("devices._AMD_COMPUTE_NODE = pathlib.Path('/dev/null')", "AMD"),
        ("host.version = lambda name: {'vllm': '0.32.0'}[name]", "not a CPU build"),
    ],
    ids=["nvidia", "nvidia-wsl", "amd", "gpu-build"],
)
def test_backend_is_gone_on_a_gpu_host(acting, host, word):
    """Catches a second active driver beside a GPU's, which stops Triton altogether."""
    found = _probe(_on(host))
    assert not found["backend"]
    assert not found["interpreted"]
    assert word in found["reason"]


def test_a_real_triton_cpu_wins(acting, tmp_path):
    """Catches our entry shadowing a working backend of the same name."""
    package = tmp_path / "real_triton_cpu"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "compiler.py").write_text(
        "from triton.backends.compiler import BaseBackend\n"
        "class RealCompiler(BaseBackend):\n"
        "    supports_target = staticmethod(lambda target: True)\n"
        + "".join(
            f"    def {n}(self, *a): ...\n"
            for n in ("hash", "parse_options", "add_stages", "load_dialects", "get_module_map")
        )
    )
    (package / "driver.py").write_text(
        "from triton.backends.driver import DriverBase\n"
        "class RealDriver(DriverBase):\n"
        "    is_active = classmethod(lambda cls: True)\n"
        + "".join(
            f"    def {n}(self, *a): ...\n"
            for n in (
                "map_python_to_cpp_type",
                "get_current_target",
                "get_active_torch_device",
                "get_benchmarker",
            )
        )
    )
    info = tmp_path / "real_triton_cpu-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: real-triton-cpu\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[triton.backends]\ncpu = real_triton_cpu\n")
    names = "\nprint('PROBE ' + json.dumps([backends['cpu'].driver.__name__, status().reason]))"
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    last = f"import sys; sys.path.append({str(tmp_path)!r})\n"
    for order in (first, last):
        driver, reason = _probe(order + PROBE + names)
        assert driver == "RealDriver"
        assert "real-triton-cpu 1.0" in reason


def test_the_entry_point_names_a_package_with_both_halves():
    """Catches a value Triton cannot import as VALUE.compiler and VALUE.driver."""
    entries = importlib.metadata.entry_points(group="triton.backends")
    ours = [e for e in entries if e.value.startswith("speculators_ext.")]
    assert [e.name for e in ours] in (["cpu"], ["cpu", "cpu"])
    for half in ("compiler", "driver"):
        assert importlib.util.find_spec(f"{ours[0].value}.{half}") is not None
