"""Keeps the skip sets in use and searches new ones with the target's own layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.forward_context import set_forward_context

from speculators_ext.engines.vllm.attention.packed_rows import PackedRows
from speculators_ext.engines.vllm.ranks import decided_on_rank_0
from speculators_ext.proposers.clasp import best_set, solve
from speculators_ext.proposers.skip_sets import evenly_spread, plan_skips

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from vllm.config import VllmConfig

    from speculators_ext.config import ClaspConfig
    from speculators_ext.engines.vllm.clasp.layer_walk import LayerWalk
    from speculators_ext.proposers.skip_sets import SkipSet

__all__ = ["SearchRows", "SkipSearch"]


class SearchRows(NamedTuple):
    """What a search looks at: the newest tokens of each request, one row a token.

    With R requests and the ``search_window`` newest tokens of each (fewer at the very start):

    ``req_ids``: [rows] the request of each row, rows of a request together.
    ``token_ids``: [rows] int64. ``positions``: [rows] int64, the token's position; a row attends
    to the cache before it and to itself, so whether its own KV is written yet does not matter.
    ``block_tables``: layer name -> [rows, max_blocks] int32.
    """

    req_ids: list[str]
    token_ids: torch.Tensor
    positions: torch.Tensor
    block_tables: dict[str, torch.Tensor]

    def select(self, rows: list[int]) -> SearchRows:
        """These rows only."""
        return SearchRows(
            [self.req_ids[row] for row in rows],
            self.token_ids[rows],
            self.positions[rows],
            {name: table[rows] for name, table in self.block_tables.items()},
        )


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
    """Skip sets by request, refreshed every ``refresh_interval`` verifications.

    With ``grouping="batch"`` one set serves the whole batch; with ``"per_request"`` each request
    has its own. A set is dropped when no request it was found for is left in the batch.

    Args:
        walk: the target's layers.
        config: the method's options.
        vllm_config: for the forward context of packed calls.
        can_pack: whether the attention backend understands packed rows; without it a search is
            impossible and the evenly spread set serves.
    """

    def __init__(
        self, walk: LayerWalk, config: ClaspConfig, vllm_config: VllmConfig, *, can_pack: bool
    ) -> None:
        self._walk = walk
        self._config = config
        self._vllm_config = vllm_config
        num_layers = walk.num_units // config.num_units(1)
        self._plan = plan_skips(config, num_layers)
        self._even = evenly_spread(walk.num_units, self._plan.num_skip, self._plan.pinned)
        self.searches = self._plan.searched and can_pack
        self.lacks_packing = self._plan.searched and not can_pack
        self._sets: dict[str, SkipSet] = {}
        self._age = 0

    def due(self, req_ids: Sequence[str]) -> bool:
        """Whether this round should search: nothing known for these requests, or sets too old."""
        if not self.searches:
            return False
        known = [req_id in self._sets for req_id in req_ids]
        enough = all(known) if self._config.grouping == "per_request" else any(known)
        return not enough or self._age >= self._config.refresh_interval

    def count_round(self) -> None:
        """One more verification has passed since the last search, drafted or not."""
        self._age += 1

    def forget_absent(self, is_present: Callable[[str], bool]) -> None:
        """Drop the sets of requests that ended, were aborted or were preempted."""
        for req_id in [r for r in self._sets if not is_present(r)]:
            del self._sets[req_id]

    def groups(self, req_ids: Sequence[str]) -> list[tuple[tuple[int, ...], list[int]]]:
        """The units to *keep* and the rows (indices into ``req_ids``) that draft with them."""
        by_set: dict[SkipSet, list[int]] = {}
        for row, req_id in enumerate(req_ids):
            by_set.setdefault(self._set_of(req_id), []).append(row)
        return [(self._kept(skipped), rows) for skipped, rows in by_set.items()]

    def _set_of(self, req_id: str) -> SkipSet:
        if self._config.grouping == "batch" and self._sets:
            return next(iter(self._sets.values()))
        return self._sets.get(req_id, self._plan.initial)

    def _kept(self, skipped: SkipSet) -> tuple[int, ...]:
        out = frozenset(skipped)
        return tuple(unit for unit in range(self._walk.num_units) if unit not in out)

    def search(self, rows: SearchRows, req_ids: Sequence[str]) -> None:
        """Find a set for ``req_ids``: together, or one for each in ``per_request`` grouping.

        Together, ``rows`` may be those of some of the requests only.
        """
        self._age = 0
        if self._config.grouping == "batch":
            found = self._solve(rows, self._set_of(rows.req_ids[0]))
            self._sets = dict.fromkeys(req_ids, found)
            return
        for req_id in dict.fromkeys(rows.req_ids):
            own = [row for row, name in enumerate(rows.req_ids) if name == req_id]
            self._sets[req_id] = self._solve(rows.select(own), self._set_of(req_id))

    def _solve(self, rows: SearchRows, previous: SkipSet) -> SkipSet:
        """One dynamic program; never worse on these rows than the previous or the even set."""
        candidates = tuple(dict.fromkeys((self._even, previous)))
        positions = rows.positions
        prefix_lens = positions.tolist() if positions.device.type == "cpu" else []
        metadata = {
            name: PackedRows(table, prefix_lens, positions)
            for name, table in rows.block_tables.items()
        }
        with set_forward_context(
            metadata, self._vllm_config, num_tokens=len(rows.req_ids), slot_mapping={}
        ):
            result = solve(
                _PackedStack(self._walk, rows.positions),
                self._walk.embed(rows.token_ids),
                self._plan.num_skip,
                self._plan.pinned,
                candidates=candidates,
            )
        found, _ = best_set(result, self._plan.num_skip, candidates)
        return decided_on_rank_0(found)
