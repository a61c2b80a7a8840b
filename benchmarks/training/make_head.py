"""Makes the head from nothing: text, features, training, acceptance. Each stage can be resumed.

python benchmarks/training/make_head.py head_data
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).parent
# Keeps glibc from handing every large tensor back to the kernel: a third of a step's time.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}


def stage(script: str, *arguments: object) -> None:
    """Run one script of this folder and stop where it fails."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    subprocess.run(command, check=True, env=ALLOCATOR | os.environ)


def main(
    folder: Annotated[Path, typer.Argument(help="where everything goes, some gigabytes")],
    shards: Annotated[int, typer.Option(help="shards of about 130,000 tokens")] = 4,
    steps: Annotated[int, typer.Option(help="updates")] = 4300,
) -> None:
    """Generate, train and measure; what is there already is kept."""
    stage("generate_text.py", folder / "text", "--shards", shards)
    stage("features.py", folder / "text", folder / "features")
    stage("train_eagle3.py", folder / "features", folder / "run", "--steps", steps)
    head = folder / "run" / "smollm2-eagle3"
    stage("acceptance.py", head, "--json", folder / "acceptance.json")


if __name__ == "__main__":
    typer.run(main)
