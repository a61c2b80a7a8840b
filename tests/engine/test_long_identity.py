"""The long proofs of exactness: hundreds of varied prompts on a real model, three concurrencies."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(7200)]

MAX_TOKENS = 32
TIE = 1e-4  # a wider batch rounds differently: where plain's two best logits tie, either is right
MODEL = "smollm2-135m-instruct"
# Fewer prompts for a quick look; the numbers below are the proof.
LIMIT = int(os.environ.get("SPECULATORS_EXT_PROOF_PROMPTS", "500"))
CASES = {
    "clasp": (
        200,
        {
            "num_speculative_tokens": 4,
            "method_config": {"num_skip_layers": 6, "adaptive": False, "refresh_interval": 8},
        },
    ),
    "eagle2": (
        500,
        {
            "model": f"{MODEL}-eagle3",
            "num_speculative_tokens": 12,
            "method_config": {"depth": 4, "topk": 4, "adaptive": False},
        },
    ),
}
REPORTS = Path("out")


def _engine(speculative_config: dict | None):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from vllm import LLM

    from speculators_ext.assets import build

    return LLM(
        str(build(MODEL)),
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


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Chat prompts: the mixed set and HumanEval first, then those asked in other words."""
    from transformers import AutoTokenizer

    from speculators_ext.assets import build
    from speculators_ext.cli.prompts import default_prompts

    tokenizer = AutoTokenizer.from_pretrained(build(MODEL))
    texts = [prompt.text for prompt in default_prompts()]
    texts += [f"In one sentence: {text}" for text in texts]
    texts += [f"{text}\n\nThink first, then answer." for text in texts]
    most = min(LIMIT, max(count for count, _ in CASES.values()))
    assert len(texts) >= most
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in texts[:most]
    ]


@pytest.fixture(scope="module")
def plain(prompts: list[str]) -> list:
    """Plain decoding's answers, with its two best logits at every position."""
    return _generate(_engine(None), prompts, 8, logprobs=2)


@pytest.mark.parametrize("method", CASES)
def test_same_text_as_plain_at_concurrency_1_4_and_8(
    method: str, prompts: list[str], plain: list
) -> None:
    """Catches any wrong token: a stale KV slot, a wrong position, an unverified draft."""
    from speculators_ext.assets import build

    count, config = CASES[method]
    if "model" in config:
        config = config | {"model": str(build(config["model"]))}
    llm = _engine({"method": method} | config)
    report: dict = {"method": method, "prompts": len(prompts[:count]), "concurrency": {}}
    out = REPORTS / f"identity_{method}.json"
    out.parent.mkdir(exist_ok=True)
    before = _accepted(llm)
    for concurrency in (8, 4, 1):
        drafted = _generate(llm, prompts[:count], concurrency, logprobs=None)
        report["concurrency"][concurrency] = _compare(plain[:count], drafted)
        report["accepted"] = _accepted(llm) - before
        out.write_text(json.dumps(report, indent=2))
    assert not any(found["wrong"] for found in report["concurrency"].values()), report
    assert report["accepted"] > report["prompts"], "nothing was drafted, so nothing was proved"


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
