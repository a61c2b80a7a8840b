"""The server a person starts: the documented command, a request over HTTP, the text of plain."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from speculators_ext.assets import build
from speculators_ext.assets.tiny_steps import load_problems
from speculators_ext.cli.metrics import parse_metrics
from speculators_ext.proposers.reasoning_step import COUNTER_MEANINGS

pytestmark = pytest.mark.engine

PROMPTS = [[9, 30, 31, 40, 41], [12], [200, 7, 7, 31, 90, 91, 92], [55, 60, 65]]
COUNT = 24
PARAMS = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
CHAIN = ("--speculative-num-steps", "4")
SERVED = {
    "CLASP": ("tiny-llama", CHAIN, {"num_skip_layers": 2, "adaptive": False}),
    "EAGLE2": ("tiny-llama", ("--speculative-num-draft-tokens", "9"), {"adaptive": False}),
    "MTP_REUSE": ("mimo-tiny-mtp", CHAIN, {"adaptive": False}),
    "REASONING_STEP": (
        "steps-target-tiny",
        ("--speculative-num-steps", "24", "--enable-metrics"),
        # A digit is never 10, so nothing passes.
        {"lossy": True, "judge": "score", "threshold": 10, "delimiter": "\n"},
    ),
}
DRAFTS = {"EAGLE2": "tiny-llama-eagle3", "REASONING_STEP": "steps-draft-tiny"}


@pytest.fixture(params=SERVED)
def served(request: pytest.FixtureRequest) -> str:
    """The algorithm that the server is started with."""
    return request.param


@pytest.fixture
def server(served, tmp_path, monkeypatch):
    """The URL of `python -m sglang.launch_server`, in the environment we print."""
    monkeypatch.delenv("TRITON_INTERPRET")
    model, drafts, config = SERVED[served]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        *(sys.executable, "-m", "sglang.launch_server", "--port", str(port)),
        *("--model-path", str(build(model)), "--dtype", "float32", "--device", "cpu"),
        *("--attention-backend", "torch_native", "--max-total-tokens", "2048"),
        *("--speculative-algorithm", served, *drafts),
        *("--speculative-method-config", json.dumps(config)),
    ]
    if served in DRAFTS:
        words += ["--speculative-draft-model-path", str(build(DRAFTS[served]))]
    command = Path(sys.executable).with_name("speculators-ext")
    switch_on = f'eval "$({command} sglang-cpu-env)" && exec "$@"'
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE")}
    log = tmp_path / "server.log"
    process = subprocess.Popen(
        ["sh", "-c", switch_on, "sh", *words],
        env=env, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield wait_for(f"http://127.0.0.1:{port}", process, log)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def wait_for(url: str, process: subprocess.Popen, log) -> str:
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
        except (urllib.error.URLError, OSError):
            time.sleep(1)
        else:
            return url
    raise AssertionError("\n".join(log.read_text().splitlines()[-30:]))


def ask(server: str, prompts: list[list[int]]) -> list[dict]:
    body = json.dumps({"input_ids": prompts, "sampling_params": PARAMS}).encode()
    request = urllib.request.Request(
        f"{server}/generate", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def test_the_documented_command_serves_plain_text(engines, served, server):
    """Catches a flag or an environment that works in tests and nowhere else."""
    prompts = problems() if served == "REASONING_STEP" else PROMPTS
    plain = engines.plain(prompts, PARAMS, model=SERVED[served][0])
    answers = ask(server, prompts)
    assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in plain]
    assert sum(a["meta_info"]["spec_verify_ct"] for a in answers) < (COUNT - 1) * len(prompts)
    if served == "REASONING_STEP":
        check_page(server)


def problems() -> list[list[int]]:
    """Sums to solve, as ids."""
    from transformers import AutoTokenizer

    folder = build("steps-target-tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.encode(problem.text) for problem in load_problems(folder)[:8]]


def check_page(server: str) -> None:
    """Catches counters that stay in the engine's process, or that bench does not find."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=30) as response:
        page = response.read().decode()
    assert "sglang:" in page
    steps = parse_metrics(page).steps
    assert steps.keys() == COUNTER_MEANINGS.keys()
    assert steps["drafted"] >= steps["judged"] == steps["refused"] > 0
    assert steps["verify_forwards"] >= steps["judge_forwards"] > 0
    assert steps["judge_seconds"] > 0
