"""The head that the package carries: whole, small, and one that fits SmolLM2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculators_ext import assets
from speculators_ext.assets import smollm2_eagle3, store

NAME = "smollm2-135m-instruct-eagle3"
MAX_BYTES = 20_000_000


@pytest.fixture(scope="module")
def folder():
    return assets.build(NAME)


@pytest.fixture(scope="module")
def tensors(folder):
    return load_file(folder / "model.safetensors")


def test_a_damaged_file_is_refused(tmp_path, monkeypatch):
    """Catches a head that was cut short on its way: it would load, or draft nonsense."""
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setitem(smollm2_eagle3.FILES, "config.json", "0" * 64)
    with pytest.raises(assets.AssetError, match=r"config\.json is damaged"):
        assets.build(NAME)
    assert not (tmp_path / "models" / NAME).exists()


def test_it_is_small_enough_to_ship(folder):
    """Catches fp32 weights, an embedding or an optimiser's state among the tensors."""
    assert (folder / "model.safetensors").stat().st_size <= MAX_BYTES


def test_the_vocabulary_maps_agree(tensors):
    """Catches offsets that are ids, or a map cut to the first ids: acceptance falls to chance."""
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    assert not torch.equal(ids, torch.arange(len(ids)))


def test_the_head_fits_its_target(folder, tensors):
    """Catches a config that was written for another target or another draft vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    target = json.loads((assets.build("smollm2-135m-instruct") / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["num_hidden_layers"] == 1
    for key in ("hidden_size", "vocab_size", "head_dim", "rope_parameters", "rms_norm_eps"):
        assert config[key] == target[key]
    hidden = target["hidden_size"]
    assert tensors["lm_head.weight"].shape == (config["draft_vocab_size"], hidden)
    assert tensors["fc.weight"].shape == (hidden, 3 * hidden)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * hidden
    assert all(value.isfinite().all() for value in tensors.values())


@pytest.fixture(scope="module")
def head(folder, tensors):
    """The shipped weights in the form they were trained in."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "training"))
    from eagle3_head import Eagle3Head
    from transformers import AutoConfig

    sys.path.pop(0)
    target = assets.build("smollm2-135m-instruct")
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    config = AutoConfig.from_pretrained(target)
    head = Eagle3Head(config, embedding, ids, torch.ones(3 * config.hidden_size))
    weights = {
        name.removeprefix("midlayer.").removeprefix("self_attn.").removeprefix("mlp."): value
        for name, value in tensors.items()
        if name not in ("d2t", "t2d")
    }
    missing, unexpected = head.load_state_dict(weights, strict=False)
    assert (sorted(missing), unexpected) == (["draft_ids", "scale"], [])
    return head


def test_it_guesses_what_the_target_writes(head, folder):
    """Catches weights that do not belong to these maps, this target or these three states."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = assets.build("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    layers = json.loads((folder / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    message = {"role": "user", "content": "Explain in a few sentences why the sky is blue."}
    prompt = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    first = prompt["input_ids"].shape[1] - 1
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        tokens = model.generate(**prompt, max_new_tokens=80, do_sample=False)
        output = model(tokens, output_hidden_states=True)
        states = torch.cat([output.hidden_states[i] for i in layers], dim=-1)[:, :-1]
        (feature,) = head.unroll(tokens, states, torch.zeros(1, dtype=torch.int64), first, 1)
        guesses = head.draft_ids[head.lm_head(head.norm(feature[0].float())).argmax(-1)]
    written = tokens[0, first + 2 :]
    share = (guesses[: len(written)] == written).float().mean()
    assert share > 0.2, share  # unrelated weights: below 0.05
