"""Steps that the target writes itself, with some of its layers skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from speculators_ext.engines.sglang.skipping.own_layers import OwnLayers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from speculators_ext.engines.sglang.request_rows import KnownRequests
    from speculators_ext.settings import SkipConfig

__all__ = ["OwnSteps"]


class OwnSteps:
    """Feeds the target's own layers; what it has verified, it has read.

    Args:
        runner: the target's ``ModelRunner``.
        skips: which layers may be skipped, and how they are chosen.
        known: the newest tokens of requests.
        vocab_size: of the target.
    """

    def __init__(
        self, runner: Any, skips: SkipConfig, known: KnownRequests, vocab_size: int
    ) -> None:
        self.vocab_size = vocab_size
        self._own, self._known = OwnLayers(runner, skips), known

    def begin(self, batch: Any, rows: list[int], lengths: list[int]) -> None:
        """A round in which ``rows`` of a batch write: search their skip sets where that is due."""
        sets = self._own.sets
        sets.forget_absent({req.rid for req in batch.reqs}.__contains__)
        if rows and sets.due([batch.reqs[row].rid for row in rows]):
            self._own.search(batch, rows, lengths, self._known)
        sets.count_round()

    def feed(
        self, batch: Any, rows: Sequence[int], starts: Sequence[int], pieces: Sequence[list[int]]
    ) -> Tensor:
        """Run over the last token of each piece, which alone has not been read.

        Args:
            batch: SGLang's ``ScheduleBatch``.
            rows: [R], requests of it.
            starts: [R], position of each piece's first token.
            pieces: [R], tokens.

        Returns:
            Logits behind each, [R, V].
        """
        found: dict[int, Tensor] = {}
        for kept, members in self._own.sets.groups([batch.reqs[row].rid for row in rows]):
            logits = self._own.logits(
                batch,
                kept,
                [rows[member] for member in members],
                [pieces[member][-1] for member in members],
                [starts[member] + len(pieces[member]) - 1 for member in members],
            )
            found |= dict(zip(members, logits, strict=True))
        return torch.stack([found[member] for member in range(len(rows))])
