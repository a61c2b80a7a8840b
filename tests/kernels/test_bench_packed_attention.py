from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels" / "bench_packed_attention.py"


@pytest.fixture
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_wrong_kernel_is_not_timed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a benchmark that praises a fast kernel for garbage, NaN included."""
    right = bench.packed_attention_paged_ref
    monkeypatch.setattr(bench, "packed_attention", lambda **call: right(**call) * torch.nan)
    with pytest.raises(SystemExit, match="not timed"):
        bench.measure(bench.SHAPES[0], torch.float32, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="would time every shape")
def test_without_a_gpu_nothing_claims_a_time(bench: ModuleType, tmp_path: Path) -> None:
    """Catches interpreter times published as the kernel's, and rows without provenance."""
    bench.main(tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["provider"] for row in rows] == ["ref", "triton"]
    for row in rows:
        assert "median_ms" not in row
        assert "not timed" in row["note"]
        assert {"gpu", "git", "torch", "triton"} <= row.keys()
