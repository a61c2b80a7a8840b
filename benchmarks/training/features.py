"""What the target computes on the training text, once, as one safetensors file a shard.

The text is packed: N tokens, S sequences. A file holds

* ``tokens`` int32 [N], ``starts`` int64 [S + 1], ``answers`` int64 [S]: where an answer begins;
* ``states`` bf16 [N, 3 * H]: the residual stream before the layers `AUX_LAYERS`, side by side;
* ``final`` bf16 [N, H]: the normed last state, of which the embedding makes the logits;
* ``log_sum_exp`` float32 [N] and ``top`` int32 [N] of those logits, whole vocabulary; 0 in prompts.

    python benchmarks/training/features.py head_data/text head_data/features
"""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from torch.nn import functional as F

from speculators_ext.assets import build

if TYPE_CHECKING:
    from torch import Tensor

TARGET = "smollm2-135m-instruct"
AUX_LAYERS = (2, 15, 27)  # vLLM's own choice for 30 layers: 2, L // 2, L - 3
BATCH_TOKENS = 2048
LOGIT_ROWS = 512
console = Console()


class Target:
    """The target in bf16, asked for the states the head reads."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(build(TARGET), dtype=torch.bfloat16)

    @torch.inference_mode()
    def features(self, sequences: list[list[int]], begins: list[int]) -> list[dict[str, Tensor]]:
        """One dict a sequence, whose answer begins at token `begins[i]`.

        Padding stands behind, where no causal position sees it.
        """
        width = max(map(len, sequences))
        ids = torch.zeros(len(sequences), width, dtype=torch.int64)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        output = self.model.model(ids, output_hidden_states=True, use_cache=False)
        states = torch.cat([output.hidden_states[layer] for layer in AUX_LAYERS], dim=-1)
        found = []
        for row, (sequence, begin) in enumerate(zip(sequences, begins, strict=True)):
            final = output.last_hidden_state[row, : len(sequence)].contiguous()
            log_sum_exp, top = self._read_logits(final[begin:])
            found.append(
                {
                    "tokens": torch.tensor(sequence, dtype=torch.int32),
                    "states": states[row, : len(sequence)],
                    "final": final,
                    "log_sum_exp": F.pad(log_sum_exp, (begin, 0)),
                    "top": F.pad(top, (begin, 0)),
                }
            )
        return found

    def _read_logits(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """log sum exp = z_top - log p_top: fewer passes over the logits than a float32 copy's."""
        sums, tops = [], []
        for rows in final.split(LOGIT_ROWS):
            logits = self.model.lm_head(rows)
            highest, top = logits.max(-1)
            share = logits.softmax(-1).gather(1, top[:, None])[:, 0]
            sums.append(highest.float() - share.float().log())
            tops.append(top.int())
        return torch.cat(sums), torch.cat(tops)


def batches(lengths: list[int]) -> list[list[int]]:
    """Indices of sequences, of like length together, at most `BATCH_TOKENS` a batch."""
    groups: list[list[int]] = [[]]
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if (len(groups[-1]) + 1) * lengths[index] > BATCH_TOKENS and groups[-1]:
            groups.append([])
        groups[-1].append(index)
    return groups


def write_shard(target: Target, source: Path, path: Path) -> int:
    """Write one feature file; returns its tokens."""
    records = [json.loads(line) for line in source.read_text().splitlines()]
    records = [record for record in records if record["answer"]]
    sequences = [record["prompt"] + record["answer"] for record in records]
    begins = [len(record["prompt"]) for record in records]
    found: list[dict[str, Tensor]] = [{}] * len(sequences)
    for group in track(batches([len(s) for s in sequences]), source.stem, console=console):
        results = target.features([sequences[i] for i in group], [begins[i] for i in group])
        for index, result in zip(group, results, strict=True):
            found[index] = result
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    tensors = {key: torch.cat([one[key] for one in found]) for key in found[0]}
    tensors["starts"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tensors["answers"] = torch.tensor(begins)
    fresh = path.with_suffix(".part")
    save_file(tensors, fresh)
    fresh.rename(path)
    return int(lengths.sum())


def main(
    text: Annotated[Path, typer.Argument(help="folder of generate_text.py")],
    folder: Annotated[Path, typer.Argument(help="where the feature files go")],
) -> None:
    """Write the feature files that are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    target = Target()
    for source in sorted(text.glob("*.jsonl")):
        path = folder / f"{source.stem}.safetensors"
        if not path.exists():
            console.print(f"{source.stem}: {write_shard(target, source, path)} tokens")


if __name__ == "__main__":
    typer.run(main)
