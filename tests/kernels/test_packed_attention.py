"""Packed attention, both implementations, against the definition written out in float64.

Cache slots that a request does not own, and the output, start as NaN: a read outside the prefix
or an element left unwritten shows in the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from speculators_ext.kernels.packed_attention import packed_attention
from speculators_ext.kernels.packed_attention_ref import (
    DequantScales,
    packed_attention_paged_ref,
    packed_attention_ref,
)
from speculators_ext.kernels.tree_attention_ref import tree_attention_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = {"ref": packed_attention_paged_ref, "triton": packed_attention}
# Absolute, for values of order 1: float32 sums of some hundred terms; float16 weights and output
# are each rounded to 2**-11.
TOLERANCES = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}

both = pytest.mark.parametrize("attend", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


@dataclass(frozen=True)
class Shape:
    prefix_lens: tuple[int, ...]
    width: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    layout: str = "HND"
    options: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    "one row": Shape((40,), width=1),
    "odd rows, several tiles": Shape((70,), width=19),
    "empty prefix": Shape((0,)),
    "ragged, one empty": Shape((0, 1, 16, 33, 130)),
    "block size no power of two": Shape((75, 20), block_size=24),
    "block of one": Shape((19,), block_size=1),
    "block larger than a tile": Shape((300,), block_size=256),
    "MHA": Shape((35,), num_heads=3, num_kv_heads=3),
    "GQA 9/3": Shape((35, 50), num_heads=9, num_kv_heads=3),
    "MQA": Shape((35,), num_heads=5, num_kv_heads=1),
    "head 32": Shape((35,), head_size=32),
    "head 80": Shape((35, 9), head_size=80),
    "head 96": Shape((35,), head_size=96),
    "head 112": Shape((35,), head_size=112),
    "head 128": Shape((75,), head_size=128, width=9),
    "head 256": Shape((35,), head_size=256),
    "window": Shape((10, 32, 100), options={"sliding_window": 32}),
    "window of one": Shape((20,), options={"sliding_window": 1}),
    "soft cap": Shape((50,), options={"soft_cap": 3.0}),
    "window and soft cap": Shape((90,), options={"sliding_window": 50, "soft_cap": 20.0}),
    "slots before heads": Shape((70, 30), num_heads=9, num_kv_heads=3, layout="NHD"),
}


@dataclass
class Problem:
    """``call`` are the keyword arguments of both implementations; caches are views of ``cache``."""

    shape: Shape
    cache: torch.Tensor
    call: dict[str, Any]

    def run(self, attend: Any, **changes: Any) -> torch.Tensor:
        out = torch.full_like(self.call["query"], math.nan, dtype=self.call["key"].dtype)
        return attend(**{**self.call, "out": out, **changes})


def make_problem(shape: Shape, dtype: torch.dtype, *, sharpness: float = 1.0) -> Problem:
    torch.manual_seed(0)
    rows = len(shape.prefix_lens) * shape.width
    head_size, num_kv_heads = shape.head_size, shape.num_kv_heads
    query = torch.randn(rows, shape.num_heads, head_size) * sharpness
    key, value = torch.randn(2, rows, num_kv_heads, head_size).unbind()
    cache, table = make_cache(shape)
    key_cache, value_cache = cache.to(DEVICE, dtype).split(head_size, dim=-1)
    call = {
        "query": query.to(DEVICE, dtype),
        "key": key.to(DEVICE, dtype),
        "value": value.to(DEVICE, dtype),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": table.to(DEVICE),
        "prefix_lens": torch.tensor(shape.prefix_lens, device=DEVICE),
        "scale": head_size**-0.5,
        **shape.options,
    }
    return Problem(shape, cache, call)


def make_cache(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, block_size, heads, 2 * head_size] in the layout's strides, NaN where unused."""
    most = max(-(-length // shape.block_size) for length in shape.prefix_lens) + 1
    num_blocks = len(shape.prefix_lens) * most + 1
    table = (torch.randperm(num_blocks - 1) + 1).to(torch.int32)
    table = table.view(len(shape.prefix_lens), most)
    inner = (shape.num_kv_heads, shape.block_size)
    cache = torch.full((num_blocks, *inner, 2 * shape.head_size), math.nan).transpose(1, 2)
    if shape.layout == "NHD":
        cache = cache.contiguous()
    window = shape.options.get("sliding_window", 0)
    for request, length in enumerate(shape.prefix_lens):
        for position in range(max(0, length + 1 - window) if window else 0, length):
            block = table[request, position // shape.block_size]
            slot = cache[block, position % shape.block_size]
            slot.copy_(torch.randn_like(slot))
        table[request, -(-length // shape.block_size) :] = 0
    return cache, table


def by_definition(call: dict[str, Any]) -> torch.Tensor:
    """The formula of the kernel's docstring, a row and a head at a time, in float64."""
    query, key, value = (call[name].double().cpu() for name in ("query", "key", "value"))
    caches = [call[name].double().cpu() for name in ("key_cache", "value_cache")]
    table, lens = call["block_table"].cpu(), call["prefix_lens"].tolist()
    block_size, group = caches[0].shape[1], query.shape[1] // key.shape[1]
    cap, window = call.get("soft_cap", 0.0), call.get("sliding_window", 0)
    out = torch.empty_like(query)
    for row in range(query.shape[0]):
        request = row // (query.shape[0] // len(lens))
        first = max(0, lens[request] + 1 - window) if window else 0
        places = [
            (table[request, j // block_size], j % block_size) for j in range(first, lens[request])
        ]
        for head in range(query.shape[1]):
            own = head // group
            keys = [caches[0][block, slot, own] for block, slot in places] + [key[row, own]]
            values = [caches[1][block, slot, own] for block, slot in places] + [value[row, own]]
            scores = torch.stack(keys) @ query[row, head] * call["scale"]
            if cap:
                scores = cap * torch.tanh(scores / cap)
            out[row, head] = torch.softmax(scores, 0) @ torch.stack(values)
    return out


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double().cpu(), expected, atol=tolerance, rtol=tolerance)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_packed_attention(attend: Any, shape: Shape, dtype: torch.dtype) -> None:
    """Catches a wrong tile edge, group, block or window: anything off by one reads a NaN."""
    problem = make_problem(shape, dtype)
    assert_close(problem.run(attend), by_definition(problem.call), TOLERANCES[dtype])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter gets bfloat16 wrong")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_packed_attention_bfloat16(shape: Shape) -> None:
    """Catches arithmetic in bfloat16 itself, which loses five more bits than the inputs did."""
    problem = make_problem(shape, torch.bfloat16)
    got = problem.run(packed_attention)
    assert_close(got, by_definition(problem.call), TOLERANCES[torch.bfloat16])


def test_the_cache_of_a_problem_is_strided() -> None:
    """Catches a test of strides whose caches are contiguous after all."""
    for layout in ("HND", "NHD"):
        problem = make_problem(Shape((20,), layout=layout), torch.float32)
        assert not problem.call["key_cache"].is_contiguous()
    strides = {make_cache(Shape((20,), layout=layout))[0].stride() for layout in ("HND", "NHD")}
    assert len(strides) == 2


@both
def test_a_row_sees_no_sibling(attend: Any) -> None:
    """Catches a causal mask, or none, in place of the diagonal one: NaN would spread."""
    problem = make_problem(Shape((20, 20), width=4), torch.float32)
    problem.call["key"][2] = math.nan
    problem.call["value"][5] = math.nan
    spoiled = problem.run(attend).isnan().flatten(1).any(1).cpu()
    assert spoiled.nonzero().flatten().tolist() == [2, 5]


@both
def test_nothing_but_the_output_is_written(attend: Any) -> None:
    """Catches a write to the cache, which verification relies on, and a store past the output."""
    problem = make_problem(Shape((20, 7), head_size=80), torch.float32)
    caches = [problem.call[name] for name in ("key_cache", "value_cache")]
    before = [cache.clone().view(torch.int32) for cache in caches]
    rows, heads, head_size = problem.call["query"].shape
    around = torch.full((rows + 1, heads + 1, head_size + 1), math.nan, device=DEVICE)
    out = problem.run(attend, out=around[:rows, :heads, :head_size])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.view(torch.int32), old)
    assert int((~around.isnan()).sum()) == out.numel() == rows * heads * head_size


@both
def test_rows_may_be_slices_of_a_fused_projection(attend: Any) -> None:
    """Catches a kernel that takes q, k and v for contiguous: engines pass views of one tensor."""
    problem = make_problem(Shape((20, 7)), torch.float32)
    parts = [problem.call[name] for name in ("query", "key", "value")]
    fused = torch.cat(parts, dim=1)
    views = fused.split([part.shape[1] for part in parts], dim=1)
    assert not any(view.is_contiguous() for view in views)
    got = problem.run(attend, **dict(zip(("query", "key", "value"), views, strict=True)))
    assert_close(got, by_definition(problem.call), TOLERANCES[torch.float32])


@both
@pytest.mark.parametrize("options", [{}, {"soft_cap": 30.0}], ids=["plain", "soft cap"])
def test_sharp_scores(attend: Any, options: dict[str, float]) -> None:
    """Catches exp() overflow (scores reach 1e4) and inf / inf in the soft cap's tanh."""
    shape = Shape((60, 0), width=5, options=options)
    problem = make_problem(shape, torch.float32, sharpness=1e4)
    # A softmax over scores that differ by thousands picks one value; ties are 1e-3 apart.
    assert_close(problem.run(attend), by_definition(problem.call), 5e-3)


def quantized(problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments with fp8 query and caches, the same numbers as float64 without)."""
    factors = DequantScales(*torch.tensor([0.5, 0.25, 2.0], device=DEVICE).split(1))
    given, plain = dict(problem.call), dict(problem.call)
    names = ("query", "key_cache", "value_cache")
    for name, factor in zip(names, factors, strict=True):
        stored = (problem.call[name].float() / factor).to(torch.float8_e4m3fn)
        given[name], plain[name] = stored, stored.double() * factor
    return {**given, "dequant": factors}, plain


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_fp8_query_and_cache(attend: Any, dtype: torch.dtype) -> None:
    """Catches a scale that is dropped, applied twice or applied to the rows' own keys or values."""
    given, plain = quantized(make_problem(Shape((40, 3), num_heads=6), dtype))
    out = torch.full(given["query"].shape, math.nan, dtype=dtype, device=DEVICE)
    assert_close(attend(**given, out=out), by_definition(plain), 2 * TOLERANCES[dtype])


def test_a_cache_of_more_than_two_billion_elements() -> None:
    """Catches 32-bit addresses: block 70000 lies 2.3e9 elements in (memory is not touched)."""
    problem = make_problem(Shape((16,)), torch.float16)
    step, last = 2**15, 70_000
    storage = torch.empty(step * (last + 1), dtype=torch.float16, device=DEVICE)
    far = {}
    for name, offset in (("key_cache", 0), ("value_cache", step // 2)):
        near = problem.call[name]
        shape = (last + 1, *near.shape[1:])
        inner = torch.empty(near.shape[1:]).stride()
        far[name] = storage.as_strided(shape, (step, *inner), offset)
        far[name][last] = near[problem.call["block_table"][0, 0].item()]
    table = torch.full_like(problem.call["block_table"], last)
    got = problem.run(packed_attention, **far, block_table=table)
    assert_close(got, by_definition(problem.call), TOLERANCES[torch.float16])


@both
def test_the_output_is_made_when_none_is_given(attend: Any) -> None:
    """Catches an output that takes an fp8 query's dtype instead of the model's."""
    given, _ = quantized(make_problem(Shape((4,)), torch.float16))
    assert attend(**given).dtype == torch.float16


def test_no_rows_is_no_launch() -> None:
    """Catches a grid of size 0, which a GPU refuses."""
    problem = make_problem(Shape((4,)), torch.float32)
    none = {name: problem.call[name][:0] for name in ("query", "key", "value")}
    assert packed_attention(**{**problem.call, **none}).shape == (0, 4, 64)


BROKEN = {
    "heads no multiple": ({"num_heads": 4}, "query", lambda t: t[:, :3], "query heads"),
    "rows no multiple": ({}, "prefix_lens", lambda t: t.repeat(2), "rows: expected"),
    "head too large": ({"head_size": 264}, "query", lambda t: t, "head_size: expected 32 to 256"),
    "value shape": ({}, "value", lambda t: t[:-1], "value shape"),
    "query dtype": ({}, "query", lambda t: t.double(), "query dtype"),
    "key dtype": ({}, "key", lambda t: t.double(), "key dtype"),
    "cache heads": ({}, "key_cache", lambda t: t[:, :, :1], "heads and head_size of key_cache"),
    "caches differ": ({}, "value_cache", lambda t: t[:-1], "value_cache shape"),
    "cache dtype": ({}, "key_cache", lambda t: t.half(), "key_cache dtype"),
    "table rows": ({}, "block_table", lambda t: t.repeat(2, 1), "block_table rows"),
    "table dtype": ({}, "block_table", lambda t: t.long(), "block_table dtype"),
    "lens dtype": ({}, "prefix_lens", lambda t: t.float(), "prefix_lens dtype"),
    "last stride": ({}, "key", lambda t: t.mT.contiguous().mT, "key last stride: expected 1"),
    "device": ({}, "block_table", lambda t: t.to("meta"), "block_table device"),
}


@pytest.mark.parametrize(("changes", "name", "spoil", "message"), BROKEN.values(), ids=BROKEN)
def test_arguments_that_do_not_fit(changes: dict, name: str, spoil: Any, message: str) -> None:
    """Catches an argument the kernel would read past, or in the wrong dtype, without a word."""
    problem = make_problem(replace(Shape((20,)), **changes), torch.float32)
    with pytest.raises(ValueError, match=message):
        packed_attention(**{**problem.call, name: spoil(problem.call[name])})


@pytest.mark.skipif(DEVICE != "cpu", reason="bfloat16 is right on a GPU")
def test_bfloat16_is_refused_by_the_interpreter() -> None:
    """Catches garbage handed out on a CPU: the interpreter's bfloat16 arithmetic is wrong."""
    problem = make_problem(Shape((20,)), torch.bfloat16)
    with pytest.raises(ValueError, match="key dtype on a CPU"):
        packed_attention(**problem.call)


@pytest.mark.parametrize("soft_cap", [0.0, 20.0])
@pytest.mark.parametrize("prefix_len", [0, 1, 37])
def test_a_tree_of_rows_that_see_themselves_is_the_reference(
    prefix_len: int, soft_cap: float
) -> None:
    """A row that attends to a sibling, or heads folded in another order than they unfold."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(5, 6, 32, generator=generator)
    key, value = torch.randn(2, 5, 2, 32, generator=generator)
    prefix = torch.randn(2, 2, prefix_len, 32, generator=generator)
    arguments = (query, key, value, prefix[0], prefix[1], 32**-0.5, soft_cap)
    torch.testing.assert_close(
        tree_attention_ref(*arguments[:5], torch.eye(5, dtype=torch.bool), *arguments[5:]),
        packed_attention_ref(*arguments),
        atol=5e-6,
        rtol=0,
    )
