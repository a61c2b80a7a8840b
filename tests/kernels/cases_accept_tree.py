from __future__ import annotations

from kernel_case import Case

from speculators_ext.kernels import accept_tree as op

INTEGERS = {
    "path_ptr": "*i32",
    "num_accepted_ptr": "*i32",
    "bonus_ptr": "*i64",
    "tokens_ptr": "*i64",
    "parents_ptr": "*i32",
    "cu_nodes_ptr": "*i32",
}


def cases(target: str) -> list[Case]:
    blocks = {"BLOCK_N": 64, "BLOCK_P": 8, "BLOCK_V": op._BLOCK_V}
    given = {"logits_ptr": None, "uniform_ptr": None, "greedy_ptr": None}
    drawn = {"uniform_ptr": "*fp32", "greedy_ptr": "*i1"}
    kernel, chosen = op._accept_tree_kernel, {"chosen_ptr": "*i64"}
    rows = [
        Case("64 nodes", kernel, {**blocks, **given}, INTEGERS | chosen, num_warps=1),
        Case(
            "256 nodes", kernel, {**blocks, **given, "BLOCK_N": 256}, INTEGERS | chosen, num_warps=1
        ),
    ]
    for logits in ("fp32", "bf16"):
        constants = {**blocks, "chosen_ptr": None}
        label = f"64 nodes, drawn from {logits}"
        warps = op._DRAW_WARPS
        rows.append(Case(label, kernel, constants, INTEGERS | drawn, logits, num_warps=warps))
    return rows
