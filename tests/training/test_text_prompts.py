"""The training questions: every template can be filled, held-out prompts stay out."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from speculators_ext.cli.prompts import default_prompts

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "training"


@pytest.fixture(scope="module")
def prompts():
    """The training scripts import each other by name, as scripts in one folder do."""
    sys.path.insert(0, str(SCRIPTS))
    yield __import__("text_prompts"), __import__("varied_prompts")
    sys.path.remove(str(SCRIPTS))


def test_every_template_and_word_can_be_filled(prompts):
    """Catches a misspelt word, which would end the generation hours after its start."""
    _, varied = prompts
    rng = random.Random(0)
    templates = [line for lines in varied.REQUESTS.values() for line in lines]
    templates += [word for words in varied.WORDS.values() for word in words]
    for template in templates:
        filled = varied.fill(rng, template)
        assert "{" not in filled or template.startswith("d = "), template
        assert filled == filled.strip() or template in varied.WORDS["order"], template


def test_a_given_text_is_put_in_as_it_is(prompts):
    """Catches a text of the model's whose own braces are taken for words of the lists."""
    _, varied = prompts
    filled = varied.fill(random.Random(0), "Say it in {language}: {text}", text="An {item}.")
    assert filled.endswith(": An {item}.")
    assert "{language}" not in filled


def test_requests_about_texts_quote_whole_sentences_and_paragraphs(prompts):
    """Catches tables, code and cut sentences among the texts that a request is about."""
    _, varied = prompts
    sentence = "The old man walked slowly to the sea"
    paragraph = f"{sentence}. " + "It was a long way and he was tired. " * 4
    texts = [f"{paragraph.strip()}\n\n| a | b |\n\n```python\nx = 1\n```\n\n{sentence}"]
    found = varied.about_texts(random.Random(0), texts, 4)
    assert len(found) == 3  # two different sentences, one paragraph
    assert sum(paragraph.strip() in request for request in found) == 1
    assert not any("|" in request or "```" in request for request in found)


def test_eight_words_of_a_held_out_prompt_are_recognised(prompts):
    """Catches a training question that contains what acceptance is measured on."""
    text, _ = prompts
    held_out = text.HeldOut()
    long = next(p.text for p in default_prompts() if len(p.text.split()) > 30)
    part = " ".join(long.split()[3:20])
    assert held_out.overlaps(f"Please help me. {part.upper()}!")
    assert not held_out.overlaps("What should everyone know about the history of painting?")
