"""Benchmarks of the tree kernels: the wrong is not timed, the interpreted claims nothing."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "kernels"


def shift(part: str) -> Any:
    """What spoils one field of a reference's result."""
    return lambda right: right._replace(**{part: getattr(right, part) + 1})


def no_number(right: torch.Tensor) -> torch.Tensor:
    return right * math.nan


def off_by_one(right: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return right[0] + 1, right[1]


# (script, the kernel it times, its reference or None, what spoils the reference's result)
WRONG = {
    "accept_block": ("accept_block", "accept_block_ref", shift("bonus")),
    "accept_drawn_tree": ("accept_drawn_tree", "accept_drawn_tree_ref", shift("path")),
    "accept_rollback_share": ("gather_rows", "gather_rows_ref", shift("positions")),
    "accept_tree": ("accept_tree", "accept_tree_ref", shift("num_accepted")),
    "compact_kv": ("compact_kv", None, None),
    "merge_attention": ("merge_attention", "merge_attention_ref", off_by_one),
    "gather_rows": ("gather_rows", "gather_rows_ref", shift("tokens")),
    "tree_attention": (
        "tree_attention",
        "tree_attention_paged_ref",
        lambda right: right * math.nan,
    ),
    "tree_attention_mla": (
        "tree_attention_mla",
        "tree_attention_mla_ref",
        lambda right: right * math.nan,
    ),
    "tree_build": ("expand_frontier", "expand_frontier_ref", shift("scores")),
    "tree_mask": ("build_tree_mask", "build_tree_mask_ref", shift("depths")),
}


def load(op: str) -> ModuleType:
    script = BENCHMARKS / f"bench_{op}.py"
    spec = importlib.util.spec_from_file_location(script.stem, script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("op", WRONG)
def test_a_wrong_kernel_is_not_timed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a benchmark that praises a fast kernel for garbage, or for doing nothing."""
    bench = load(op)
    kernel, reference, spoil = WRONG[op]

    def wrong(*args: Any, **call: Any) -> Any:
        return spoil(getattr(bench, reference)(*args, **call)) if reference else None

    monkeypatch.setattr(bench, kernel, wrong)
    monkeypatch.setattr(bench, "SHAPES", bench.SHAPES[:1])
    with pytest.raises(SystemExit, match="not timed"):
        bench.main(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="times the kernel too")
@pytest.mark.parametrize("op", WRONG)
def test_without_a_gpu_only_the_reference_claims_a_time(
    op: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches interpreter times published as the kernel's, and rows without provenance."""
    bench = load(op)
    monkeypatch.setattr(bench, "SHAPES", bench.SHAPES[:1])
    monkeypatch.setattr(bench.kernel_bench, "SECONDS", 0.0)
    bench.main(tmp_path / "rows.json")
    ref, kernel = json.loads((tmp_path / "rows.json").read_text())
    assert (ref["provider"], kernel["provider"]) == ("ref", "triton")
    assert ref["median_ms"] > 0
    assert "median_ms" not in kernel
    assert "not timed" in kernel["note"]
    assert {"gpu", "git", "torch", "triton"} <= ref.keys() & kernel.keys()


@pytest.mark.parametrize("kernel", ["accept_tree", "compact_kv", "gather_rows"])
def test_the_share_is_not_told_of_a_wrong_part(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a share of a step whose caches were not moved, or whose path is another."""
    bench = load("accept_rollback_share")
    ref = getattr(bench, f"{kernel}_ref")
    wrong = {"accept_tree": shift("num_accepted"), "gather_rows": shift("rows")}.get(kernel)
    spoiled = (lambda *call, **named: wrong(ref(*call, **named))) if wrong else lambda *call: None
    monkeypatch.setattr(bench, kernel, spoiled)
    monkeypatch.setattr(bench, "SHAPES", bench.SHAPES[:1])
    with pytest.raises(SystemExit, match="not timed"):
        bench.main(None)


def test_a_share_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a share of the rest of a step taken for one of the whole."""
    bench = load("accept_rollback_share")
    monkeypatch.setattr(bench.kernel_bench, "quantiles_ms", lambda call: {"median_ms": 1.0})
    trial = bench.kernel_bench.Trial(None, None, lambda: "", step_ms=99.0)
    rows = bench.kernel_bench.measure("op", bench.SHAPES[0], trial, check=False)
    assert {row["share_of_step"] for row in rows} == {0.01}
