"""Two tiny trained models that solve the problems of `steps_world`, carried by the package.

They share a tokenizer; the files are the output of ``benchmarks/training/make_steps_models.py``,
and each model's card says how it was made and measured. ``problems.jsonl``, in either folder, holds
problems that neither has been trained on, as prompts with their answers.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from speculators_ext.assets.steps_world import Operation, Problem
from speculators_ext.assets.store import AssetError, sha256

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Report = Callable[[str], None]

TARGET = "steps-target-tiny"
DRAFT = "steps-draft-tiny"
SUMMARIES = {
    TARGET: "a trained Llama of 3.6M weights that solves sums step by step and can grade a step, "
    "bf16, carried by this package",
    DRAFT: "a trained Llama of 0.1M weights that solves them less well, and words steps "
    "differently, bf16, carried by this package",
}
PROBLEMS = "problems.jsonl"
FOLDER = "tiny_steps"
# What the cards describe: a damaged file must not be measured.
SHARED: dict[str, str] = {}
OWN: dict[str, dict[str, str]] = {TARGET: {}, DRAFT: {}}


def load_problems(folder: Path) -> list[Problem]:
    """The held-out problems, from either model's folder."""
    lines = (folder / PROBLEMS).read_text(encoding="utf-8").splitlines()
    return [read_problem(json.loads(line)["prompt"]) for line in lines]


def read_problem(text: str) -> Problem:
    """The problem that a prompt states."""
    *parts, last = text.strip().split(" ; ")
    signed = [part.split()[1] for part in parts]
    operations = [Operation("plus" if s[0] == "+" else "minus", int(s[1:])) for s in signed]
    return Problem(int(last.removeprefix("start ")), tuple(operations))


def source(name: str) -> dict[str, Any]:
    """The expected digests: other weights are another asset."""
    return {"sha256": SHARED | OWN[name]}


def build_into(name: str, folder: Path, report: Report) -> None:
    """Copies model and card; raises `AssetError` when a file is missing or damaged."""
    report("copying the model")
    shipped = resources.files("speculators_ext.assets").joinpath(FOLDER)
    for file in (*SHARED, *OWN[name], "README.md"):
        part = shipped.joinpath(file if file in SHARED else f"{name}/{file}")
        if not part.is_file():
            raise AssetError(f"the package lacks {file} of {name}: reinstall it")
        (folder / file).write_bytes(part.read_bytes())
    for file, digest in source(name)["sha256"].items():
        if sha256(folder / file) != digest:
            raise AssetError(f"{file} of {name} is damaged: reinstall the package")
