"""What the output head of a draft step costs, by the size of the draft vocabulary.

The tiny models' heads are too small to show it, so a head of a real size is timed by itself: the
rows of `draft_vocab_size` tokens, their softmax and its maximum, as a draft step runs them, and
what another choice of the vocabulary takes, which happens once in thousands of tokens.

    python benchmarks/mtp_reduced_vocab.py --vocabulary 129280 --hidden 2048 --json head.json
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from speculators_ext.proposers.mtp_vocab import DraftVocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

FRACTIONS = (1, 2, 4, 8)


def milliseconds(call: Callable[[], Any], times: int) -> float:
    """Median thread time of a call."""
    taken = []
    for _ in range(times):
        started = time.thread_time()
        call()
        taken.append(1000 * (time.thread_time() - started))
    return statistics.median(taken)


def rows_of(head: torch.Tensor, part: int, requests: int, times: int) -> dict[str, Any]:
    """One line: the head's share, what a step takes, and what a new choice takes."""
    hidden = torch.randn(requests, head.shape[1], dtype=head.dtype)
    size = head.shape[0] // part
    if part == 1:
        used, choice = head, 0.0
    else:
        vocabulary = DraftVocabulary(head.shape[0], size, [head.shape[0] - 1], "cpu")
        used = head[vocabulary.ids]
        generator = torch.Generator().manual_seed(0)
        vocabulary.count(torch.randint(head.shape[0], (4096,), generator=generator))
        started = time.thread_time()
        slots = vocabulary.choose()
        used[slots] = head[vocabulary.ids[slots]]
        choice = 1000 * (time.thread_time() - started)

    def step() -> None:
        torch.nn.functional.linear(hidden, used).float().softmax(-1).max(-1)

    step()
    return {
        "part": f"1/{part}",
        "tokens": size,
        "requests": requests,
        "step_ms": round(milliseconds(step, times), 2),
        "choice_ms": round(choice, 1),
    }


def main(
    vocabulary: Annotated[int, typer.Option(help="Of the target.")] = 129280,
    hidden: Annotated[int, typer.Option(help="Width of the target.")] = 2048,
    requests: Annotated[str, typer.Option(help="Requests at once.")] = "1,4",
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    times: Annotated[int, typer.Option()] = 15,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Time the heads and print a table."""
    torch.set_num_threads(1)
    head = torch.randn(vocabulary, hidden).to(getattr(torch, dtype))
    rows = [
        rows_of(head, part, int(count), times)
        for count in requests.split(",")
        for part in FRACTIONS
    ]
    table = Table(*rows[0], title=f"{vocabulary} x {hidden}, {dtype}, one thread")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if json_path is not None:
        settings = {"vocabulary": vocabulary, "hidden": hidden, "dtype": dtype}
        json_path.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
