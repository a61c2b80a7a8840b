"""Tree attention, both implementations, against the definition written out in float64.

Cache slots that a request does not own, and the outputs, start as NaN: a read outside the prefix
and the tree, or an element left unwritten, shows in the result.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from speculators_ext.kernels.merge_attention import merge_attention
from speculators_ext.kernels.packed_attention_ref import DequantScales
from speculators_ext.kernels.tree_attention import tree_attention
from speculators_ext.kernels.tree_attention_ref import LocalRows, TreeBatch
from speculators_ext.kernels.tree_attention_ref import tree_attention_paged_ref as paged_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = {"ref": paged_ref, "triton": tree_attention}
# Absolute, for values of order 1: float32 sums of some hundred terms; float16 weights and output
# are each rounded to 2**-11.
TOLERANCES = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}

both = pytest.mark.parametrize("attend", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


@dataclass(frozen=True)
class Shape:
    prefix_lens: tuple[int, ...]
    counts: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    "root only": Shape((40,), (1,)),
    "empty prefix": Shape((0,), (7,)),
    "ragged, empty trees": Shape((5, 0, 33, 16, 130), (0, 9, 1, 0, 33)),
    "256 nodes": Shape((20,), (256,), num_heads=2, num_kv_heads=2, head_size=32),
    "block size no power of two": Shape((75, 20), (5, 14), block_size=24),
    "block of one": Shape((19,), (6,), block_size=1),
    "MHA": Shape((35,), (5,), num_heads=3, num_kv_heads=3),
    "GQA 9/3": Shape((35, 50), (17, 8), num_heads=9, num_kv_heads=3),
    "MQA, group 8": Shape((35,), (12,), num_heads=8, num_kv_heads=1),
    "head 80": Shape((35, 9), (5, 3), head_size=80),
    "head 128": Shape((75,), (9,), head_size=128),
    "head 256": Shape((35,), (6,), head_size=256),
    "window": Shape((10, 32, 100), (6, 20, 30), options={"sliding_window": 32}),
    "window within the tree": Shape((20, 0), (20, 9), options={"sliding_window": 2}),
    "soft cap": Shape((50,), (7,), options={"soft_cap": 3.0}),
    "window and soft cap": Shape((9,), (40,), options={"sliding_window": 4, "soft_cap": 20.0}),
}


def random_parents(count: int, rng: random.Random) -> list[int]:
    """Parents of a tree of this many rows, now a chain, now a bush."""
    return [-1] + [rng.choice([row - 1, rng.randrange(row)]) for row in range(1, count)]


def make_masks(counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(words int32 [N, W], depths int32 [N]) of random trees."""
    rng = random.Random(0)
    words = torch.zeros(sum(counts), -(-max(*counts, 1) // 32), dtype=torch.int64)
    depths, first = [], 0
    for count in counts:
        seen: list[int] = []
        for row, parent in enumerate(random_parents(count, rng)[:count]):
            seen.append((seen[parent] if parent >= 0 else 0) | 1 << row)
            depths.append(seen[row].bit_count() - 1)
            for word in range(words.shape[1]):
                words[first + row, word] = seen[row] >> 32 * word & 0xFFFFFFFF
        first += count
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return signed.int(), torch.tensor(depths, dtype=torch.int32)


def make_call(shape: Shape, dtype: torch.dtype, *, sharpness: float = 1.0) -> dict[str, Any]:
    """What both implementations are given, trees' fields by name; tree rows are in the cache."""
    torch.manual_seed(0)
    query = torch.randn(sum(shape.counts), shape.num_heads, shape.head_size) * sharpness
    words, depths = make_masks(shape.counts)
    lengths = [p + n for p, n in zip(shape.prefix_lens, shape.counts, strict=True)]
    most = -(-max(lengths) // shape.block_size) + 1
    table = (torch.randperm(len(lengths) * most) + 1).to(torch.int32).view(-1, most)
    inner = (shape.num_kv_heads, shape.block_size, 2 * shape.head_size)
    cache = torch.full((table.numel() + 1, *inner), math.nan).transpose(1, 2)
    for request, length in enumerate(lengths):
        for position in range(length):
            block = table[request, position // shape.block_size]
            cache[block, position % shape.block_size] = torch.randn(inner[0], inner[2])
        table[request, -(-length // shape.block_size) :] = 0
    key_cache, value_cache = cache.to(DEVICE, dtype).split(shape.head_size, dim=-1)
    return {
        "query": query.to(DEVICE, dtype),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": table.to(DEVICE),
        "prefix_lens": torch.tensor(shape.prefix_lens, device=DEVICE),
        "cu_nodes": torch.tensor([0, *shape.counts], device=DEVICE).cumsum(0).int(),
        "mask_words": words.to(DEVICE),
        "max_nodes": max(*shape.counts, 1),
        "scale": shape.head_size**-0.5,
        "depths": depths.to(DEVICE),
        **shape.options,
    }


def arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments: the fields of the trees are one."""
    rest = {name: part for name, part in call.items() if name not in TreeBatch._fields}
    return {**rest, "trees": TreeBatch(*(call[name] for name in TreeBatch._fields))}


def run(attend: Any, call: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    query = call["query"]
    out = torch.full_like(query, math.nan, dtype=changes.pop("dtype", query.dtype))
    lse = torch.full(query.shape[:2], math.nan, device=DEVICE)
    attend(**arguments({**call, "out": out, "lse": lse, **changes}))
    return out, lse


def by_definition(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula of the reference's docstring, a row and a head at a time, in float64."""
    query = call["query"].double().cpu()
    caches = [call[name].double().cpu() for name in ("key_cache", "value_cache")]
    cu_nodes, lens = call["cu_nodes"].tolist(), call["prefix_lens"].tolist()
    table, words, depths = (call[name].tolist() for name in ("block_table", "mask_words", "depths"))
    block_size, group = caches[0].shape[1], query.shape[1] // caches[0].shape[2]
    cap, window = call.get("soft_cap", 0.0), call.get("sliding_window", 0) or math.inf
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2], dtype=torch.float64)
    for request, prefix_len in enumerate(lens):
        rows = range(cu_nodes[request], cu_nodes[request + 1])
        for row in rows:
            stands = prefix_len + depths[row]
            seen = [j for j in range(prefix_len) if j > stands - window]
            for j in range(len(rows)):
                visible = words[row][j // 32] >> j % 32 & 1
                if visible and depths[rows[0] + j] > depths[row] - window:
                    seen.append(prefix_len + j)
            places = [(table[request][j // block_size], j % block_size) for j in seen]
            blocks, slots = (torch.tensor(part) for part in zip(*places, strict=True))
            for head in range(query.shape[1]):
                scores = caches[0][blocks, slots, head // group] @ query[row, head] * call["scale"]
                if cap:
                    scores = cap * torch.tanh(scores / cap)
                weights = torch.softmax(scores, 0)
                out[row, head] = weights @ caches[1][blocks, slots, head // group]
                lse[row, head] = torch.logsumexp(scores, 0)
    return out, lse


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double().cpu(), expected, atol=tolerance, rtol=tolerance)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tree_attention(attend: Any, shape: Shape, dtype: torch.dtype) -> None:
    """Catches a wrong tile edge, bit, group, block or window, in the output or in its lse."""
    call = make_call(shape, dtype)
    out, lse = run(attend, call)
    expected, expected_lse = by_definition(call)
    assert_close(out, expected, TOLERANCES[dtype])
    assert_close(lse, expected_lse, TOLERANCES[dtype])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter gets bfloat16 wrong")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tree_attention_bfloat16(shape: Shape) -> None:
    """Catches arithmetic in bfloat16 itself, which loses five more bits than the inputs did."""
    call = make_call(shape, torch.bfloat16)
    assert_close(run(tree_attention, call)[0], by_definition(call)[0], TOLERANCES[torch.bfloat16])


def without_trees(call: dict[str, Any], shape: Shape) -> tuple[dict[str, Any], LocalRows]:
    """The same problem with the tree rows in tensors of their own, and NaN in their slots."""
    caches = [call[name].clone() for name in ("key_cache", "value_cache")]
    rows: list[list[torch.Tensor]] = [[], []]
    for request, (prefix_len, count) in enumerate(
        zip(shape.prefix_lens, shape.counts, strict=True)
    ):
        for j in range(prefix_len, prefix_len + count):
            block = call["block_table"][request, j // shape.block_size]
            for cache, part in zip(caches, rows, strict=True):
                part.append(cache[block, j % shape.block_size].clone())
                cache[block, j % shape.block_size] = math.nan
    local = LocalRows(*map(torch.stack, rows), call["cu_nodes"], call["depths"])
    return {**call, "key_cache": caches[0], "value_cache": caches[1]}, local


LOCAL_SHAPES = ["ragged, empty trees", "GQA 9/3", "empty prefix", "window within the tree"]


@both
@pytest.mark.parametrize("name", LOCAL_SHAPES)
def test_tree_rows_outside_the_cache(attend: Any, name: str) -> None:
    """Catches a read of the tree's slots, which nobody has written then."""
    call = make_call(SHAPES[name], torch.float32)
    expected, expected_lse = by_definition(call)
    spoiled, local = without_trees(call, SHAPES[name])
    out, lse = run(attend, spoiled, local=local)
    assert_close(out, expected, TOLERANCES[torch.float32])
    assert_close(lse, expected_lse, TOLERANCES[torch.float32])


@both
def test_queries_may_be_some_of_the_rows(attend: Any) -> None:
    """Catches query rows taken for tree rows: a drafter asks for its newest level only."""
    shape = Shape((20, 7), (12, 9))
    call = make_call(shape, torch.float32)
    expected, _ = by_definition(call)
    spoiled, local = without_trees(call, shape)
    last = torch.tensor([9, 10, 11, 12 + 7, 12 + 8], device=DEVICE)
    asked = {name: spoiled[name][last] for name in ("query", "mask_words", "depths")}
    asked["cu_nodes"] = torch.tensor([0, 3, 5], dtype=torch.int32, device=DEVICE)
    out, _ = run(attend, {**spoiled, **asked, "max_nodes": 3}, local=local)
    assert_close(out, expected[last.cpu()], TOLERANCES[torch.float32])


@both
def test_a_sibling_weighs_nothing(attend: Any) -> None:
    """Catches a causal mask, or none: siblings would shout every other row down."""
    shape = Shape((5,), (3,), num_heads=1, num_kv_heads=1)
    call = make_call(shape, torch.float32)
    call["mask_words"] = torch.tensor([[1], [3], [5]], dtype=torch.int32, device=DEVICE)
    loud = call["key_cache"].clone()
    loud[call["block_table"][0, 0], 6] = 1e6
    call["query"] = call["query"].abs()
    quiet, _ = run(attend, call)
    shouted, _ = run(attend, {**call, "key_cache": loud})
    assert torch.equal(quiet[[0, 2]], shouted[[0, 2]])
    assert not torch.equal(quiet[1], shouted[1])


@both
def test_the_trees_part_alone(attend: Any) -> None:
    """Catches a prefix that is attended to although another kernel does it: NaN here."""
    shape = Shape((20, 7), (6, 3))
    call = make_call(shape, torch.float32)
    alone = make_call(shape, torch.float32)
    spoiled, local = without_trees(call, shape)
    for name in ("key_cache", "value_cache"):
        spoiled[name][:] = math.nan
    out, lse = run(attend, spoiled, local=local, with_prefix=False)
    assert not out.isnan().any()
    # The same trees behind no prefix.
    at = torch.arange(9, device=DEVICE)
    table = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 7, 8, 0, 0, 0]], dtype=torch.int32)
    caches = {"key_cache": local.key[at, None], "value_cache": local.value[at, None]}
    none = {"prefix_lens": torch.zeros(2, dtype=torch.int64, device=DEVICE)}
    moved = {**alone, **caches, **none, "block_table": table.to(DEVICE)}
    expected, expected_lse = by_definition(moved)
    assert_close(out, expected, TOLERANCES[torch.float32])
    assert_close(lse, expected_lse, TOLERANCES[torch.float32])
    cached, _ = run(attend, call, with_prefix=False)
    assert_close(cached, expected, TOLERANCES[torch.float32])


@both
def test_fp8_cache_and_query(attend: Any) -> None:
    """Catches a scale that is dropped, applied twice, or applied to rows that are not quantized."""
    shape = Shape((40, 3), (6, 9), num_heads=6)
    call = make_call(shape, torch.float32)
    factors = DequantScales(*torch.tensor([0.5, 0.25, 2.0], device=DEVICE).split(1))
    given, plain = dict(call), dict(call)
    for name, factor in zip(("query", "key_cache", "value_cache"), factors, strict=True):
        stored = (call[name] / factor).to(torch.float8_e4m3fn)
        given[name], plain[name] = stored, stored.double() * factor
    given["dequant"] = factors
    _, local = without_trees({**plain, "query": plain["query"].float()}, shape)
    expected, _ = by_definition(plain)
    local = local._replace(key=local.key.float(), value=local.value.float())
    out, _ = run(attend, {**given, "local": local}, dtype=torch.float32)
    assert_close(out, expected, 2 * TOLERANCES[torch.float32])
    half = LocalRows(local.key.half(), local.value.half(), local.cu_rows)
    out, _ = run(attend, {**given, "local": half}, dtype=torch.float16)
    assert_close(out, expected, 2 * TOLERANCES[torch.float16])


@both
def test_fp8_rows_in_the_cache(attend: Any) -> None:
    """Catches a tree row read back without the cache's scale."""
    call = make_call(Shape((40, 3), (6, 9)), torch.float16)
    factors = DequantScales(None, *torch.tensor([0.25, 2.0], device=DEVICE).split(1))
    given, plain = {**call, "dequant": factors}, dict(call)
    for name, factor in zip(("key_cache", "value_cache"), factors[1:], strict=True):
        given[name] = (call[name].float() / factor).to(torch.float8_e4m3fn)
        plain[name] = given[name].double() * factor
    out, _ = run(attend, given)
    assert_close(out, by_definition(plain)[0], 2 * TOLERANCES[torch.float16])


@both
def test_sharp_scores(attend: Any) -> None:
    """Catches exp() overflow: scores reach 1e4."""
    call = make_call(Shape((60, 0), (9, 7)), torch.float32, sharpness=1e4)
    # A softmax over scores that differ by thousands picks one value; ties are 1e-3 apart.
    assert_close(run(attend, call)[0], by_definition(call)[0], 5e-3)


@both
def test_a_row_that_sees_nothing_gives_zero(attend: Any) -> None:
    """Catches NaN of padded rows, which a captured graph carries along."""
    call = make_call(Shape((0,), (4,)), torch.float32)
    call["mask_words"][2:] = 0
    out, lse = run(attend, call)
    assert not out.isnan().any()
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert bool((lse[2:] == -math.inf).all())


@both
def test_nothing_but_the_output_is_written(attend: Any) -> None:
    """Catches a write to the cache, and a store past the output."""
    call = make_call(Shape((20, 7), (5, 3), head_size=80), torch.float32)
    caches = [call[name] for name in ("key_cache", "value_cache")]
    before = [cache.clone().view(torch.int32) for cache in caches]
    rows, heads, head_size = call["query"].shape
    around = torch.full((rows + 1, heads + 1, head_size + 1), math.nan, device=DEVICE)
    out = attend(**arguments({**call, "out": around[:rows, :heads, :head_size]}))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.view(torch.int32), old)
    assert int((~around.isnan()).sum()) == out.numel() == rows * heads * head_size


BROKEN = {
    "words": ("mask_words", lambda t: t[:, :0], "mask words for 40 rows: expected at least 2"),
    "mask rows": ("mask_words", lambda t: t[1:], "mask_words rows"),
    "mask dtype": ("mask_words", lambda t: t.long(), "mask_words dtype"),
    "offsets": ("cu_nodes", lambda t: t[:-1], "cu_nodes"),
    "depths": ("depths", lambda t: None, "a sliding window needs them"),
    "depths dtype": ("depths", lambda t: t.long(), "depths dtype"),
    "heads": ("query", lambda t: t[:, :3], "query heads"),
    "head size": ("query", lambda t: t[..., :32], "head_size of key_cache"),
    "cache dtype": ("key_cache", lambda t: t.half(), "key_cache dtype"),
    "table rows": ("block_table", lambda t: t.repeat(2, 1), "block_table rows"),
    "device": ("mask_words", lambda t: t.to("meta"), "mask_words device"),
}


@pytest.mark.parametrize(("name", "spoil", "message"), BROKEN.values(), ids=BROKEN)
def test_arguments_that_do_not_fit(name: str, spoil: Any, message: str) -> None:
    """Catches an argument the kernel would read past, or in the wrong dtype, without a word."""
    call = make_call(Shape((20,), (40,), options={"sliding_window": 9}), torch.float32)
    with pytest.raises(ValueError, match=message):
        tree_attention(**arguments({**call, name: spoil(call[name])}))


@pytest.mark.skipif(DEVICE != "cpu", reason="bfloat16 is right on a GPU")
def test_bfloat16_is_refused_by_the_interpreter() -> None:
    """Catches garbage handed out on a CPU: the interpreter's bfloat16 arithmetic is wrong."""
    call = make_call(Shape((20,), (4,)), torch.bfloat16)
    with pytest.raises(ValueError, match="dtype on a CPU"):
        tree_attention(**arguments(call))


SPLIT_SHAPES = ["ragged, empty trees", "GQA 9/3", "window", "empty prefix"]


@pytest.mark.parametrize("num_splits", [2, 5])
@pytest.mark.parametrize("name", SPLIT_SHAPES)
def test_a_prefix_shared_by_programs(name: str, num_splits: int) -> None:
    """Catches a position that is lost between parts, or a tree that counts in each of them."""
    call = make_call(SHAPES[name], torch.float32)
    out, lse = run(tree_attention, call, num_splits=num_splits)
    expected, expected_lse = by_definition(call)
    assert_close(out, expected, TOLERANCES[torch.float32])
    assert_close(lse, expected_lse, TOLERANCES[torch.float32])


def test_no_rows_is_no_launch() -> None:
    """Catches a grid of size 0, which a GPU refuses."""
    call = arguments(make_call(Shape((4,), (0,)), torch.float32))
    assert tree_attention(**call, num_splits=2).shape == (0, 4, 64)


def test_the_cascade_is_the_fused_form() -> None:
    """Catches parts that share a key, or miss one, or an lse in another base."""
    shape = Shape((40, 0, 7), (6, 9, 0))
    call = make_call(shape, torch.float32)
    fused, fused_lse = run(tree_attention, call)
    tree, tree_lse = run(tree_attention, call, with_prefix=False)
    nobody = torch.zeros_like(call["mask_words"])
    out, lse = merge_attention(*run(tree_attention, call, mask_words=nobody), tree, tree_lse)
    torch.testing.assert_close(out, fused, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, fused_lse, atol=1e-5, rtol=1e-5)
