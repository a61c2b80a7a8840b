"""How fast the methods are on SmolLM2 beside plain decoding and vLLM's own chains, in turns.

All engines live in one process and answer the same prompts, a few prompts each before the next one
does: a machine that drifts weighs on all alike. So many requests are in flight all the time. The
head has seen none of the prompts. Seconds are processor time of the engines' thread. The first time
through the prompts holds the trials of `adaptive`, and what it learned counts in the later ones.

    python benchmarks/methods_in_turns.py --json methods_in_turns.json
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from itertools import count
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated, Any

import typer
from clasp_acceptance import chat, show
from rich.progress import track

from speculators_ext.assets import build
from speculators_ext.cli.prompts import own_prompts

MODEL = "smollm2-135m-instruct"
HEAD = f"{MODEL}-eagle3"
TREES: dict[str, Any] = {"method": "eagle2", "model": HEAD, "num_speculative_tokens": 12}
FULL = {"method_config": {"adaptive": False}}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "eagle3, 2": {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 2},
    "eagle3, 3": {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3},
    "eagle2": TREES,
    "eagle2, adaptive off": TREES | FULL,
    "clasp": {"method": "clasp", "num_speculative_tokens": 6},
}
MAX_REQUESTS = 16
_ids = count()


def start(config: dict[str, Any] | None, dtype: str) -> Any:
    """An engine in this process."""
    from vllm import LLM

    if config and "model" in config:
        config = config | {"model": str(build(config["model"]))}
    return LLM(
        str(build(MODEL)),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=MAX_REQUESTS,
        enable_prefix_caching=False,
        speculative_config=config,
    )


def seconds(engine: Any, prompts: list[str], max_tokens: int, requests: int) -> float:
    """Processor time for the prompts, ``requests`` of them in flight."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    waiting, running = list(reversed(prompts)), 0
    started = time.thread_time()
    while waiting or running:
        while waiting and running < requests:
            engine.llm_engine.add_request(str(next(_ids)), waiting.pop(), params)
            running += 1
        running -= sum(output.finished for output in engine.llm_engine.step())
    return time.thread_time() - started


def compare(
    engines: dict[str, Any], prompts: list[str], requests: int, max_tokens: int, turns: int
) -> list[dict[str, Any]]:
    """A row each variant: its speed relative to plain in the first turn and after it."""
    names, size = deque(engines), 2 * requests
    taken = {name: [0.0] * turns for name in names}
    parts = [(turn, at) for turn in range(turns) for at in range(0, len(prompts), size)]
    for turn, at in track(parts, f"{requests} in flight"):
        for name in names:
            part = prompts[at : at + size]
            taken[name][turn] += seconds(engines[name], part, max_tokens, requests)
        names.rotate()  # each follows another one
    plain = taken["plain"]
    return [
        {
            "variant": name,
            "requests": requests,
            "tokens_a_turn": len(prompts) * max_tokens,
            "tokens_a_second": len(prompts) * max_tokens * turns / sum(own),
            "first_turn": plain[0] / own[0],
            "later_turns": sum(plain[1:]) / sum(own[1:]),
            "all": sum(plain) / sum(own),
        }
        for name, own in taken.items()
    ]


def main(
    variants: Annotated[
        str, typer.Option(help=f"Separated by ';', of: {'; '.join(VARIANTS)}.")
    ] = ";".join(VARIANTS),
    requests: Annotated[str, typer.Option(help=f"Requests in flight, {MAX_REQUESTS} at most.")] = (
        "1,4,16"
    ),
    num_prompts: Annotated[int, typer.Option(help="Prompts a turn.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated a prompt.")] = 48,
    turns: Annotated[int, typer.Option(min=2, help="Turns each engine takes.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Measure the methods in turns, on SmolLM2."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = [name.strip() for name in variants.split(";")]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}; accepted: {'; '.join(VARIANTS)}")
    engines = {name: start(VARIANTS[name], dtype) for name in dict.fromkeys(["plain", *names])}
    prompts = chat(
        [prompt.text for prompt in own_prompts()][:num_prompts], engines["plain"].get_tokenizer()
    )
    rows = [
        row
        for number in requests.split(",")
        for row in compare(engines, prompts, int(number), max_tokens, turns)
    ]
    show(rows, f"Speed relative to plain, {MODEL}, {dtype}")
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
