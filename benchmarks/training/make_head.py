"""Makes the head from nothing: text, features, training in two rounds, acceptance.

Each stage keeps what is there, so that a second call goes on where the first one stopped.

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
    shards: Annotated[int, typer.Option(help="shards of about 130,000 tokens, in all")] = 9,
    first_shards: Annotated[int, typer.Option(help="shards of the first round")] = 4,
    steps: Annotated[int, typer.Option(help="updates of the first round")] = 4300,
    more_steps: Annotated[int, typer.Option(help="updates of the second round")] = 2300,
    size: Annotated[int, typer.Option(help="conversations a shard")] = 500,
    max_answer: Annotated[int, typer.Option(help="tokens an answer, at most")] = 320,
    num_prompts: Annotated[int, typer.Option(help="held-out prompts to measure")] = 48,
) -> None:
    """Generate, train and measure; the second round is about the shards new to it."""
    text, features, first, second = (folder / n for n in ("text", "features", "first", "second"))
    kinds = ("--shards", shards, "--varied", first_shards + 1)
    stage("generate_text.py", text, *kinds, "--size", size, "--max-answer", max_answer)
    stage("features.py", text, features)
    train = ("train_eagle3.py", features)
    stage(*train, first, "--end-shard", first_shards, "--steps", steps)
    build_on = ("--start", first / "checkpoint.safetensors", "--first-shard", first_shards)
    stage(*train, second, *build_on, "--steps", more_steps, "--rate", 6e-4, "--seed", 1)
    measure = ("--num-prompts", num_prompts, "--json", folder / "acceptance.json")
    stage("acceptance.py", second / "smollm2-eagle3", *measure)


if __name__ == "__main__":
    typer.run(main)
