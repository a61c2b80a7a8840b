from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from kernel_case import FP8_NAMES, TRITON_NAMES, Case

from speculators_ext.kernels import tree_attention as op

NUM_PAIRS = 256  # 64 rows of 4 query heads


class Variant(NamedTuple):
    dtype: torch.dtype
    head_size: int
    fp8_cache: bool = False
    window: int = 0
    soft_cap: float = 0.0
    local: bool = False
    split: bool = False


VARIANTS = (
    Variant(torch.float16, 64),
    Variant(torch.bfloat16, 128),
    Variant(torch.bfloat16, 128, local=True),
    Variant(torch.bfloat16, 128, split=True),
    Variant(torch.bfloat16, 256),
    Variant(torch.bfloat16, 80, window=1024, soft_cap=50.0),
    Variant(torch.bfloat16, 256, window=4096, soft_cap=50.0),
    Variant(torch.bfloat16, 128, fp8_cache=True),
    Variant(torch.float32, 64),
    Variant(torch.float32, 128),
)


def cases(target: str) -> list[Case]:
    return [
        make_case(variant, target)
        for variant in VARIANTS
        if target in FP8_NAMES or not variant.fp8_cache
    ]


def make_case(variant: Variant, target: str) -> Case:
    block_m, block_n = op.choose_tiles(
        NUM_PAIRS,
        variant.head_size,
        variant.dtype,
        hidden_and_capped=variant.window > 0 < variant.soft_cap,
    )
    rows = TRITON_NAMES[variant.dtype]
    cache = FP8_NAMES[target] if variant.fp8_cache else rows
    constants: dict[str, Any] = {
        "GROUP": 4,
        "HEAD_SIZE": variant.head_size,
        "BLOCK_SIZE": 16,
        "WINDOW": variant.window,
        "SOFT_CAP": variant.soft_cap,
        "WITH_PREFIX": True,
        "DOT_DTYPE": op.DOT_DTYPES[variant.dtype],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_L": min(block_n, 32),
        "BLOCK_D": triton.next_power_of_2(variant.head_size),
        "q_scale_ptr": None,
    }
    integers = ("block_table_ptr", "cu_nodes_ptr", "cu_rows_ptr", "mask_ptr")
    types = dict.fromkeys(integers, "*i32") | {"prefix_lens_ptr": "*i64", "scale": "fp32"}
    types |= {"key_cache_ptr": f"*{cache}", "value_cache_ptr": f"*{cache}", "lse_ptr": "*fp32"}
    if variant.fp8_cache:
        types |= {"k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
    else:
        constants.update(k_scale_ptr=None, v_scale_ptr=None)
    if variant.window:
        types |= {"depths_ptr": "*i32", "row_depths_ptr": "*i32"}
    else:
        constants.update(depths_ptr=None, row_depths_ptr=None)
    if variant.split:
        types["out_ptr"] = "*fp32"
    else:
        constants["num_splits"] = 1
    if not variant.local:
        constants.update(key_ptr=None, value_ptr=None)
    label = rows + (", fp8 cache" if variant.fp8_cache else "") + f", head {variant.head_size}"
    label += ", window, cap" if variant.window else ", own rows" if variant.local else ""
    label += ", split" if variant.split else ""
    return Case(label, op._tree_attention_kernel, constants, types, rows)
