r"""Moving accepted nodes' keys and values to the front of the tree: definition and CPU path.

The rows of a draft tree lie in the cache behind the request's prefix, row i in slot
``prefix_len + i``. Once a path through the tree is accepted, its rows must follow one another:

    slot(prefix_len + j) <- slot(prefix_len + path[j])    for 1 <= j <= num_accepted

for keys and values of every layer. Row 0, the root, is in its place; so is every row with
``path[j] = j``, and where that is all of them nothing is read or written. A path goes up
(``path[j] >= j``), so a slot written may be one that was to be read for an *earlier* j.

What is moved are bytes: dtypes and quantisation do not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from speculators_ext.kernels.checks import require

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CacheTable", "compact_kv_ref"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class CacheTable:
    """Caches that share block tables and block size: a view for each layer's keys, and values.

    Every view is [num_blocks, block_size, heads, units], of the widest integers that its layout
    allows. ``CacheTable.of`` makes one of caches as engines have them.
    """

    views: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, caches: Sequence[torch.Tensor]) -> CacheTable:
        """Take views of any strides and dtype, [num_blocks, block_size, heads, head_size] or, of a
        latent cache (MLA), [num_blocks, block_size, size].

        Raises:
            ValueError: there is none, or their dims, block sizes or devices differ.
        """
        require(len(caches) > 0, "caches", "at least 1", 0)
        first = caches[0]
        for cache in caches:
            require(cache.dim() in (3, 4), "dims of a cache", "3 or 4", cache.dim())
            require(cache.shape[1] == first.shape[1], "block size", first.shape[1], cache.shape[1])
            require(cache.device == first.device, "cache device", first.device, cache.device)
        views = (cache.unsqueeze(2) if cache.dim() == 3 else cache for cache in caches)
        return cls(tuple(_widest(view) for view in views))

    @property
    def block_size(self) -> int:
        """Slots a block holds."""
        return self.views[0].shape[1]

    @cached_property
    def pointers(self) -> torch.Tensor:
        """[number of views] int64 addresses, on the caches' device."""
        addresses = [view.data_ptr() for view in self.views]
        return torch.tensor(addresses, dtype=torch.int64, device=self.views[0].device)

    @cached_property
    def layouts(self) -> tuple[tuple, tuple]:
        """(units, shape and strides of the first view, those of one that differs or its own)."""
        found = [(view.dtype, tuple(view.shape), view.stride()) for view in self.views]
        return found[0], next((layout for layout in found if layout != found[0]), found[0])

    @cached_property
    def storages(self) -> tuple[tuple[tuple[torch.Tensor, ...], list[torch.Tensor]], ...]:
        """(views, flat storages of that layout) for each layout: one index moves them all."""
        together: dict[tuple, list[torch.Tensor]] = {}
        for view in self.views:
            place = (view.untyped_storage().data_ptr(), view.dtype)
            together.setdefault(place, []).append(view)
        layouts: dict[tuple, tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]] = {}
        for views in together.values():
            key = tuple((v.dtype, v.shape, v.stride(), v.storage_offset()) for v in views)
            size = views[0].untyped_storage().nbytes() // views[0].element_size()
            _, flats = layouts.setdefault(key, (tuple(views), []))
            flats.append(views[0].as_strided((size,), (1,), 0))
        return tuple(layouts.values())


def compact_kv_ref(
    table: CacheTable,
    block_table: torch.Tensor,  # [R, max_blocks]
    prefix_lens: torch.Tensor,  # [R]
    path: torch.Tensor,  # [R, P]
    num_accepted: torch.Tensor,  # [R]
) -> None:
    """Move the rows; arguments are those of ``compact_kv.compact_kv``. Path and counts are read
    back. Where the caches' strides are the same one index per storage moves keys and values.
    """
    moves = [
        (request, prefix_len + step, prefix_len + row)
        for request, (steps, accepted, prefix_len) in enumerate(
            zip(path.tolist(), num_accepted.tolist(), prefix_lens.tolist(), strict=True)
        )
        for row, step in enumerate(steps[: accepted + 1])
        if step not in (-1, row)
    ]
    if not moves:
        return
    requests, *slots = torch.tensor(moves, device=path.device).unbind(1)
    sources, targets = (
        (block_table[requests, slot // table.block_size].long(), slot % table.block_size)
        for slot in slots
    )
    for views, flats in table.storages:
        source = torch.cat([_elements(view, *sources) for view in views])
        target = torch.cat([_elements(view, *targets) for view in views])
        for flat in flats:
            flat.index_copy_(0, target, flat.index_select(0, source))


def _widest(cache: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers of up to 8, where they lie side by side and aligned."""
    width = cache.element_size()
    if cache.stride(3) == 1:
        steps = (cache.shape[3], *cache.stride()[:3], int(cache.storage_offset()))
        width = math.gcd(8, cache.data_ptr(), *(step * width for step in steps))
    return cache.view(_INTEGERS[width])


def _elements(view: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Where in the storage the units of these slots lie, [slots * heads * units]."""
    steps = view.stride()
    head = torch.arange(view.shape[2], device=view.device)
    element = torch.arange(view.shape[3], device=view.device)
    inner = (head[:, None] * steps[2] + element * steps[3]).flatten()
    slot = int(view.storage_offset()) + blocks * steps[0] + slots * steps[1]
    return (slot[:, None] + inner).flatten()
