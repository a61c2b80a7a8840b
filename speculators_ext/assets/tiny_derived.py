"""What is made from ``tiny-llama``: a LoRA adapter for it, and a quantised copy of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from speculators_ext.assets import tiny
from speculators_ext.assets.tiny_specs import SPECS
from speculators_ext.assets.tiny_weights import tensor_noise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    Report = Callable[[str], None]

BASE = "tiny-llama"
LORA = "tiny-llama-lora"
W8A8 = "tiny-llama-w8a8"
LORA_RANK = 8
LORA_SEED = 7
LORA_STRENGTH = 0.5  # size of the change relative to the projection's own output
_INT8_MAX = 127
_LORA_TARGETS = ("q_proj", "v_proj", "gate_proj", "up_proj")
_W8A8_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": False,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def source() -> dict[str, Any]:
    """What both depend on: the base model's source."""
    return {"recipe": 2, "base": tiny.source(BASE)}


def build_lora_into(folder: Path, report: Report) -> None:
    """Writes a rank-8 adapter in PEFT's folder format; it changes most greedy tokens."""
    from safetensors.torch import save_file

    report("writing a random adapter")
    options = SPECS[BASE].config_options()
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(options["num_hidden_layers"]):
        for target in _LORA_TARGETS:
            block = "self_attn" if target in ("q_proj", "v_proj") else "mlp"
            name = f"base_model.model.model.layers.{layer}.{block}.{target}"
            tensors |= _lora_pair(name, options["hidden_size"], _out_features(target, options))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE,
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(_LORA_TARGETS),
        "inference_mode": True,
    }
    _write_json(folder / "adapter_config.json", config)


def build_w8a8_into(folder: Path, report: Report) -> None:
    """Writes the base model with int8 weights, one scale an output channel (compressed-tensors).

    Activations are quantised by the engine, one scale and zero point a token. The zero point is
    there because vLLM's AMX kernel for symmetric ones refuses fp32; this runs in fp32 and bf16.
    """
    from safetensors.torch import load_file, save_file

    tiny.build_into(BASE, folder, report)
    report("quantising it to int8")
    path = folder / tiny.WEIGHTS
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(path).items():
        tensors |= _quantised(name, value) if "_proj" in name else {name: value}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    _write_json(folder / "config.json", config | {"quantization_config": _W8A8_CONFIG})


def _lora_pair(name: str, in_features: int, out_features: int) -> dict[str, torch.Tensor]:
    """A: [rank, in_features], B: [out_features, rank]; B A is of size strength/sqrt(in)."""
    down, up = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
    return {
        down: tensor_noise(LORA, LORA_SEED, down, (LORA_RANK, in_features)) / in_features**0.5,
        up: tensor_noise(LORA, LORA_SEED, up, (out_features, LORA_RANK))
        * LORA_STRENGTH
        / LORA_RANK**0.5,
    }


def _out_features(target: str, options: dict[str, Any]) -> int:
    head_dim = options["hidden_size"] // options["num_attention_heads"]
    return {
        "q_proj": options["num_attention_heads"] * head_dim,
        "v_proj": options["num_key_value_heads"] * head_dim,
    }.get(target, options["intermediate_size"])


def _quantised(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight: [out, in] fp32 -> int8 of the same shape, and scales [out, 1] fp32."""
    import torch

    scale = weight.abs().amax(dim=1, keepdim=True) / _INT8_MAX
    levels = (weight / scale).round().to(torch.int8)
    return {name: levels, f"{name}_scale": scale}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
