"""Trains an EAGLE-3 head with a reduced draft vocabulary for SmolLM2-135M-Instruct, on a CPU.

The loss of step j at position t is the cross entropy of the head's distribution against the
target's at position t + 1 + j, over the draft vocabulary: half the target's own distribution, half
its top token, weighted by the target's mass inside the vocabulary and by 0.8^j (`EAGLE-3`,
arXiv 2503.01840, section 3, without a feature loss). Only positions of answers count.

    python benchmarks/training/train_eagle3.py head_data/features head_data/run
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from conversations import Batch, Conversations
from eagle3_head import Eagle3Head, SoftCrossEntropy
from export_head import export
from features import AUX_LAYERS, TARGET
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file

from speculators_ext.assets import build

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

DECAY = 0.8  # of the loss, a step
TOP_SHARE = 0.5  # of the target's top token in what the head learns
BETAS, CLIP = (0.9, 0.95), 1.0
FIRST_ALONE = 0.25  # share of a new head's updates that train the first step only, for a third
HEAD_RATE = 0.3  # of the learning rate, for the rows that start as the target's embedding
console = Console(soft_wrap=True)


def new_head(target: Any, data: Conversations, draft_vocab: int) -> Eagle3Head:
    """A head that starts from the target: its last layer, last norm and embedding rows."""
    embedding = target.model.embed_tokens.weight.detach()
    counts = data.token_counts(len(embedding))
    draft_ids = counts.argsort(descending=True, stable=True)[:draft_vocab].sort().values
    sample = data.load(data.training[:64])
    # Of answers only: a sequence's first position is an attention sink with huge states.
    column = torch.arange(sample.final.shape[1] - 1)
    seen = sample.states[:, sample.first + 1 :][column < sample.lengths[:, None] - 1]
    scale = seen.float().square().mean(0).rsqrt()
    head = Eagle3Head(target.config, embedding, draft_ids, scale)
    hidden, layers = target.config.hidden_size, target.model.layers
    first, last = layers[0], layers[-1]
    with torch.no_grad():
        # The feature starts as the highest state itself, so that the last layer's weights mean
        # what they meant; the embeddings meet the weights of the layer that reads embeddings.
        head.fc.weight.normal_(std=0.3 / math.sqrt(3 * hidden))
        head.fc.weight[:, 2 * hidden :] += torch.diag(1 / scale[2 * hidden :])
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(head, name).weight
            weight[:, :hidden] = getattr(first.self_attn, name).weight
            weight[:, hidden:] = getattr(last.self_attn, name).weight
        head.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(head, name).weight.copy_(getattr(last.mlp, name).weight)
        head.input_layernorm.weight.copy_(first.input_layernorm.weight)
        head.hidden_norm.weight.copy_(last.input_layernorm.weight)
        head.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(embedding[draft_ids])
    return head


def build_on(head: Eagle3Head, checkpoint: Path) -> None:
    """Takes over the weights of an earlier run, whose vocabulary may differ.

    A token new to the vocabulary gets its embedding plus what the others' rows moved on average.
    """
    with safe_open(checkpoint, framework="pt") as file:
        old = {k[5:]: file.get_tensor(k) for k in file.keys() if k.startswith("head.")}  # noqa: SIM118
    ids, rows = old.pop("draft_ids"), old["lm_head.weight"]
    row_of = torch.full((len(head.embedding),), -1).index_put((ids,), torch.arange(len(ids)))
    row = row_of[head.draft_ids][:, None]
    moved = (rows - head.embedding[ids].float()).mean(0)
    fresh = head.embedding[head.draft_ids].float() + moved
    old["lm_head.weight"] = torch.where(row >= 0, rows[row[:, 0].clamp(min=0)], fresh)
    head.load_state_dict(old | {"draft_ids": head.draft_ids})


class Trainer:
    """The head, its optimiser and what both need to go on after an interruption.

    The first `alone` updates unroll one step: the others build on it.
    """

    def __init__(self, head: Eagle3Head, rate: float, steps: int, unroll: int, alone: int) -> None:
        self.head, self.rate, self.steps, self.unroll = head, rate, steps, unroll
        self.alone = alone
        slow = list(head.lm_head.parameters())
        fast = [p for name, p in head.named_parameters() if not name.startswith("lm_head")]
        self.optimizer = torch.optim.AdamW(
            [{"params": fast, "share": 1.0}, {"params": slow, "share": HEAD_RATE}],
            *(rate, BETAS, 1e-8, 0.01),
            fused=True,
        )
        self.done = 0
        self._set_vocabulary()

    def _set_vocabulary(self) -> None:
        embedding, ids = self.head.embedding, self.head.draft_ids
        self.draft_rows = embedding[ids]
        self.draft_of = torch.full((len(embedding),), -1).index_put((ids,), torch.arange(len(ids)))

    def wanted(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """What the logits of each position should say.

        Returns:
            `q` bf16 [B * T, D], the top token's draft id int64 [B * T], and the row's weight
            float32 [B * T], 0 where the draft vocabulary has not the target's top token.
        """
        logits = batch.final.flatten(0, 1) @ self.draft_rows.T
        q = logits.softmax(-1)
        found = self.draft_of[batch.top.flatten()]
        top = found.clamp(min=0)[:, None]
        in_vocabulary = (logits.gather(1, top)[:, 0] - batch.log_sum_exp.flatten()).exp()
        mass = (in_vocabulary / q.gather(1, top)[:, 0].float().clamp(min=1e-6)).clamp_(max=1)
        share = torch.full((len(q), 1), TOP_SHARE, dtype=q.dtype)
        q.mul_(1 - TOP_SHARE).scatter_add_(1, top, share)
        return q, top[:, 0], mass * (found >= 0)

    def rows(self, batch: Batch, step: int) -> Tensor:
        """Flat indices into [B, A] of the drafts whose token of this step the answer holds."""
        column = torch.arange(batch.final.shape[1])
        return (column + step < batch.lengths[:, None] - 1).flatten().nonzero()[:, 0]

    def unrolled(self, batch: Batch, depth: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(step, rows of the targets in [B * A], normed features of the drafts) of each step."""
        features = self.head.unroll(batch.tokens, batch.states, batch.padding, batch.first, depth)
        for step, feature in enumerate(features):
            rows = self.rows(batch, step)
            x = feature.flatten(0, 1).index_select(0, rows)
            # draft u of step j guesses what follows answer token u + j
            yield step, rows + step, self.head.norm(x.float()).bfloat16()

    def loss(self, batch: Batch) -> Tensor:
        """The weighted sum over steps, a mean over positions."""
        q, top, mass = self.wanted(batch)
        total = torch.zeros(())
        count = len(self.rows(batch, 0))
        depth = 1 if self.done < self.alone else self.unroll
        for step, wanted, x in self.unrolled(batch, depth):
            total = total + SoftCrossEntropy.apply(
                x,
                self.head.lm_head.weight,
                q.index_select(0, wanted),
                top[wanted],
                mass[wanted] * (DECAY**step / count),
            )
        return total

    def step(self, batch: Batch) -> float:
        """One update; returns the loss before it."""
        warm = min(1.0, (self.done + 1) / (0.03 * self.steps))
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, self.done / self.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * self.rate * warm * (0.02 + 0.98 * cosine)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return float(loss.detach())

    @torch.inference_mode()
    def accuracy(self, batches: list[Batch]) -> list[float]:
        """Share of drafts of 1, 2, ... tokens that are the target's top tokens throughout."""
        right = torch.zeros(self.unroll)
        count = 0
        for batch in batches:
            alive = torch.ones(batch.top.numel(), dtype=torch.bool)
            complete = self.rows(batch, self.unroll - 1)
            count += len(complete)
            with torch.autocast("cpu", torch.bfloat16):
                for step, wanted, x in self.unrolled(batch, self.unroll):
                    guess = self.head.draft_ids[self.head.lm_head(x).argmax(-1)]
                    alive[wanted - step] &= guess == batch.top.flatten()[wanted]
                    right[step] += alive[complete].sum()
        return [round(share, 4) for share in (right / count).tolist()]

    def save(self, path: Path) -> None:
        """Everything a resumed run needs, as safetensors."""
        tensors = {f"head.{k}": v.detach() for k, v in self.head.state_dict().items()}
        for name, parameter in self.head.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{key}.{name}"] = value
        fresh = path.with_suffix(".part")
        save_file({k: v.contiguous() for k, v in tensors.items()}, fresh, {"done": str(self.done)})
        fresh.rename(path)

    def load(self, path: Path) -> None:
        """Goes on from `save`."""
        with safe_open(path, framework="pt") as file:
            self.done = int(file.metadata()["done"])
            state = {k[5:]: file.get_tensor(k) for k in file.keys() if k.startswith("head.")}  # noqa: SIM118
            self.head.load_state_dict(state)
            for name, parameter in self.head.named_parameters():
                self.optimizer.state[parameter] = {
                    key: file.get_tensor(f"{key}.{name}")
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
        self._set_vocabulary()


def main(
    features: Annotated[Path, typer.Argument(help="folder of features.py")],
    folder: Annotated[Path, typer.Argument(help="checkpoint, log and exported head")],
    steps: Annotated[int, typer.Option(help="updates in all")] = 4300,
    rate: Annotated[float, typer.Option(help="highest learning rate")] = 8e-4,
    batch_tokens: Annotated[int, typer.Option(help="padded answer tokens an update")] = 1024,
    unroll: Annotated[int, typer.Option(help="draft steps trained together")] = 3,
    draft_vocab: Annotated[int, typer.Option(help="tokens the head can draft")] = 8192,
    every: Annotated[int, typer.Option(help="updates between two checkpoints")] = 100,
    seed: Annotated[int, typer.Option(help="order of the data and first weights")] = 0,
    start: Annotated[Path | None, typer.Option(help="checkpoint of a run to build on")] = None,
    first_shard: Annotated[int, typer.Option(help="the first shard to train on")] = 0,
    end_shard: Annotated[int | None, typer.Option(help="the shard to stop before")] = None,
) -> None:
    """Train, or go on with the training in the folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    data = Conversations(features, first_shard, end_shard)
    target: Any = AutoModelForCausalLM.from_pretrained(build(TARGET), dtype=torch.bfloat16)
    head = new_head(target, data, draft_vocab)
    if start:
        build_on(head, start)
    trainer = Trainer(head, rate, steps, unroll, 0 if start else int(FIRST_ALONE * steps))
    checkpoint = folder / "checkpoint.safetensors"
    if checkpoint.exists():
        trainer.load(checkpoint)
    validation = [data.load(group) for group in data.grouped(data.kept_back, batch_tokens)]
    losses: list[float] = []
    started = time.monotonic()
    for batch in data.batches(seed, batch_tokens, trainer.done):
        if trainer.done >= steps:
            break
        losses.append(trainer.step(batch))
        if trainer.done % every and trainer.done != steps:
            continue
        accepted = trainer.accuracy(validation)
        row = {
            "step": trainer.done,
            "loss": round(sum(losses) / len(losses), 4),
            "accepted_by_position": accepted,
            "mean_length": round(1 + sum(accepted), 3),
            "seconds": round(time.monotonic() - started, 1),
        }
        console.print_json(json.dumps(row), indent=None)
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")
        losses.clear()
        trainer.save(checkpoint)
        export(trainer.head, target.config, AUX_LAYERS, folder / "smollm2-eagle3")


if __name__ == "__main__":
    typer.run(main)
