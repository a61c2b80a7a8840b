"""Searches skip sets with the target's own layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.forward_context import set_forward_context

from speculators_ext.engines.vllm.attention.packed_rows import PackedRows
from speculators_ext.engines.vllm.ranks import decided_on_rank_0
from speculators_ext.proposers.clasp import best_set, solve
from speculators_ext.proposers.skip_search import SkipSets
from speculators_ext.proposers.skip_sets import plan_skips

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config import VllmConfig

    from speculators_ext.engines.vllm.skipping.layer_walk import LayerWalk
    from speculators_ext.proposers.skip_sets import SkipSet
    from speculators_ext.settings import SkipConfig

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


class SkipSearch(SkipSets):
    """The skip sets in use, searched with vLLM's layers.

    Args:
        walk: the target's layers.
        config: which layers may be skipped, and how they are chosen.
        vllm_config: for the forward context of packed calls.
        can_pack: whether the attention backend understands packed rows; without it a search is
            impossible and the evenly spread set serves.
    """

    def __init__(
        self, walk: LayerWalk, config: SkipConfig, vllm_config: VllmConfig, *, can_pack: bool
    ) -> None:
        plan = plan_skips(config, walk.num_units // config.num_units(1))
        super().__init__(config, plan, can_search=can_pack)
        self.lacks_packing = plan.searched and not can_pack
        self._walk = walk
        self._vllm_config = vllm_config

    def search_rows(self, rows: SearchRows, req_ids: Sequence[str]) -> None:
        """Find a set for ``req_ids``: together, or one for each in ``per_request`` grouping.

        Together, ``rows`` may be those of some of the requests only.
        """

        def best(own: list[int], candidates: tuple[SkipSet, ...]) -> SkipSet:
            return self._solve(rows.select(own), candidates)

        self.search(req_ids, rows.req_ids, best)

    def _solve(self, rows: SearchRows, candidates: tuple[SkipSet, ...]) -> SkipSet:
        """One dynamic program; never worse on these rows than a candidate."""
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
