"""How fast `eagle2` is by the shape of its trees, and where the time of a step goes.

Two engines on SmolLM2 in one process, plain and `eagle2`, take turns over the same prompts (the
package's mixed set, none of which the head has seen), a tree shape after the other; plain is run
again beside every shape, since the machine drifts. Drafting is not adaptive: every round drafts the
whole shape.

    python benchmarks/eagle2_trees.py --shapes 1x4x4,2x6x8,3x4x8 --json eagle2_trees.json

A shape is depth x topk x nodes. Seconds are processor time of the engine's thread.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from speculators_ext.assets import build
from speculators_ext.cli.prompts import Prompt, own_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

console = Console()
TARGET, HEAD = "smollm2-135m-instruct", "smollm2-135m-instruct-eagle3"
PARTS = ("verify", "sample", "accept", "compact", "extend", "grow")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's thread is ours to time
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


class Shape(NamedTuple):
    """A tree: levels, nodes a level grows from and children of each, nodes verified."""

    depth: int
    topk: int
    nodes: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``2x6x8``."""
        return cls(*map(int, text.split("x")))


class Timer:
    """Seconds spent in some calls, by part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps = 0

    def watch(self, holder: Any, name: str, part: str, *, step: bool = False) -> None:
        """Time every call of ``holder.name``."""
        call: Callable[..., Any] = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[part] += time.thread_time() - started
                self.steps += step

        setattr(holder, name, timed)


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner


def watched(llm: Any) -> Timer:
    from speculators_ext.engines.vllm.trees import sampler

    timer, runner = Timer(), runner_of(llm)
    timer.watch(runner.model, "forward", "verify")
    timer.watch(runner, "sample", "sample")
    timer.watch(sampler, "accept_tree_ref", "accept")
    timer.watch(runner.model_state, "compact", "compact")
    timer.watch(runner.speculator, "_extend", "extend")
    timer.watch(runner.speculator, "grow", "grow")
    timer.watch(runner, "execute_model", "execute", step=True)
    return timer


def start(dtype: str, eager: bool, speculative: dict[str, Any] | None) -> Any:
    from vllm import LLM

    return LLM(
        str(build(TARGET)), dtype=dtype, enforce_eager=eager, max_model_len=1024, max_num_seqs=16,
        seed=0, speculative_config=speculative,
    )  # fmt: skip


def mixed(count: int) -> list[Prompt]:
    """The first of each category, then the second of each, and so on."""
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in own_prompts():
        by_category[prompt.category].append(prompt)
    rounds = zip(*by_category.values(), strict=True)
    return [prompt for one_of_each in rounds for prompt in one_of_each][:count]


def reshape(speculator: Any, options: Any, shape: Shape) -> None:
    """Let an engine that was started for the largest shape grow this one."""
    speculator._options = options.model_copy(update={"depth": shape.depth, "topk": shape.topk})
    speculator._clock._max_depth = shape.depth
    speculator.num_speculative_steps = shape.nodes


def groups(texts: list[str], size: int) -> Iterator[list[list[dict[str, str]]]]:
    for at in range(0, len(texts), size):
        yield [[{"role": "user", "content": text}] for text in texts[at : at + size]]


def run(llm: Any, chats: Any, params: Any) -> tuple[int, float]:
    """Tokens made, and seconds."""
    started = time.thread_time()
    outputs = llm.chat(chats, params, use_tqdm=False)
    seconds = time.thread_time() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs), seconds


def measure(
    plain: Any, spec: Any, timer: Timer, texts: list[str], requests: int, params: Any
) -> dict[str, Any]:
    timer.seconds.clear()
    timer.steps = 0
    totals = {"plain": [0, 0.0], "eagle2": [0, 0.0]}
    for chats in groups(texts, requests):
        for name, llm in (("plain", plain), ("eagle2", spec)):
            tokens, seconds = run(llm, chats, params)
            totals[name][0] += tokens
            totals[name][1] += seconds
    speed = {name: tokens / seconds for name, (tokens, seconds) in totals.items()}
    parts = {part: 1000 * timer.seconds[part] / timer.steps for part in PARTS}
    parts["sample"] -= parts["accept"]
    whole = 1000 * totals["eagle2"][1] / timer.steps
    return {
        "plain_tokens_per_second": round(speed["plain"], 2),
        "eagle2_tokens_per_second": round(speed["eagle2"], 2),
        "relative": round(speed["eagle2"] / speed["plain"], 3),
        "tokens_per_step": round(totals["eagle2"][0] / timer.steps / requests, 3),
        "milliseconds_per_step": {
            **{part: round(value, 2) for part, value in parts.items()},
            "host": round(whole - sum(parts.values()), 2),
            "all": round(whole, 2),
        },
    }


def main(
    shapes: Annotated[str, typer.Option()] = "1x4x4,2x4x8,2x6x8,3x4x8,4x4x12",
    head: Annotated[str, typer.Option(help="A folder, or the asset.")] = HEAD,
    requests: Annotated[int, typer.Option(help="Prompts at once.")] = 1,
    num_prompts: Annotated[int, typer.Option()] = 12,
    max_tokens: Annotated[int, typer.Option()] = 64,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    eager: Annotated[bool, typer.Option()] = True,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure every shape and print a table."""
    import torch
    from vllm import SamplingParams

    torch.set_num_threads(1)
    wanted = [Shape.parse(text) for text in shapes.split(",")]
    folder = str(build(HEAD)) if head == HEAD else head
    largest = Shape(*(max(sizes) for sizes in zip(*wanted, strict=True)))
    options = {"depth": largest.depth, "topk": largest.topk, "adaptive": False}
    config = {"method": "eagle2", "model": folder, "num_speculative_tokens": largest.nodes}
    plain = start(dtype, eager, None)
    spec = start(dtype, eager, {**config, "method_config": options})
    speculator = runner_of(spec).speculator
    full, timer = speculator._options, watched(spec)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    texts = [prompt.text for prompt in mixed(num_prompts)]
    for llm in (plain, spec):
        run(llm, next(groups(texts, requests)), params)
    rows = {}
    for shape in wanted:
        reshape(speculator, full, shape)
        name = "x".join(map(str, shape))
        rows[name] = measure(plain, spec, timer, texts, requests, params)
        console.print(name, rows[name])
    show(rows)
    if json_path is not None:
        settings = {
            "requests": requests, "prompts": len(texts), "max_tokens": max_tokens, "dtype": dtype,
            "eager": eager, "seconds": "processor time of the engine's thread",
        }  # fmt: skip
        json_path.write_text(json.dumps({"settings": settings, "shapes": rows}, indent=2) + "\n")


def show(rows: dict[str, Any]) -> None:
    """A row a shape; the parts of a step in ms, those of the host and of acceptance together."""
    table = Table("shape", "x plain", "tokens", "verify", "sample", "draft", "host", "all")
    for name, row in rows.items():
        ms = row["milliseconds_per_step"]
        host = ms["host"] + ms["accept"] + ms["compact"]
        parts = ms["verify"], ms["sample"], ms["extend"] + ms["grow"], host, ms["all"]
        table.add_row(
            name, f"{row['relative']:.2f}", f"{row['tokens_per_step']:.2f}",
            *(f"{part:.1f}" for part in parts),
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
