from __future__ import annotations

from kernel_case import Case

from speculators_ext.kernels import gather_rows as op


def cases(target: str) -> list[Case]:
    longs = ("out_tokens_ptr", "out_positions_ptr", "out_rows_ptr", "tokens_ptr", "positions_ptr")
    types = dict.fromkeys((*longs, "bonus_ptr"), "*i64")
    types |= dict.fromkeys(("cu_nodes_ptr", "cu_rows_ptr", "path_ptr"), "*i32")
    return [
        Case(
            f"{reqs} requests",
            op._gather_rows_kernel,
            {"BLOCK_R": reqs, "BLOCK_H": op._MAX_BLOCK_H},
            types,
            "i16",
        )
        for reqs in (64, 4096)
    ]
