"""How often stock vLLM's own `eagle3` chain accepts a head's drafts, on held-out prompts.

Greedy, bf16, through the chat template, by category of prompt and by position in the chain. The
prompts are the benchmark's own (HumanEval and a mixed set), which no training text comes from.

    python benchmarks/training/acceptance.py head_data/run/smollm2-eagle3 --json acceptance.json
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from speculators_ext.assets import build
from speculators_ext.cli.prompts import Prompt, default_prompts

TARGET = "smollm2-135m-instruct"
console = Console()
# What a server's worker has on two cores; two threads beside other work would spin on each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


class Engine:
    """One in-process vLLM with the head, and its counters."""

    def __init__(self, head: Path, depth: int, requests: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM

        self.llm = LLM(
            str(build(TARGET)),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=requests,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config={
                "method": "eagle3",
                "model": str(head),
                "num_speculative_tokens": depth,
            },
        )

    def counters(self) -> Counter[str]:
        """Rounds of drafting and accepted drafts of each position, since the start."""
        found: Counter[str] = Counter()
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:spec_decode_num_drafts":
                found["rounds"] = metric.value
            elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                found.update({str(i + 1): n for i, n in enumerate(metric.values)})
        return found

    def measure(self, prompts: list[Prompt], max_tokens: int, depth: int) -> dict[str, Any]:
        """Generate, and say what share of rounds accepted the draft of each position."""
        from vllm import SamplingParams

        messages: list[Any] = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        before = self.counters()
        self.llm.chat(messages, params, use_tqdm=False)
        new = self.counters() - before
        shares = [new[str(i + 1)] / new["rounds"] for i in range(depth)]
        return {"rounds": new["rounds"], "accepted": shares, "mean_length": 1 + sum(shares)}


def main(
    head: Annotated[Path, typer.Argument(help="folder of the exported head")],
    depth: Annotated[int, typer.Option(help="tokens drafted a round")] = 5,
    num_prompts: Annotated[int, typer.Option(help="held-out prompts")] = 48,
    max_tokens: Annotated[int, typer.Option(help="tokens a prompt")] = 128,
    requests: Annotated[int, typer.Option(help="requests at a time")] = 8,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure acceptance on the first held-out prompts."""
    prompts = default_prompts()[:num_prompts]
    engine = Engine(head, depth, requests)
    rows: dict[str, dict[str, Any]] = {}
    for category in track(sorted({prompt.category for prompt in prompts}), console=console):
        chosen = [prompt for prompt in prompts if prompt.category == category]
        rows[category] = engine.measure(chosen, max_tokens, depth) | {"prompts": len(chosen)}
    rounds = sum(row["rounds"] for row in rows.values())
    shares = [
        sum(row["accepted"][i] * row["rounds"] for row in rows.values()) / rounds
        for i in range(depth)
    ]
    rows["all"] = {
        "rounds": rounds,
        "accepted": shares,
        "mean_length": 1 + sum(shares),
        "prompts": len(prompts),
    }
    table = Table(title=f"drafts accepted by position, {depth} a round, greedy, bf16")
    for heading in ("prompts", "count", *(str(i + 1) for i in range(depth)), "mean length"):
        table.add_column(heading)
    for name, row in rows.items():
        shown = [f"{share:.3f}" for share in row["accepted"]]
        table.add_row(name, str(row["prompts"]), *shown, f"{row['mean_length']:.3f}")
    console.print(table)
    if json_path:
        json_path.write_text(json.dumps({"max_tokens": max_tokens, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
