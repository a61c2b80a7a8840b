"""Keys and values of a request's prefix in plain order, kept beside vLLM's packed CPU cache.

Attention of our own reads the whole prefix in every layer of every step. Unpacking it anew each
time costs as much as the attention; here a step unpacks only the positions it has not seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from speculators_ext.engines.vllm.attention.kv_layout import read_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    import torch

    from speculators_ext.engines.vllm.attention.kv_layout import BlockLayout

__all__ = ["PrefixShadow"]

_ROOM = 128
"""Positions a copy grows by."""


_Kind = tuple[int, int, "torch.dtype"]
"""Layers whose copies lie in one tensor: heads, head size, the cache's dtype."""


class _Copies(NamedTuple):
    """One request's keys and values in layers of a kind.

    Attributes:
        sides: [2, layers, num_kv_heads, room, head_size], keys and values.
        seen: positions copied, by the layer's place.
    """

    sides: torch.Tensor
    seen: dict[int, int]


class PrefixShadow:
    """Plain copies by owner (a request) and layer.

    The copy doubles the cache of the requests in it: keep only the owners in the
    batch. Positions once copied must not change in the cache, as those of verified tokens do not.
    """

    def __init__(self) -> None:
        self._copies: dict[Hashable, dict[_Kind, _Copies]] = {}
        self._places: dict[_Kind, dict[str, int]] = {}

    def keep_only(self, owners: Sequence[Hashable]) -> None:
        """Drop the copies of all other owners."""
        present = set(owners)
        for owner in [o for o in self._copies if o not in present]:
            del self._copies[owner]

    def rows(
        self,
        owner: Hashable,
        layer_name: str,
        kv_cache: torch.Tensor,
        layout: BlockLayout,
        block_table: torch.Tensor,
        prefix_len: int,
        extra: int,
        convert: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The prefix of one request in one layer, with room behind it.

        Args:
            owner: whose prefix it is.
            layer_name: whose cache it is.
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], as packed.
            layout: how it is packed.
            block_table: [max_blocks] int32, the owner's blocks.
            prefix_len: positions of the prefix.
            extra: rows left free behind it, for the caller's own keys and values.
            convert: makes stored keys and values computable (fp8 to the query's dtype).

        Returns:
            Keys and values [num_kv_heads, prefix_len + extra, head_size], views of the copy.
        """
        kind = (kv_cache.shape[1], layout.head_size, kv_cache.dtype)
        places = self._places.setdefault(kind, {})
        place = places.setdefault(layer_name, len(places))
        kinds = self._copies.setdefault(owner, {})
        copies = kinds.get(kind)
        known = copies.seen.get(place) if copies else None
        length = prefix_len + extra
        # A prefix that shrank is cut too: the caller's rows overwrite what stood behind it.
        if copies is None or known != prefix_len or copies.sides.shape[3] < length:
            seen = min(known or 0, prefix_len)
            fresh = convert(*read_prefix(kv_cache, layout, block_table, seen, prefix_len))
            copies = kinds[kind] = _with_room(copies, fresh[0], len(places), length)
            for side, new in zip(copies.sides, fresh, strict=True):
                side[place, :, seen:prefix_len] = new
            copies.seen[place] = prefix_len
        keys, values = copies.sides[:, place, :, :length]
        return keys, values

    def keep(
        self, owner: Hashable, layer_names: Iterable[str], prefix_len: int, rows: Sequence[int]
    ) -> None:
        """Make some of the rows the caller left behind a prefix a part of it.

        Args:
            owner: whose prefix it is.
            layer_names: the layers whose rows are as the cache will hold them.
            prefix_len: what ``rows`` was last called with.
            rows: ascending numbers of the rows that stay, in order.
        """
        until = prefix_len + len(rows)
        names = set(layer_names)
        for kind, copies in self._copies.get(owner, {}).items():
            for places in _runs(
                place
                for name, place in self._places[kind].items()
                if name in names and copies.seen.get(place) == prefix_len
            ):
                copies.seen.update(dict.fromkeys(places, until))
                own = copies.sides[:, places.start : places.stop, :, prefix_len:]
                for goal, row in enumerate(rows):  # ascending: no later one is overwritten
                    if row != goal:
                        own[:, :, :, goal] = own[:, :, :, row]


def _runs(places: Iterable[int]) -> Iterator[range]:
    """Ascending numbers as ranges."""
    run: range | None = None
    for place in places:
        if run is not None and place != run.stop:
            yield run
            run = None
        run = range(run.start if run else place, place + 1)
    if run is not None:
        yield run


def _with_room(old: _Copies | None, like: torch.Tensor, num_layers: int, length: int) -> _Copies:
    """``old``, or where it is too small a larger copy of it; ``like`` [heads, any, head_size]."""
    if old is not None and old.sides.shape[1] >= num_layers and old.sides.shape[3] >= length:
        return old
    room = -(-length // _ROOM) * _ROOM
    if old is not None:  # layers are met one after another
        num_layers = max(old.sides.shape[1], 1 << (num_layers - 1).bit_length())
        room = max(room, old.sides.shape[3])
    sides = like.new_empty(2, num_layers, like.shape[0], room, like.shape[2])
    if old is not None:
        _, layers, _, kept, _ = old.sides.shape
        sides[:, :layers, :, :kept] = old.sides
    return _Copies(sides, old.seen if old else {})
