"""Teaches the target to grade: layers on top of the trained solver, which stays as it is.

    python benchmarks/training/grade_steps.py steps_data

Behind every line, sound or not, the judging suffix is read as when the model is served, and the
digit is learned. To compare what a line says with what the solver would have said is an equality
of two tokens, which by itself is found only after a long plateau. Two heads that are thrown away
lead there: behind the first new layer one reads the solver's prediction of the token that is read,
behind the third one reads whether this digit is the line's first fault.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from steps_data import (
    OPERATIONS,
    TARGET,
    Batch,
    Batches,
    Row,
    digits_of,
    read_lines,
    train_tokenizer,
)
from steps_models import CONFIGS, SOLVER, TinyLlama, branched, export, load
from torch import Tensor, nn
from torch.nn import functional as F
from train_steps import SEED, SIZE, link_ids, move, optimizers, rate, right_results
from transformers import AutoModelForCausalLM

from speculators_ext.assets.steps_world import JUDGE_SUFFIX, draw_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NAME, DRAFT = "steps-target-tiny", "steps-draft-tiny"
UPDATES, DECAY = 1200, 0.7
MUON_RATE, HEADS_RATE = 0.015, 0.01
FAULTS = 0.4  # share of the lines; it learns from the others that it need not grade
DRAFTED = 300  # solutions of the small model, for each number of operations, greedy and sampled
SOLVER_LAYERS = CONFIGS[SOLVER]["num_hidden_layers"]
console = Console()


def drafted_rows(
    folder: Path, tokenizer: PreTrainedTokenizerFast, count: int, seed: int, *, held_out: bool
) -> dict[int, list[Row]]:
    """What the small model in ``folder`` writes, half of it sampled, by number of operations."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows: dict[int, list[Row]] = {}
    for operations in OPERATIONS:
        for sampled in (False, True):
            problems = [draw_problem(rng, operations, held_out=held_out) for _ in range(count)]
            # No padding: problems of so many operations have the same number of tokens. Without
            # the start that the small model is used to it errs more, which is what is wanted here.
            texts = [p.text for p in problems]
            given = tokenizer(texts, return_tensors="pt", add_special_tokens=False)
            made = model.generate(**given, max_new_tokens=150, do_sample=sampled)
            texts = tokenizer.batch_decode(
                made[:, given["input_ids"].shape[1] :], skip_special_tokens=True
            )
            for problem, text in zip(problems, texts, strict=True):
                lines = read_lines(problem, text)
                if lines is not None:
                    rows.setdefault(operations, []).append(Row(problem.text, lines, False))
    return rows


