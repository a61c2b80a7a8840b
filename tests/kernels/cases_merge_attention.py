from __future__ import annotations

from kernel_case import Case

from speculators_ext.kernels import merge_attention as op


def cases(target: str) -> list[Case]:
    types = dict.fromkeys(("lse_ptr", "lse_a_ptr", "lse_b_ptr"), "*fp32")
    return [
        Case(f"head {size}", op._merge_attention_kernel, {"BLOCK_D": size}, types, num_warps=1)
        for size in (128, 512)
    ]
