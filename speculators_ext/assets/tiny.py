"""Builds the tiny random models as Hugging Face folders (fp32 safetensors, a few MB each)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from speculators_ext.assets import tiny_tokenizer
from speculators_ext.assets.quiet import no_progress_bars
from speculators_ext.assets.tiny_specs import HIDDEN, SPECS, TinySpec
from speculators_ext.assets.tiny_weights import Initializer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    Report = Callable[[str], None]
    Tensors = dict[str, torch.Tensor]

RECIPE = 1
WEIGHTS = "model.safetensors"


def source(name: str) -> dict[str, Any]:
    """The recipe's number and the model's configuration."""
    spec = SPECS[name]
    return {"recipe": RECIPE, "seed": spec.seed, "config": spec.config_options(), "raw": spec.raw}


def build_into(name: str, folder: Path, report: Report) -> None:
    """Writes configuration, tokenizer and weights; raises `ImportError` without transformers.

    transformers' own class, saved once, says which tensors a checkpoint has and of what shape; the
    values are then replaced by ours.
    """
    from safetensors.torch import load_file, save_file

    report("building a random model")
    spec = SPECS[name]
    _save_skeleton(spec, folder)
    initialize = Initializer(name, spec.seed, HIDDEN, gemma="gemma" in name)
    shapes = {key: value.shape for key, value in load_file(folder / WEIGHTS).items()}
    tensors = {key: initialize(key, shape) for key, shape in shapes.items()}
    if spec.mtp == "deepseek":
        tensors |= _deepseek_mtp(tensors, spec.config_options()["num_hidden_layers"])
    elif spec.mtp == "mimo":
        tensors |= _mimo_mtp(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    tiny_tokenizer.write(folder)


def _save_skeleton(spec: TinySpec, folder: Path) -> None:
    import transformers

    config = getattr(transformers, spec.config_class)(**spec.config_options())
    model = getattr(transformers, spec.built_as or spec.architecture)(config)
    with no_progress_bars():
        model.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    written |= {"architectures": [spec.architecture], **spec.raw}
    path.write_text(json.dumps(written, indent=2) + "\n")


def _deepseek_mtp(tensors: Tensors, layer: int) -> Tensors:
    """The MTP layer, numbered after the last: the last decoder layer again, fed by the embedding.

    ``eh_proj`` passes [embedding, hidden] as the embedding plus a little of the hidden state, so
    that the module predicts what the target would with most layers skipped: right now and then.
    """
    prefix, last = f"model.layers.{layer}", f"model.layers.{layer - 1}."
    copied = {
        key.replace(last, f"{prefix}."): value.clone()
        for key, value in tensors.items()
        if key.startswith(last)
    }
    identity = _identity()
    return copied | {
        f"{prefix}.enorm.weight": _ones(),
        f"{prefix}.hnorm.weight": _ones(),
        f"{prefix}.eh_proj.weight": _beside(identity, 0.3 * identity),
        f"{prefix}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{prefix}.shared_head.norm.weight": tensors["model.norm.weight"].clone(),
        f"{prefix}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }


def _mimo_mtp(tensors: Tensors) -> Tensors:
    """MiMo's MTP layer, on the pattern of `_deepseek_mtp`; its input is [hidden, embedding]."""
    prefix, first = "model.mtp_layers.0", "model.layers.0."
    copied = {
        key.replace(first, f"{prefix}."): value.clone()
        for key, value in tensors.items()
        if key.startswith(first)
    }
    identity = _identity()
    return copied | {
        f"{prefix}.token_layernorm.weight": _ones(),
        f"{prefix}.hidden_layernorm.weight": _ones(),
        f"{prefix}.input_proj.weight": _beside(0.3 * identity, identity),
        f"{prefix}.final_layernorm.weight": tensors["model.norm.weight"].clone(),
    }


def _ones() -> torch.Tensor:
    import torch

    return torch.ones(HIDDEN)


def _identity() -> torch.Tensor:
    import torch

    return torch.eye(HIDDEN)


def _beside(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([left, right], dim=1)
