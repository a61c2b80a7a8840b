"""What a method costs in memory for a given target, worked out from the target's config.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators_ext.cli.common import CliError
from speculators_ext.cli.hub import fetch_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from speculators_ext.config import MethodConfig, TargetInfo

_FOUR_BYTES = ("float32", "float")


@dataclass(frozen=True)
class Cost:
    """One line of a bill: `bytes` of memory (None: not known), and how the number comes about."""

    item: str
    formula: str
    bytes: int | None

    def as_json(self) -> dict[str, Any]:
        """The line as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a decoder-only target that its memory depends on.

    Attributes:
        name: as the user gave it.
        config: the decoder's part of config.json.
        architectures: class names.
        layers, hidden, intermediate, heads, kv_heads, head_dim: counts and widths.
        latent: width of MLA's compressed KV with its rotary part, 0 without MLA.
        element_bytes: bytes of a weight and of a cached element, by the checkpoint's dtype.
    """

    name: str
    config: Mapping[str, Any]
    architectures: tuple[str, ...]
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    latent: int
    element_bytes: int

    @property
    def kv_bytes_per_layer(self) -> int:
        """Bytes of KV cache one token takes in one layer."""
        width = self.latent or 2 * self.kv_heads * self.head_dim
        return width * self.element_bytes

    @property
    def kv_formula(self) -> str:
        """How `kv_bytes_per_layer` comes about."""
        if self.latent:
            return f"{self.latent} (MLA latent + rotary) x {self.element_bytes} B"
        return f"2 x {self.kv_heads} KV heads x {self.head_dim} x {self.element_bytes} B"

    def info(self) -> TargetInfo:
        """What method settings are checked against."""
        from speculators_ext.config import TargetInfo

        longest = self.config.get("max_position_embeddings")
        return TargetInfo(self.name, self.architectures, self.layers, longest)


def read_target(name: str) -> TargetShape:
    """Read a target's shape from its folder, or from the hub where it is a hub name.

    Raises:
        CliError: there is no readable config.json, or a size is missing in it.
    """
    path = Path(name, "config.json") if Path(name).is_dir() else fetch_config(name)
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        config = {**whole, **(whole.get("text_config") or {})}
        return _shape(name, whole, config)
    except (OSError, ValueError) as error:
        raise CliError(f"--target {name}: {path} cannot be read: {error}") from error
    except KeyError as error:
        raise CliError(
            f"--target {name}: {path} has no {error}: only decoder-only language models can be "
            "costed"
        ) from error


def method_costs(
    method: str, config: MethodConfig, target: TargetShape, num_speculative_tokens: int
) -> list[Cost]:
    """The bill of one method: its own lines, then the KV slots every method reserves."""
    own = _BILLS.get(method)
    slots = Cost(
        "look-ahead KV slots, per running request",
        f"{num_speculative_tokens} drafts x {target.layers} layers x {target.kv_formula}",
        num_speculative_tokens * target.layers * target.kv_bytes_per_layer,
    )
    return [*(own(config, target) if own else ()), slots]


def _clasp_bill(config: Any, target: TargetShape) -> list[Cost]:
    """Weights, and what the search for a skip set holds while it runs one unit."""
    from speculators_ext.proposers.skip_sets import plan_skips

    plan = plan_skips(config, target.layers)
    if not plan.searched:
        return [_NO_WEIGHTS]
    # A state for each number of skipped units, the full model's, and two sets that ride along.
    packed = plan.num_skip + 3
    rows = config.search_window * packed
    rows_formula = f"{config.search_window} x ({plan.num_skip} skipped + 3) rows"
    size = target.element_bytes
    qkv = (target.heads + 2 * target.kv_heads) * target.head_dim
    width = 4 * target.hidden + qkv + 3 * target.intermediate
    return [
        _NO_WEIGHTS,
        Cost(
            "activations of the search for a skip set, at most, per request in the batch",
            f"{rows_formula} x (4 x {target.hidden} hidden + {qkv} qkv + "
            f"3 x {target.intermediate} MLP) x {size} B, one layer at a time",
            rows * width * size,
        ),
        Cost(
            "attention of that search on a CPU, per token of context, one request at a time",
            f"one layer's {target.kv_formula}, and 2 x {packed} rows x {target.heads} heads x 4 B",
            target.kv_bytes_per_layer + 2 * packed * target.heads * 4,
        ),
        Cost(
            "parent bits of that search",
            f"{plan.num_units} units x ({plan.num_skip} skipped + 1) x 1 B",
            plan.num_units * (plan.num_skip + 1),
        ),
    ]


def _eagle2_bill(config: Any, target: TargetShape) -> list[Cost]:
    """A head of one layer with the target's sizes, its cache, and the CPU's copies of prefixes."""
    del config
    hidden, qkv = target.hidden, (target.heads + 2 * target.kv_heads) * target.head_dim
    vocabulary = int(target.config.get("vocab_size") or 0)
    weights = (
        3 * hidden * hidden
        + 2 * hidden * qkv
        + target.heads * target.head_dim * hidden
        + 3 * hidden * target.intermediate
        + vocabulary * hidden
    )
    return [
        Cost(
            "weights of an EAGLE-3 head, at most: less with a reduced draft vocabulary",
            f"(3 x {hidden} + 2 x {qkv} qkv + {target.heads * target.head_dim} + "
            f"3 x {target.intermediate} MLP + {vocabulary} vocabulary) x {hidden} hidden x "
            f"{target.element_bytes} B",
            weights * target.element_bytes,
        ),
        Cost(
            "the head's KV cache, per token of context",
            f"one layer's {target.kv_formula}",
            target.kv_bytes_per_layer,
        ),
        Cost(
            "plain copies of prefixes on a CPU, per token of context of a running request",
            f"{target.layers} layers and the head's x {target.kv_formula}",
            (target.layers + 1) * target.kv_bytes_per_layer,
        ),
    ]


def _mtp_reuse_bill(config: Any, target: TargetShape) -> list[Cost]:
    """The module: a layer of the target's kind behind a projection; its cache; its draft head."""
    hidden, size = target.hidden, target.element_bytes
    attention, mlp = _attention_weights(target), _mlp_weights(target)
    bill = [
        Cost(
            "weights of the checkpoint's MTP module",
            f"(2 x {hidden} x {hidden} projection + {attention} attention + {mlp} MLP) x {size} B",
            (2 * hidden * hidden + attention + mlp) * size,
        ),
        Cost(
            "the module's KV cache, per token of context",
            f"one layer's {target.kv_formula}",
            target.kv_bytes_per_layer,
        ),
    ]
    if config.draft_vocab_size is not None:
        bill.append(
            Cost(
                "the output head of the draft vocabulary",
                f"{config.draft_vocab_size} tokens x {hidden} hidden x {size} B",
                config.draft_vocab_size * hidden * size,
            )
        )
    if config.topk > 1:
        bill.append(
            Cost(
                "plain copies of prefixes on a CPU, per token of context of a running request",
                f"{target.layers} layers and the module's x {target.kv_formula}",
                (target.layers + 1) * target.kv_bytes_per_layer,
            )
        )
    return bill


