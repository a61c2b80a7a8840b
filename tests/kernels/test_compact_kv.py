"""Compaction, both implementations, against a copy of all caches made before."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from speculators_ext.kernels.compact_kv import compact_kv
from speculators_ext.kernels.compact_kv_ref import CacheTable, compact_kv_ref

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = {"ref": compact_kv_ref, "triton": compact_kv}
NUM_BLOCKS, LAYERS = 40, 3

both = pytest.mark.parametrize("compact", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


@dataclass(frozen=True)
class Form:
    """A cache's shape; ``block`` slots a block."""

    block: int = 16
    heads: int = 2
    size: int = 8
    dtype: torch.dtype = torch.float32

    def storage(self, *shape: int) -> torch.Tensor:
        """Random bytes, NaN patterns and all: what is moved is not looked at."""
        width = self.dtype.itemsize
        wide = (*shape[:-1], shape[-1] * width)
        return torch.randint(0, 256, wide, dtype=torch.uint8, device=DEVICE).view(self.dtype)


def slots_then_heads(form: Form) -> list[torch.Tensor]:
    return [form.storage(NUM_BLOCKS, form.block, form.heads, form.size) for _ in range(2)]


def heads_then_slots(form: Form) -> list[torch.Tensor]:
    both_sizes = form.storage(NUM_BLOCKS, form.heads, form.block, 2 * form.size).transpose(1, 2)
    return list(both_sizes.split(form.size, dim=-1))


def flash(form: Form) -> list[torch.Tensor]:
    return list(form.storage(2, NUM_BLOCKS, form.block, form.heads, form.size))


def blocks_first(form: Form) -> list[torch.Tensor]:
    return list(form.storage(NUM_BLOCKS, 2, form.block, form.heads, form.size).unbind(1))


def latent(form: Form) -> list[torch.Tensor]:
    return [form.storage(NUM_BLOCKS, form.block, form.size)]


def transposed_keys(form: Form) -> list[torch.Tensor]:
    """A CPU engine's: a block's keys lie as [size, slot], its values behind as [slot, size]."""
    whole = form.storage(NUM_BLOCKS, form.heads, 2 * form.block, form.size)
    keys, values = whole.split(form.block, dim=2)
    keys = keys.flatten(2).unflatten(2, (form.size, form.block))
    assert keys.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return [keys.permute(0, 3, 1, 2), values.transpose(1, 2)]


ON_EVERY_DEVICE: dict[str, tuple[Callable, Form]] = {
    "slots then heads": (slots_then_heads, Form()),
    "heads then slots": (heads_then_slots, Form()),
    "flash": (flash, Form()),
    "keys and values in a block": (blocks_first, Form()),
    "latent": (latent, Form(size=576, dtype=torch.bfloat16)),
    "fp8": (flash, Form(size=64, dtype=torch.float8_e4m3fn)),
    "int8 of odd size": (slots_then_heads, Form(heads=3, size=5, dtype=torch.int8)),
    "bf16, block no power of two": (flash, Form(block=24, dtype=torch.bfloat16)),
    "block of one": (flash, Form(block=1, dtype=torch.float16)),
    "block larger than the tree": (blocks_first, Form(block=256)),
    "wide": (flash, Form(heads=8, size=128, dtype=torch.bfloat16)),
}
LAYOUTS = {
    f"{name}-{implementation}": (make, form, compact)
    for name, (make, form) in ON_EVERY_DEVICE.items()
    for implementation, compact in IMPLEMENTATIONS.items()
} | {"transposed keys-ref": (transposed_keys, Form(dtype=torch.bfloat16), compact_kv_ref)}


