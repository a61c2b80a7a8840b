"""Training text of the two reasoning models: solutions as token ids with a weight a token.

The target's text has faults and grades: some steps are wrong, and after a step there may be the
judging suffix with a digit, 9 for a sound step and 0 for a wrong one. Wrong steps and the suffix
weigh nothing, so that the model learns to give the digit but not to write faults or suffixes.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from speculators_ext.assets.steps_world import (
    JUDGE_SUFFIX,
    LABELS,
    MODULUS,
    Habits,
    Operation,
    Problem,
    draw_problem,
    write_step,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB_SIZE = 384
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
_WORDS = r" ?[A-Za-z]+| [+-][0-9]| ?[0-9]|\n| ?[^A-Za-z0-9\s]|\s"
OPERATIONS = (4, 5, 6, 7, 8)
FAULTS, GRADED = 0.15, 0.25

# Both write all wordings; what each writes most differs in the opening and in the order of the
# numbers, and agrees in the rest.
TARGET = Habits((0.5, 0.25, 0.25), (0.5, 0.2, 0.3), (0.5, 0.25, 0.25), (0.7, 0.3))
DRAFT = Habits((0.15, 0.7, 0.15), (0.1, 0.1, 0.8), (0.8, 0.1, 0.1), (0.9, 0.1))


class Piece(NamedTuple):
    """A stretch of text and whether it is trained on."""

    text: str
    weight: float


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over this world's words: a word or a digit is one token, and so is a line's
    end.
    """
    rng = random.Random(0)
    lines = []
    for count in (3, 9):
        for _ in range(200):
            problem = draw_problem(rng, count, held_out=False)
            lines.append("".join(piece.text for piece in solution(rng, problem, TARGET, True)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (
        "{% for message in messages %}{{ message['content'].strip() + '\\n' }}{% endfor %}"
    )
    return fast


def solution(rng: random.Random, problem: Problem, habits: Habits, graded: bool) -> Iterator[Piece]:
    """Prompt, steps and answer; with ``graded`` also faults and grades."""
    yield Piece(problem.text, 0.0)
    value = problem.start
    for label, operation in zip(LABELS, problem.operations, strict=False):
        fault = graded and rng.random() < FAULTS
        word, x, y, z = operation.word, value, operation.operand, operation.apply(value)
        if fault:
            word, x, y, z = _spoil(rng, word, x, y, z)
        yield Piece(write_step(rng, habits, label, word, x, y, z), 0.0 if fault else 1.0)
        if fault or (graded and rng.random() < GRADED):
            yield Piece(JUDGE_SUFFIX, 0.0)
            yield Piece(" 0" if fault else " 9", 1.0)
            yield Piece("\n", 0.0)
        value = z
    yield Piece(f"answer {value:02d}\n", 1.0)


def _spoil(rng: random.Random, word: str, x: int, y: int, z: int) -> tuple[str, int, int, int]:
    """A step that is wrong in the result, in an operand, or in what it does."""
    kind = rng.random()
    if kind < 0.6:
        shift = rng.choice((1, -1, 10, -10, rng.randrange(1, MODULUS)))
        return word, x, y, (z + shift) % MODULUS
    if kind < 0.8:
        wrong = y % 9 + 1
        return word, x, wrong, Operation(word, wrong).apply(x)
    if kind < 0.9:
        wrong = (x + rng.choice((1, -1, 10, -10))) % MODULUS
        return word, wrong, y, Operation(word, y).apply(wrong)
    other = "minus" if word == "plus" else "plus"
    return other, x, y, Operation(other, y).apply(x)


class Batches:
    """Endless batches of solutions, all of one batch with the same number of operations.

    Args:
        tokenizer: of both models.
        habits: the writer's.
        graded: see `solution`.
        size: solutions in a batch.
        seed: of the problems and wordings.
        held_out: whether problems come from the part kept out of training.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        habits: Habits,
        graded: bool,
        size: int,
        seed: int,
        *,
        held_out: bool = False,
    ) -> None:
        self._tokenizer, self._habits = tokenizer, habits
        self._graded, self._size = graded, size
        self._rng = random.Random(seed)
        self._held_out = held_out

    def draw(self) -> tuple[Tensor, Tensor]:
        """Ids int64 [B, T], padded, and the weight of predicting each, fp32 [B, T]."""
        count = self._rng.choice(OPERATIONS)
        problems = [
            draw_problem(self._rng, count, held_out=self._held_out) for _ in range(self._size)
        ]
        texts = [list(solution(self._rng, p, self._habits, self._graded)) for p in problems]
        rows = self._encode(texts)
        length = max(len(ids) for ids, _ in rows)
        tokens = torch.full((self._size, length), self._tokenizer.pad_token_id)
        weights = torch.zeros(self._size, length)
        for row, (ids, own) in enumerate(rows):
            tokens[row, : len(ids)] = torch.tensor(ids)
            weights[row, : len(ids)] = torch.tensor(own)
        return tokens, weights

    def _encode(self, texts: list[list[Piece]]) -> list[tuple[list[int], list[float]]]:
        pieces = [piece for text in texts for piece in text]
        encoded = iter(
            self._tokenizer([p.text for p in pieces], add_special_tokens=False)["input_ids"]
        )
        rows = []
        for text in texts:
            ids, weights = [self._tokenizer.bos_token_id], [0.0]
            for piece in text:
                part = next(encoded)
                ids += part
                weights += [piece.weight] * len(part)
            rows.append(([*ids, self._tokenizer.eos_token_id], [*weights, 1.0]))
        return rows
