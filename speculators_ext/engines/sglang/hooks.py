"""Everything of SGLang that we rely on and change, probed before it is set."""

from __future__ import annotations

import importlib.metadata
import os
from typing import TYPE_CHECKING

from speculators_ext.engines.devices import find_gpu
from speculators_ext.engines.sglang.gpus import is_allowed
from speculators_ext.engines.source_probe import Expectation, engine_root
from speculators_ext.engines.source_probe import find_problem as find_problem_in_source

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TESTED_VERSIONS", "find_problem", "install"]

TESTED_VERSIONS = ("0.5.23",)

_SRT = "sglang.srt"
_EXPECTED = (
    Expectation(f"{_SRT}.plugins.hook_registry", "HookRegistry.register",
                ("cls", "target", "hook", "hook_type")),
    Expectation(f"{_SRT}.speculative.spec_info", "SpeculativeAlgorithm.register",
                ("cls", "name", "supports_overlap", "spec_class")),
    Expectation(f"{_SRT}.speculative.spec_registry", "CustomSpecAlgo.handle_server_args",
                ("self", "server_args")),
    Expectation(f"{_SRT}.speculative.base_spec_worker", "BaseSpecWorker.alloc_memory_pool",
                ("self", "memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator")),
    Expectation(f"{_SRT}.speculative.base_spec_worker", "BaseSpecWorker.target_worker"),
    Expectation(f"{_SRT}.speculative.eagle_worker_common", "run_eagle_verify",
                ("batch", "target_worker", "req_to_token_pool", "token_to_kv_pool_allocator",
                 "plan_stream", "plan_stream_ctx", "topk", "num_draft_tokens", "device",
                 "metadata_ready_pre_pad", "finalize_tree_path", "grammar_barrier")),
    Expectation(f"{_SRT}.speculative.eagle_utils", "eagle_sample",
                ("verify_input", "batch", "logits_output")),
    Expectation("sglang.kernels.ops.speculative.spec_tree", "verify_tree_greedy_func",
                ("predicts", "accept_index", "accept_token_num", "candidates", "target_predict")),
    Expectation(f"{_SRT}.speculative.eagle_utils", "_verify_uses_greedy",
                ("is_all_greedy", "is_cpu", "is_hip", "is_xpu", "use_rejection_sampling")),
    Expectation(f"{_SRT}.speculative.eagle_utils", "TreeMaskMode"),
    Expectation(f"{_SRT}.speculative.spec_info", "create_dummy_verify_input",
                ("spec_algorithm", "custom_mask", "num_tokens_per_req", "is_draft_worker")),
    Expectation(f"{_SRT}.model_executor.runner.decode_cuda_graph_runner",
                "DecodeCudaGraphRunner.get_spec_info", ("self", "num_tokens")),
    Expectation(f"{_SRT}.layers.attention.base_attn_backend", "AttentionBackend.verify_mask"),
    Expectation(f"{_SRT}.speculative.eagle_info", "EagleDraftInput.filter_batch",
                ("self", "new_indices", "new_indices_cpu")),
    Expectation(f"{_SRT}.speculative.eagle_info", "EagleVerifyInput"),
    Expectation(f"{_SRT}.speculative.eagle_worker_v2", "EagleDraftWorker.__init__",
                ("self", "server_args", "gpu_id", "nccl_port", "target_worker")),
    Expectation(f"{_SRT}.speculative.eagle_worker_v2", "EagleDraftWorker.init_attention_backend",
                ("self",)),
    Expectation(f"{_SRT}.speculative.eagle_worker_v2", "EagleDraftWorker.init_cuda_graphs",
                ("self",)),
    Expectation(f"{_SRT}.speculative.eagle_worker_v2", "EagleDraftWorker.init_token_map",
                ("self",)),
    Expectation(f"{_SRT}.speculative.standalone_worker_v2", "StandaloneDraftWorker.__init__",
                ("self", "server_args", "gpu_id", "nccl_port", "target_worker")),
    Expectation(f"{_SRT}.speculative.standalone_worker_v2", "StandaloneDraftWorker.init_lm_head",
                ("self",)),
    Expectation(f"{_SRT}.layers.logits_processor", "LogitsProcessor._compute_lm_head",
                ("self", "hidden_states", "lm_head")),
    Expectation(f"{_SRT}.mem_cache.memory_pool", "KVWriteLoc"),
    Expectation(f"{_SRT}.mem_cache.allocation_sizing", "get_req_to_token_extra_context_len", ()),
    Expectation(f"{_SRT}.mem_cache.allocation_sizing", "get_alloc_reserve_per_decode", ()),
    Expectation(f"{_SRT}.mem_cache.allocation_sizing", "get_alloc_page_size", ()),
    Expectation(f"{_SRT}.speculative.draft_utils", "DraftBackendFactory.create_decode_backend",
                ("self",)),
    Expectation(f"{_SRT}.speculative.draft_utils",
                "DraftBackendFactory.create_draft_extend_backend", ("self",)),
    Expectation(f"{_SRT}.runtime_context", "attention_backends"),
    Expectation(f"{_SRT}.server_args", "ServerArgs.add_cli_args", ("parser",)),
    Expectation(f"{_SRT}.layers.attention.torch_native_backend",
                "TorchNativeAttnBackend.forward_extend",
                ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")),
    Expectation(f"{_SRT}.layers.sampler", "sampling_from_probs_torch",
                ("probs", "sampling_seed", "positions")),
    Expectation(f"{_SRT}.layers.sampler", "top_k_top_p_min_p_sampling_from_probs_torch",
                ("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed",
                 "positions")),
    Expectation(f"{_SRT}.layers.layer_boundary.residual.batch", "set_written",
                ("hidden_states", "forward_batch")),
    Expectation(f"{_SRT}.layers.layer_boundary.residual.batch", "fold",
                ("hidden_states", "forward_batch")),
    Expectation(f"{_SRT}.model_executor.forward_batch_info", "ForwardBatch.init_new",
                ("cls", "batch", "model_runner", "return_hidden_states_before_norm")),
    Expectation(f"{_SRT}.model_executor.forward_context", "ForwardContext"),
    Expectation(f"{_SRT}.runtime_context", "get_spec"),
    Expectation(f"{_SRT}.utils.hf_transformers.config", "get_config"),
    Expectation(f"{_SRT}.configs.model_config", "is_hybrid_swa_model",
                ("model_architectures", "hf_text_config")),
)  # fmt: skip


def find_problem() -> str | None:
    """Why we cannot work with this SGLang, naming what is missing; None when we can."""
    root = engine_root("sglang")
    if root is None:
        return "SGLang is not installed"
    problems = [found for e in _EXPECTED if (found := find_problem_in_source(e, root))]
    if not problems:
        return None
    tested = ", ".join(TESTED_VERSIONS)
    return (
        f"SGLang {importlib.metadata.version('sglang')} ({'; '.join(problems)}); "
        f"tested with SGLang {tested}: install one of them"
    )


def install() -> None:
    """Register our algorithms and hooks; SGLang applies them once all plugins have loaded."""
    from speculators_ext.engines.sglang.algorithm import register_algorithms
    from speculators_ext.engines.sglang.requested import add_flag

    register_algorithms()
    _hook("sglang.srt.server_args.ServerArgs.add_cli_args", add_flag, "AFTER")
    if _on_cpu():
        _install_on_both()
        _install_on_cpu()
    elif find_gpu() is not None and is_allowed():
        _install_on_both()
        _install_on_gpu()


def _on_cpu() -> bool:
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and find_gpu() is None


def _install_on_both() -> None:
    from speculators_ext.engines.sglang import cache_rows, sampling

    _hook(
        "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        cache_rows.get_req_to_token_extra_context_len,
        "AFTER",
    )
    _hook("sglang.srt.speculative.eagle_utils.eagle_sample", sampling.eagle_sample)
    _hook(
        "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func",
        sampling.verify_tree_greedy,
    )


def _install_on_gpu() -> None:
    from speculators_ext.engines.sglang import capture, sampling

    eagle_utils = "sglang.srt.speculative.eagle_utils"
    _hook(f"{eagle_utils}._verify_uses_greedy", sampling.verify_uses_greedy)
    runners = "sglang.srt.model_executor.runner"
    _hook(
        f"{runners}.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
        capture.get_spec_info,
    )
    _hook(
        "sglang.srt.speculative.spec_info.create_dummy_verify_input",
        capture.create_dummy_verify_input,
    )


def _install_on_cpu() -> None:
    from speculators_ext.engines.sglang.cpu import draft_attention, verify_attention

    _hook(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend",
        verify_attention.forward_extend,
    )
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    _hook(f"{factory}.create_decode_backend", draft_attention.create_decode_backend)
    _hook(f"{factory}.create_draft_extend_backend", draft_attention.create_draft_extend_backend)


def _hook(target: str, function: Callable[..., object], kind: str = "AROUND") -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType[kind])
