"""Writes a trained tiny MTP model as the Hugging Face folder that vLLM loads, and reads it back."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import torch
from mtp_models import TinyMtp
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

WEIGHTS = "model.safetensors"
_DEEPSEEK = {
    "mtp.enorm.": "model.layers.{last}.enorm.",
    "mtp.hnorm.": "model.layers.{last}.hnorm.",
    "mtp.proj.": "model.layers.{last}.eh_proj.",
    "mtp.norm.": "model.layers.{last}.shared_head.norm.",
    "mtp.block.": "model.layers.{last}.",
}
_MIMO = {
    "mtp.enorm.": "model.mtp_layers.0.token_layernorm.",
    "mtp.hnorm.": "model.mtp_layers.0.hidden_layernorm.",
    "mtp.proj.": "model.mtp_layers.0.input_proj.",
    "mtp.norm.": "model.mtp_layers.0.final_layernorm.",
    "mtp.block.": "model.mtp_layers.0.",
}


def export(
    model: TinyMtp, config: dict[str, Any], tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Configuration, tokenizer and bf16 weights under the released models' names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    tensors = {k: v.contiguous() for k, v in _to_checkpoint(model.state_dict(), config).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load(folder: Path) -> TinyMtp:
    """The training form of an exported model, fp32, in evaluation mode."""
    config = json.loads((folder / "config.json").read_text())
    model = TinyMtp(config)
    found = load_file(folder / WEIGHTS)
    model.load_state_dict({k: _from_checkpoint(k, found, config) for k in model.state_dict()})
    return model.eval()


def _to_checkpoint(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.endswith("mlp.bias"):  # the choice's bias stays in fp32, as released
            tensors[_name(name, config)] = value.clone()
        elif ".stack." in name:
            rows = _split(name, value, config)
            tensors |= {part: row.bfloat16() for part, row in rows.items()}
        else:
            tensors[_name(name, config)] = value.bfloat16()
    if "kv_lora_rank" in config:
        prefix = f"model.layers.{config['num_hidden_layers']}"
        tensors[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


def _from_checkpoint(name: str, found: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    if ".stack." not in name:
        return found[_name(name, config)].float()
    parts = [found[part].float() for part in _expert_names(name, config)]
    return torch.cat(parts, dim=_expert_dim(name))


def _split(name: str, value: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    parts = value.split(config["moe_intermediate_size"], dim=_expert_dim(name))
    return dict(zip(_expert_names(name, config), parts, strict=True))


def _expert_names(name: str, config: dict[str, Any]) -> list[str]:
    """The tensors of which a stack consists: the routed experts', then the shared one's."""
    routed = [f"experts.{index}" for index in range(config["n_routed_experts"])]
    return [_name(name, config).replace("stack", part) for part in (*routed, "shared_experts")]


def _expert_dim(name: str) -> int:
    return 1 if "down_proj" in name else 0


def _name(name: str, config: dict[str, Any]) -> str:
    """A module's name in training -> the tensor's name in a checkpoint."""
    name = name.replace("mlp.bias", "mlp.gate.e_score_correction_bias")
    for ours, theirs in (_DEEPSEEK if "kv_lora_rank" in config else _MIMO).items():
        if name.startswith(ours):
            return name.replace(ours, theirs.format(last=config["num_hidden_layers"]))
    return re.sub(r"^(?!lm_head)", "model.", name)
