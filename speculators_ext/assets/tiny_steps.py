"""Two tiny trained models that solve the problems of `steps_world`, carried by the package.

They share a tokenizer; the files are the output of ``benchmarks/training/make_steps_models.py``,
and each model's card says how it was made and measured. ``problems.jsonl``, in either folder, holds
problems that neither has been trained on, as prompts with their answers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from speculators_ext.assets.shipped import copy_shipped
from speculators_ext.assets.steps_world import read_problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from speculators_ext.assets.steps_world import Problem

    Report = Callable[[str], None]

TARGET = "steps-target-tiny"
DRAFT = "steps-draft-tiny"
SUMMARIES = {
    TARGET: "a trained Llama of 2.2M weights that solves sums step by step and grades steps, bf16, "
    "carried by this package",
    DRAFT: "a trained Llama of 0.1M weights that solves them less well, and words steps "
    "differently, bf16, carried by this package",
}
PROBLEMS = "problems.jsonl"
FOLDER = "tiny_steps"
# What the cards describe.
SHARED = {
    "chat_template.jinja": "3c0b9de3573aed7eb5d83a37eb6010427e5d0075a14e300c5006c0e4051ac6fa",
    PROBLEMS: "6905a7b0309e93e9e8c9a8a356f6ace33a7d1ea585f53037d02651712dd3f690",
    "tokenizer.json": "d92a04c5e27a9c1320ab32580a295ebd8db53624ebde05b3f3e9d5a62ec5a6c6",
    "tokenizer_config.json": "cd288383feff2762059184749d2b66a516d019015bcc0fb7eecad6e77a145e26",
}
OWN = {
    TARGET: {
        "config.json": "d39f1affb59e2222a79ba9fe163806b71ec56497eac30e48b09a6a51f5192f2c",
        "model.safetensors": "5272e8ef117a3867a41506a2bb39f3d3dc83b5ba068da5acff43026f9d366781",
    },
    DRAFT: {
        "config.json": "77ee556b4e79e1917ed0ecdab99576d2abeca9ec65c729e89dc7c2375c946cd2",
        "model.safetensors": "621889e38e53e0ce607fb46ea8ddbfe3cc3e30f4e37b04fcee19abc177bac750",
    },
}


def load_problems(folder: Path) -> list[Problem]:
    """The held-out problems, from either model's folder."""
    lines = (folder / PROBLEMS).read_text(encoding="utf-8").splitlines()
    return [read_problem(json.loads(line)["prompt"]) for line in lines]


def source(name: str) -> dict[str, Any]:
    """The expected digests: other weights are another asset."""
    return {"sha256": SHARED | OWN[name]}


def build_into(name: str, folder: Path, report: Report) -> None:
    """Copies model and card; raises `AssetError` when a file is missing or damaged."""
    report("copying the model")
    copy_shipped(SHARED | OWN[name], folder, FOLDER, f"{FOLDER}/{name}")
