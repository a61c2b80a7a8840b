"""What `eagle2` adds to a step, by requests and nodes: does it grow faster than the batch?

One engine with a tiny random model and a head made by rule drafts full trees (not adaptive), from 1
to 64 requests and 8 to 128 nodes a tree. What is measured does not depend on the target's size; the
draft head's own forwards, which do depend on the head's, stand apart, its output layer does not.
Counted as ours, in processor time of the engine's thread: all of `propose` around the head's
forwards (backlog, growth, host), the trees' positions and shapes for a step, their masks (built
once a step), acceptance, and the compaction of KV. Not counted: the target's forward over the
nodes, and vLLM's own scheduling and sampling, which verification by any method has.

    python benchmarks/eagle2_growth.py --json eagle2_growth.json --png eagle2_growth.png

With a real model it says which share of a step acceptance and rollback take:

    python benchmarks/eagle2_growth.py --target smollm2-135m-instruct \
        --head smollm2-135m-instruct-eagle3 --dtype bfloat16 --requests 64 --nodes 12 --depth 2
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated, Any

import typer
from eagle2_trees import Shape, Timer, mixed, reshape, runner_of
from rich.console import Console
from rich.table import Table

from speculators_ext.assets import build

console = Console()
OURS = ("propose", "shapes", "masks", "accept", "compact")
MAX_MODEL_LEN = 1024


def start(target: str, head: str, dtype: str, requests: int, shape: Shape) -> Any:
    """An engine for the largest trees and batches."""
    from vllm import LLM

    options = {"depth": shape.depth, "topk": shape.topk, "adaptive": False}
    return LLM(
        str(build(target)), dtype=dtype, enforce_eager=True, seed=0, max_num_seqs=requests,
        max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False,
        max_num_batched_tokens=max(4096, requests * (shape.nodes + 1)),
        speculative_config={
            "method": "eagle2", "model": str(build(head)),
            "num_speculative_tokens": shape.nodes, "method_config": options,
        },
    )  # fmt: skip


def watched(llm: Any) -> Timer:
    """Times every part; `extend` and `grow` lie within `propose`, `head` within both."""
    from speculators_ext.engines.vllm.trees import attention_cpu, sampler

    timer, runner = Timer(), runner_of(llm)
    speculator, state = runner.speculator, runner.model_state
    timer.watch(runner.model, "forward", "verify")
    timer.watch(speculator, "propose", "propose")
    timer.watch(speculator, "_extend", "extend")
    timer.watch(speculator, "grow", "grow")
    timer.watch(speculator.model, "forward", "head")
    timer.watch(state.trees, "begin", "shapes")
    timer.watch(state, "prepare_inputs", "shapes")
    timer.watch(attention_cpu.TreeCPUImpl, "_tree_bias", "masks")
    timer.watch(sampler, "accept_tree_ref", "accept")
    timer.watch(state, "compact", "compact")
    return timer


def said(outputs: list[Any]) -> int:
    """Tokens of all answers so far."""
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def measure(llm: Any, timer: Timer, requests: int, steps: int, tokens: int) -> dict[str, Any]:
    """Milliseconds of a step by part, over decoding steps with all requests running."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [prompt.text[:200] for prompt in mixed(requests)]
    for index in range(requests):
        engine.add_request(f"{time.monotonic()}-{index}", prompts[index % len(prompts)], params)
    while len(engine.step()) < requests:
        pass  # prompts
    before = said(engine.step())
    timer.seconds.clear()
    started = time.thread_time()
    for _ in range(steps):
        outputs = engine.step()
    whole = time.thread_time() - started
    made = said(outputs) - before
    engine.abort_request([output.request_id for output in outputs])
    while engine.has_unfinished_requests():
        engine.step()
    parts = {part: 1000 * seconds / steps for part, seconds in timer.seconds.items()}
    parts["propose"] -= parts["head"]
    ours = sum(parts.get(part, 0.0) for part in OURS)
    return {
        "milliseconds": {**{k: round(v, 3) for k, v in parts.items()}, "ours": round(ours, 3)},
        "step": round(1000 * whole / steps, 3),
        "tokens_per_step": round(made / steps / requests, 3),
        "accept_and_compact_share": round(
            (parts["accept"] + parts.get("compact", 0.0)) / (1000 * whole / steps), 5
        ),
    }