def _attention_weights(target: TargetShape) -> int:
    """Of one layer; MLA's projections go through its two latents."""
    config, hidden, heads = target.config, target.hidden, target.heads
    if not target.latent:
        return (2 * target.heads + 2 * target.kv_heads) * target.head_dim * hidden
    rope, rank = int(config["qk_rope_head_dim"]), int(config["kv_lora_rank"])
    nope, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    queries = int(config.get("q_lora_rank") or 0)
    into = hidden * queries + queries * heads * (nope + rope) if queries else 0
    into = into or hidden * heads * (nope + rope)
    return into + hidden * target.latent + rank * heads * (nope + value) + heads * value * hidden


def _mlp_weights(target: TargetShape) -> int:
    """Of one layer, all its experts."""
    config = target.config
    experts = int(config.get("n_routed_experts") or config.get("num_experts") or 0)
    if not experts:
        return 3 * target.hidden * target.intermediate
    experts += int(config.get("n_shared_experts") or 0)
    return 3 * target.hidden * int(config["moe_intermediate_size"]) * experts


def _reasoning_step_bill(config: Any, target: TargetShape) -> list[Cost]:
    """What the small model takes is its own matter: the target says nothing of it."""
    del config, target
    return [
        Cost(
            "weights and KV cache of the small model that writes the steps",
            "they come on top, and are not known until the model is named",
            None,
        )
    ]


_NO_WEIGHTS = Cost("weights", "0: the target's own layers draft", 0)
_BILLS: dict[str, Callable[[Any, TargetShape], list[Cost]]] = {
    "clasp": _clasp_bill,
    "eagle2": _eagle2_bill,
    "mtp_reuse": _mtp_reuse_bill,
    "reasoning_step": _reasoning_step_bill,
}


def _shape(name: str, whole: Mapping[str, Any], config: Mapping[str, Any]) -> TargetShape:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    latent = int(config.get("kv_lora_rank") or 0)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return TargetShape(
        name=name,
        config=config,
        architectures=tuple(whole.get("architectures") or ()),
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        latent=latent + int(config.get("qk_rope_head_dim") or 0) if latent else 0,
        element_bytes=4 if dtype in _FOUR_BYTES else 2,
    )
