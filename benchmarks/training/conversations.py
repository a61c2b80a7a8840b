"""The training text with the target's features, in padded batches of like length."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import load_file
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

HELD_BACK = 50  # one conversation in so many is kept for validation
# A feature: does it also cover the prompt, and does it leave out the last token?
SHAPES = {
    "tokens": (True, False),
    "states": (True, True),
    "final": (False, False),
    "log_sum_exp": (False, False),
    "top": (False, False),
}
POOL = 96  # conversations sorted by length together: batches stay random, padding small


class Batch(NamedTuple):
    """B conversations whose answers all begin in column P; A is the longest answer's length."""

    tokens: Tensor  # int64 [B, P + A], zeros in front of a prompt and behind an answer
    states: Tensor  # bf16 [B, P + A - 1, 3 * H]
    padding: Tensor  # int64 [B], columns in front of the prompt
    first: int  # P - 1: the column before the answers, the first that drafts
    lengths: Tensor  # int64 [B], of the answers
    final: Tensor  # bf16 [B, A, H], of the answers, like the next two
    log_sum_exp: Tensor  # float32 [B, A]
    top: Tensor  # int64 [B, A]


class Conversations:
    """The feature files of a folder, mapped, not read into memory.

    It holds the first `end` shards; epochs leave out those before `first`. What is kept back of
    a shard does not depend on either.
    """

    def __init__(self, folder: Path, first: int = 0, end: int | None = None) -> None:
        self.shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))[:end]]
        everything = [
            (shard, row)
            for shard, tensors in enumerate(self.shards)
            for row in range(len(tensors["answers"]))
        ]
        self.kept_back = everything[::HELD_BACK]
        chosen = set(self.kept_back)
        self.counted = [one for one in everything if one not in chosen]
        self.training = [one for one in self.counted if one[0] >= first]

    def lengths(self, one: tuple[int, int]) -> tuple[int, int]:
        """Tokens of a conversation's prompt and of its answer."""
        tensors = self.shards[one[0]]
        prompt = int(tensors["answers"][one[1]])
        start, end = tensors["starts"][one[1] : one[1] + 2].tolist()
        return prompt, end - start - prompt

    def token_counts(self, vocab_size: int) -> Tensor:
        """int64 [V]: how many answers hold each token. One that repeats itself counts once."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for shard, row in self.counted:
            tensors = self.shards[shard]
            start, end = tensors["starts"][row : row + 2].tolist()
            answer = tensors["tokens"][start + int(tensors["answers"][row]) : end]
            counts[answer.long().unique()] += 1
        return counts

    def epoch(self, seed: int, batch_tokens: int) -> list[list[tuple[int, int]]]:
        """The training conversations once, in batches of at most so many padded answer tokens."""
        rng = random.Random(seed)
        order = rng.sample(self.training, len(self.training))
        groups = [
            group
            for start in range(0, len(order), POOL)
            for group in self.grouped(order[start : start + POOL], batch_tokens)
        ]
        rng.shuffle(groups)
        return groups

    def grouped(self, chosen: list[tuple[int, int]], batch_tokens: int) -> list[list]:
        """Those of like length together; a batch's padded answers hold at most so many tokens."""
        groups: list[list[tuple[int, int]]] = [[]]
        longest = 0
        for one in sorted(chosen, key=self._sort_key):
            longest = max(longest, self.lengths(one)[1])
            if groups[-1] and (len(groups[-1]) + 1) * longest > batch_tokens:
                groups.append([])
                longest = self.lengths(one)[1]
            groups[-1].append(one)
        return groups

    def _sort_key(self, one: tuple[int, int]) -> tuple[int, int]:
        prompt, answer = self.lengths(one)
        return -(answer // 40), prompt

    def batches(self, seed: int, batch_tokens: int, first: int = 0) -> Iterator[Batch]:
        """Batches without end, epoch after epoch; `first` skips those a resumed run has seen."""
        seen = 0
        for epoch in range(10**6):
            groups = self.epoch(seed + epoch, batch_tokens)
            for group in groups[max(0, first - seen) :]:
                yield self.load(group)
            seen += len(groups)

    def load(self, group: list[tuple[int, int]]) -> Batch:
        """Copies a batch out of the mapped files."""
        sizes = [self.lengths(one) for one in group]
        prompt, answer = (max(size) for size in zip(*sizes, strict=True))
        rows: dict[str, list[Tensor]] = {name: [] for name in SHAPES}
        for (shard, row), (p, a) in zip(group, sizes, strict=True):
            tensors = self.shards[shard]
            start = int(tensors["starts"][row])
            for name, (with_prompt, without_last) in SHAPES.items():
                part = tensors[name][
                    start + (0 if with_prompt else p) : start + p + a - without_last
                ]
                front, behind = (prompt - p if with_prompt else 0), answer - a
                widths = [0, 0] * (part.dim() - 1) + [front, behind]
                rows[name].append(F.pad(part, widths))
        stacked = {name: torch.stack(parts) for name, parts in rows.items()}
        return Batch(
            tokens=stacked["tokens"].long(),
            states=stacked["states"],
            padding=torch.tensor([prompt - p for p, _ in sizes]),
            first=prompt - 1,
            lengths=torch.tensor([a for _, a in sizes]),
            final=stacked["final"],
            log_sum_exp=stacked["log_sum_exp"],
            top=stacked["top"].long(),
        )
