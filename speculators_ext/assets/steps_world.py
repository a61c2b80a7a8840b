"""A small world of checkable reasoning: sums with carries, one step a line.

A problem names operations with labels and a starting number; a solution takes them one a line and
ends with the answer. Numbers keep their last two digits, so every result is one of 100::

    b +8 ; c -9 ; start 47
    then b : 47 plus 8 gives 55
    then c : take 9 from 55 makes 46 , so 46
    answer 46

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

_NUMBER, _DIGIT = r"(\d\d)", r"(\d)"
_STEP = re.compile(
    rf"(?:{'|'.join(OPENINGS)}) ([a-z]) : (?:"
    rf"{_NUMBER} plus {_DIGIT}|{_DIGIT} plus {_NUMBER}|add {_DIGIT} to {_NUMBER}|"
    rf"{_NUMBER} (?:minus|less) {_DIGIT}|take {_DIGIT} from {_NUMBER})"
    rf" (?:{'|'.join(LINKS)}) {_NUMBER}(?: , so {_NUMBER})?"
)
_ANSWER = re.compile(rf"answer {_NUMBER}")


class Operation(NamedTuple):
    """``word`` is plus or minus, ``operand`` 1 to 9."""

    word: str
    operand: int

    @property
    def sign(self) -> str:
        """As problems write it."""
        return "+" if self.word == "plus" else "-"

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
        parts = [
            f"{label} {operation.sign}{operation.operand}"
            for label, operation in zip(LABELS, self.operations, strict=False)
        ]
        return " ; ".join([*parts, f"start {self.start:02d}"]) + "\n"

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
            Operation(rng.choice(("plus", "minus")), rng.randint(1, 9)) for _ in range(operations)
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
    body = form.format(x=f"{x:02d}", y=y)
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
    """Whether ``line`` is sound after the lines ``before`` (without the prompt): the next step, or
    behind the last one the answer.
    """
    value: int | None = problem.start
    index = -1
    for index, earlier in enumerate(before.splitlines()):
        _, value = _check_step(problem, index, value, earlier)
    index += 1
    found = _ANSWER.fullmatch(line.rstrip("\n"))
    if found is not None:
        return index == len(problem.operations) and int(found[1]) == value
    return _check_step(problem, index, value, line.rstrip("\n"))[0]


def _check_step(
    problem: Problem, index: int, value: int | None, line: str
) -> tuple[bool, int | None]:
    """Whether a line is sound after ``value``, and the number the next line goes on from."""
    found = _STEP.fullmatch(line)
    if found is None or index >= len(problem.operations):
        return False, None
    label, *numbers = found.groups()
    operation = problem.operations[index]
    given = [int(n) for n in numbers[:-2] if n is not None]
    word = "plus" if any(n is not None for n in numbers[:6]) else "minus"
    # Where the digit is written first, the pair is turned round.
    turned = numbers[2] is not None or numbers[4] is not None or numbers[8] is not None
    result, tail = int(numbers[-2]), numbers[-1]
    sound = (
        label == LABELS[index]
        and value is not None
        and word == operation.word
        and (given[::-1] if turned else given) == [value, operation.operand]
        and result == operation.apply(value)
        and tail in (None, numbers[-2])
    )
    return sound, int(tail or result)


def read_problem(text: str) -> Problem:
    """The problem that a prompt states."""
    *parts, last = text.strip().split(" ; ")
    signed = [part.split()[1] for part in parts]
    operations = [Operation("plus" if s[0] == "+" else "minus", int(s[1:])) for s in signed]
    return Problem(int(last.removeprefix("start ")), tuple(operations))
