"""Training text of the two reasoning models: solutions as token ids with a weight a token.

Text to learn grading from has faults: some lines are wrong. These weigh nothing, so that a model
learns to recognise them and not to write them; so do lines that the small model has written.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
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
    is_sound,
    write_step,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB_SIZE = 384
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
_WORDS = r" ?[A-Za-z]+| [+-][0-9]| ?[0-9]|\n| ?[^A-Za-z0-9\s]|\s"
OPERATIONS = (4, 5, 6, 7, 8)
CORPUS_FAULTS, CORPUS_GRADED = 0.15, 0.25  # shares of lines, in the tokenizer's text

# Both write all wordings; what each writes most differs in the opening and in the order of the
# numbers, and agrees in the rest.
TARGET = Habits((0.5, 0.25, 0.25), (0.5, 0.2, 0.3), (0.5, 0.25, 0.25), (0.7, 0.3))
DRAFT = Habits((0.15, 0.7, 0.15), (0.1, 0.1, 0.8), (0.8, 0.1, 0.1), (0.9, 0.1))


class Line(NamedTuple):
    """A line of a solution: what it says, whether it is sound, and, of a wrong one whose fault is
    known, the sound line in the same wording.
    """

    text: str
    sound: bool
    right: str | None = None


class Row(NamedTuple):
    """A prompt, the lines behind it, and whether sound lines are learned or only graded."""

    prompt: str
    lines: list[Line]
    learned: bool = True


class Batch(NamedTuple):
    """Solutions with the same number of lines, G.

    Attributes:
        tokens: int64 [B, T], padded.
        weights: of predicting each, fp32 [B, T].
        ends: where each line ends, int64 [B, G].
        sound: whether it is sound, bool [B, G].
        wrong: of digits, 1 for the first fault of a line and 0 in front of it; -1 where nothing
            can be said, int64 [B, T].
    """

    tokens: Tensor
    weights: Tensor
    ends: Tensor
    sound: Tensor
    wrong: Tensor


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over this world's words: a word or a digit is one token, and so is a line's
    end.
    """
    rng = random.Random(0)
    lines = []
    for count in (3, 9):
        for _ in range(200):
            problem = draw_problem(rng, count, held_out=False)
            lines.append(_graded_text(rng, problem))
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
    # Rows begin with it, so prompts must: without it both models err in their first steps.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (
        "{{ bos_token }}"
        "{% for message in messages %}{{ message['content'].strip() + '\\n' }}{% endfor %}"
    )
    return fast


def _graded_text(rng: random.Random, problem: Problem) -> str:
    """A solution in which some lines are graded, for the tokenizer."""
    text = problem.text
    for line in solution(rng, problem, TARGET, CORPUS_FAULTS):
        text += line.text
        asked = not line.text.startswith("answer")
        if asked and (not line.sound or rng.random() < CORPUS_GRADED):
            text += f"{JUDGE_SUFFIX} {9 if line.sound else 0}\n"
    return text


def solution(
    rng: random.Random,
    problem: Problem,
    habits: Habits,
    faults: float = 0.0,
    answer_faults: float = 0.0,
) -> Iterator[Line]:
    """Steps and answer; a share of both is wrong, and later steps go on from a wrong number."""
    value = problem.start
    for label, operation in zip(LABELS, problem.operations, strict=False):
        fault = bool(faults) and rng.random() < faults
        said = operation.word, value, operation.operand, operation.apply(value)
        shown = _spoil(rng, *said) if fault else said
        before = rng.getstate()
        text = write_step(rng, habits, label, *shown)
        right = None
        if fault:
            after = rng.getstate()
            rng.setstate(before)
            right = write_step(rng, habits, label, *said)
            rng.setstate(after)
        yield Line(text, not fault, right)
        value = shown[-1]
    right = f"answer {value:02d}\n"
    fault = bool(answer_faults) and rng.random() < answer_faults
    shown = f"answer {_shift(rng, value):02d}\n" if fault else right
    yield Line(shown, not fault, right if fault else None)


def _spoil(rng: random.Random, word: str, x: int, y: int, z: int) -> tuple[str, int, int, int]:
    """A step that is wrong in the result, in an operand, or in what it does."""
    kind = rng.random()
    if kind < 0.6:
        return word, x, y, _shift(rng, z)
    if kind < 0.8:
        wrong = y % 9 + 1
        return word, x, wrong, Operation(word, wrong).apply(x)
    if kind < 0.9:
        wrong = (x + rng.choice((1, -1, 10, -10))) % MODULUS
        return word, wrong, y, Operation(word, y).apply(wrong)
    other = "minus" if word == "plus" else "plus"
    return other, x, y, Operation(other, y).apply(x)


