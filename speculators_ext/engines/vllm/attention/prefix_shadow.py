"""Keys and values of a request's prefix in plain order, kept beside vLLM's packed CPU cache.

Attention of our own reads the whole prefix in every layer of every step. Unpacking it anew each
time costs as much as the attention; here a step unpacks only the positions it has not seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from speculators_ext.engines.vllm.attention.kv_layout import read_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    import torch

    from speculators_ext.engines.vllm.attention.kv_layout import BlockLayout

__all__ = ["PrefixShadow"]

_ROOM = 128
"""Positions a copy grows by."""


class _Copy(NamedTuple):
    """One request's keys and values in one layer, [num_kv_heads, room, head_size] each."""

    keys: torch.Tensor
    values: torch.Tensor
    seen: int


class PrefixShadow:
    """Plain copies by owner (a request) and layer.

    The copy doubles the cache of the requests in it: keep only the owners in the
    batch. Positions once copied must not change in the cache, as those of verified tokens do not.
    """

    def __init__(self) -> None:
        self._copies: dict[Hashable, dict[str, _Copy]] = {}

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
        layers = self._copies.setdefault(owner, {})
        copy = layers.get(layer_name)
        seen = min(copy.seen, prefix_len) if copy else 0
        length = prefix_len + extra
        # A prefix that shrank is cut too: the caller's rows overwrite what stood behind it.
        if copy is None or copy.seen != prefix_len or copy.keys.shape[1] < length:
            fresh = convert(*read_prefix(kv_cache, layout, block_table, seen, prefix_len))
            copy = layers[layer_name] = _extended(copy, seen, fresh, length)
        return copy.keys[:, :length], copy.values[:, :length]

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
        layers = self._copies.get(owner, {})
        until = prefix_len + len(rows)
        in_place = list(rows) == list(range(len(rows)))
        for name in layer_names:
            copy = layers.get(name)
            if copy is None or copy.seen != prefix_len:
                continue
            for side in () if in_place else (copy.keys, copy.values):
                side[:, prefix_len:until] = side[:, [prefix_len + row for row in rows]]
            layers[name] = copy._replace(seen=until)


def _extended(
    copy: _Copy | None, seen: int, fresh: tuple[torch.Tensor, torch.Tensor], length: int
) -> _Copy:
    """``copy`` with the fresh positions behind the ``seen`` ones and room for ``length``."""
    until = seen + fresh[0].shape[1]
    kept = (copy.keys, copy.values) if copy else (None, None)
    keys, values = (_written(old, seen, new, length) for old, new in zip(kept, fresh, strict=True))
    return _Copy(keys, values, until)


def _written(old: torch.Tensor | None, seen: int, new: torch.Tensor, length: int) -> torch.Tensor:
    """One side: ``old``, or where it is too short a longer copy of it, with ``new`` written."""
    heads, count, head_size = new.shape
    if old is None or old.shape[1] < length:
        grown = new.new_empty(heads, -(-length // _ROOM) * _ROOM, head_size)
        if old is not None:
            grown[:, :seen] = old[:, :seen]
        old = grown
    old[:, seen : seen + count] = new
    return old
