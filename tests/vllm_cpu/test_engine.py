"""A real engine in a process of its own: which model runner it takes, and what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=128, dtype="float32", max_num_seqs=4)
base = dict(max_tokens=8, ignore_eos=True)
cases = [
    dict(temperature=0.0),
    dict(temperature=0.0, logprobs=2, prompt_logprobs=1),
    dict(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4),
    dict(temperature=0.0, logit_bias={7: 3.0}, min_tokens=3, bad_words=["a"]),
    dict(temperature=1.0, seed=11, top_k=20, top_p=0.9),
    dict(temperature=0.8, seed=12, min_p=0.05),
]
prompts = [{"prompt_token_ids": [1, 5, 9, 20, 5, 9]}, {"prompt_token_ids": [1, 7, 7, 8] * 5}]
out = []
for _ in range(2):
    for case in cases:
        done = llm.generate(prompts, SamplingParams(**base, **case), use_tqdm=False)
        out.append([list(d.outputs[0].token_ids) for d in done])
print("TOKENS " + json.dumps(out))
"""


def _generate(switch: str) -> tuple[list, str]:
    pytest.importorskip("vllm")
    from speculators_ext.assets import build
    from speculators_ext.engines.vllm.cpu import status

    if not status().active:
        pytest.skip(status().reason)
    env = {
        **os.environ,
        "SPECULATORS_EXT_CPU_V2": switch,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Two OpenMP threads that spin for one busy core take minutes over these few tokens.
        "OMP_NUM_THREADS": "1",
    }
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(build("tiny-llama"))],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    return json.loads(done.stdout.rpartition("TOKENS ")[2].splitlines()[0]), log


def test_v2_runs_by_installation_and_v1_when_switched_off():
    """Catches a stock vLLM left on V1, a switch that is ignored, V2 text unlike V1's.

    Runs both in turn: greedy text must not depend on the runner, and a seeded request must
    repeat itself within V2 (V1 draws from another generator).
    """
    v2, v2_log = _generate("1")
    assert "Using V2 Model Runner" in v2_log
    assert "Triton kernels run as Numba" in v2_log
    assert "stays interpreted" not in v2_log
    v1, v1_log = _generate("0")
    assert "Using V2 Model Runner" not in v1_log
    cases = len(v2) // 2
    assert v2[:4] == v1[:4]
    assert v2[:cases] == v2[cases:]
