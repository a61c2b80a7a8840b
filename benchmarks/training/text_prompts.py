"""Where the training prompts come from: the model itself, the standard library, templates.

Three sources, dealt out by a seeded generator:

* the model's own questions: its user turn is sampled from the chat template, from nothing or from
  a given opening ("What is the difference between"), as in Magpie (arXiv 2406.08464);
* functions of Python's standard library: to complete, explain, test, document or write;
* short templates over lists of subjects and numbers.

A prompt that shares eight words in a row with a held-out prompt is dropped.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from speculators_ext.cli.prompts import default_prompts

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

OPENINGS = (
    *("Write a Python function", "def ", "Here is a function:\n\ndef ", "Complete the code"),
    *("What is the", "How do I", "How does", "Why", "Explain", "Can you", "List", "Give me"),
    *("Write a", "Summarize the following", "Translate", "Rewrite", "Solve", "Calculate"),
    *("If a", "A store sells", "Describe", "Compare", "Find", "Create a", "Fix", "What are"),
)
SUBJECTS = re.split(
    r"[|\n]",
    """bread|volcanoes|the moon|a bank loan|public libraries|bicycles|chess|photosynthesis|rivers
electric cars|solar panels|the water cycle|vaccines|earthquakes|gravity|the French revolution
ancient Rome|the stock market|inflation|a healthy breakfast|sleep|yoga|swimming|long walks
gardening|tomatoes|honey bees|whales|dogs|cats|rainforests|deserts|recycling|plastic waste
time zones|airplanes|trains|bridges|skyscrapers|the internet|passwords|email|databases
operating systems|compilers|binary search|hash tables|recursion|unit tests|version control
machine learning|neural networks|probability|prime numbers|fractions|triangles|percentages
the scientific method|telescopes|black holes|atoms|the periodic table|salt|glass|paper|poetry
short stories|jazz|painting|museums|a job interview|teamwork|a new manager|budgets|moving house
a birthday party|travel by train|learning a language|public speaking|friendship""",
)
REQUESTS = """
Explain {} in simple terms.
What should everyone know about {}?
Write a short story about {}.
Give me ten facts about {}.
Write a poem about {}.
What are the pros and cons of {}?
Write three questions and answers about {}.
Describe the history of {} in two paragraphs.
Make a step by step plan for a beginner interested in {}.
Write a dialogue about {}.
Name five books or articles one could write about {}, with one sentence each.
Write a polite letter to a friend about {}.
What is a common mistake people make with {}?
Write an outline of a lesson about {} for children aged ten.
Why does {} matter?
Compare {} with {}.
Make a table with three columns about {} and {}.
""".strip().splitlines()
SUMS = """
What is {a} plus {b}? Explain.
A box holds {a} apples. How many apples are in {b} boxes?
I have {a} dollars and spend {b} cents a day. How long will it last? Show your steps.
Solve for x: {b}x + {a} = {c}.
What is {b} percent of {c}?
A car drives {a} km in {b} hours. What is its average speed?
Anna is {b} years old and her father is {a} years older. How old is he in {c} years?
The sides of a rectangle are {a} cm and {b} cm. Find its area and perimeter.
Write the first ten multiples of {b} and add them up.
""".strip().splitlines()
LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese")
PACKAGES = (  # of the standard library, for the later shards
    *("asyncio", "collections", "concurrent/futures", "ctypes", "curses", "distutils", "email"),
    *("html", "http", "idlelib", "importlib", "json", "lib2to3", "logging", "multiprocessing"),
    *("re", "sqlite3", "tkinter", "unittest", "urllib", "wsgiref", "xml/dom", "xml/etree"),
    *("xml/sax", "xmlrpc", "zoneinfo"),
)
CODE_REQUESTS = (
    *("Finish this function:\n\n{head}", "Write the body of this function.\n\n{head}", "{head}"),
    "Implement the following in Python:\n\n```python\n{head}```",
    *("What does this code do?\n\n{source}", "Write unit tests for this code:\n\n{source}"),
    *("Explain this function line by line.\n\n{source}", "Add type hints:\n\n{source}"),
    *("Write a Python function called {name}. {doc}", "Rewrite this more simply:\n\n{source}"),
    *("Translate into {language}: {doc}", "Summarise in one sentence: {doc}"),
)


def template_prompt(rng: random.Random) -> str:
    """One request from the lists above; a sum one time in four."""
    if rng.random() < 0.25:
        numbers = {"a": rng.randint(11, 99), "b": rng.randint(2, 12), "c": rng.randint(100, 900)}
        return rng.choice(SUMS).format(**numbers)
    return rng.choice(REQUESTS).format(*rng.sample(SUBJECTS, 2))


def code_prompts(rng: random.Random, folders: tuple[str, ...] = ("",)) -> Iterator[str]:
    """Requests about functions of the standard library, in a random order, each function once."""
    functions = sorted(set(_library_functions(folders)))
    rng.shuffle(functions)
    for name, head, source, doc in functions:
        language = rng.choice(LANGUAGES)
        yield rng.choice(CODE_REQUESTS).format(
            name=name, head=head, source=source, doc=doc, language=language
        )


def _library_functions(folders: tuple[str, ...]) -> Iterator[tuple[str, str, str, str]]:
    """(name, signature with docstring, whole source, docstring) of short documented functions."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(path for folder in folders for path in (root / folder).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
                continue
            source = "".join(lines[node.lineno - 1 : node.end_lineno])
            if len(source) > 1200 or not 20 < len(doc) < 600 or len(node.body) < 2:
                continue
            head = "".join(lines[node.lineno - 1 : node.body[0].end_lineno])
            indent = " " * node.col_offset
            head, source = (re.sub(f"(?m)^{indent}", "", part) for part in (head, source))
            yield node.name, head, source, doc


class HeldOut:
    """Says whether a text shares eight words in a row with a prompt kept for measuring."""

    def __init__(self) -> None:
        self.runs = {run for prompt in default_prompts() for run in _word_runs(prompt.text)}

    def overlaps(self, text: str) -> bool:
        """Whether eight words in a row (letters and digits only) are a held-out prompt's."""
        return not self.runs.isdisjoint(_word_runs(text))


def _word_runs(text: str, length: int = 8) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return (tuple(words[i : i + length]) for i in range(len(words) - length + 1))
