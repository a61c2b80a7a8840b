"""The long proof of exactness: 200 varied prompts on a real model, at three concurrencies."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(7200)]

NUM_PROMPTS = int(os.environ.get("SPECULATORS_EXT_PROOF_PROMPTS", "200"))
MAX_TOKENS = 32
TIE = 1e-4  # a wider batch rounds differently: where plain's two best logits tie, either is right
REPORT = Path("out/two_hundred_prompts.json")


def _engine(speculative_config: dict | None):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from vllm import LLM

    from speculators_ext.assets import build

    return LLM(
        str(build("smollm2-135m-instruct")),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        speculative_config=speculative_config,
        disable_log_stats=False,
    )


def _generate(llm, prompts: list[str], concurrency: int, logprobs: int | None):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=logprobs)
    outputs = []
    for start in range(0, len(prompts), concurrency):
        outputs += llm.generate(prompts[start : start + concurrency], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def _margin(plain, position: int) -> float:
    """Distance between plain decoding's two best tokens at ``position``, in nats."""
    best = sorted((p.logprob for p in plain.logprobs[position].values()), reverse=True)
    return best[0] - best[1]


def test_same_text_as_plain_at_concurrency_1_4_and_8():
    """Catches any wrong token: a stale KV slot, a wrong position, an unverified draft."""
    from speculators_ext.cli.prompts import default_prompts

    llm = _engine(None)
    tokenizer = llm.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
        )
        for prompt in default_prompts()[:NUM_PROMPTS]
    ]
    assert len(prompts) == NUM_PROMPTS
    plain = _generate(llm, prompts, 8, logprobs=2)
    del llm
    llm = _engine(
        {
            "method": "clasp",
            "num_speculative_tokens": 4,
            "method_config": {"num_skip_layers": 6, "adaptive": False, "refresh_interval": 8},
        }
    )
    report: dict = {"prompts": NUM_PROMPTS, "concurrency": {}}
    REPORT.parent.mkdir(exist_ok=True)
    for concurrency in (8, 4, 1):
        report["concurrency"][concurrency] = _compare(
            plain, _generate(llm, prompts, concurrency, logprobs=None)
        )
        report["accepted"] = _accepted(llm)
        REPORT.write_text(json.dumps(report, indent=2))
    assert not any(found["wrong"] for found in report["concurrency"].values()), report
    assert report["accepted"] > NUM_PROMPTS, "nothing was drafted, so nothing was proved"


def _accepted(llm) -> int:
    return sum(m.value for m in llm.get_metrics() if m.name.endswith("accepted_tokens"))


def _compare(plain: list, drafted: list) -> dict[str, list]:
    """Mismatches, split into ties (either token is right) and wrong tokens."""
    found: dict[str, list] = {"ties": [], "wrong": []}
    for index, (want, got) in enumerate(zip(plain, drafted, strict=True)):
        if list(want.token_ids) == list(got.token_ids):
            continue
        pairs = zip(want.token_ids, got.token_ids, strict=False)
        at = next(i for i, (a, b) in enumerate(pairs) if a != b)
        case = {"prompt": index, "token": at, "margin": _margin(want, at)}
        found["ties" if case["margin"] <= TIE else "wrong"].append(case)
    return found
