"""Tree attention over a gathered prefix, the CPU's path, against the definition in float64."""

from __future__ import annotations

import math

import pytest
import torch

from speculators_ext.kernels.tree_attention import choose_splits
from speculators_ext.kernels.tree_attention_ref import (
    tree_attention_ref,
    tree_bias,
    unpack_mask,
)

# Absolute, for values of order 1; bfloat16 weights and output are each rounded to 2**-8.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-2}

# query heads, KV heads, query rows, tree rows, prefix
SIZES = {
    "MHA": (3, 3, 5, 5, 20),
    "GQA 3": (9, 3, 33, 33, 50),
    "group 8": (8, 1, 17, 17, 9),
    "no prefix": (4, 2, 7, 7, 0),
    "root only": (4, 2, 1, 1, 30),
    "no rows": (4, 2, 0, 0, 30),
    "the newest rows only": (4, 2, 3, 12, 30),
}


def by_definition(query, keys, values, seen, scale, soft_cap):
    """keys, values [kv_heads, P + L, size]; seen [n, P + L]."""
    group = query.shape[1] // keys.shape[0]
    keys, values = (part.double().repeat_interleave(group, 0) for part in (keys, values))
    scores = torch.einsum("nhd,hkd->nhk", query.double(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores.masked_fill_(~seen[:, None], -math.inf)
    return torch.einsum("nhk,hkd->nhd", torch.softmax(scores, -1), values)


@pytest.mark.parametrize("soft_cap", [0.0, 3.0], ids=["plain", "soft cap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_tree_attention_ref(sizes, dtype, soft_cap):
    """Catches heads of a group out of order, and a bias that shifts with the prefix."""
    num_heads, num_kv_heads, num_rows, num_local, prefix_len = sizes
    torch.manual_seed(0)
    query = torch.randn(num_rows, num_heads, 64).to(dtype)
    key, value = torch.randn(2, num_local, num_kv_heads, 64).to(dtype)
    prefix = torch.randn(2, num_kv_heads, prefix_len, 64).to(dtype)
    mask = torch.rand(num_rows, num_local) < 0.4
    mask[:, num_local - num_rows :].fill_diagonal_(True)
    got = tree_attention_ref(query, key, value, *prefix, mask, 0.125, soft_cap)
    both = [
        torch.cat([old, new.transpose(0, 1)], 1)
        for old, new in zip(prefix, (key, value), strict=True)
    ]
    seen = torch.nn.functional.pad(mask, (prefix_len, 0), value=True)
    expected = by_definition(query, *both, seen, 0.125, soft_cap)
    assert got.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_bias_serves_every_head_of_a_group():
    """Catches heads of a group that do not see the same rows."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    bias = tree_bias(mask, 2, 4, torch.float32)
    assert bias.shape == (6, 7)
    assert torch.equal(bias[:, :4], torch.zeros(6, 4))
    assert torch.equal(bias[:, 4:] == 0, mask.repeat(2, 1))


def test_words_are_bits_from_the_lowest():
    """Catches bit 31, which makes a word negative, and the second word."""
    words = torch.tensor([[1, 0], [-(2**31), 0], [2, 5]], dtype=torch.int32)
    rows = [mask.nonzero().flatten().tolist() for mask in unpack_mask(words, 40)]
    assert rows == [[0], [31], [1, 32, 34]]


@pytest.mark.parametrize(
    ("num_reqs", "max_prefix_len", "expected"), [(1, 32768, 32), (1, 100, 1), (64, 32768, 1)]
)
def test_splits_fill_a_gpu(num_reqs: int, max_prefix_len: int, expected: int) -> None:
    """Catches a long prefix read by eight programs, and a short one by hundreds."""
    assert choose_splits(num_reqs, 8, max_prefix_len, 132) == expected
