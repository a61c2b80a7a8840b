"""EAGLE heads for ``tiny-llama`` that guess right now and then, made by rule and not by training.

``tiny-llama`` mostly says what the embedding of its last token makes likely. So a head that carries
that embedding to its output, more or less whole, often has the target's token among its best few:
drafts get accepted and rejected, on first branches and on others.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from speculators_ext.assets import tiny, tiny_tokenizer
from speculators_ext.assets.tiny_specs import SPECS
from speculators_ext.assets.tiny_weights import Initializer, tensor_noise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    Report = Callable[[str], None]
    Tensors = dict[str, torch.Tensor]

BASE = "tiny-llama"
EAGLE = "tiny-llama-eagle"
EAGLE3 = "tiny-llama-eagle3"
DRAFT_VOCABULARY = 256
_SEED = 7
_SELF_ATTENTION = 3.0  # scale of queries and keys: a row looks mostly at itself
_FEATURE = 0.3  # share of the target's hidden state beside the embedding


def source() -> dict[str, Any]:
    """What both heads depend on: their recipe and the target's source."""
    return {"recipe": 1, "base": tiny.source(BASE)}


def build_eagle_into(folder: Path, report: Report) -> None:
    """Writes an EAGLE-1 head: ``fc`` over [embedding, hidden], then the target's last layer."""
    import torch

    report("writing an EAGLE head")
    target = _target(folder)
    config = _config() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    last = f"model.layers.{SPECS[BASE].config_options()['num_hidden_layers'] - 1}."
    tensors = {
        key.replace(last, "layers.0."): value
        for key, value in target.items()
        if key.startswith(last) and "input_layernorm" not in key
    }
    identity = torch.eye(config["hidden_size"])
    tensors["fc.weight"] = torch.cat([identity, _FEATURE * identity], dim=1)
    _write(folder, config, tensors)


def build_eagle3_into(folder: Path, report: Report) -> None:
    """Writes an EAGLE-3 head: three fused hidden states, a reduced vocabulary, ``d2t``, ``t2d``."""
    report("writing an EAGLE-3 head")
    target = _target(folder)
    config = _config() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCABULARY,
    }
    _write(folder, config, _eagle3_tensors(config, target))


def _target(folder: Path) -> Tensors:
    """The target's tensors, by the target's own rule; ``folder`` holds a skeleton meanwhile."""
    from safetensors.torch import load_file

    tiny.build_into(BASE, folder, lambda _: None)
    tensors = load_file(folder / tiny.WEIGHTS)
    for path in folder.iterdir():
        path.unlink()
    return tensors


def _config() -> dict[str, Any]:
    return {"model_type": "llama", "head_dim": 32, **SPECS[BASE].config_options()}


def _eagle3_tensors(config: dict[str, Any], target: Tensors) -> Tensors:
    import torch

    hidden, size = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    kept = torch.tensor(tiny_tokenizer.readable_ids()[:DRAFT_VOCABULARY])
    in_target = torch.zeros(config["vocab_size"], dtype=torch.bool)
    in_target[kept] = True
    # What attention carries: a row's own embedding, seen through half as many numbers.
    basis = torch.linalg.qr(tensor_noise(EAGLE3, _SEED, "basis", (hidden, kv))).Q.T
    seen = torch.cat([basis, torch.zeros_like(basis)], dim=1)
    heads = seen.view(-1, config["head_dim"], 2 * hidden)
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    queries = heads.repeat_interleave(group, dim=0).reshape(-1, 2 * hidden)
    back = (heads[..., :hidden].repeat_interleave(group, dim=0) / group).reshape(-1, hidden).T
    initialize = Initializer(EAGLE3, _SEED, hidden)
    layer = "midlayer."
    mlp = {
        f"{layer}mlp.{name}.weight": 0.2 * initialize(f"layers.0.{name}.weight", torch.Size(shape))
        for name, shape in (
            ("gate_proj", (size, hidden)),
            ("up_proj", (size, hidden)),
            ("down_proj", (hidden, size)),
        )
    }
    zeros = torch.zeros(hidden, hidden)
    return mlp | {
        "fc.weight": torch.cat([zeros, zeros, _FEATURE * torch.eye(hidden)], dim=1),
        f"{layer}hidden_norm.weight": torch.ones(hidden),
        f"{layer}input_layernorm.weight": torch.ones(hidden),
        f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}self_attn.q_proj.weight": _SELF_ATTENTION * queries,
        f"{layer}self_attn.k_proj.weight": _SELF_ATTENTION * seen,
        f"{layer}self_attn.v_proj.weight": seen.clone(),
        f"{layer}self_attn.o_proj.weight": back.contiguous(),
        "norm.weight": target["model.norm.weight"].clone(),
        "lm_head.weight": target["lm_head.weight"][kept].clone(),
        "d2t": kept - torch.arange(DRAFT_VOCABULARY),
        "t2d": in_target,
    }


def _write(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / tiny.WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
