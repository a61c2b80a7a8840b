"""What a judge buys and costs: right answers, target forwards, tokens a second, by its threshold.

Solves held-out problems of the package's world of checkable steps with the plain target, the
plain small model, token-level speculation (vLLM's own `draft_model`) and `reasoning_step` with
every judge over its thresholds. All variants live in this process and answer the same problems:
first many at a time, for accuracy, then some of them one at a time and in turns, for target
forwards and seconds (processor time of the engines' thread). A threshold is a request's own, so one
engine a judge serves all of them.

    python benchmarks/reasoning_step.py --json r.json --png r.png

How lenient a default may be is asked on other problems (`steps_curve/calibration.py`):

    python benchmarks/reasoning_step.py --calibrate 800
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from steps_curve.calibration import GRIDS, SEED, calibration_problems, most_lenient
from steps_curve.show import draw, table_of

from speculators_ext.assets import build
from speculators_ext.assets.steps_world import JUDGE_SUFFIX, Problem, check
from speculators_ext.assets.tiny_steps import DRAFT, TARGET, load_problems
from speculators_ext.method_configs import JUDGE_SUFFIX as DEFAULT_SUFFIX
from speculators_ext.method_configs import ReasoningStepConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

console = Console()
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's thread is ours to time
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
MAX_TOKENS = 160
LONGEST_STEP = 32
THRESHOLDS = {
    "logprob": (-1.0, -1.5, -2.0, -2.5, -3.0, -4.0, -6.0, -9.0, -20.0),
    "score": (8.9, 8.5, 8.0, 7.0, 6.0, 5.0, 3.0, 1.0, 0.0),
}
PLAIN, SMALL = "plain target", "plain draft"


@dataclass
class Tally:
    """What one variant did.

    Of all problems, many at a time: right answers, sound steps, texts identical to plain's, and the
    counts of `StepCounters`. Of the timed ones, one at a time: tokens, seconds, and ``forwards``,
    every call of the target (the plain small model's own), prompts and judging too.
    """

    problems: int = 0
    right: int = 0
    sound: int = 0
    steps: int = 0
    identical: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    timed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    forwards: int = 0

    def row(self, plain: Tally) -> dict[str, Any]:
        """The numbers of the table."""
        judged = self.counters.get("judged", 0)
        whole = self.counters.get("drafted", 0)
        kept = self.counters.get("accepted", 0) + self.counters.get("agreed", 0)
        speed = self.tokens / self.seconds
        return {
            "accuracy": self.right / self.problems,
            "sound_steps": self.sound / max(1, self.steps),
            "identical": self.identical,
            "problems": self.problems,
            "timed_problems": self.timed,
            "tokens": self.tokens,
            "target_forwards": self.forwards,
            "forwards_per_token": self.forwards / self.tokens,
            "tokens_per_second": speed,
            "speedup": speed / (plain.tokens / plain.seconds),
            "solved_speedup": plain.seconds / self.seconds,
            "steps_accepted": self.counters.get("accepted", 0) / judged if judged else None,
            "steps_kept_whole": kept / whole if whole else None,
        } | {f"counter_{name}": value for name, value in self.counters.items()}


class Engine:
    """An engine that counts and times its target's forwards, those of the judge by themselves."""

    def __init__(self, model: str, config: dict[str, Any] | None, dtype: str) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(build(model)), dtype=dtype, enforce_eager=True, max_model_len=512, max_num_seqs=16,
            enable_prefix_caching=False, speculative_config=config, num_gpu_blocks_override=64,
        )  # fmt: skip
        self.forwards = 0
        self.spent: dict[str, list[float]] = {"judge": [], "other": []}
        self._start, self._judged = 0.0, 0
        core = self.llm.llm_engine.engine_core.engine_core
        target = core.model_executor.driver_worker.model_runner.model
        target.register_forward_pre_hook(self._begin)
        target.register_forward_hook(self._count)

    def _begin(self, *_: Any) -> None:
        self._start = time.thread_time()

    def _count(self, *_: Any) -> None:
        from speculators_ext.engines.vllm.reasoning_step.book import COUNTERS

        spent = time.thread_time() - self._start
        judging = COUNTERS.judge_forwards > self._judged  # counted just before it is run
        self._judged = COUNTERS.judge_forwards
        self.forwards += 1
        self.spent["judge" if judging else "other"].append(spent)

    def solve(self, problems: list[Problem], extra: dict[str, Any] | None) -> list[Any]:
        """Answers to all of them, in one batch."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, extra_args=extra)
        outputs = self.llm.generate([p.text for p in problems], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]


def step_config(judge: str, tokens: int, suffix: str = JUDGE_SUFFIX) -> dict[str, Any]:
    """`reasoning_step` in this world."""
    return {
        "method": "reasoning_step",
        "model": str(build(DRAFT)),
        "num_speculative_tokens": tokens,
        "method_config": {
            "lossy": True, "judge": judge, "delimiter": "\n", "judge_suffix": suffix,
        },
    }  # fmt: skip


def token_config(tokens: int) -> dict[str, Any]:
    """vLLM's own token-level speculation with the same small model."""
    return {
        "method": "draft_model", "model": str(build(DRAFT)), "num_speculative_tokens": tokens,
    }  # fmt: skip


