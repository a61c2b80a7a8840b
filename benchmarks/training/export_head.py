"""Writes a trained head as the Hugging Face folder that vLLM's built-in `eagle3` loads."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

    from eagle3_head import Eagle3Head
    from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def export(head: Eagle3Head, config: Any, aux_layers: tuple[int, ...], folder: Path) -> None:
    """Replaces the folder by the head's bf16 weights, maps and config.

    ``d2t`` int64 [D] holds offsets (target id = draft id + offset), ``t2d`` bool [V] says which
    target ids the draft vocabulary has. The embedding is the target's and is not written.
    """
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file(_tensors(head, config.vocab_size), fresh / "model.safetensors", {"format": "pt"})
    described = config.to_diff_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(head.draft_ids),
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(aux_layers),
        "dtype": "bfloat16",
    }
    described.pop("_name_or_path", None)  # a path of this machine
    (fresh / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _tensors(head: Eagle3Head, vocab_size: int) -> dict[str, Tensor]:
    names = {
        **{name: f"midlayer.self_attn.{name}" for name in ATTENTION},
        **{name: f"midlayer.mlp.{name}" for name in MLP},
        **{name: f"midlayer.{name}" for name in NORMS},
        "norm": "norm",
        "lm_head": "lm_head",
    }
    tensors = {
        f"{name}.weight": getattr(head, ours).weight.detach().bfloat16()
        for ours, name in names.items()
    }
    tensors["fc.weight"] = (head.fc.weight.detach() * head.scale).bfloat16()
    ids = head.draft_ids
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors
