from __future__ import annotations

from kernel_case import Case

from speculators_ext.kernels import compact_kv as op


def cases(target: str) -> list[Case]:
    types = {"pointers_ptr": "*i64", "prefix_lens_ptr": "*i64"}
    variants = [("heads of 128 bf16", 8, 256), ("heads of 5 int8", 1, 16)]
    return [
        Case(
            f"{label}, {size} bytes a unit",
            op._compact_kv_kernel,
            {
                "UNIT": op._TRITON_UNITS[size],
                "BLOCK_SIZE": 16,
                "BLOCK_P": op._BLOCK_P,
                "BLOCK_U": block_u,
            },
            types,
            "i32",
            aligned=size > 1,
        )
        for label, size, block_u in variants
    ]
