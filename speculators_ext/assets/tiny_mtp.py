"""Two tiny trained models with an MTP module, which the package carries, copied into the cache.

Both read and write Python and share a tokenizer. The files are the output of
``benchmarks/training/make_mtp_models.py``; each model's card says how it was made and measured.
``prompts.jsonl``, in either folder, holds 320 beginnings of code that neither has been trained on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.assets.shipped import copy_shipped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Report = Callable[[str], None]

DEEPSEEK = "deepseek-v3-tiny-mtp"
MIMO = "mimo-tiny-mtp"
SUMMARIES = {
    DEEPSEEK: "a trained DeepSeek-V3 of 5M weights (latent attention, experts) that writes Python, "
    "with its MTP layer, bf16, carried by this package",
    MIMO: "a trained MiMo (Qwen2 layers) of 4M weights that writes Python, with its MTP layer, "
    "bf16, carried by this package",
}
PROMPTS = "prompts.jsonl"
FOLDER = "tiny_mtp"
# What the cards describe.
SHARED = {
    "chat_template.jinja": "c4123e078b4bdc0f5f63fa38eca171496c1d7ee48987353469d9d611d0428e66",
    PROMPTS: "3f2076bcb4f6f77a3081673c85125ba20e5eec537a56186797c2027a932c6777",
    "tokenizer.json": "d14df3965f192ada03e306d0e63e20c8dd6529d1a8306ed07964aaedc2298e38",
    "tokenizer_config.json": "cd288383feff2762059184749d2b66a516d019015bcc0fb7eecad6e77a145e26",
}
OWN = {
    DEEPSEEK: {
        "config.json": "b88d9fac9d9cec7c53578855301d0f7330f51885fff5bd3330519c6884cfeb9c",
        "model.safetensors": "0b925684144e7b5a646ebffb4e074d729ead9ca00b16f30930ceff14456fdb32",
    },
    MIMO: {
        "config.json": "266ce531871e182738170a73c2b8106e4341bb33fcdc50e0c2eb7942506a3c3d",
        "model.safetensors": "1a7437d142bc0c6a6db68aaed613f01caff3a4866ff408f9ad483a7963b940b7",
    },
}


def source(name: str) -> dict[str, Any]:
    """The expected digests: other weights are another asset."""
    return {"sha256": SHARED | OWN[name]}


def build_into(name: str, folder: Path, report: Report) -> None:
    """Copies model and card; raises `AssetError` when a file is missing or damaged."""
    report("copying the model")
    copy_shipped(SHARED | OWN[name], folder, FOLDER, f"{FOLDER}/{name}")
