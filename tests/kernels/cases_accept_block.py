from __future__ import annotations

from cases_accept_tree import INTEGERS
from kernel_case import Case

from speculators_ext.kernels import accept_block as op


def cases(target: str) -> list[Case]:
    types = INTEGERS | {"accept_uniform_ptr": "*fp32", "token_uniform_ptr": "*fp32"}
    types.pop("parents_ptr")
    blocks = {"BLOCK_P": 8, "BLOCK_V": op._BLOCK_V}
    kernel = op._accept_block_kernel
    return [Case(probs, kernel, blocks, types, probs, num_warps=8) for probs in ("fp32", "bf16")]
