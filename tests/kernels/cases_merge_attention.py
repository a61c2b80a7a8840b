from __future__ import annotations

from kernel_case import Case

from speculators_ext.kernels import merge_attention as op


def cases(target: str) -> list[Case]:
    types = dict.fromkeys(("lse_ptr", "lse_a_ptr", "lse_b_ptr"), "*fp32")
    two = [
        Case(f"head {size}", op._merge_attention_kernel, {"BLOCK_D": size}, types, num_warps=1)
        for size in (128, 512)
    ]
    types = dict.fromkeys(("lse_ptr", "lses_ptr", "parts_ptr"), "*fp32")
    blocks = {"BLOCK_S": 16, "BLOCK_D": 128}
    return [*two, Case("16 parts, head 128", op._merge_parts_kernel, blocks, types, num_warps=1)]
