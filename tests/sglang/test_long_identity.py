"""The long proof of exactness on SGLang: many varied prompts on a real model, two concurrencies.

REASONING_STEP solves sums, with the judge that lets nothing pass.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from speculators_ext.assets import build

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(7200)]

TIE = 1e-4  # a wider batch rounds differently: where plain's two best logits tie, either is right
SMOLLM2, MIMO, STEPS = "smollm2-135m-instruct", "mimo-tiny-mtp", "steps-target-tiny"
# Fewer prompts or tokens for a quick look; the numbers below are the proof.
LIMIT = int(os.environ.get("SPECULATORS_EXT_PROOF_PROMPTS", "200"))
MAX_TOKENS = int(os.environ.get("SPECULATORS_EXT_PROOF_TOKENS", "24"))
METHODS: dict[str, dict[str, Any]] = {
    "CLASP": {
        "model": SMOLLM2,
        "speculative_num_steps": 4,
        "method_config": {"num_skip_layers": 6, "adaptive": False, "refresh_interval": 8},
    },
    "EAGLE2": {
        "model": SMOLLM2,
        "speculative_draft_model_path": f"{SMOLLM2}-eagle3",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 9,
        "method_config": {"adaptive": False},
    },
    "MTP_REUSE": {
        "model": MIMO,
        "speculative_num_steps": 4,
        "method_config": {"adaptive": False},
    },
    "REASONING_STEP": {
        "model": STEPS,
        "speculative_draft_model_path": "steps-draft-tiny",
        "speculative_num_steps": 24,
        "method_config": {"lossy": True, "judge": "exact", "delimiter": "\n"},
    },
}
WRITTEN = {MIMO: "prompts.jsonl", STEPS: "problems.jsonl"}
SHARED = {"context_length": 1024, "max_total_tokens": 8192}
REPORTS = Path("out")
CHEAP = {STEPS: 4}  # so many times as many tokens; a step is to end within them


def params(model: str) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": MAX_TOKENS * CHEAP.get(model, 1)}


def some_texts(model: str) -> list[str]:
    """Prompts as the model wants them: the mixed set and HumanEval, or its own."""
    from transformers import AutoTokenizer

    from speculators_ext.cli.prompts import default_prompts, load_prompts

    own = build(model) / WRITTEN[model] if model in WRITTEN else None
    found = load_prompts(own) if own else default_prompts()
    texts = [prompt.text for prompt in found][:LIMIT]
    assert len(texts) == LIMIT
    if own:
        return texts
    tokenizer = AutoTokenizer.from_pretrained(build(model))
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in texts
    ]


@pytest.fixture(scope="module")
def plain(engines) -> Callable[[str], tuple[list[str], list[dict]]]:
    """A model's prompts and stock SGLang's answers, asked once."""
    known: dict[str, tuple[list[str], list[dict]]] = {}

    def of(model: str) -> tuple[list[str], list[dict]]:
        if model not in known:
            prompts = some_texts(model)
            answers = engines.get(model, **SHARED).generate(
                prompts,
                params(model),
                return_logprob=True,
                top_logprobs_num=2,
                logprob_start_len=-1,
            )
            known[model] = prompts, answers
        return known[model]

    return of


@pytest.mark.parametrize("method", METHODS)
def test_same_text_as_plain_at_concurrency_1_and_4(engines, plain, method):
    """Catches any wrong token: a stale KV slot, a wrong position, an unverified draft."""
    options = METHODS[method] | SHARED
    asked = params(options["model"])
    prompts, wanted = plain(options["model"])
    if "speculative_draft_model_path" in options:
        options["speculative_draft_model_path"] = str(
            build(options["speculative_draft_model_path"])
        )
    engine = engines.get(speculative_algorithm=method, **options)
    report: dict = {"method": method, "prompts": len(prompts)}
    report |= {"max_tokens": asked["max_new_tokens"], "concurrency": {}, "saved": 0}
    out = REPORTS / f"identity_sglang_{method.lower()}.json"
    out.parent.mkdir(exist_ok=True)
    for concurrency in (1, 4):
        answers = []
        for start in range(0, len(prompts), concurrency):
            answers += engine.generate(prompts[start : start + concurrency], asked)
        report["concurrency"][concurrency] = compare(wanted, answers)
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
