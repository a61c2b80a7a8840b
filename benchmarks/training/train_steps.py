"""Trains one of the two reasoning models to solve problems, and exports it.

    python benchmarks/training/train_steps.py steps-draft-tiny steps_data

The target's lower half is trained here, as a model of its own; `grade_steps.py` puts the upper half
on it. Weights are fp32, products bf16. Matrices are moved by Muon, the rest by Adam.
"""

from __future__ import annotations

import json
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from steps_data import DRAFT, TARGET, Batches, train_tokenizer
from steps_models import CONFIGS, SOLVER, TinyLlama, export
from torch import Tensor
from torch.nn import functional as F

from speculators_ext.assets.steps_world import LINKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SEED = 6
SIZE = 32
ADAM_RATES = {"embed_tokens": 0.03, "lm_head": 0.004, "norm": 0.01}
MUON_RATES = {SOLVER: 0.008, "steps-draft-tiny": 0.01}
WARMUP, DECAY = 30, 0.6  # updates, share of the run
UPDATES = {SOLVER: 600, "steps-draft-tiny": 600}
console = Console()


def loss_of(model: TinyLlama, tokens: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross entropy of tokens [B, T] after their own beginnings (fp32 scalar)."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
    each = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    known = weights[:, 1:].flatten()
    return (each * known).sum() / known.sum()


@torch.no_grad()
def right_results(model: TinyLlama, batches: Batches, links: Tensor) -> float:
    """Share of results whose two digits are both the model's first choice, given what precedes."""
    right = total = 0
    for _ in range(4):
        tokens, weights = batches.draw()[:2]
        with torch.autocast("cpu", torch.bfloat16):
            chosen = model(tokens[:, :-1]).argmax(-1)
        hit = chosen == tokens[:, 1:]
        tens = torch.isin(tokens[:, :-2], links) & (weights[:, 1:-1] > 0)
        right += int((hit[:, :-1] & hit[:, 1:])[tens].sum())
        total += int(tens.sum())
    return right / total


def optimizers(model: TinyLlama, muon_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, Adam with a rate of its own for every other kind."""
    named = dict(model.named_parameters())
    groups = {kind: [p for n, p in named.items() if kind in n] for kind in ADAM_RATES}
    known = {id(p) for group in groups.values() for p in group}
    matrices = [p for p in named.values() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Adam(
            [{"params": group, "lr": ADAM_RATES[kind]} for kind, group in groups.items()],
            betas=(0.9, 0.95),
        ),
    ]


def rate(step: int, steps: int, decay: float) -> float:
    """Warm-up, a level stretch, and a straight line to zero over a share ``decay`` of the run."""
    return min((step + 1) / WARMUP, (steps - step) / (steps * decay), 1.0)


def move(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    """A step with a share of the first rates."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("first_lr", group["lr"]) * share
        optimizer.step()


def link_ids(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Ids of the words in front of a result, int64."""
    texts = [f" {link}" for link in LINKS]
    found = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([ids[0] for ids in found])


def main(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(UPDATES)}")],
    folder: Annotated[Path, typer.Argument(help="where log and model go")],
    steps: Annotated[int | None, typer.Option(help="updates of 32 solutions")] = None,
) -> None:
    """Train one model and export it to FOLDER/NAME."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    steps = steps or UPDATES[name]
    tokenizer = train_tokenizer()
    habits = TARGET if name == SOLVER else DRAFT
    batches = Batches(tokenizer, habits, SIZE, SEED)
    held_out = Batches(tokenizer, habits, SIZE, SEED + 1, held_out=True)
    links = link_ids(tokenizer)
    model = TinyLlama(CONFIGS[name])
    model.initialize(torch.Generator().manual_seed(SEED))
    console.print(f"{name}: {sum(p.numel() for p in model.parameters())} weights")
    chosen = optimizers(model, MUON_RATES[name])
    log = (folder / f"{name}.jsonl").open("w")
    started = time.process_time()
    for step in range(steps):
        loss = loss_of(model, *batches.draw()[:2])
        model.zero_grad(set_to_none=True)
        loss.backward()
        move(chosen, rate(step, steps, DECAY))
        if step % 50 == 0 or step + 1 == steps:
            record = {
                "step": step,
                "cpu_seconds": time.process_time() - started,
                "loss": loss.item(),
            }
            record["right_results"] = right_results(model, held_out, links)
            log.write(json.dumps(record) + "\n")
            log.flush()
            console.print(record)
    export(model, CONFIGS[name], tokenizer, folder / name)


if __name__ == "__main__":
    typer.run(main)