Plan = list[tuple[str, str, dict[str, Any] | None]]
"""Name of a variant, name of its engine, extra arguments of its requests."""


def answer_all(plan: Plan, engines: dict[str, Engine], problems: list[Problem]) -> dict[str, Tally]:
    """Every variant over all problems: what is right, sound and as plain."""
    from speculators_ext.engines.vllm.reasoning_step.book import COUNTERS

    tallies, plain = {}, [""] * len(problems)
    for name, engine, extra in plan:
        before = COUNTERS.as_dict()
        texts = [made.text for made in engines[engine].solve(problems, extra)]
        counters = {key: value - before[key] for key, value in COUNTERS.as_dict().items()}
        plain = texts if name == PLAIN else plain
        verdicts = [check(p, text) for p, text in zip(problems, texts, strict=True)]
        tallies[name] = Tally(
            problems=len(problems),
            right=sum(v.right for v in verdicts),
            sound=sum(sum(v.steps) for v in verdicts),
            steps=sum(len(v.steps) for v in verdicts),
            identical=sum(t == own for t, own in zip(texts, plain, strict=True)),
            counters=counters,
        )
    return tallies


def time_turns(
    plan: Plan, engines: dict[str, Engine], problems: list[Problem], tallies: dict[str, Tally]
) -> None:
    """Every variant over some problems, one at a time and in turns: seconds and forwards."""
    for problem in problems:
        for name, engine, extra in plan:
            tally, served = tallies[name], engines[engine]
            forwards, started = served.forwards, time.thread_time()
            [made] = served.solve([problem], extra)
            tally.seconds += time.thread_time() - started
            tally.forwards += served.forwards - forwards
            tally.tokens += len(made.token_ids)
            tally.timed += 1


def judge_costs(problems: list[Problem], dtype: str) -> list[dict[str, Any]]:
    """What the judge's forward costs, behind this world's suffix and the package's own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build(TARGET))
    found = []
    for suffix in (JUDGE_SUFFIX, DEFAULT_SUFFIX):
        length = len(tokenizer.encode(suffix, add_special_tokens=False))
        engine = Engine(TARGET, step_config("score", max(length, LONGEST_STEP), suffix), dtype)
        for spent in engine.spent.values():
            spent.clear()
        for problem in problems:
            engine.solve([problem], None)
        judge, verify = (median(engine.spent[kind]) * 1e3 for kind in ("judge", "other"))
        found.append({"suffix_tokens": length, "judge_ms": judge, "verify_ms": verify})
        console.print(
            f"a judge's forward behind {length} tokens: {judge:.2f} ms, a verify forward "
            f"{verify:.2f} ms (medians, 1 request)"
        )
    return found


def write(found: dict[str, Any], path: Path | None) -> None:
    """What was found and by which versions, as JSON."""
    import torch
    import vllm

    if path is not None:
        versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        path.write_text(json.dumps(found | versions, indent=2) + "\n", encoding="utf-8")


def calibrate(count: int, tokens: int, dtype: str) -> dict[str, Any]:
    """Accuracies on other problems than the curve's, and the thresholds chosen by them."""
    problems = calibration_problems(count, load_problems(build(TARGET)))
    engines = {PLAIN: Engine(TARGET, None, dtype)}
    plan: Plan = [(PLAIN, PLAIN, None)]
    for judge, grid in GRIDS.items():
        engines[judge] = Engine(TARGET, step_config(judge, tokens), dtype)
        plan += at_thresholds(judge, grid)
    tallies = answer_all(plan, engines, problems)
    accuracy = {name: tally.right / count for name, tally in tallies.items()}
    chosen = {}
    for judge, grid in GRIDS.items():
        found = {value: accuracy[f"{judge} {value:g}"] for value in grid}
        chosen[judge] = most_lenient(found, accuracy[PLAIN])
    console.print(accuracy, chosen)
    return {"problems": count, "seed": SEED, "accuracy": accuracy, "chosen": chosen}


