"""Trains one of the two reasoning models and exports it.

    python benchmarks/training/train_steps.py steps-target-tiny steps_data

Weights are fp32, products bf16. Matrices are moved by Muon, the rest by Adam. The target
starts with half of its layers; the other half joins later, silent at first (see `TinyLlama.grow`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated

import torch
import typer
from rich.console import Console
from steps_data import DRAFT, TARGET, Batches, train_tokenizer
from steps_models import CONFIGS, TinyLlama, export
from torch import Tensor
from torch.nn import functional as F

from speculators_ext.assets.steps_world import LINKS

SEED = 6
SIZE = 32
ADAM_RATES = {"embed_tokens": 0.03, "lm_head": 0.004, "norm": 0.01}
MUON_RATES = {"steps-target-tiny": 0.008, "steps-draft-tiny": 0.01}
WARMUP, DECAY = 30, 0.6  # updates, share of the run
GROWTH = 0.65  # share of the run after which the target gets the second half of its layers
UPDATES = {"steps-target-tiny": 660, "steps-draft-tiny": 600}
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
        tokens, weights = batches.draw()
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


def rate(step: int, steps: int) -> float:
    """Warm-up, a level stretch, and a straight line to zero."""
    return min((step + 1) / WARMUP, (steps - step) / (steps * DECAY), 1.0)


def main(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(CONFIGS)}")],
    folder: Annotated[Path, typer.Argument(help="where log and model go")],
    steps: Annotated[int | None, typer.Option(help="updates of 32 solutions")] = None,
) -> None:
    """Train one model and export it to FOLDER/NAME."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    steps = steps or UPDATES[name]
    is_target = name == "steps-target-tiny"
    tokenizer = train_tokenizer()
    habits = TARGET if is_target else DRAFT
    batches = Batches(tokenizer, habits, is_target, SIZE, SEED)
    held_out = Batches(tokenizer, habits, False, SIZE, SEED + 1, held_out=True)
    links = torch.tensor([tokenizer(f" {link}")["input_ids"][0] for link in LINKS])
    model = TinyLlama(CONFIGS[name], CONFIGS[name]["num_hidden_layers"] // (2 if is_target else 1))
    model.initialize(torch.Generator().manual_seed(SEED))
    console.print(f"{name}: {sum(p.numel() for p in model.parameters())} weights")
    chosen = optimizers(model, MUON_RATES[name])
    log = (folder / f"{name}.jsonl").open("w")
    started = time.process_time()
    for step in range(steps):
        if is_target and step == int(steps * GROWTH):
            model.grow()
            chosen = optimizers(model, MUON_RATES[name])
        loss = loss_of(model, *batches.draw())
        model.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("first_lr", group["lr"]) * rate(step, steps)
            optimizer.step()
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
