"""What ``mtp_reuse`` refuses before anything is loaded, in one line each."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from speculators_ext.config import ConfigError
from speculators_ext.engines.vllm.trees.requested import check_trees, find_tree_obstacle

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.config.model import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    from speculators_ext.config import MtpReuseConfig

__all__ = ["check_request", "count_modules", "find_target_obstacle"]

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_MARKS = (".mtp", "mtp.", "mtp_", "nextn", "eh_proj", "enorm")
_CHOOSE = "choose a target with such a module, or another method"


def count_modules(config: Any) -> int:
    """How many MTP modules a target's Hugging Face config names."""
    for part in (config, getattr(config, "text_config", None)):
        for key in _COUNTS:
            count = part.get(key) if isinstance(part, dict) else getattr(part, key, None)
            if count:
                return int(count)
    return 0


def find_target_obstacle(architectures: Sequence[str], hf_config: Any) -> str | None:
    """Why the target cannot draft with an MTP module, as a clause; None when it can."""
    if count_modules(hf_config):
        return None
    return (
        f"the target has no MTP module: its config.json sets none of {', '.join(_COUNTS)} "
        f"({', '.join(architectures)})"
    )


def check_request(
    request: dict[str, Any], options: MtpReuseConfig, args: EngineArgs, target: ModelConfig
) -> None:
    """Check the options against each other, the engine and the target.

    Raises:
        ConfigError: one line naming the key at fault.
    """
    modules = count_modules(target.hf_config) or count_modules(target.hf_text_config)
    _check_weights(target, modules)
    if modules > 1 and request["num_speculative_tokens"] > 1:
        raise ConfigError(
            f"speculative method 'mtp_reuse': the target has {modules} MTP modules, each with a "
            "cache of its own, and one is reused only where there is one; accepted: "
            "num_speculative_tokens=1, or vLLM's own 'mtp'"
        )
    if args.data_parallel_size > 1 and target.is_moe:
        raise ConfigError(
            f"speculative method 'mtp_reuse': data_parallel_size={args.data_parallel_size} of a "
            "target with experts is not supported, ranks would draft unequally deep; accepted: 1, "
            "or vLLM's own 'mtp'"
        )
    _check_vocabulary(options, args, target)
    if options.topk > 1:
        _check_tree(request, options, args, target)


def _check_weights(target: ModelConfig, modules: int) -> None:
    """The engine builds such a module, and the checkpoint has its tensors."""
    from vllm.config.speculative import MTPModelTypes, SpeculativeConfig

    draft = SpeculativeConfig.hf_config_override(copy.deepcopy(target.hf_config))
    if draft.model_type not in get_args(MTPModelTypes):
        raise ConfigError(
            "speculative method 'mtp_reuse': this vLLM builds no MTP module for "
            f"{', '.join(target.architectures)}; {_CHOOSE}"
        )
    layers = target.get_total_num_hidden_layers()
    marks = (*_MARKS, *(f".layers.{layers + index}." for index in range(modules)))
    names = _tensor_names(Path(target.model))
    if names is not None and not any(mark in name for name in names for mark in marks):
        raise ConfigError(
            f"speculative method 'mtp_reuse': config.json names {modules} MTP module(s) but the "
            f"checkpoint has no tensor of any (such as model.layers.{layers}.eh_proj.weight): it "
            f"was saved without; {_CHOOSE}"
        )


def _tensor_names(folder: Path) -> Iterable[str] | None:
    """Names of a checkpoint's tensors where its safetensors are here, else None."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    from safetensors import safe_open

    names: list[str] = []
    for path in files:
        with safe_open(path, framework="numpy") as file:
            names += file.keys()
    return names


def _check_vocabulary(options: MtpReuseConfig, args: EngineArgs, target: ModelConfig) -> None:
    size, full = options.draft_vocab_size, target.get_vocab_size()
    ranks = args.tensor_parallel_size
    if size is not None and (size >= full or size % ranks):
        raise ConfigError(
            f"speculative method_config: draft_vocab_size={size} does not fit the target's "
            f"vocabulary of {full}; accepted: an integer from 2 to {full - 1}"
            + (f" that {ranks} ranks divide evenly" if ranks > 1 else "")
            + f"; try {full // 4 // ranks * ranks}"
        )


def _takes_reference_backend(args: EngineArgs) -> bool:
    """Whether vLLM builds its reference backend for latent attention on this CPU."""
    import torch

    asked = getattr(args.attention_config, "backend", None) or args.attention_backend
    name = getattr(asked, "name", asked)
    return name == "CPU_MLA" or not torch.cpu._is_amx_tile_supported()


def _check_tree(
    request: dict[str, Any], options: MtpReuseConfig, args: EngineArgs, target: ModelConfig
) -> None:
    from vllm.platforms import current_platform

    latent = current_platform.is_cpu() and getattr(target.hf_text_config, "kv_lora_rank", None)
    obstacle = None if latent else find_tree_obstacle(target.hf_text_config)
    if latent and not _takes_reference_backend(args):
        obstacle = (
            "on this CPU vLLM takes its AMX backend for latent attention, and trees are known to "
            "CPU_MLA (set it as the backend in attention_config, with block_size 16)"
        )
    if obstacle is not None:
        raise ConfigError(
            f"speculative method_config: topk={options.topk} is not possible, the target cannot "
            f"attend a draft tree: {obstacle}; accepted: 1 (a chain)"
        )
    nodes = request["num_speculative_tokens"]
    check_trees("mtp_reuse", request, args, target)
    if nodes > options.num_candidates:
        raise ConfigError(
            f"speculative config: num_speculative_tokens={nodes} is more than the "
            f"{options.num_candidates} nodes that depth={options.depth} and topk={options.topk} "
            "can grow; lower it, or raise depth or topk in method_config"
        )