@dataclass
class Problem:
    caches: list[torch.Tensor]
    block_table: torch.Tensor
    prefix_lens: list[int]
    paths: list[list[int]]

    def run(self, compact: Any, width: int | None = None, **changes: Any) -> None:
        width = width or max(map(len, self.paths), default=1)
        table = [(path + [-1] * width)[:width] for path in self.paths]
        call = {
            "block_table": self.block_table,
            "prefix_lens": torch.tensor(self.prefix_lens, device=DEVICE),
            "path": torch.tensor(table, dtype=torch.int32, device=DEVICE),
            "num_accepted": torch.tensor(
                [max(len(path) - 1, 0) for path in self.paths], dtype=torch.int32, device=DEVICE
            ),
        }
        compact(CacheTable.of(self.caches), **{**call, **changes})


def make_problem(
    make: Callable, form: Form, prefix_lens: list[int], paths: list[list[int]]
) -> Problem:
    torch.manual_seed(0)
    caches = [view for _ in range(LAYERS) for view in make(form)]
    per_request = NUM_BLOCKS // len(prefix_lens)
    blocks = torch.randperm(NUM_BLOCKS)[: per_request * len(prefix_lens)].to(torch.int32)
    return Problem(caches, blocks.view(-1, per_request).to(DEVICE), prefix_lens, paths)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.contiguous().view(torch.uint8).clone()


