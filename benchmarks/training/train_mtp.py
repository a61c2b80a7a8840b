"""Trains a tiny MTP model: the target's cross entropy plus 0.3 times its MTP module's, jointly.

    python benchmarks/training/train_mtp.py deepseek-v3-tiny-mtp mtp_data

Weights are fp32, products bf16. Matrices are moved by Muon, the rest by Adam.
"""

from __future__ import annotations

import json
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated

import torch
import typer
from mtp_corpus import encode, held_out_texts, train_tokenizer, training_texts
from mtp_export import export
from mtp_models import CONFIGS, TinyMtp
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

SEED = 5
BATCH, LENGTH = 8, 256
MTP_WEIGHT = 0.3  # DeepSeek-V3 for most of its training
MUON_RATE = 0.006
ADAM_RATES = {"embed_tokens": 0.03, "lm_head": 0.004, "gate": 0.004, "": 0.01}
BALANCE_RATE = 0.002
WARMUP, DECAY = 30, 0.6  # updates, share of the run
console = Console()


class Sampler:
    """Windows of `LENGTH` tokens and the two after them, from anywhere in the text."""

    def __init__(self, stream: Tensor, seed: int) -> None:
        self.stream = stream
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self) -> Tensor:
        """int64 [BATCH, LENGTH + 2]."""
        last = len(self.stream) - LENGTH - 2
        starts = torch.randint(last, (BATCH, 1), generator=self.generator)
        return self.stream[starts + torch.arange(LENGTH + 2)]


def losses(model: TinyMtp, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropies of target and module for [B, T + 2] tokens, and how often their first
    choices for the same token agree (fp32 scalars).
    """
    with torch.autocast("cpu", torch.bfloat16):
        first, second = model.logits(tokens[:, :-1])
    main = F.cross_entropy(first.float().flatten(0, 1), tokens[:, 1:].flatten())
    mtp = F.cross_entropy(second.float().flatten(0, 1), tokens[:, 2:].flatten())
    agree = (first[:, 1:].argmax(-1) == second.argmax(-1)).float().mean()
    return main, mtp, agree


@torch.no_grad()
def validate(model: TinyMtp, stream: Tensor, batches: int = 4) -> dict[str, float]:
    """The same three numbers on the held-out modules, always on the same windows."""
    model.eval()
    sampler = Sampler(stream, SEED)
    rows = torch.tensor([losses(model, sampler.batch()) for _ in range(batches)])
    model.train()
    return dict(zip(("main", "mtp", "agree"), rows.mean(dim=0).tolist(), strict=True))


def optimizers(model: TinyMtp) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, Adam with a rate of its own for every other kind."""
    named = dict(model.named_parameters())
    others = ("embed_tokens", "lm_head", "gate.weight")
    matrices = [p for n, p in named.items() if p.ndim == 2 and not any(o in n for o in others)]
    known = {id(p) for p in matrices}
    groups: dict[str, list[Tensor]] = {kind: [] for kind in ADAM_RATES}
    for name, weight in named.items():
        if id(weight) not in known:
            kind = next(k for k in ADAM_RATES if k in name and (k != "gate" or weight.ndim == 2))
            groups[kind].append(weight)
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Adam(
            [{"params": groups[k], "lr": rate} for k, rate in ADAM_RATES.items() if groups[k]],
            betas=(0.9, 0.95),
        ),
    ]


def rate(step: int, steps: int) -> float:
    """Warm-up, a level stretch, and a straight line to zero."""
    return min((step + 1) / WARMUP, (steps - step) / (steps * DECAY), 1.0)


def train(model: TinyMtp, stream: Tensor, held_out: Tensor, steps: int, log: Path) -> None:
    """Runs all updates; a line of numbers every 50 and a validation every 200."""
    chosen = optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate(step, steps)) for o in chosen
    ]
    sampler = Sampler(stream, SEED)
    started = time.process_time()
    for step in range(steps):
        main, mtp, agree = losses(model, sampler.batch())
        model.zero_grad(set_to_none=True)
        (main + MTP_WEIGHT * mtp).backward()
        for part in (*chosen, *schedules):
            part.step()
        model.balance_experts(BALANCE_RATE)
        if step % 50 == 0 or step + 1 == steps:
            row = {"main": main.item(), "mtp": mtp.item(), "agree": agree.item()}
            record = {"step": step, "cpu_seconds": time.process_time() - started, "train": row}
            if step % 200 == 0 or step + 1 == steps:
                record["held_out"] = validate(model, held_out)
            with log.open("a") as stream_out:
                stream_out.write(json.dumps(record) + "\n")
            console.print(record)


def main(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(CONFIGS)}")],
    folder: Annotated[Path, typer.Argument(help="where logs and models go")],
    steps: Annotated[int, typer.Option(help="updates of 2048 tokens")] = 1000,
) -> None:
    """Train one model and export it to FOLDER/NAME."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    texts = training_texts()
    tokenizer = train_tokenizer(texts)
    stream = encode(tokenizer, texts)
    held_out = encode(tokenizer, list(held_out_texts().values()))
    console.print(f"{len(texts)} modules, {len(stream)} tokens; {len(held_out)} held out")
    model = TinyMtp(CONFIGS[name])
    model.initialize(torch.Generator().manual_seed(SEED))
    console.print(f"{name}: {sum(p.numel() for p in model.parameters())} weights")
    log = folder / f"{name}.jsonl"
    log.unlink(missing_ok=True)
    train(model, stream, held_out, steps, log)
    model.restore_scales()
    export(model, CONFIGS[name], tokenizer, folder / name)


if __name__ == "__main__":
    typer.run(main)
