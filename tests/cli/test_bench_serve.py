"""`bench serve` against a real engine, from the command line to the JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="needs an engine")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


def bench(*arguments, logs):
    command = [sys.executable, "-c", "from speculators_ext.cli import app; app()", "bench", "serve"]
    command += [*arguments, "--log-dir", str(logs)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_plain_end_to_end(tmp_path):
    """Catches flags vLLM does not know, a server left running, and JSON mixed with progress."""
    result = bench(
        *("--model", "tiny-llama", "--methods", "plain", "--concurrency", "1,2"),
        *("--num-prompts", "3", "--max-tokens", "8", "--dtype", "float32", "--json", "-"),
        *("--chart", str(tmp_path / "chart.png")),
        logs=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [(r["method"], r["concurrency"], r["output_tokens"]) for r in rows] == [
        ("plain", 1, 24),
        ("plain", 2, 24),
    ]
    assert all(r["output_tok_s"] > 0 and r["speedup"] == 1.0 for r in rows)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plain.log").stat().st_size > 0


def test_server_that_cannot_start_is_one_line_and_exit_code_1(tmp_path):
    """Catches a page of traceback, or a wait for the time limit, where the engine said why."""
    result = bench(
        *("--model", "tiny-llama", "--methods", "plain", "--num-prompts", "1"),
        *("--extra-args", "--max-model-len 99999999"),
        logs=tmp_path,
    )
    assert result.returncode == 1
    first = next(line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert "vllm serve for 'plain' ended with code" in first
    assert "max_model_len" in first
    assert "Traceback" not in first