def exponent(rows: list[dict[str, Any]], key: str) -> float:
    """The power of ``key`` that the overhead grows with, from its smallest to its largest value."""
    small, large = (pick(row[key] for row in rows) for pick in (min, max))
    ends = [
        sum(row["milliseconds"]["ours"] for row in rows if row[key] == value)
        for value in (small, large)
    ]
    return math.log(ends[1] / ends[0]) / math.log(large / small)


def show(rows: list[dict[str, Any]]) -> None:
    """The parts of ``ours`` one by one are in the JSON; side by side they do not fit a terminal."""
    table = Table(
        "requests", "nodes", "extend + grow", "verify", "ours", "a node, µs", "accept + compact",
        title="ms a step",
    )  # fmt: skip
    for row in rows:
        ms = row["milliseconds"]
        table.add_row(
            str(row["requests"]), str(row["nodes"]), f"{ms['extend'] + ms['grow']:.1f}",
            f"{ms['verify']:.1f}", f"{ms['ours']:.2f}",
            f"{1000 * ms['ours'] / row['requests'] / row['nodes']:.1f}",
            f"{row['accept_and_compact_share']:.2%}",
        )  # fmt: skip
    console.print(table)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Overhead a step over requests, a line for each number of nodes, both axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for nodes in sorted({row["nodes"] for row in rows}):
        line = [row for row in rows if row["nodes"] == nodes]
        counts = [row["requests"] for row in line]
        axes.plot(counts, [row["milliseconds"]["ours"] for row in line], "o-", label=str(nodes))
    axes.set(xscale="log", yscale="log", xlabel="requests", ylabel="overhead a step, ms")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.grid(alpha=0.3)
    axes.legend(title="nodes a tree")
    figure.savefig(path, dpi=150)


def main(
    target: Annotated[str, typer.Option(help="An asset.")] = "tiny-llama",
    head: Annotated[str, typer.Option(help="An asset.")] = "tiny-llama-eagle3",
    requests: Annotated[str, typer.Option()] = "1,4,16,64",
    nodes: Annotated[str, typer.Option()] = "8,16,32,64,128",
    depth: Annotated[int, typer.Option()] = 4,
    topk: Annotated[int, typer.Option()] = 8,
    steps: Annotated[int, typer.Option(min=2, help="Steps measured a row.")] = 8,
    dtype: Annotated[str, typer.Option()] = "float32",
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    png_path: Annotated[Path | None, typer.Option("--png")] = None,
) -> None:
    """Measure every batch and tree, print a table, draw it."""
    import torch

    torch.set_num_threads(1)
    batches, sizes = ([int(n) for n in text.split(",")] for text in (requests, nodes))
    llm = start(target, head, dtype, max(batches), Shape(depth, topk, max(sizes)))
    speculator = runner_of(llm).speculator
    full, timer = speculator._options, watched(llm)
    rows = []
    for size in sizes:
        reshape(speculator, full, Shape(depth, topk, size))
        for count in batches:
            tokens = (steps + 8) * (depth + 1)
            measured = measure(llm, timer, count, steps, tokens)
            rows.append({"requests": count, "nodes": size, **measured})
    show(rows)
    growth = {key: round(exponent(rows, key), 2) for key in ("requests", "nodes")
              if len({row[key] for row in rows}) > 1}  # fmt: skip
    console.print("overhead grows with the power of", growth)
    if json_path is not None:
        settings = {
            "target": target, "head": head, "depth": depth, "topk": topk, "steps": steps,
            "dtype": dtype, "seconds": "processor time of the engine's thread",
        }  # fmt: skip
        result = {"settings": settings, "exponents": growth, "rows": rows}
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    if png_path is not None:
        draw(rows, png_path)


if __name__ == "__main__":
    typer.run(main)
