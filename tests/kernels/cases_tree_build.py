from __future__ import annotations

import triton
from kernel_case import Case

from speculators_ext.kernels import tree_build as op

POINTERS = {
    "tokens_ptr": "*i64",
    "scores_ptr": "*fp32",
    "parents_ptr": "*i32",
    "maxima_ptr": "*fp32",
    "sums_ptr": "*fp32",
}


def cases(target: str) -> list[Case]:
    reduce_blocks = {"BLOCK_V": op._BLOCK_V, "BLOCKS": op._BLOCKS}
    floats = {"maxima_ptr": "*fp32", "sums_ptr": "*fp32"}
    expand = [
        ("children, topk 10, V 128k", 10, 128_256, True),
        ("children, topk 32, V 262k", 32, 262_144, False),
        ("root, topk 4, V 8k", 4, 8192, True),
    ]
    select = [("frontier, topk 10", 10), ("frontier, topk 32", 32)]
    return [
        Case("blocks", op._reduce_blocks_kernel, reduce_blocks, floats),
        *(expand_case(*variant) for variant in expand),
        *(select_case(*variant) for variant in select),
    ]


def expand_case(label: str, topk: int, vocab_size: int, reduced: bool) -> Case:
    constants = {
        "F": 1 if label.startswith("root") else topk,
        "TOPK": topk,
        "BLOCK_K": triton.next_power_of_2(topk),
        "BLOCK_S": triton.next_power_of_2(triton.cdiv(vocab_size, op._BLOCK_V)),
        "BLOCK_V": op._BLOCK_V,
    }
    types = POINTERS.copy()
    if constants["F"] == 1:
        constants |= {"frontier_scores_ptr": None, "frontier_columns_ptr": None}
    else:
        types |= {"frontier_scores_ptr": "*fp32", "frontier_columns_ptr": "*i32"}
    if reduced:
        types |= {"draft_to_target_ptr": "*i64"}
    else:
        constants |= {"draft_to_target_ptr": None}
    return Case(label, op._expand_rows_kernel, constants, types, num_warps=8)


def select_case(label: str, topk: int) -> Case:
    width = topk * topk
    constants = {"WIDTH": width, "TOPK": topk, **op._choose_tiles(width)}
    types = {"tokens_ptr": "*i64", "scores_ptr": "*fp32"}
    types |= {"out_tokens_ptr": "*i64", "out_scores_ptr": "*fp32"}
    types |= {"out_columns_ptr": "*i32", "out_origin_ptr": "*i64"}
    return Case(label, op._select_frontier_kernel, constants, types)