class Ids(NamedTuple):
    """The judging suffix, the grades, and all digits."""

    suffix: int
    wrong: int
    sound: int
    digits: Tensor

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Ids:
        """Of this world's tokenizer, in which each is one token."""
        texts = [JUDGE_SUFFIX, " 0", " 9"]
        single = [ids[0] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        return cls(*single, torch.tensor(sorted(digits_of(tokenizer))))


class Heads(nn.Module):
    """What is thrown away: each reads the residual stream behind one of the new layers."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.predicted, self.fault = nn.Linear(hidden, vocabulary), nn.Linear(hidden, 2)
        self.register_buffer("balance", torch.tensor([1.0, 6.0]))

    def losses(
        self, model: TinyLlama, states: list[Tensor], batch: Batch, ids: Ids
    ) -> tuple[Tensor, Tensor]:
        """Cross entropies (fp32 scalars), on digits: against the solver's law of the token that is
        read, and of the line's first fault.
        """
        length = batch.tokens.shape[1]
        digit = torch.isin(batch.tokens, ids.digits)
        with torch.no_grad():
            law = model.logits(states[SOLVER_LAYERS][:, : length - 1]).float().softmax(-1)
        read = self.predicted(_normed(states[SOLVER_LAYERS + 1][:, 1:length])).float()
        each = -(law * read.log_softmax(-1)).sum(-1)
        fault = self.fault(_normed(states[SOLVER_LAYERS + 3][:, :length])).float()
        return each[digit[:, 1:]].mean(), F.cross_entropy(
            fault.flatten(0, 1), batch.wrong.flatten(), weight=self.balance, ignore_index=-1
        )


def _normed(state: Tensor) -> Tensor:
    return F.rms_norm(state, state.shape[-1:])


def run(model: TinyLlama, batch: Batch, ids: Ids) -> tuple[list[Tensor], Tensor, Tensor]:
    """States, logits of the text [B, T, V], and logits behind each line's suffix [B, G, V]."""
    batch_size, length = batch.tokens.shape
    suffixes = torch.full((batch_size, batch.ends.shape[1]), ids.suffix)
    states = model.states(torch.cat([batch.tokens, suffixes], dim=1), branched(length, batch.ends))
    logits = model.logits(states[-1]).float()
    return states, logits[:, :length], logits[:, length:]


def loss_of(model: TinyLlama, heads: Heads, batch: Batch, ids: Ids) -> dict[str, Tensor]:
    """The four losses (fp32 scalars), all of the same weight."""
    with torch.autocast("cpu", torch.bfloat16):
        states, text, grades = run(model, batch, ids)
        predicted, fault = heads.losses(model, states, batch, ids)
    each = F.cross_entropy(
        text[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none"
    )
    known = batch.weights[:, 1:].flatten()
    wanted = torch.where(batch.sound, ids.sound, ids.wrong)
    grade = F.cross_entropy(grades.flatten(0, 1), wanted.flatten())
    return {
        "text": (each * known).sum() / known.sum(),
        "grade": grade,
        "predicted": predicted,
        "fault": fault,
    }


@torch.no_grad()
def graded_right(model: TinyLlama, batches: list[Batch], ids: Ids) -> dict[str, float]:
    """How well 9 against 0 tells lines of the small model apart: the area under the curve, and the
    share of sound lines above 99 in 100 of the wrong ones.
    """
    scores, sound = [], []
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            grades = run(model, batch, ids)[2]
        scores.append((grades[..., ids.sound] - grades[..., ids.wrong]).flatten())
        sound.append(batch.sound.flatten())
    score, truth = torch.cat(scores), torch.cat(sound)
    good, bad = score[truth], score[~truth]
    return {
        "area": float((good[:, None] > bad).float().mean()),
        "sound_above_wrong": float((good > bad.quantile(0.99)).float().mean()),
    }


def main(
    folder: Annotated[Path, typer.Argument(help="where `train_steps.py` has put both models")],
    steps: Annotated[int, typer.Option(help="updates of 32 solutions")] = UPDATES,
) -> None:
    """Train the upper layers and export FOLDER/steps-target-tiny."""
    torch.set_num_threads(1)
    tokenizer = train_tokenizer()
    ids, links, config = Ids.of(tokenizer), link_ids(tokenizer), CONFIGS[NAME]
    started = time.process_time()
    pool = drafted_rows(folder / DRAFT, tokenizer, DRAFTED, SEED, held_out=False)
    unseen = drafted_rows(folder / DRAFT, tokenizer, 40, SEED + 1, held_out=True)
    batches = Batches(tokenizer, TARGET, SIZE, SEED + 2, faults=FAULTS, drafted=pool)
    held_out = Batches(tokenizer, TARGET, SIZE, SEED + 1, held_out=True)
    checked = [batches.encode(rows) for rows in unseen.values()]
    model = load(folder / SOLVER).requires_grad_(False).train()
    model.grow(config, torch.Generator().manual_seed(SEED))
    torch.manual_seed(SEED)
    heads = Heads(config["hidden_size"], config["vocab_size"])
    chosen = [
        *optimizers(model, MUON_RATE),
        torch.optim.Adam(heads.parameters(), lr=HEADS_RATE),
    ]
    with (folder / f"{NAME}.jsonl").open("w") as log:
        for step in range(steps):
            losses = loss_of(model, heads, batches.draw(), ids)
            model.zero_grad(set_to_none=True)
            heads.zero_grad(set_to_none=True)
            torch.stack(list(losses.values())).sum().backward()
            move(chosen, rate(step, steps, DECAY))
            if step % 50 == 0 or step + 1 == steps:
                record = {"step": step, "cpu_seconds": time.process_time() - started}
                record |= {name: loss.item() for name, loss in losses.items()}
                record |= graded_right(model, checked, ids)
                record["right_results"] = right_results(model, held_out, links)
                log.write(json.dumps(record) + "\n")
                log.flush()
                console.print(record)
    export(model, config, tokenizer, folder / NAME)


if __name__ == "__main__":
    typer.run(main)
