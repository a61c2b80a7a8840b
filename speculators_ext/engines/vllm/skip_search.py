"""Keeps the skip sets in use and searches new ones with the target's own layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.forward_context import set_forward_context

from speculators_ext.engines.vllm.packed_rows import PackedRows
from speculators_ext.proposers.clasp import backtrack, solve
from speculators_ext.proposers.skip_sets import default_num_skip, evenly_spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from vllm.config import VllmConfig

    from speculators_ext.config import ClaspConfig
    from speculators_ext.engines.vllm.layer_walk import LayerWalk

__all__ = ["SearchRows", "SkipSearch"]


class SearchRows(NamedTuple):
    """The requests a search looks at, one row each.

    ``req_ids``: names, R of them. ``token_ids``: [R] int64, each request's newest token, which has
    no KV yet. ``positions``: [R] int64, that token's position; the cache holds everything before.
    ``block_tables``: layer name -> [R, max_blocks] int32.
    """

    req_ids: list[str]
    token_ids: torch.Tensor
    positions: torch.Tensor
    block_tables: dict[str, torch.Tensor]


class _PackedStack:
    """The target's units as the search calls them: [R, W, H] in one packed call."""

    def __init__(self, walk: LayerWalk, positions: torch.Tensor) -> None:
        self.num_units = walk.num_units
        self._walk = walk
        self._positions = positions

    def apply(self, unit: int, states: torch.Tensor) -> torch.Tensor:
        num_rows, width, hidden_size = states.shape
        positions = self._positions.repeat_interleave(width)
        packed = self._walk.apply(unit, positions, states.reshape(num_rows * width, hidden_size))
        return packed.view(num_rows, width, hidden_size)


class SkipSearch:
    """Skip sets by request group, refreshed every ``refresh_interval`` verifications.

    With ``grouping="batch"`` one set serves the whole batch; with ``"per_request"`` each request
    has its own. A set is dropped when no request it was found for is left in the batch.

    Args:
        walk: the target's layers.
        config: the method's options.
        vllm_config: for the forward context of packed calls.
        can_pack: whether the attention backend understands packed rows; without it a search is
            impossible and the evenly spread set serves.
        broadcast: hands rank 0's parent bits to every tensor-parallel rank.
    """

    def __init__(
        self,
        walk: LayerWalk,
        config: ClaspConfig,
        vllm_config: VllmConfig,
        *,
        can_pack: bool,
        broadcast: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._walk = walk
        self._config = config
        self._vllm_config = vllm_config
        self._broadcast = broadcast
        num_layers = walk.num_units // (2 if config.skip_unit == "sublayer" else 1)
        self._pinned = config.pinned_units(num_layers)
        free = walk.num_units - len(self._pinned)
        wanted = config.num_skip_layers
        self._num_skip = min(default_num_skip(walk.num_units) if wanted is None else wanted, free)
        self._fixed = self._fixed_set(can_pack)
        self._sets: dict[str, tuple[int, ...]] = {}
        self._age = 0

    def _fixed_set(self, can_pack: bool) -> tuple[int, ...] | None:
        if self._config.skip_layers is not None:
            return tuple(self._config.skip_layers)
        if self._config.policy == "even" or not can_pack or self._num_skip == 0:
            return self.even_set
        return None

    @property
    def even_set(self) -> tuple[int, ...]:
        """The evenly spread set, in use until the first search."""
        return evenly_spread(self._walk.num_units, self._num_skip, self._pinned)

    @property
    def searches(self) -> bool:
        """Whether sets are searched at all (False: one fixed set)."""
        return self._fixed is None

    def due(self, req_ids: Sequence[str]) -> bool:
        """Whether this round should search: nothing known for these requests, or sets too old."""
        if self._fixed is not None:
            return False
        if self._config.grouping == "per_request":
            unknown = any(req_id not in self._sets for req_id in req_ids)
        else:
            unknown = not any(req_id in self._sets for req_id in req_ids)
        return unknown or self._age >= self._config.refresh_interval

    def count_round(self) -> None:
        """One more verification has passed since the last search."""
        self._age += 1

    def forget_absent(self, is_present: Callable[[str], bool]) -> None:
        """Drop the sets of requests that ended, were aborted or were preempted."""
        for req_id in [r for r in self._sets if not is_present(r)]:
            del self._sets[req_id]

    def reset(self) -> None:
        """Drop everything (new weights)."""
        self._sets.clear()
        self._age = 0

    def groups(self, req_ids: Sequence[str]) -> list[tuple[tuple[int, ...], list[int]]]:
        """The units to *keep* and the rows (indices into ``req_ids``) that draft with them."""
        by_set: dict[tuple[int, ...], list[int]] = {}
        for row, req_id in enumerate(req_ids):
            by_set.setdefault(self._set_of(req_id), []).append(row)
        return [(self._kept(skipped), rows) for skipped, rows in by_set.items()]

    def _set_of(self, req_id: str) -> tuple[int, ...]:
        if self._fixed is not None:
            return self._fixed
        if self._config.grouping == "batch":
            return next(iter(self._sets.values()), None) or self.even_set
        return self._sets.get(req_id, self.even_set)

    def _kept(self, skipped: tuple[int, ...]) -> tuple[int, ...]:
        out = frozenset(skipped)
        return tuple(unit for unit in range(self._walk.num_units) if unit not in out)

    def search(self, rows: SearchRows) -> None:
        """Find sets for these requests by the dynamic program, in one pass over the layers."""
        shared = self._config.grouping == "batch"
        stack = _PackedStack(self._walk, rows.positions)
        prefix_lens = rows.positions.tolist()
        metadata = {
            name: PackedRows(table, prefix_lens) for name, table in rows.block_tables.items()
        }
        with set_forward_context(
            metadata, self._vllm_config, num_tokens=len(prefix_lens), slot_mapping={}
        ):
            result = solve(
                stack,
                self._walk.embed(rows.token_ids),
                self._num_skip,
                self._pinned,
                shared=shared,
            )
        parents = self._broadcast(result.parents).cpu()
        self._age = 0
        for row, req_id in enumerate(rows.req_ids):
            own = parents if shared else parents[row]
            self._sets[req_id] = backtrack(own, self._num_skip)
