"""A small world of checkable reasoning: sums of two-digit numbers, one step a line.

A problem names a starting number and operations with labels; a solution takes them one a line and
ends with the answer. Numbers keep their last two digits, so every result is one of 100::

    start 27 ; b plus 48 ; c minus 91
    then b : 27 plus 48 gives 75
    then c : take 91 from 75 makes 84 , so 84
    answer 84

A step can be worded in several ways that are all sound, and each writer has its habits
(`Habits`). `check` reads any of the wordings and says which lines are sound.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import random

LABELS = "bcdefghij"
MODULUS = 100
OPENINGS = ("then", "step", "now")
PLUS = ("{x} plus {y}", "{y} plus {x}", "add {y} to {x}")
MINUS = ("{x} minus {y}", "{x} less {y}", "take {y} from {x}")
LINKS = ("gives", "makes", "is")
TAILS = ("", " , so {z}")
JUDGE_SUFFIX = "grade"
HELD_OUT_SHARE = 8
"""One problem in so many, by its text's checksum, is never trained on."""

_NUMBER = r"(\d\d)"
_STEP = re.compile(
    rf"(?:{'|'.join(OPENINGS)}) ([a-z]) : (?:"
    rf"{_NUMBER} plus {_NUMBER}|add {_NUMBER} to {_NUMBER}|"
    rf"{_NUMBER} (?:minus|less) {_NUMBER}|take {_NUMBER} from {_NUMBER})"
    rf" (?:{'|'.join(LINKS)}) {_NUMBER}(?: , so {_NUMBER})?"
)
_ANSWER = re.compile(rf"answer {_NUMBER}")


class Operation(NamedTuple):
    """``word`` is plus or minus, ``operand`` 0 to 99."""

    word: str
    operand: int

    def apply(self, value: int) -> int:
        """The last two digits of the result."""
        signed = self.operand if self.word == "plus" else -self.operand
        return (value + signed) % MODULUS


@dataclass(frozen=True)
class Problem:
    """A starting number and at most nine operations."""

    start: int
    operations: tuple[Operation, ...]

    @property
    def text(self) -> str:
        """The prompt, one line with its end."""
        parts = [f"start {self.start:02d}"]
        for label, (word, operand) in zip(LABELS, self.operations, strict=False):
            parts.append(f"{label} {word} {operand:02d}")
        return " ; ".join(parts) + "\n"

    @property
    def answer(self) -> int:
        """What the last line must say."""
        value = self.start
        for operation in self.operations:
            value = operation.apply(value)
        return value

    @property
    def held_out(self) -> bool:
        """Whether it belongs to the problems that no model is trained on."""
        return zlib.crc32(self.text.encode()) % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class Habits:
    """How often a writer takes each wording, as weights in the order of the tables above."""

    openings: tuple[float, ...]
    forms: tuple[float, ...]
    links: tuple[float, ...]
    tails: tuple[float, ...]


def draw_problem(rng: random.Random, operations: int, *, held_out: bool) -> Problem:
    """A random problem from the training part or from the held-out part."""
    while True:
        drawn = tuple(
            Operation(rng.choice(("plus", "minus")), rng.randrange(MODULUS))
            for _ in range(operations)
        )
        problem = Problem(rng.randrange(MODULUS), drawn)
        if problem.held_out == held_out:
            return problem


def write_step(
    rng: random.Random, habits: Habits, label: str, word: str, x: int, y: int, z: int
) -> str:
    """One line (with its end) that says ``x word y`` is ``z``, in a random wording."""
    opening = rng.choices(OPENINGS, habits.openings)[0]
    form = rng.choices(PLUS if word == "plus" else MINUS, habits.forms)[0]
    link = rng.choices(LINKS, habits.links)[0]
    tail = rng.choices(TAILS, habits.tails)[0]
    body = form.format(x=f"{x:02d}", y=f"{y:02d}")
    return f"{opening} {label} : {body} {link} {z:02d}{tail.format(z=f'{z:02d}')}\n"


class Verdict(NamedTuple):
    """What `check` found.

    ``right``: the last line is the true answer. ``steps``: lines before it, each sound or not,
    judged by the lines in front of it (a step that goes on from a wrong number can be sound).
    """

    right: bool
    steps: list[bool]


def check(problem: Problem, text: str) -> Verdict:
    """Read a solution; lines in no known wording are unsound."""
    value: int | None = problem.start
    steps: list[bool] = []
    lines = text.strip().split("\n")
    for index, line in enumerate(lines[:-1]):
        sound, value = _check_step(problem, index, value, line)
        steps.append(sound)
    last = _ANSWER.fullmatch(lines[-1])
    return Verdict(last is not None and int(last[1]) == problem.answer, steps)


def is_sound(problem: Problem, before: str, line: str) -> bool:
    """Whether ``line`` is a sound next step after the lines ``before`` (without the prompt)."""
    value: int | None = problem.start
    index = -1
    for index, earlier in enumerate(before.splitlines()):
        _, value = _check_step(problem, index, value, earlier)
    return _check_step(problem, index + 1, value, line.rstrip("\n"))[0]


def _check_step(
    problem: Problem, index: int, value: int | None, line: str
) -> tuple[bool, int | None]:
    """Whether a line is sound after ``value``, and the number the next line goes on from."""
    found = _STEP.fullmatch(line)
    if found is None or index >= len(problem.operations):
        return False, None
    label, *numbers = found.groups()
    plus = [int(n) for n in numbers[0:4] if n is not None]
    minus_plain = [int(n) for n in numbers[4:6] if n is not None]
    minus_taken = [int(n) for n in numbers[6:8] if n is not None][::-1]
    result = int(numbers[8])
    operation = problem.operations[index]
    sound = (
        label == LABELS[index]
        and value is not None
        and (
            (operation.word == "plus" and sorted(plus) == sorted((value, operation.operand)))
            or (
                operation.word == "minus"
                and (minus_plain or minus_taken) == [value, operation.operand]
            )
        )
        and result == operation.apply(value)
        and numbers[9] in (None, numbers[8])
    )
    return sound, int(numbers[9] or numbers[8])