def at_thresholds(judge: str, values: Iterable[float]) -> Plan:
    """Variants of a judge's engine."""
    return [(f"{judge} {v:g}", judge, {"speculators_ext_threshold": v}) for v in values]


def main(
    num_problems: Annotated[int, typer.Option(help="Held-out problems, for accuracy.")] = 200,
    num_timed: Annotated[int, typer.Option(help="Of these, answered one at a time.")] = 24,
    tokens: Annotated[int, typer.Option(help="Longest step.")] = LONGEST_STEP,
    token_level: Annotated[str, typer.Option(help="Drafts of token-level speculation.")] = "3,5,8",
    dtype: Annotated[str, typer.Option()] = "float32",
    calibration: Annotated[
        int | None,
        typer.Option("--calibrate", help="Only choose thresholds, on so many other problems."),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    png_path: Annotated[Path | None, typer.Option("--png")] = None,
) -> None:
    """Measure all variants and print a table."""
    import torch

    torch.set_num_threads(1)
    if calibration is not None:
        found = calibrate(calibration, tokens, dtype) | {"dtype": dtype, "longest_step": tokens}
        write(found, json_path)
        return
    engines = {PLAIN: Engine(TARGET, None, dtype), SMALL: Engine(DRAFT, None, dtype)}
    plan: Plan = [(n, n, None) for n in (PLAIN, SMALL)]
    for count in token_level.split(","):
        name = f"token-level {count}"
        engines[name] = Engine(TARGET, token_config(int(count)), dtype)
        plan.append((name, name, None))
    engines["exact"] = Engine(TARGET, step_config("exact", tokens), dtype)
    plan.append(("exact", "exact", None))
    for judge, thresholds in THRESHOLDS.items():
        engines[judge] = Engine(TARGET, step_config(judge, tokens), dtype)
        plan += at_thresholds(judge, thresholds)
    problems = load_problems(build(TARGET))[:num_problems]
    tallies = answer_all(plan, engines, problems)
    time_turns(plan, engines, problems[:num_timed], tallies)
    defaults = {f"{j} {ReasoningStepConfig(lossy=True, judge=j).passes_from:g}" for j in THRESHOLDS}
    rows = {
        name: tally.row(tallies[PLAIN]) | {"default": name in defaults}
        for name, tally in tallies.items()
    }
    title = (
        f"{TARGET} and {DRAFT}, {num_problems} held-out problems; timed: {num_timed}, 1 request, "
        f"{dtype}"
    )
    console.print(table_of(rows, title))
    costs = judge_costs(problems[:num_timed], dtype)
    settings = {
        "problems": num_problems, "timed": num_timed, "requests": 1, "longest_step": tokens,
        "dtype": dtype, "seconds": "processor time of the engine's thread",
    }  # fmt: skip
    write({"settings": settings, "rows": rows, "judge_costs": costs}, json_path)
    if png_path is not None:
        draw(rows, THRESHOLDS, png_path, title)


if __name__ == "__main__":
    typer.run(main)
