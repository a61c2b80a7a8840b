from __future__ import annotations

from typing import Any

import torch
from kernel_case import FP8_NAMES, Case

from speculators_ext.kernels import tree_attention_mla as op


def cases(target: str) -> list[Case]:
    rows = [
        make_case("bf16", "bf16", 16),
        make_case("fp16", "fp16", 128),
        make_case("bf16", "bf16", 16, local=True),
    ]
    if target in FP8_NAMES:
        rows.append(make_case("bf16", FP8_NAMES[target], 128))
    return rows


def make_case(rows: str, cache: str, num_heads: int, *, local: bool = False) -> Case:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[rows]
    constants: dict[str, Any] = {
        "NUM_HEADS": num_heads,
        "LATENT": 512,
        "ROPE": 64,
        "BLOCK_SIZE": 64,
        "WITH_PREFIX": True,
        "DOT_DTYPE": op.DOT_DTYPES[dtype],
        "BLOCK_M": op.BLOCK_M,
        "BLOCK_N": op.BLOCK_N,
        "q_scale_ptr": None,
    }
    integers = ("block_table_ptr", "cu_nodes_ptr", "cu_rows_ptr", "mask_ptr", "prefix_lens_ptr")
    types = dict.fromkeys(integers, "*i32") | {"scale": "fp32", "lse_ptr": "*fp32"}
    types["cache_ptr"] = f"*{cache}"
    if cache == rows:
        constants["cache_scale_ptr"] = None
    else:
        types["cache_scale_ptr"] = "*fp32"
    if not local:
        constants["rows_ptr"] = None
    label = f"{rows}, {num_heads} heads" + ("" if cache == rows else ", fp8 cache")
    label += ", own rows" if local else ""
    return Case(label, op._tree_attention_mla_kernel, constants, types, rows)
