"""Stands in for ``sgl_kernel`` on machines without a GPU: the few operations SGLang imports.

It must not define ``torch.ops.sgl_kernel.convert_weight_packed``: SGLang takes that for AMX.
"""

from speculators_ext.engines.devices import find_gpu
from speculators_ext.engines.sglang.cpu.cache_ops import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from speculators_ext.engines.sglang.cpu.tree_ops import (
    build_tree_kernel_efficient_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

_gpu = find_gpu()
if _gpu is not None:
    raise ImportError(
        f"speculators-ext's stand-in for sgl_kernel is for machines without a GPU, and {_gpu} is "
        "here: take its folder off PYTHONPATH and install SGLang's own sgl_kernel"
    )
