"""How `EAGLE2` on SGLang stands beside SGLang's own drafts of the same head, in turns.

Each variant is a server of its own, and all run at once: they answer the same prompts, a few each
before the next one does, so a machine that drifts weighs on all alike. Seconds are processor time
of the schedulers' processes, which run the models. Runs in the environment of `make venv-sglang`:

    .venv-sglang/bin/python benchmarks/sglang/drafts_in_turns.py --variants 'eagle3, tree;eagle2'
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from speculators_ext.assets import build
from speculators_ext.cli.load import Driver, served_model
from speculators_ext.cli.metrics import SpecCounters
from speculators_ext.cli.prompts import own_prompts
from speculators_ext.cli.server import free_port, running_server
from speculators_ext.cli.sglang_server import sglang_command, sglang_environment

MODEL = "smollm2-135m-instruct"
TREE: dict[str, Any] = {"num_speculative_tokens": 8}
FULL = {"method_config": {"adaptive": False}}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "eagle3, 2": {"method": "eagle3", "num_speculative_tokens": 2},
    "eagle3, tree": TREE | {"method": "eagle3", "depth": 2, "topk": 8},
    "eagle2": TREE | {"method": "eagle2"},
    "eagle2, adaptive off": TREE | FULL | {"method": "eagle2"},
}


def scheduler_seconds(group: int) -> float:
    """Processor time of a server's scheduler so far, user and system."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # gone meanwhile
        fields = rest.split()
        if int(fields[2]) == group and name.startswith("sglang::sched"):
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise SystemExit(f"no scheduler in process group {group}")


class Contestant:
    """A server, what its scheduler spent and what it answered, by requests in flight."""

    def __init__(
        self, name: str, dtype: str, max_tokens: int, stack: ExitStack, logs: Path
    ) -> None:
        config = VARIANTS[name]
        if config is not None:
            config = config | {"model": str(build(f"{MODEL}-eagle3"))}
        port = free_port()
        command = sglang_command(
            str(build(MODEL)), port, dtype=dtype, speculative=config, extra=["--sleep-on-idle"]
        )
        log = logs / f"{len(list(logs.iterdir()))}.log"
        server = stack.enter_context(
            running_server(command, port, log, name=name, environment=sglang_environment())
        )
        self.name, self._group = name, server.pid
        self._driver = Driver(server.url, served_model(server.url), max_tokens, engine="sglang")
        self.seconds, self.tokens, self.counters = 0.0, 0, SpecCounters()

    def answer(self, prompts: list[Any], requests: int) -> None:
        before = scheduler_seconds(self._group)
        answers, _ = self._driver.run(prompts, requests)
        self.seconds += scheduler_seconds(self._group) - before
        self.tokens += sum(answer.tokens for answer in answers)
        self.counters += self._driver.counters_since(SpecCounters(), answers)

    def row(self, requests: int, first: Contestant) -> dict[str, Any]:
        speed = self.tokens / self.seconds
        return {
            "variant": self.name,
            "requests": requests,
            "tokens": self.tokens,
            "tokens_a_second": speed,
            "relative_to_the_first": speed / (first.tokens / first.seconds),
            "tokens_a_step": self.counters.mean_acceptance_length,
        }

    def reset(self) -> None:
        self.seconds, self.tokens, self.counters = 0.0, 0, SpecCounters()


def compare(
    contestants: list[Contestant], prompts: list[Any], requests: int, turns: int
) -> list[dict[str, Any]]:
    """A row each; a first part, in which adaptive methods make their trials, is not counted."""
    order, size = deque(contestants), 2 * requests
    parts = [prompts[at : at + size] for at in range(0, len(prompts), size)] * turns
    for contestant in contestants:
        contestant.answer(parts[0], requests)
        contestant.reset()
    for part in parts:
        for contestant in order:
            contestant.answer(part, requests)
        order.rotate()
    return [contestant.row(requests, contestants[0]) for contestant in contestants]


def main(
    variants: Annotated[str, typer.Option(help=f"Separated by ';', of: {'; '.join(VARIANTS)}.")],
    requests: Annotated[str, typer.Option(help="Requests in flight.")] = "1,4",
    num_prompts: Annotated[int, typer.Option(help="Prompts a turn.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens generated a prompt.")] = 48,
    turns: Annotated[int, typer.Option(min=1, help="Turns each server takes.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Measure drafts on SGLang in turns."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = [name.strip() for name in variants.split(";")]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}; accepted: {'; '.join(VARIANTS)}")
    logs = Path(tempfile.mkdtemp(prefix="speculators-ext-turns-"))
    with ExitStack() as stack:
        contestants = [Contestant(name, dtype, max_tokens, stack, logs) for name in names]
        prompts = own_prompts()[:num_prompts]
        rows = [
            row
            for number in requests.split(",")
            for row in compare(contestants, prompts, int(number), turns)
        ]
    for row in rows:
        print(json.dumps(row))
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
