from __future__ import annotations

from kernel_case import Case

from speculators_ext.kernels import tree_rerank as op


def cases(target: str) -> list[Case]:
    types = {
        "out_tokens_ptr": "*i64",
        "out_parents_ptr": "*i32",
        "out_depths_ptr": "*i32",
        "out_scores_ptr": "*fp32",
        "out_counts_ptr": "*i32",
        "tokens_ptr": "*i64",
        "scores_ptr": "*fp32",
        "parents_ptr": "*i32",
        "root_tokens_ptr": "*i64",
        "max_rows_ptr": "*i32",
        "floor": "fp32",
    }
    return [
        Case(
            f"topk {topk}, {num_rows} rows",
            op._rerank_kernel,
            {"TOPK": topk, "BLOCK_C": op._BLOCK_C, "BLOCK_J": op.BLOCK_J, "BLOCK_M": num_rows},
            types,
        )
        for topk, num_rows in ((10, 64), (4, 256))
    ]
