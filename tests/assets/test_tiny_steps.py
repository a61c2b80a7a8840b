"""The two reasoning models that the package carries: whole, small, one vocabulary."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from speculators_ext import assets
from speculators_ext.assets import store, tiny_steps
from speculators_ext.assets.steps_world import JUDGE_SUFFIX
from speculators_ext.cli.prompts import load_prompts
from speculators_ext.proposers.step_tokens import find_suffix, same_tokens

NAMES = (tiny_steps.TARGET, tiny_steps.DRAFT)


@pytest.fixture(scope="module", params=NAMES)
def folder(request):
    return assets.build(request.param)


def test_a_damaged_file_is_refused(tmp_path, monkeypatch):
    """Catches weights that were cut short on their way: they would load, or write nonsense."""
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setitem(tiny_steps.OWN[tiny_steps.DRAFT], "model.safetensors", "0" * 64)
    with pytest.raises(assets.AssetError, match=r"tiny.*model\.safetensors is damaged"):
        assets.build(tiny_steps.DRAFT)
    assert not (tmp_path / "models" / tiny_steps.DRAFT).exists()


def test_both_together_are_small_enough_to_ship():
    """Catches fp32 weights or an optimiser's state among the tensors."""
    sizes = [(assets.build(n) / "model.safetensors").stat().st_size for n in NAMES]
    assert sum(sizes) <= 10_000_000
    assert sizes[0] > 10 * sizes[1]  # else drafting could not pay


def test_the_weights_are_finite_and_trained(folder):
    """Catches a diverged run, and a layer whose output never left its start at zero."""
    tensors = load_file(folder / "model.safetensors")
    assert all(value.isfinite().all() for value in tensors.values())
    outputs = [value for name, value in tensors.items() if "o_proj" in name or "down_proj" in name]
    assert len(outputs) == 2 * json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert all(value.float().std() > 1e-3 for value in outputs)


def test_they_share_a_tokenizer_in_which_steps_can_be_judged():
    """Catches a vocabulary of one's own, and grades of more than one token."""
    target, draft = (AutoTokenizer.from_pretrained(assets.build(n)) for n in NAMES)
    assert same_tokens(target, draft) is None
    assert len(find_suffix(target, JUDGE_SUFFIX).ids) == 1
    assert target.encode("\n", add_special_tokens=False) != []
    text = "then b : 47 plus 8 gives 55 \u00e9\n"
    assert target.decode(target.encode(text, add_special_tokens=False)) == text


def test_a_prompt_begins_as_in_training_and_so_does_a_chat_request(folder):
    """Catches prompts without the start that both models were trained with, which makes them err
    in their first steps, and a template whose markers they have never seen, or that eats the line's
    end.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.encode("b +8 ; start 47\n")
    assert prompt[0] == tokenizer.bos_token_id
    assert prompt.count(tokenizer.bos_token_id) == 1
    for content in ("b +8 ; start 47", "b +8 ; start 47\n"):
        messages = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.encode(text, add_special_tokens=False) == prompt


def test_the_problems_are_many_and_held_out(folder):
    """Catches a file that was cut short, twins, answers of other problems, and trained problems."""
    problems = tiny_steps.load_problems(folder)
    assert len(set(problems)) >= 390
    assert all(problem.held_out for problem in problems)
    assert len(load_prompts(folder / tiny_steps.PROBLEMS)) == len(problems)
    lines = (folder / tiny_steps.PROBLEMS).read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    assert answers == [f"{problem.answer:02d}" for problem in problems]
