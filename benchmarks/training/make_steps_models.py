"""Makes both reasoning models from nothing: tokenizer, training, held-out problems.

python benchmarks/training/make_steps_models.py steps_data
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from train_steps import UPDATES

from speculators_ext.assets.steps_world import draw_problem

HERE = Path(__file__).parent
PROBLEMS, SEED = 400, 7
# Training has longer ones too, but so short a run does not teach the last labels well.
OPERATIONS = (4, 5, 6)
# One thread: the weights' last bits depend on it. The rest keeps glibc from handing every large
# tensor back to the kernel.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
}


def problem_lines() -> str:
    """Held-out problems with their answers, one JSON object a line."""
    rng = random.Random(SEED)
    lines = []
    for index in range(PROBLEMS):
        problem = draw_problem(rng, rng.choice(OPERATIONS), held_out=True)
        record = {"id": f"steps-{index}", "prompt": problem.text, "answer": f"{problem.answer:02d}"}
        lines.append(json.dumps(record) + "\n")
    return "".join(lines)


def main(folder: Annotated[Path, typer.Argument(help="where everything goes")]) -> None:
    """Train both."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = [["train_steps.py", name] for name in UPDATES] + [["grade_steps.py"]]
    for script, *names in stages:
        command = [sys.executable, str(HERE / script), *names, str(folder)]
        subprocess.run(command, check=True, env=os.environ | SETTINGS)
    (folder / "problems.jsonl").write_text(problem_lines())


if __name__ == "__main__":
    typer.run(main)
