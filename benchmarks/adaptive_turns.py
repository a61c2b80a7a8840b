"""What `adaptive` costs where drafting does not pay: a method against plain decoding, in turns.

Two engines in one process answer the same prompts by turns, so that a machine that drifts by a few
per cent in minutes weighs on both alike. The first turn of each method holds its trials.

    python benchmarks/adaptive_turns.py --json adaptive_turns.json
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated, Any

import typer
from clasp_acceptance import chat, show
from rich.progress import track

from speculators_ext.assets import build
from speculators_ext.cli.prompts import default_prompts

MODEL = "smollm2-135m-instruct"
METHODS: dict[str, dict[str, Any]] = {
    "clasp": {"num_speculative_tokens": 6},
    "eagle2": {"num_speculative_tokens": 8, "model": f"{MODEL}-eagle3"},
}


def start(method: str | None, dtype: str) -> Any:
    """An engine in this process, plain or with a method and its preset."""
    from vllm import LLM

    config = None
    if method is not None:
        config = {"method": method} | METHODS[method]
        if "model" in config:
            config["model"] = str(build(config["model"]))
    return LLM(
        str(build(MODEL)),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=16,
        enable_prefix_caching=False,
        speculative_config=config,
    )


def seconds(engine: Any, prompts: list[str], max_tokens: int, requests: int) -> float:
    """Wall time of one turn."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    for first in range(0, len(prompts), requests):
        engine.generate(prompts[first : first + requests], params, use_tqdm=False)
    return time.perf_counter() - started


def compare(
    engines: dict[str, Any], prompts: list[str], requests: int, max_tokens: int, turns: int
) -> list[dict[str, Any]]:
    """One row a method: its speed relative to plain in the first turn, and after it."""
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for _ in track(range(turns), f"{requests} at once"):
        for name, engine in engines.items():
            taken[name].append(seconds(engine, prompts, max_tokens, requests))
    plain = taken.pop("plain")
    return [
        {
            "method": name,
            "requests": requests,
            "tokens_a_turn": len(prompts) * max_tokens,
            "first_turn": plain[0] / own[0],
            "later_turns": statistics.median(
                a / b for a, b in zip(plain[1:], own[1:], strict=True)
            ),
            "all": sum(plain) / sum(own),
        }
        for name, own in taken.items()
    ]


def main(
    methods: Annotated[str, typer.Option(help="Comma-separated methods of ours.")] = "clasp,eagle2",
    requests: Annotated[str, typer.Option(help="Requests at a time (16 at most).")] = "1,4,16",
    num_prompts: Annotated[int, typer.Option(help="Prompts a turn.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated a prompt.")] = 64,
    turns: Annotated[int, typer.Option(min=2, help="Turns each engine takes.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Measure methods with `adaptive` on against plain decoding, on SmolLM2."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    engines = {"plain": start(None, dtype)}
    engines |= {method: start(method, dtype) for method in methods.split(",")}
    texts = [prompt.text for prompt in default_prompts()][:num_prompts]
    prompts = chat(texts, engines["plain"].get_tokenizer())
    rows = [
        row
        for count in requests.split(",")
        for row in compare(engines, prompts, int(count), max_tokens, turns)
    ]
    show(rows, f"Speed relative to plain, adaptive on, {MODEL}, {dtype}")
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    typer.run(main)
