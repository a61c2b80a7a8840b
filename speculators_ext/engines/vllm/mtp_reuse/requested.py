"""What ``mtp_reuse`` refuses before anything is loaded, in one line each."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from speculators_ext.config import ConfigError
from speculators_ext.engines.checkpoints import (
    check_module_weights,
    count_modules,
    find_module_obstacle,
)
from speculators_ext.engines.vllm.trees.requested import check_trees, find_tree_obstacle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config.model import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    from speculators_ext.config import MtpReuseConfig

__all__ = ["check_request", "find_target_obstacle"]

_CHOOSE = "choose a target with such a module, or another method"


def find_target_obstacle(architectures: Sequence[str], hf_config: Any) -> str | None:
    """Why the target cannot draft with an MTP module, as a clause; None when it can."""
    return find_module_obstacle(architectures, hf_config)


def check_request(
    request: dict[str, Any], options: MtpReuseConfig, args: EngineArgs, target: ModelConfig
) -> None:
    """Check the options against each other, the engine and the target.

    Raises:
        ConfigError: one line naming the key at fault.
    """
    modules = count_modules(target.hf_config) or count_modules(target.hf_text_config)
    _check_weights(target, modules)
    if modules > 1 and (options.topk > 1 or options.calibrate):
        key = f"topk={options.topk}" if options.topk > 1 else "calibrate=true"
        raise ConfigError(
            f"speculative method_config: {key} is not possible, the target has {modules} MTP "
            "modules, each of which drafts one position of a chain; leave it out"
        )
    drafts = request["num_speculative_tokens"]
    if modules > 1 and drafts > modules and drafts % modules:
        raise ConfigError(
            f"speculative method 'mtp_reuse': num_speculative_tokens={drafts} does not fit the "
            f"target's {modules} MTP modules; accepted: up to {modules}, and multiples of it"
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
    check_module_weights(
        Path(target.model),
        modules,
        target.get_total_num_hidden_layers(),
        "speculative method 'mtp_reuse'",
        _CHOOSE,
    )


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
            f"can grow; accepted: at most {options.num_candidates}; lower it, or raise depth or "
            "topk in method_config"
        )
