"""Every supported architecture writes plain decoding's text; so do two ranks and torch.compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES = [
    "tiny-mistral",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-gemma2",
    "tiny-gemma3",
    "tiny-phi3",
    "tiny-mixtral",
    "tiny-qwen3-moe",
    "tiny-deepseek-v3",
]
# The long prompt and its answer run past every tiny model's window of 64 tokens.
PROMPTS = ["The capital of France is", "def fib(n):\n    return", "red green blue " * 14]
pytestmark = pytest.mark.engine


def greedy(max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def engine_for(model: str) -> dict[str, Any]:
    """Engine arguments; latent attention in fp32 needs vLLM's reference kernel on a CPU."""
    import torch

    if model != "tiny-deepseek-v3" or torch.cuda.is_available():
        return {"model": model}
    return {"model": model, "attention_config": {"backend": "CPU_MLA"}, "block_size": 16}


def check(twins: Any) -> dict[str, int]:
    """Same text; returns what was drafted and accepted."""
    before = twins.clasp.counters()
    got = twins.check(PROMPTS, greedy())
    assert len({token for output in got for token in output.outputs[0].token_ids}) > 20
    after = twins.clasp.counters()
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_same_text(make_twins: Any, model: str) -> None:
    """Catches a layer walk that misses an architecture's scale, norm, window, cap or router."""
    twins = make_twins({"num_skip_layers": 2}, alike=engine_for(model))
    count = check(twins)
    assert 0 < count["num_accepted_tokens"] < count["num_draft_tokens"]


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_with_nothing_skipped_every_draft_is_right(
    make_twins: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a walk that is not the model: verification alone would hide it as low acceptance."""
    twins = make_twins({"num_skip_layers": 2}, alike=engine_for(model))
    search = twins.clasp.speculator._search
    every = tuple(range(search._walk.num_units))
    monkeypatch.setattr(search, "groups", lambda names: [(every, list(range(len(names))))])
    count = check(twins)
    assert count["num_accepted_tokens"] == count["num_draft_tokens"]


@pytest.mark.parametrize("model", ["tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_half_layers(make_twins: Any, model: str) -> None:
    """Catches half-layers composed otherwise than the architecture composes them."""
    twins = make_twins({"num_skip_layers": 3, "skip_unit": "sublayer"}, alike={"model": model})
    count = check(twins)
    assert count["num_accepted_tokens"] > 0


def test_quantised_weights(make_twins: Any) -> None:
    """Catches a draft batch that quantised kernels cannot take."""
    check(make_twins({"num_skip_layers": 2}, alike={"model": "tiny-llama-w8a8"}))


SCRIPT = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, changes, prompts = json.loads(sys.argv[1])
    llm = LLM(model, dtype="float32", max_model_len=256, max_num_seqs=8, block_size=32,
              num_gpu_blocks_override=128, seed=0, disable_log_stats=False, **changes)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    accepted = counts.get("vllm:spec_decode_num_accepted_tokens", 0)
    print("ANSWER", json.dumps([[list(o.outputs[0].token_ids) for o in outputs], accepted]))
"""


def answer_of(folder: Path, model: str, **changes: Any) -> tuple[list[list[int]], int]:
    """What an engine in a process of its own says, and how many drafts it accepted."""
    from speculators_ext.assets import build

    script = folder / "answer.py"
    script.write_text(SCRIPT)
    job = json.dumps([str(build(model)), changes, PROMPTS])
    done = subprocess.run(
        [sys.executable, str(script), job],
        # vLLM binds no two ranks to the cores of one NUMA node by itself.
        env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, (done.stdout + done.stderr)[-3000:]
    tokens, accepted = json.loads(lines[-1].removeprefix("ANSWER "))
    return tokens, accepted


def clasp(**options: Any) -> dict[str, Any]:
    keys = {"num_skip_layers": 3, "adaptive": False, "refresh_interval": 2, "exit_threshold": 0.0}
    return {"method": "clasp", "num_speculative_tokens": 4, "method_config": keys | options}


@pytest.mark.parametrize(
    "adaptive",
    [False, pytest.param(True, marks=pytest.mark.full)],
    ids=["full depth", "adaptive"],
)
def test_two_ranks(plain: Any, tmp_path: Path, adaptive: bool) -> None:
    """Catches ranks that launch different layers or depths: a hang, or other text."""
    expected = [list(o.outputs[0].token_ids) for o in plain.remembered(PROMPTS, greedy())]
    got, accepted = answer_of(
        tmp_path,
        "tiny-llama",
        tensor_parallel_size=2,
        enforce_eager=True,
        speculative_config=clasp(adaptive=adaptive),
    )
    assert got == expected
    assert adaptive or accepted > 0


@pytest.mark.parametrize(
    "adaptive",
    [False, pytest.param(True, marks=pytest.mark.full)],
    ids=["full trees", "adaptive"],
)
def test_two_ranks_with_trees(plain: Any, tmp_path: Path, adaptive: bool) -> None:
    """Catches ranks that grow, accept or compact differently: a hang, or other text."""
    from speculators_ext.assets import build

    expected = [list(o.outputs[0].token_ids) for o in plain.remembered(PROMPTS, greedy())]
    got, accepted = answer_of(
        tmp_path,
        "tiny-llama",
        tensor_parallel_size=2,
        enforce_eager=True,
        speculative_config={
            "method": "eagle2",
            "model": str(build("tiny-llama-eagle3")),
            "num_speculative_tokens": 12,
            "method_config": {"depth": 4, "topk": 3, "adaptive": adaptive},
        },
    )
    assert got == expected
    assert adaptive or accepted > 0


@pytest.mark.full
def test_compiled(plain: Any, tmp_path: Path) -> None:
    """Catches layers that cannot be called by themselves once vLLM has compiled the model."""
    expected = [list(o.outputs[0].token_ids) for o in plain.remembered(PROMPTS, greedy())]
    got, accepted = answer_of(tmp_path, "tiny-llama", speculative_config=clasp())
    assert got == expected
    assert accepted > 0
