"""A target as its own draft model: which of its layers each request skips, and its draft steps.

Drafts write the target's own slots behind what was verified, in the layers they run through.
Verification runs all layers over those slots, and so leaves nothing of a draft behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.sglang.decode_steps import decode_step
from speculators_ext.engines.sglang.skipping.drafting import draft_logits, search_set
from speculators_ext.engines.sglang.skipping.target_layers import TargetLayers
from speculators_ext.proposers.skip_search import SkipSets
from speculators_ext.proposers.skip_sets import plan_skips

if TYPE_CHECKING:
    from torch import Tensor

    from speculators_ext.engines.sglang.request_rows import KnownRequests
    from speculators_ext.proposers.skip_sets import SkipSet
    from speculators_ext.settings import SkipConfig

__all__ = ["OwnLayers"]


class OwnLayers:
    """Draft steps through the layers that are kept.

    Args:
        runner: the target's ``ModelRunner``.
        skips: which layers may be skipped, and how they are chosen.

    Attributes:
        sets: what is known of the skip sets of requests.
    """

    def __init__(self, runner: Any, skips: SkipConfig) -> None:
        self._runner = runner
        self._layers = TargetLayers(runner.model)
        self._plan = plan_skips(skips, self._layers.num_layers)
        self.sets = SkipSets(skips, self._plan, can_search=True)

    def search(self, batch: Any, rows: list[int], lengths: list[int], known: KnownRequests) -> None:
        """Search skip sets for some rows of a batch.

        Args:
            batch: SGLang's ``ScheduleBatch``.
            rows: of it.
            lengths: tokens with KV, of each of the batch's requests.
            known: the newest tokens of requests.
        """
        wanting = [batch.reqs[row].rid for row in rows]
        rows, window = self.sets.looked_at(rows)
        looked_at: list[tuple[int, int, int]] = []  # row, token, position
        for row in rows:
            newest = known.newest(batch.reqs[row].rid, window)
            first = lengths[row] + 1 - len(newest)
            looked_at += [(row, token, first + back) for back, token in enumerate(newest)]

        def best(tokens: list[int], candidates: tuple[SkipSet, ...]) -> SkipSet:
            chosen = [looked_at[token] for token in tokens]
            own, ids, positions = (list(part) for part in zip(*chosen, strict=True))
            step = decode_step(batch, self._runner, own, ids, positions)
            return search_set(self._layers, self._runner, step, self._plan, candidates)

        self.sets.search(wanting, [batch.reqs[row].rid for row, _, _ in looked_at], best)

    def logits(
        self,
        batch: Any,
        kept: tuple[int, ...],
        rows: list[int],
        tokens: list[int],
        positions: list[int],
    ) -> Tensor:
        """One draft step of n rows of a batch through the layers ``kept``: [n, V]."""
        step = decode_step(batch, self._runner, rows, tokens, positions)
        return draft_logits(self._layers, self._runner, kept, step)
