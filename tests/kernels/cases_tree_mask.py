from __future__ import annotations

from kernel_case import Case

from speculators_ext.kernels import tree_mask as op


def cases(target: str) -> list[Case]:
    types = {"prefix_lens_ptr": "*i64", "positions_ptr": "*i64"}
    kernel = op._tree_mask_kernel
    return [
        Case(
            f"{32 * words} rows",
            kernel,
            {"BLOCK_N": op._BLOCK_N, "BLOCK_W": words},
            types,
            "i32",
            num_warps=1,
        )
        for words in (2, 8)
    ]
