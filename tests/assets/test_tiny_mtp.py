"""The tiny MTP models that the package carries: whole, small, and of the released layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from speculators_ext import assets
from speculators_ext.assets import store, tiny_mtp
from speculators_ext.cli.prompts import load_prompts

NAMES = (tiny_mtp.DEEPSEEK, tiny_mtp.MIMO)
MAX_BYTES = 12_000_000
SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "training"


@pytest.fixture(scope="module", params=NAMES)
def folder(request):
    return assets.build(request.param)


@pytest.fixture(scope="module")
def config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def tensors(folder):
    return load_file(folder / "model.safetensors")


def test_a_damaged_file_is_refused(tmp_path, monkeypatch):
    """Catches weights that were cut short on their way: they would load, or write nonsense."""
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setitem(tiny_mtp.OWN[tiny_mtp.MIMO], "model.safetensors", "0" * 64)
    with pytest.raises(assets.AssetError, match=r"tiny.*model\.safetensors is damaged"):
        assets.build(tiny_mtp.MIMO)
    assert not (tmp_path / "models" / tiny_mtp.MIMO).exists()


def test_it_is_small_enough_to_ship(folder):
    """Catches fp32 weights or an optimiser's state among the tensors."""
    assert (folder / "model.safetensors").stat().st_size <= MAX_BYTES


def test_the_weights_are_finite_and_trained(tensors):
    """Catches a diverged run, and a layer whose output never left its start at zero."""
    assert all(value.isfinite().all() for value in tensors.values())
    outputs = [value for name, value in tensors.items() if "o_proj" in name or "down_proj" in name]
    assert all(value.float().std() > 1e-3 for value in outputs)


def test_deepseek_has_the_released_layout():
    """Catches an MTP layer under another number or without its own copies of shared rows."""
    tensors = load_file(assets.build(tiny_mtp.DEEPSEEK) / "model.safetensors")
    config = json.loads((assets.build(tiny_mtp.DEEPSEEK) / "config.json").read_text())
    hidden, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}"
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (512, 64)
    assert tensors[f"{last}.eh_proj.weight"].shape == (hidden, 2 * hidden)
    for own, shared in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert tensors[f"{last}.{own}.weight"].equal(tensors[f"{shared}.weight"])
    assert f"{last}.mlp.shared_experts.up_proj.weight" in tensors


def test_the_final_norms_make_a_difference(tensors):
    """Catches scales of about one: the states in front of and behind the norm would be the same."""
    scales = tensors["model.norm.weight"].float()
    assert scales.log().std() > 0.3


def test_the_tokenizer_gives_back_any_text(folder, config):
    """Catches a vocabulary without all bytes, or clean-up of blanks before punctuation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def f(x) :\n\treturn {'\u00e9\u4e2d': x , 1 : \"\\0\"}   # done !\n\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.eos_token_id == config["eos_token_id"]


def test_a_chat_request_is_continued_like_its_text(folder):
    """Catches a template whose markers the model has never seen."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "import os\n"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "import os\n"


def test_the_prompts_are_many_and_of_held_out_modules(folder):
    """Catches a file that was cut short, twins, and prompts from the training text."""
    import sys

    sys.path.insert(0, str(SCRIPTS))
    from mtp_corpus import HELD_OUT

    sys.path.pop(0)
    prompts = load_prompts(folder / tiny_mtp.PROMPTS)
    assert len({prompt.text for prompt in prompts}) >= 300
    assert {prompt.category for prompt in prompts} <= set(HELD_OUT)
