"""The long proofs of exactness: hundreds of varied prompts on a trained model, three concurrencies.

``clasp`` and ``eagle2`` answer chat questions on SmolLM2, ``mtp_reuse`` continues code on a tiny
DeepSeek-V3 (latent attention, experts) with an MTP module, and ``reasoning_step`` with the judge
that lets nothing pass begins the solutions of sums, or answers chat questions with steps that
SmolLM2 writes itself.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(0)]

MAX_TOKENS = 32
TIE = 1e-4  # a wider batch rounds differently: where plain's two best logits tie, either is right
SMOLLM2, DEEPSEEK = "smollm2-135m-instruct", "deepseek-v3-tiny-mtp"
STEPS = "steps-target-tiny"
# Fewer prompts for a quick look; the numbers below are the proof.
LIMIT = int(os.environ.get("SPECULATORS_EXT_PROOF_PROMPTS", "500"))
CONCURRENCY = [int(n) for n in os.environ.get("SPECULATORS_EXT_PROOF_REQUESTS", "8,4,1").split(",")]
CASES = {
    "clasp": (
        SMOLLM2,
        200,
        {
            "num_speculative_tokens": 4,
            "method_config": {"num_skip_layers": 6, "adaptive": False, "refresh_interval": 8},
        },
    ),
    "eagle2": (
        SMOLLM2,
        500,
        {
            "model": f"{SMOLLM2}-eagle3",
            "num_speculative_tokens": 12,
            "method_config": {"depth": 4, "topk": 4, "adaptive": False},
        },
    ),
    "mtp_reuse": (
        DEEPSEEK,
        300,
        {"num_speculative_tokens": 4, "method_config": {"adaptive": False}},
    ),
    "reasoning_step": (
        STEPS,
        200,
        {
            "model": "steps-draft-tiny",
            "num_speculative_tokens": 24,
            "method_config": {"lossy": True, "judge": "exact", "delimiter": "\n"},
        },
    ),
    "reasoning_step alone": (
        SMOLLM2,
        200,
        {
            "num_speculative_tokens": 24,
            "method_config": {"lossy": True, "judge": "exact", "delimiter": "."},
        },
    ),
}
WRITTEN = {DEEPSEEK: "prompts.jsonl", STEPS: "problems.jsonl"}
REPORTS = Path("out")


def _engine(model: str, speculative_config: dict | None):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from vllm import LLM

    from speculators_ext.assets import build

    # Latent attention in fp32 needs vLLM's reference kernel on a CPU.
    latent = {"attention_config": {"backend": "CPU_MLA"}, "block_size": 16}
    return LLM(
        str(build(model)),
        **(latent if model == DEEPSEEK else {}),
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


def _prompts(model: str) -> list[str]:
    """Chat prompts: the mixed set and HumanEval first, then those asked in other words; or the
    model's own.
    """
    from transformers import AutoTokenizer

    from speculators_ext.assets import build
    from speculators_ext.cli.prompts import default_prompts, load_prompts

    if model in WRITTEN:
        return [prompt.text for prompt in load_prompts(build(model) / WRITTEN[model])]
    tokenizer = AutoTokenizer.from_pretrained(build(model))
    texts = [prompt.text for prompt in default_prompts()]
    texts += [f"In one sentence: {text}" for text in texts]
    texts += [f"{text}\n\nThink first, then answer." for text in texts]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in texts
    ]


@pytest.fixture(scope="module")
def plain() -> Callable[[str, int], tuple[list[str], list]]:
    """`plain(model, count)`: prompts, and plain decoding's answers with its two best logits."""
    known: dict[str, tuple[list[str], list]] = {}

    def answer(model: str, count: int) -> tuple[list[str], list]:
        if model not in known:
            most = max(own for target, own, _ in CASES.values() if target == model)
            prompts = _prompts(model)[: min(LIMIT, most)]
            assert len(prompts) == min(LIMIT, most)
            known[model] = prompts, _generate(_engine(model, None), prompts, 8, logprobs=2)
        return tuple(part[:count] for part in known[model])

    return answer


@pytest.mark.parametrize("case", CASES)
def test_same_text_as_plain_at_concurrency_1_4_and_8(case: str, plain: Callable) -> None:
    """Catches any wrong token: a stale KV slot, a wrong position, an unverified draft."""
    from speculators_ext.assets import build

    model, count, config = CASES[case]
    method = case.partition(" ")[0]
    if "model" in config:
        config = config | {"model": str(build(config["model"]))}
    prompts, expected = plain(model, count)
    llm = _engine(model, {"method": method} | config)
    report: dict = {"method": case, "model": model, "prompts": len(prompts), "concurrency": {}}
    out = REPORTS / f"identity_{case.replace(' ', '_')}.json"
    out.parent.mkdir(exist_ok=True)
    before = _accepted(llm)
    for concurrency in CONCURRENCY:
        drafted = _generate(llm, prompts, concurrency, logprobs=None)
        report["concurrency"][concurrency] = _compare(expected, drafted)
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
