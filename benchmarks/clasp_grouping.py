"""One skip set for the whole batch, or one for each request: which is faster in `clasp`?

Both ways generate the same prompts in one engine, in turns, every request drafting to full depth.
A set for each request fits it better, and costs a draft forward for every different set.

    python benchmarks/clasp_grouping.py --json clasp_grouping.json
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated, Any

import typer
from clasp_acceptance import Engine, chat, show

from speculators_ext.assets import build
from speculators_ext.cli.prompts import default_prompts

GROUPINGS = ("batch", "per_request")


def turn(engine: Engine, prompts: list[str], max_tokens: int, batch: int) -> dict[str, Any]:
    """Generate once: acceptance, and output tokens a second."""
    started = time.perf_counter()
    result = engine.measure(prompts, max_tokens, batch)
    seconds = time.perf_counter() - started
    return result | {"output_tok_s": len(prompts) * max_tokens / seconds}


def compare(
    engine: Engine, prompts: list[str], *, num_skip: int, batch: int, max_tokens: int, turns: int
) -> list[dict[str, Any]]:
    """One row a grouping, medians over the turns."""
    taken: dict[str, list[dict[str, Any]]] = {grouping: [] for grouping in GROUPINGS}
    for _ in range(turns):
        for grouping in GROUPINGS:
            engine.configure(num_skip_layers=num_skip, grouping=grouping)
            taken[grouping].append(turn(engine, prompts, max_tokens, batch))
    return [
        {"skipped": num_skip, "requests": batch, "grouping": grouping}
        | {
            key: statistics.median(row[key] for row in rows)
            for key in ("output_tok_s", "acceptance_rate", "mean_acceptance_length")
        }
        for grouping, rows in taken.items()
    ]


def main(
    num_prompts: Annotated[int, typer.Option(help="Prompts a turn.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated a prompt.")] = 64,
    turns: Annotated[int, typer.Option(help="Turns each grouping takes.")] = 3,
    skip: Annotated[str, typer.Option(help="Numbers of skipped layers.")] = "6,12",
    requests: Annotated[str, typer.Option(help="Requests at a time (8 at most).")] = "4,8",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Measure both groupings on SmolLM2 in bfloat16."""
    engine = Engine(build("smollm2-135m-instruct"), "bfloat16")
    texts = [prompt.text for prompt in default_prompts()][:num_prompts]
    prompts = chat(texts, engine.llm.get_tokenizer())
    rows = [
        row
        for count in skip.split(",")
        for batch in requests.split(",")
        for row in compare(
            engine,
            prompts,
            num_skip=int(count),
            batch=int(batch),
            max_tokens=max_tokens,
            turns=turns,
        )
    ]
    show(rows, "One skip set a batch, or one a request, SmolLM2-135M-Instruct, bfloat16")
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    typer.run(main)