def _shift(rng: random.Random, number: int) -> int:
    """Another number, mostly a near one."""
    shift = rng.choice((1, -1, 10, -10, rng.randrange(1, MODULUS)))
    return (number + shift) % MODULUS


def read_lines(problem: Problem, text: str) -> list[Line] | None:
    """Lines of a solution that someone else has written, or None where they are too few or many."""
    lines: list[Line] = []
    before = ""
    for line in text.splitlines(keepends=True):
        lines.append(Line(line, is_sound(problem, before, line)))
        before += line
    return lines if len(lines) == len(problem.operations) + 1 else None


class Batches:
    """Endless batches of solutions, all of one batch with the same number of operations.

    Args:
        tokenizer: of both models.
        habits: the writer's.
        size: solutions in a batch.
        seed: of the problems and wordings.
        faults: see `solution`.
        drafted: rows that the small model has written, by their number of operations; half of each
            batch is taken from them.
        held_out: whether problems come from the part kept out of training.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        habits: Habits,
        size: int,
        seed: int,
        *,
        faults: float = 0.0,
        drafted: dict[int, list[Row]] | None = None,
        held_out: bool = False,
    ) -> None:
        self._tokenizer, self._habits, self._size = tokenizer, habits, size
        self._rng = random.Random(seed)
        self._faults, self._drafted, self._held_out = faults, drafted, held_out
        self._digits = digits_of(tokenizer)

    def draw(self) -> Batch:
        """The next batch."""
        count = self._rng.choice(OPERATIONS)
        taken = self._size // 2 if self._drafted else 0
        problems = [
            draw_problem(self._rng, count, held_out=self._held_out)
            for _ in range(self._size - taken)
        ]
        rows = [
            Row(p.text, list(solution(self._rng, p, self._habits, self._faults, self._faults / 2)))
            for p in problems
        ]
        if self._drafted:
            rows += self._rng.sample(self._drafted[count], taken)
        return self.encode(rows)

    def encode(self, rows: list[Row]) -> Batch:
        """Rows with the same number of lines as a batch."""
        encoded = [self._encode(row) for row in rows]
        length = max(len(tokens) for tokens, *_ in encoded)
        padding = (self._tokenizer.pad_token_id, 0.0, -1)
        tokens, weights, wrong = (
            torch.tensor([row[at] + [fill] * (length - len(row[at])) for row in encoded])
            for at, fill in enumerate(padding)
        )
        ends = torch.tensor([row[3] for row in encoded])
        sound = torch.tensor([[line.sound for line in row.lines] for row in rows])
        return Batch(tokens, weights, ends, sound, wrong)

    def _encode(self, row: Row) -> tuple[list[int], list[float], list[int], list[int]]:
        texts = [row.prompt, *(line.text for line in row.lines)]
        prompt, *parts = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        ids = [self._tokenizer.bos_token_id, *prompt]
        weights, wrong, ends = [0.0] * len(ids), [-1] * len(ids), []
        for line, part in zip(row.lines, parts, strict=True):
            ids += part
            weights += [float(row.learned and line.sound)] * len(part)
            wrong += self._faults_in(line, part) if row.learned else [-1] * len(part)
            ends.append(len(ids) - 1)
        ids.append(self._tokenizer.eos_token_id)
        return ids, [*weights, float(row.learned)], [*wrong, -1], ends

    def _faults_in(self, line: Line, ids: list[int]) -> list[int]:
        found = [0 if token in self._digits else -1 for token in ids]
        if line.right is not None:
            right = self._tokenizer(line.right, add_special_tokens=False)["input_ids"]
            first = next(
                at for at, pair in enumerate(zip(ids, right, strict=False)) if len(set(pair)) > 1
            )
            found[first:] = [1 if ids[first] in self._digits else -1] + [-1] * (
                len(ids) - first - 1
            )
        return found


def digits_of(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Ids of all digits, with a space before them and without."""
    texts = [f"{space}{digit}" for space in ("", " ") for digit in range(10)]
    return {ids[0] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]}
