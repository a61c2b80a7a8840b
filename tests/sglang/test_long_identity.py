"""The long proof of exactness on SGLang: many varied prompts on a real model, two concurrencies."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(7200)]

MAX_TOKENS = 32
TIE = 1e-4  # a wider batch rounds differently: where plain's two best logits tie, either is right
MODEL = "smollm2-135m-instruct"
# Fewer prompts for a quick look; the number below is the proof.
LIMIT = int(os.environ.get("SPECULATORS_EXT_PROOF_PROMPTS", "200"))
METHODS = {
    "CLASP": {
        "speculative_num_steps": 4,
        "method_config": {"num_skip_layers": 6, "adaptive": False, "refresh_interval": 8},
    },
}
REPORTS = Path("out")
PARAMS = {"temperature": 0, "max_new_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Chat prompts: the mixed set and HumanEval."""
    from transformers import AutoTokenizer

    from speculators_ext.assets import build
    from speculators_ext.cli.prompts import default_prompts

    tokenizer = AutoTokenizer.from_pretrained(build(MODEL))
    texts = [prompt.text for prompt in default_prompts()][:LIMIT]
    assert len(texts) == LIMIT
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in texts
    ]


@pytest.mark.parametrize("method", METHODS)
def test_same_text_as_plain_at_concurrency_1_and_4(engines, method, prompts):
    """Catches any wrong token: a stale KV slot, a wrong position, an unverified draft."""
    shared = {"context_length": 1024, "max_total_tokens": 8192}
    plain = engines.get(MODEL, **shared).generate(
        prompts, PARAMS, return_logprob=True, top_logprobs_num=2, logprob_start_len=-1
    )
    engine = engines.get(MODEL, speculative_algorithm=method, **METHODS[method], **shared)
    report: dict = {"method": method, "prompts": len(prompts), "concurrency": {}, "saved": 0}
    out = REPORTS / f"identity_sglang_{method.lower()}.json"
    out.parent.mkdir(exist_ok=True)
    for concurrency in (4, 1):
        answers = []
        for start in range(0, len(prompts), concurrency):
            answers += engine.generate(prompts[start : start + concurrency], PARAMS)
        report["concurrency"][concurrency] = compare(plain, answers)
        report["saved"] += sum(
            a["meta_info"]["completion_tokens"] - 1 - a["meta_info"]["spec_verify_ct"]
            for a in answers
        )
        out.write_text(json.dumps(report, indent=2))
    assert not any(found["wrong"] for found in report["concurrency"].values()), report
    assert report["saved"] > report["prompts"], "nothing was drafted, so nothing was proved"
    assert engine.do("used_tokens") == 0


def compare(plain: list[dict], answers: list[dict]) -> dict[str, list]:
    """Mismatches, split into ties (either token is right) and wrong tokens."""
    found: dict[str, list] = {"ties": [], "wrong": []}
    for index, (want, got) in enumerate(zip(plain, answers, strict=True)):
        wanted, ids = want["output_ids"], got["output_ids"]
        if wanted == ids:
            continue
        pairs = zip(wanted, ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(ids)))
        best = want["meta_info"]["output_top_logprobs"]
        margin = best[at][0][0] - best[at][1][0] if at < len(best) else 1.0
        found["ties" if margin <= TIE else "wrong"].append(
            {"prompt": index, "token": at, "margin": margin}
        )
    return found
