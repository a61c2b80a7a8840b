from __future__ import annotations

from cases_accept_tree import INTEGERS
from kernel_case import Case

from speculators_ext.kernels import accept_drawn_tree as op


def cases(target: str) -> list[Case]:
    types = INTEGERS | {"accept_uniform_ptr": "*fp32", "token_uniform_ptr": "*fp32"}
    return [
        Case(
            f"{nodes} nodes, {probs}",
            op._accept_drawn_tree_kernel,
            {"BLOCK_N": nodes, "BLOCK_P": 8, "BLOCK_V": op._BLOCK_V},
            types,
            probs,
            num_warps=8,
        )
        for nodes, probs in ((64, "fp32"), (64, "bf16"), (256, "fp32"))
    ]
