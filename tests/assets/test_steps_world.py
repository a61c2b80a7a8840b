"""The world of checkable steps: what is sound passes in every wording, and nothing else does."""

from __future__ import annotations

import itertools
import random

import pytest

from speculators_ext.assets.steps_world import (
    LINKS,
    MINUS,
    OPENINGS,
    PLUS,
    TAILS,
    Habits,
    Operation,
    Problem,
    check,
    draw_problem,
    is_sound,
    read_problem,
    write_step,
)

PROBLEM = Problem(47, (Operation("plus", 8), Operation("minus", 9)))
RIGHT = "then b : 47 plus 8 gives 55\nthen c : take 9 from 55 makes 46 , so 46\nanswer 46\n"
EVEN = Habits((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1))


def test_the_example_of_the_description() -> None:
    """Catches a checker that reads another language than the documentation shows."""
    assert PROBLEM.text == "b +8 ; c -9 ; start 47\n"
    assert check(PROBLEM, RIGHT) == (True, [True, True])


@pytest.mark.parametrize("word", ["plus", "minus"])
def test_every_wording_of_a_sound_step_is_sound(word: str) -> None:
    """Catches a wording that the checker takes for a mistake: the small model's would look bad."""
    operation = Operation(word, 8)
    problem, z = Problem(3, (operation,)), operation.apply(3)
    forms = PLUS if word == "plus" else MINUS
    for opening, form, link, tail in itertools.product(OPENINGS, forms, LINKS, TAILS):
        body = form.format(x="03", y=8)
        line = f"{opening} b : {body} {link} {z:02d}{tail.format(z=f'{z:02d}')}"
        assert is_sound(problem, "", line), line


WRONG = [
    "then b : 47 plus 8 gives 45",  # a forgotten carry
    "then b : 47 plus 7 gives 54",  # another operand
    "then b : 37 plus 8 gives 45",  # another number to start from
    "then b : 47 minus 8 gives 39",  # another operation
    "then c : 47 plus 8 gives 55",  # another label
    "then b : 47 plus 8 gives 55 , so 56",
    "then b : 8 minus 47 gives 61",
    "then b : 47 plus 8 gives 55 now",
    "grade 9",
    "",
]


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_step_is_wrong(line: str) -> None:
    """Catches a checker that looks at the result alone, or at a part of the line."""
    assert not is_sound(PROBLEM, "", line)


def test_a_step_is_judged_by_what_precedes_it() -> None:
    """A right sum of a wrong number is a sound step of a wrong solution."""
    text = "then b : 47 plus 8 gives 45\nthen c : 45 minus 9 gives 36\nanswer 36\n"
    assert check(PROBLEM, text) == (False, [False, True])
    assert check(PROBLEM, RIGHT.replace("answer 46", "answer 45")) == (False, [True, True])
    assert not check(PROBLEM, "").right


@pytest.mark.parametrize(
    ("before", "line", "sound"),
    [
        ("then b : 47 plus 8 gives 55\nnow c : 55 less 9 is 46\n", "answer 46\n", True),
        ("then b : 47 plus 8 gives 55\nnow c : 55 less 9 is 46\n", "answer 45\n", False),
        ("then b : 47 plus 8 gives 54\nnow c : 54 less 9 is 45\n", "answer 45\n", True),
        ("then b : 47 plus 8 gives 55\n", "answer 55\n", False),
    ],
    ids=["right", "wrong", "of wrong steps", "too early"],
)
def test_an_answer_is_judged_by_what_precedes_it(before: str, line: str, sound: bool) -> None:
    """Catches a target that learns to let every answer pass, or none."""
    assert is_sound(PROBLEM, before, line) == sound


def test_written_steps_are_sound_and_problems_are_read_back() -> None:
    """Catches a writer and a checker that disagree, and prompts that cannot be read."""
    rng = random.Random(0)
    for _ in range(300):
        problem = draw_problem(rng, rng.randint(1, 9), held_out=bool(rng.randrange(2)))
        assert read_problem(problem.text) == problem
        text, value = "", problem.start
        for label, (word, y) in zip("bcdefghij", problem.operations, strict=False):
            x, value = value, Operation(word, y).apply(value)
            text += write_step(rng, EVEN, label, word, x, y, value)
        assert check(problem, text + f"answer {value:02d}\n") == (
            True,
            [True] * len(problem.operations),
        )


def test_held_out_problems_are_their_own_part() -> None:
    """Catches a split that depends on the run: a trained problem would be measured."""
    rng = random.Random(1)
    drawn = [draw_problem(rng, 5, held_out=False) for _ in range(200)]
    assert not any(problem.held_out for problem in drawn)
    assert draw_problem(rng, 5, held_out=True).held_out
