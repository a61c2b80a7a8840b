"""Makes both tiny MTP models from nothing: tokenizer, prompts, training, acceptance.

python benchmarks/training/make_mtp_models.py mtp_data
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from mtp_corpus import held_out_prompts
from mtp_models import CONFIGS

HERE = Path(__file__).parent
# One thread: the weights' last bits depend on it. The rest keeps glibc from handing every large
# tensor back to the kernel.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
}


def stage(script: str, *arguments: object) -> None:
    """Run one script of this folder and stop where it fails."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    subprocess.run(command, check=True, env=os.environ | SETTINGS)


def main(folder: Annotated[Path, typer.Argument(help="where everything goes")]) -> None:
    """Train both, and measure stock vLLM's `mtp` with each."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = "".join(json.dumps(record) + "\n" for record in held_out_prompts())
    for name in CONFIGS:
        stage("train_mtp.py", name, folder)
        (folder / name / "prompts.jsonl").write_text(prompts)
        stage("mtp_acceptance.py", folder / name, "--json", folder / f"{name}-acceptance.json")


if __name__ == "__main__":
    typer.run(main)
