"""SmolLM2 from its GGUF file: the conversion, and what a user of the folder relies on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from speculators_ext import assets
from speculators_ext.assets import smollm2

NAME = "smollm2-135m-instruct"
PROSE = (
    "The city of Paris is the capital of France. It lies on the river Seine, in the north of the "
    "country, and is known for its museums, its food and the Eiffel Tower. Every year, millions of "
    "people visit the city to see its famous buildings and to walk along the river."
)
TEXT = "Photosynthesis turns light into chemical energy. In 1905, def f(x): return x + 1\n"


@pytest.fixture(scope="module")
def folder():
    return assets.build(NAME)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_unpermute_rotary_puts_halves_one_after_the_other():
    """Interleaved halves give fluent nonsense: shapes match, nothing raises."""
    heads, head_dim = 2, 6
    halves = np.arange(heads * head_dim).reshape(heads, 2, head_dim // 2)
    interleaved = halves.swapaxes(1, 2).reshape(heads * head_dim, 1)
    assert smollm2.unpermute_rotary(interleaved, heads)[:, 0].tolist() == list(range(12))


def test_unknown_tensor_is_refused():
    """A tensor that is dropped in silence gives a model that is a bit wrong."""
    with pytest.raises(assets.AssetError, match=r"blk\.0\.attn_q\.bias"):
        smollm2.hugging_face_name("blk.0.attn_q.bias")


def logits(folder, ids, **options):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.inference_mode():
        return model(ids).logits


def test_text_is_as_likely_as_a_trained_model_finds_it(folder, tokenizer):
    """Catches a wrong dequantisation, name or rotary order where no second reader is installed.

    Measured: 2.11 nats a token on this text; with the rotary halves left interleaved, 3.20.
    """
    ids = tokenizer(PROSE, return_tensors="pt").input_ids
    loss = torch.nn.functional.cross_entropy(logits(folder, ids)[0, :-1], ids[0, 1:])
    assert loss < 2.5


def test_logits_agree_with_transformers_own_reader(folder, tokenizer):
    """Catches a wrong dequantisation, name, rotary order or configuration, however slight.

    transformers reads the same file by its own code (own names, own un-permuting, fp32 weights);
    what is left is this folder's one rounding to bf16: measured 0.4 % of the logits' spread.
    """
    pytest.importorskip("accelerate", reason="transformers reads GGUF weights with accelerate only")
    path = smollm2.gguf_path()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    ours = logits(folder, ids)
    theirs = logits(path.parent, ids, gguf_file=path.name)
    assert ours.shape == theirs.shape == (1, ids.shape[1], 49152)
    error = (ours - theirs).abs().mean() / theirs.std()
    assert error < 0.01, error
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.95


def test_text_round_trips_and_chat_has_one_turn_token_each(tokenizer):
    """A tokenizer that splits <|im_start|> or eats spaces ruins every chat answer."""
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert (chat[0], chat.count(1), chat.count(2)) == (1, 3, 2)
    assert tokenizer.convert_ids_to_tokens([1, 2]) == ["<|im_start|>", "<|im_end|>"]


def test_generation_stops_at_the_end_of_the_turn(folder):
    """Without eos in generation_config a server writes on to the length limit."""
    from transformers import GenerationConfig

    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2


def test_wrong_answer_fails_the_build(folder, monkeypatch):
    """The check must be able to fail: a model that cannot answer is not handed out."""
    monkeypatch.setattr(smollm2, "_ANSWER", "Reykjavik")
    with pytest.raises(assets.AssetError, match="not with Reykjavik"):
        smollm2._check_answer(folder)


def test_wheel_without_the_model_says_what_to_install(monkeypatch):
    """A later wheel could drop the file."""

    class Empty:
        version, files = "9.9", ()

    monkeypatch.setattr(smollm2.importlib.metadata, "distribution", lambda name: Empty())
    with pytest.raises(assets.AssetError, match=r"9\.9 holds no \.gguf file: pip install"):
        smollm2.gguf_path()