def expected(problem: Problem) -> list[torch.Tensor]:
    """Each cache as it should be afterwards: every slot from a copy, one after another."""
    wanted = []
    for cache in problem.caches:
        before, after = as_bytes(cache), as_bytes(cache)
        block_size = cache.shape[1]
        for request, (prefix_len, path) in enumerate(
            zip(problem.prefix_lens, problem.paths, strict=True)
        ):
            table = problem.block_table[request].tolist()
            for row, step in enumerate(path):
                source, target = prefix_len + step, prefix_len + row
                kept = before[table[source // block_size], source % block_size]
                after[table[target // block_size], target % block_size] = kept
        wanted.append(after)
    return wanted


def check(problem: Problem, compact: Any, **changes: Any) -> None:
    wanted = expected(problem)
    problem.run(compact, **changes)
    for cache, after in zip(problem.caches, wanted, strict=True):
        assert torch.equal(as_bytes(cache), after)


@pytest.mark.parametrize(("make", "form", "compact"), LAYOUTS.values(), ids=LAYOUTS)
def test_compact_kv(make: Callable, form: Form, compact: Any) -> None:
    """Catches a stride, a page edge or a byte too few, and any write where nothing should move."""
    prefix_lens = [0, 3, 5, 4] if form.block == 1 else [0, 7, 15, 30]
    paths = [[0, 2, 3], [0, 4], [0, 1, 3, 4], [0]]
    check(make_problem(make, form, prefix_lens, paths), compact)


@both
def test_a_target_may_be_another_rows_source(compact: Any) -> None:
    """Catches rows written before they are read: all move up by one, across a page."""
    check(make_problem(flash, Form(block=4), [6], [[0, *range(2, 9)]]), compact)


@both
def test_a_path_longer_than_a_program_moves_at_once(compact: Any) -> None:
    """Catches a group of rows dropped, or written over before its turn."""
    paths = [[0, *range(2, 30)], [0, 1, 2, *range(10, 40, 2)]]
    check(make_problem(flash, Form(), [5, 100], paths), compact)


@both
def test_random_paths(compact: Any) -> None:
    """Catches what a hand-made case does not think of."""
    random.seed(0)
    paths = [[0, *sorted(random.sample(range(1, 12), random.randint(0, 5)))] for _ in range(9)]
    prefix_lens = [random.randint(0, 50) for _ in paths]
    check(make_problem(slots_then_heads, Form(), prefix_lens, paths), compact)


@both
def test_a_path_that_is_a_prefix_moves_nothing(compact: Any) -> None:
    """Catches a copy onto itself: the block table would send it out of the cache."""
    problem = make_problem(flash, Form(), [5, 9], [[0, 1, 2, 3], [0]])
    nowhere = torch.full_like(problem.block_table, 2**30)
    check(problem, compact, block_table=nowhere)


@both
def test_rows_behind_the_path_stay(compact: Any) -> None:
    """Catches a prompt, whose path is -1 or too short to list its rows, moved about."""
    problem = make_problem(flash, Form(), [5, 9], [[0, 1, 2, 3, 4, 5], [0, 1, 2]])
    path = torch.tensor([[0, 1, 2], [0, -1, -1]], dtype=torch.int32, device=DEVICE)
    check(problem, compact, path=path)


@both
def test_rejected_rows_of_the_path_stay(compact: Any) -> None:
    """Catches a path followed past what was accepted."""
    problem = make_problem(flash, Form(), [5], [[0, 2]])
    path = torch.tensor([[0, 2, 4, 6]], dtype=torch.int32, device=DEVICE)
    check(problem, compact, path=path)


@both
def test_no_requests(compact: Any) -> None:
    """Catches a grid of size 0, which a GPU refuses."""
    problem = make_problem(flash, Form(), [0], [[0]])
    none = torch.empty(0, 1, dtype=torch.int32, device=DEVICE)
    check(problem, compact, block_table=none, prefix_lens=none[:, 0], path=none,
          num_accepted=none[:, 0])  # fmt: skip


def test_a_cache_of_more_than_two_billion_bytes() -> None:
    """Catches 32-bit addresses: block 70000 lies 2.3e9 bytes in (memory is not touched)."""
    step, last = 2**15 + 1, 70_000
    storage = torch.empty(step * (last + 1), dtype=torch.uint8, device=DEVICE)
    cache = storage.as_strided((last + 1, 4, 1, 3), (step, 3, 3, 1))
    cache[last] = torch.arange(12, device=DEVICE).view(4, 1, 3)
    table = torch.full((1, 1), last, dtype=torch.int32, device=DEVICE)
    problem = Problem([cache], table, [0], [[0, 3]])
    problem.run(compact_kv)
    assert cache[last, :, 0, 0].tolist() == [0, 9, 6, 9]


def test_caches_that_make_no_table() -> None:
    """Catches caches of which one address table would read some wrongly."""
    form = Form()
    views = flash(form)
    with pytest.raises(ValueError, match="caches: expected at least 1, got 0"):
        CacheTable.of([])
    with pytest.raises(ValueError, match="block size: expected 16, got 8"):
        CacheTable.of([*views, *flash(Form(block=8))])
    with pytest.raises(ValueError, match="dims of a cache: expected 3 or 4, got 5"):
        CacheTable.of([form.storage(2, 3, 4, 5, 6)])
    for others, message in (
        (heads_then_slots(form), "dtype, shape and strides of a cache"),
        (flash(Form(dtype=torch.float16)), "dtype, shape and strides of a cache"),
    ):
        with pytest.raises(ValueError, match=message):
            Problem([*views, *others], torch.zeros(1, 1).int(), [0], [[0]]).run(compact_kv)
    with pytest.raises(ValueError, match="last stride of the caches: expected 1"):
        Problem(transposed_keys(form)[:1], torch.zeros(1, 1).int(), [0], [[0]]).run(compact_kv)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("path", lambda t: t.long(), "path dtype"),
        ("num_accepted", lambda t: t[:0], "num_accepted rows: expected 1, got 0"),
        ("block_table", lambda t: t[0], "dims of block_table: expected 2, got 1"),
        ("prefix_lens", lambda t: t.to("meta"), "prefix_lens device"),
    ],
)
def test_arguments_that_do_not_fit(name: str, spoil: Any, message: str) -> None:
    """Catches an argument the kernel would read past, or in the wrong dtype, without a word."""
    problem = make_problem(flash, Form(), [5], [[0, 2]])
    path = torch.tensor([[0, 2]], dtype=torch.int32, device=DEVICE)
    given = {"path": path, "num_accepted": path[:, 1], "prefix_lens": path[:, 0]}
    given["block_table"] = problem.block_table
    with pytest.raises(ValueError, match=message):
        problem.run(compact_kv, **{name: spoil(given[name])})
