"""Tree attention over latents, kernel and reference, against the definition in float64.

Cache slots that a request does not own, and the outputs, start as NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from speculators_ext.kernels.merge_attention import merge_attention
from speculators_ext.kernels.packed_attention_ref import DequantScales
from speculators_ext.kernels.tree_attention_mla import tree_attention_mla
from speculators_ext.kernels.tree_attention_mla_ref import (
    LocalLatents,
    gather_latents,
    tree_attention_mla_gathered_ref,
    tree_attention_mla_ref,
)
from speculators_ext.kernels.tree_attention_ref import TreeBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = {"ref": tree_attention_mla_ref, "triton": tree_attention_mla}
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

both = pytest.mark.parametrize("attend", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


@dataclass(frozen=True)
class Shape:
    prefix_lens: tuple[int, ...]
    counts: tuple[int, ...]
    num_heads: int = 2
    latent: int = 32
    rope: int = 16
    block_size: int = 16


SHAPES = {
    "root only": Shape((40,), (1,)),
    "empty prefix": Shape((0,), (7,)),
    "ragged, empty trees": Shape((5, 0, 33, 16, 70), (0, 9, 1, 0, 35)),
    "100 nodes": Shape((20,), (100,)),
    "heads no power of two": Shape((35,), (5,), num_heads=3),
    "block of 64": Shape((75, 20), (5, 14), block_size=64),
    "DeepSeek-V3": Shape((40, 3), (5, 2), num_heads=16, latent=512, rope=64),
}


def make_call(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """What both are given, trees' fields by name: row i of a tree hangs from (i - 1) // 2."""
    torch.manual_seed(0)
    width = shape.latent + shape.rope
    lengths = [p + n for p, n in zip(shape.prefix_lens, shape.counts, strict=True)]
    most = -(-max(lengths) // shape.block_size) + 1
    table = (torch.randperm(len(lengths) * most) + 1).to(torch.int32).view(-1, most)
    cache = torch.full((table.numel() + 1, shape.block_size, width), math.nan)
    for request, length in enumerate(lengths):
        for position in range(length):
            block = table[request, position // shape.block_size]
            cache[block, position % shape.block_size] = torch.randn(width)
        table[request, -(-length // shape.block_size) :] = 0
    num_words = -(-max(*shape.counts, 1) // 32)
    words: list[list[int]] = []
    for count in shape.counts:
        seen: list[int] = []
        for row in range(count):
            seen.append((seen[(row - 1) // 2] if row else 0) | 1 << row)
            parts = [seen[row] >> 32 * word & 0xFFFFFFFF for word in range(num_words)]
            words.append([part - 2**32 if part >= 2**31 else part for part in parts])
    query = torch.randn(sum(shape.counts), shape.num_heads, width)
    return {
        "query": query.to(DEVICE, dtype),
        "cache": cache.to(DEVICE, dtype),
        "block_table": table.to(DEVICE),
        "prefix_lens": torch.tensor(shape.prefix_lens, device=DEVICE),
        "cu_nodes": torch.tensor([0, *shape.counts], device=DEVICE).cumsum(0).int(),
        "mask_words": torch.tensor(words, dtype=torch.int32, device=DEVICE).view(-1, num_words),
        "max_nodes": max(*shape.counts, 1),
        "scale": width**-0.5,
        "latent": shape.latent,
    }


def arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments: the fields of the trees are one."""
    trees = {name: call[name] for name in TreeBatch._fields if name in call}
    rest = {name: part for name, part in call.items() if name not in trees}
    return {**rest, "trees": TreeBatch(**trees)}


def run(attend: Any, call: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*call["query"].shape[:2], call["latent"])
    dtype = changes.pop("dtype", call["query"].dtype)
    out = torch.full(shape, math.nan, device=DEVICE, dtype=dtype)
    lse = torch.full(shape[:2], math.nan, device=DEVICE)
    attend(**arguments({**call, "out": out, "lse": lse, **changes}))
    return out, lse


def by_definition(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    query, cache = call["query"].double().cpu(), call["cache"].double().cpu()
    cu_nodes, lens = call["cu_nodes"].tolist(), call["prefix_lens"].tolist()
    table, words = call["block_table"].tolist(), call["mask_words"].tolist()
    out = torch.empty(*query.shape[:2], call["latent"], dtype=torch.float64)
    lse = torch.empty(query.shape[:2], dtype=torch.float64)
    for request, prefix_len in enumerate(lens):
        rows = range(cu_nodes[request], cu_nodes[request + 1])
        for row in rows:
            tree = [j for j in range(len(rows)) if words[row][j // 32] >> j % 32 & 1]
            seen = [*range(prefix_len), *(prefix_len + j for j in tree)]
            size = cache.shape[1]
            entries = torch.stack([cache[table[request][j // size], j % size] for j in seen])
            scores = query[row] @ entries.T * call["scale"]
            out[row] = torch.softmax(scores, -1) @ entries[:, : call["latent"]]
            lse[row] = torch.logsumexp(scores, -1)
    return out, lse


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double().cpu(), expected, atol=tolerance, rtol=tolerance)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tree_attention_mla(attend: Any, shape: Shape, dtype: torch.dtype) -> None:
    """Catches a rotated part that is scored apart, a value with it, a wrong bit or tile edge."""
    call = make_call(shape, dtype)
    out, lse = run(attend, call)
    expected, expected_lse = by_definition(call)
    assert_close(out, expected, TOLERANCES[dtype])
    assert_close(lse, expected_lse, TOLERANCES[dtype])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter gets bfloat16 wrong")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tree_attention_mla_bfloat16(shape: Shape) -> None:
    """Catches arithmetic in bfloat16 itself, which loses five more bits than the inputs did."""
    call = make_call(shape, torch.bfloat16)
    out, _ = run(tree_attention_mla, call)
    assert_close(out, by_definition(call)[0], TOLERANCES[torch.bfloat16])


@both
def test_fp8_cache_and_query(attend: Any) -> None:
    """Catches a scale that reaches the scores and not the values, which are the same numbers."""
    call = make_call(Shape((40, 3), (6, 9)), torch.float16)
    query_scale, cache_scale = torch.tensor([0.5, 0.25], device=DEVICE).split(1)
    given, plain = dict(call), dict(call)
    for name, factor in (("query", query_scale), ("cache", cache_scale)):
        given[name] = (call[name].float() / factor).to(torch.float8_e4m3fn)
        plain[name] = given[name].double() * factor
    given["query"], plain["query"] = call["query"], call["query"].double()
    out, _ = run(attend, {**given, "dequant": DequantScales(key=cache_scale)})
    assert_close(out, by_definition(plain)[0], 2 * TOLERANCES[torch.float16])


def test_the_cascade_is_the_fused_form() -> None:
    """Catches parts that share a latent, or miss one."""
    call = make_call(Shape((40, 0, 7), (6, 9, 0)), torch.float32)
    fused, fused_lse = run(tree_attention_mla, call)
    tree = run(tree_attention_mla, call, with_prefix=False)
    nobody = {"mask_words": torch.zeros_like(call["mask_words"])}
    out, lse = merge_attention(*run(tree_attention_mla, call, **nobody), *tree)
    torch.testing.assert_close(out, fused, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, fused_lse, atol=1e-5, rtol=1e-5)


def without_trees(call: dict[str, Any], shape: Shape) -> tuple[dict[str, Any], LocalLatents]:
    """The same problem with the tree rows in a tensor of their own, and NaN in their slots."""
    cache, rows = call["cache"].clone(), []
    for request, (prefix_len, count) in enumerate(
        zip(shape.prefix_lens, shape.counts, strict=True)
    ):
        for j in range(prefix_len, prefix_len + count):
            block = call["block_table"][request, j // shape.block_size]
            rows.append(cache[block, j % shape.block_size].clone())
            cache[block, j % shape.block_size] = math.nan
    return {**call, "cache": cache}, LocalLatents(torch.stack(rows), call["cu_nodes"])


@both
@pytest.mark.parametrize("name", ["ragged, empty trees", "empty prefix", "block of 64"])
def test_tree_rows_outside_the_cache(attend: Any, name: str) -> None:
    """Catches a read of the tree's slots, which nobody has written while a drafter grows."""
    call = make_call(SHAPES[name], torch.float32)
    expected, expected_lse = by_definition(call)
    spoiled, local = without_trees(call, SHAPES[name])
    out, lse = run(attend, spoiled, local=local)
    assert_close(out, expected, TOLERANCES[torch.float32])
    assert_close(lse, expected_lse, TOLERANCES[torch.float32])
    assert attend(**arguments({**spoiled, "local": local})).dtype == torch.float32


@both
def test_queries_may_be_some_of_the_rows(attend: Any) -> None:
    """Catches query rows taken for tree rows: a drafter asks for its newest level only."""
    shape = Shape((20, 7), (12, 9))
    call = make_call(shape, torch.float32)
    expected, _ = by_definition(call)
    spoiled, local = without_trees(call, shape)
    last = torch.tensor([9, 10, 11, 12 + 7, 12 + 8], device=DEVICE)
    asked = {name: spoiled[name][last] for name in ("query", "mask_words")}
    asked["cu_nodes"] = torch.tensor([0, 3, 5], dtype=torch.int32, device=DEVICE)
    out, _ = run(attend, {**spoiled, **asked, "max_nodes": 3}, local=local)
    assert_close(out, expected[last.cpu()], TOLERANCES[torch.float32])


@both
def test_rows_beside_an_fp8_cache_are_not_scaled(attend: Any) -> None:
    """Catches the cache's scale on rows that were never quantized."""
    shape = Shape((40, 3), (6, 9))
    call = make_call(shape, torch.float32)
    factor = torch.tensor([0.25], device=DEVICE)
    stored = (call["cache"] / factor).to(torch.float8_e4m3fn)
    plain = {**call, "cache": (stored.double() * factor).float()}
    _, local = without_trees(plain, shape)
    given = {**call, "cache": stored, "local": local, "dequant": DequantScales(key=factor)}
    assert_close(run(attend, given)[0], by_definition(plain)[0], 2 * TOLERANCES[torch.float32])


@both
def test_a_row_that_sees_nothing_gives_zero(attend: Any) -> None:
    """Catches NaN of padded rows, which a captured graph carries along."""
    call = make_call(Shape((0,), (4,)), torch.float32)
    call["mask_words"][2:] = 0
    out, lse = run(attend, call)
    assert not out.isnan().any()
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert bool((lse[2:] == -math.inf).all())


@pytest.mark.parametrize("prefix_len", [0, 5, 32])
def test_gathered_latents_of_one_request(prefix_len: int) -> None:
    """Catches a prefix cut at a block's end, and a bfloat16 product where float32 is promised."""
    shape = Shape((prefix_len,), (7,))
    call = make_call(shape, torch.float32)
    latents = gather_latents(call["cache"], call["block_table"][0], prefix_len + 7)
    words = call["mask_words"][:, 0, None] >> torch.arange(7, device=DEVICE)
    out = tree_attention_mla_gathered_ref(
        call["query"], latents, (words & 1).bool(), call["scale"], shape.latent
    )
    assert_close(out, by_definition(call)[0], TOLERANCES[torch.float32])
    half = [part.bfloat16() for part in (call["query"], latents)]
    exact = tree_attention_mla_gathered_ref(
        half[0].float(), half[1].float(), (words & 1).bool(), call["scale"], shape.latent
    )
    rounded = tree_attention_mla_gathered_ref(
        *half, (words & 1).bool(), call["scale"], shape.latent
    )
    assert torch.equal(rounded, exact.bfloat16())


def test_no_rows_is_no_launch() -> None:
    """Catches a grid of size 0, which a GPU refuses."""
    call = make_call(Shape((4,), (0,)), torch.float32)
    assert tree_attention_mla(**arguments(call)).shape == (0, 2, 32)


BROKEN = {
    "latent": ({"latent": 24}, "numbers of the latent: expected a power of two"),
    "rotated key": (
        {"query": torch.zeros(4, 2, 56), "cache": torch.zeros(4, 16, 56)},
        "numbers of the rotated key",
    ),
    "width": ({"cache": torch.zeros(4, 16, 40)}, "width of cache"),
    "value scale": ({"dequant": DequantScales(value=torch.ones(1))}, "value scale"),
    "words": ({"max_nodes": 40}, "mask words for 40 rows"),
    "local width": (
        {"local": LocalLatents(torch.zeros(4, 47), torch.zeros(2).int())},
        "width of local rows",
    ),
    "local offsets": (
        {"local": LocalLatents(torch.zeros(4, 48), torch.zeros(3).int())},
        "local cu_rows",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BROKEN.values(), ids=BROKEN)
def test_arguments_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    """Catches an argument the kernel would read past without a word."""
    call = {**make_call(Shape((20,), (4,)), torch.float32), **changes}
    tensors = {name: part.to(DEVICE) for name, part in call.items() if torch.is_tensor(part)}
    with pytest.raises(ValueError, match=message):
        tree_attention_mla(**arguments({**call, **tensors}))
