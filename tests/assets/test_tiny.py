"""The tiny models: they load, their text varies, and tests that compare text can rely on them."""

from __future__ import annotations

import json
from functools import cache
from typing import NamedTuple

import pytest
import torch

from speculators_ext import assets
from speculators_ext.assets import tiny_derived, tiny_tokenizer
from speculators_ext.assets.tiny_specs import SLIDING_WINDOW, SPECS

PROMPTS = (
    "Hello world, how are you?",
    "The cat sat on the mat and then",
    "1 2 3 4 5 6 7",
    "def f(x):\n    return x + 1\n",
)
TOKENS = 48
SKIPPED = (2, 4)
CONFIG_KEYS = {
    "tiny-mistral": {"sliding_window": SLIDING_WINDOW},
    "tiny-gemma2": {"sliding_window": SLIDING_WINDOW},
    "tiny-gemma3": {"sliding_window": SLIDING_WINDOW},
    "tiny-deepseek-v3": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
    },
    "tiny-mimo": {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
}


class Runs(NamedTuple):
    """One model's greedy text: each [prompts, TOKENS]."""

    tokens: torch.Tensor
    margins: torch.Tensor
    drafts: torch.Tensor


def load(name: str):
    import transformers

    folder = assets.build(name)
    spec = SPECS[name]
    cls = getattr(transformers, spec.built_as or spec.architecture)
    # Only the eager attention applies Gemma 2's cap on attention logits.
    return cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@cache
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(assets.build("tiny-llama"))


def greedy(model, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(new tokens [TOKENS], their logits [TOKENS, vocabulary])."""
    ids = tokenizer()(prompt, return_tensors="pt").input_ids
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, ids.shape[1] :], torch.cat(out.logits)


@pytest.fixture(scope="module", params=SPECS)
def runs(request) -> Runs:
    """Each prompt's greedy tokens and margins, and what the model drafts with layers skipped."""
    model = load(request.param)
    layers = model.model.layers
    kept = torch.nn.ModuleList(layers[i] for i in range(len(layers)) if i not in SKIPPED)
    tokens, best, drafts = [], [], []
    for prompt in PROMPTS:
        written, logits = greedy(model, prompt)
        ids = torch.cat([tokenizer()(prompt, return_tensors="pt").input_ids[0], written])[None]
        model.model.layers = kept
        with torch.inference_mode():
            drafts.append(model(ids, use_cache=False).logits[0, -TOKENS - 1 : -1].argmax(-1))
        model.model.layers = layers
        tokens.append(written)
        best.append(logits.topk(2).values)
    top = torch.stack(best)
    return Runs(torch.stack(tokens), top[..., 0] - top[..., 1], torch.stack(drafts))


def test_text_varies(runs):
    """Text that is one token for ever makes every identity test say yes."""
    distinct = [len(set(row)) for row in runs.tokens.tolist()]
    assert min(distinct) >= 20, distinct
    assert len({tuple(row) for row in runs.tokens.tolist()}) == len(PROMPTS)


def test_best_token_leads_clearly(runs):
    """Where the best two logits are a rounding error apart, identity tests fail by chance."""
    assert runs.margins.median() > 0.5
    assert (runs.margins < 1e-3).float().mean() < 0.02


def test_skipping_layers_keeps_some_tokens_and_changes_others(runs):
    """With all drafts accepted, or none, one half of a speculative test is never run."""
    kept = (runs.drafts == runs.tokens).float().mean()
    assert 0.3 < kept < 0.97, kept


@pytest.mark.parametrize("name", assets.names())
def test_only_safetensors_and_only_small(name):
    """A pickle runs code when it is loaded; a big file makes every test wait."""
    folder = assets.build(name)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")]
    assert any(path.suffix == ".safetensors" for path in files)
    if name.startswith("tiny-"):
        assert sum(path.stat().st_size for path in files) < 12e6


@pytest.mark.parametrize("name", CONFIG_KEYS)
def test_config_names_what_engines_look_for(name):
    """transformers renames or drops some keys when it saves; engines read the published ones."""
    config = json.loads((assets.build(name) / "config.json").read_text())
    assert {key: config.get(key) for key in CONFIG_KEYS[name]} == CONFIG_KEYS[name]


def test_same_weights_every_time(tmp_path):
    """Two machines must test the same models: nothing may come from a global generator."""
    from safetensors.torch import load_file

    from speculators_ext.assets import tiny

    torch.manual_seed(1)
    tiny.build_into("tiny-qwen3", tmp_path, lambda stage: None)
    fresh = load_file(tmp_path / tiny.WEIGHTS)
    cached = load_file(assets.build("tiny-qwen3") / tiny.WEIGHTS)
    assert fresh.keys() == cached.keys()
    assert all(torch.equal(fresh[key], cached[key]) for key in fresh)


@pytest.mark.parametrize(
    ("name", "prefix", "expected"),
    [
        ("tiny-deepseek-v3", "model.layers.6.", {"eh_proj", "enorm", "hnorm", "shared_head.head"}),
        ("tiny-mimo", "model.mtp_layers.0.", {"input_proj", "token_layernorm", "mlp.down_proj"}),
    ],
)
def test_multi_token_prediction_layer_is_there(name, prefix, expected):
    """An engine loads what it finds: a missing MTP tensor leaves random memory as weights."""
    from safetensors.torch import load_file

    keys = load_file(assets.build(name) / "model.safetensors").keys()
    parts = {key.removeprefix(prefix).removesuffix(".weight") for key in keys if prefix in key}
    assert expected <= parts


def test_tokenizer_round_trips_any_text_with_every_id_in_use():
    """Lossy text hides differences between two token sequences."""
    text = 'Thé quick\t{"brown": [1, 2]}\n  fox \u2603 jumps'
    assert tokenizer().decode(tokenizer()(text).input_ids) == text
    vocabulary = tiny_tokenizer.vocabulary()
    assert sorted(vocabulary.values()) == list(range(tiny_tokenizer.VOCAB_SIZE))
    assert len(tokenizer()("the banana").input_ids) < len("the banana")


def test_lora_changes_the_text():
    """An adapter too weak to change a token would let a dropped adapter pass."""
    from safetensors.torch import load_file

    model = load("tiny-llama")
    plain, _ = greedy(model, PROMPTS[0])
    pairs = load_file(assets.build(tiny_derived.LORA) / "adapter_model.safetensors")
    parameters = dict(model.named_parameters())
    for key in [key for key in pairs if "lora_A" in key]:
        name = key.removeprefix("base_model.model.").replace(".lora_A", "")
        change = pairs[key.replace("lora_A", "lora_B")] @ pairs[key]
        assert parameters[name].shape == change.shape
        parameters[name].data += change
    adapted, _ = greedy(model, PROMPTS[0])
    assert (plain != adapted).sum() > TOKENS // 4


def test_quantised_weights_are_near_the_original():
    """A scale along the wrong axis still loads, and still writes varied nonsense."""
    from safetensors.torch import load_file

    quantised = load_file(assets.build(tiny_derived.W8A8) / "model.safetensors")
    original = load_file(assets.build("tiny-llama") / "model.safetensors")
    scales = [key for key in quantised if key.endswith("_scale")]
    assert len(scales) == 8 * 7
    for key in scales:
        name = key.removesuffix("_scale")
        assert quantised[name].dtype == torch.int8
        error = (quantised[name] * quantised[key] - original[name]).abs()
        assert (error <= quantised[key] / 2 + 1e-6).all()
