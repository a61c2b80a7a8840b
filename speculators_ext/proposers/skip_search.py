"""Keeps the skip sets in use, by request; an adapter brings the search itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculators_ext.proposers.skip_sets import evenly_spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from speculators_ext.proposers.skip_sets import SkipPlan, SkipSet
    from speculators_ext.settings import SkipConfig

__all__ = ["SkipSets"]

# A set for the whole batch looks at so many tokens: each costs as many packed rows a layer as there
# are skips, which for every token of 16 requests would be tens of plain steps.
MAX_SEARCH_ROWS = 4


class SkipSets:
    """Skip sets by request, refreshed every ``refresh_interval`` verifications.

    With ``grouping="batch"`` one set serves the whole batch; with ``"per_request"`` each request
    has its own. A set is dropped when no request it was found for is left.

    Args:
        config: the method's options.
        plan: the same, resolved for the target.
        can_search: whether packed rows can be attended; else the plan's initial set serves.
    """

    def __init__(self, config: SkipConfig, plan: SkipPlan, *, can_search: bool) -> None:
        self._config = config
        self._plan = plan
        self._even = evenly_spread(plan.num_units, plan.num_skip, plan.pinned)
        self.searches = plan.searched and can_search
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

    def looked_at(self, rows: list[int]) -> tuple[list[int], int]:
        """Which of ``rows`` a search looks at, and how many of the newest tokens of each."""
        window = self._config.search_window
        if self._config.grouping == "batch":
            rows = rows[:: -(-len(rows) // MAX_SEARCH_ROWS)]
            window = max(1, min(window, MAX_SEARCH_ROWS // len(rows)))
        return rows, window

    def search(
        self,
        req_ids: Sequence[str],
        owners: Sequence[str],
        solve: Callable[[list[int], tuple[SkipSet, ...]], SkipSet],
    ) -> None:
        """Find a set for ``req_ids``: together, or one for each in ``per_request`` grouping.

        Args:
            req_ids: the requests to find sets for.
            owners: the request of each token looked at; together, some requests may have none.
            solve: (tokens, candidates) -> the best set for those tokens (indices into
                ``owners``), never worse on them than a candidate.
        """
        self._age = 0
        if self._config.grouping == "batch":
            found = solve(list(range(len(owners))), self._candidates(owners[0]))
            self._sets = dict.fromkeys(req_ids, found)
            return
        for req_id in dict.fromkeys(owners):
            own = [row for row, owner in enumerate(owners) if owner == req_id]
            self._sets[req_id] = solve(own, self._candidates(req_id))

    def _candidates(self, req_id: str) -> tuple[SkipSet, ...]:
        return tuple(dict.fromkeys((self._even, self._set_of(req_id))))

    def _set_of(self, req_id: str) -> SkipSet:
        if self._config.grouping == "batch" and self._sets:
            return next(iter(self._sets.values()))
        return self._sets.get(req_id, self._plan.initial)

    def _kept(self, skipped: SkipSet) -> tuple[int, ...]:
        out = frozenset(skipped)
        return tuple(unit for unit in range(self._plan.num_units) if unit not in out)
