"""The small model as SGLang loads it for ``STANDALONE``, run over rows of our choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker

from speculators_ext.engines.sglang.decode_steps import decode_step
from speculators_ext.engines.sglang.heads.attention import ExtendBackend
from speculators_ext.engines.sglang.heads.draft_model import DraftModel, prefix_slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["SmallModel"]


class SmallModel(DraftModel, StandaloneDraftWorker):
    """A model of its own, whose cache has the target's slots."""

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self.draft_runner.model_config.vocab_size

    def begin(self, batch: Any, rows: list[int], lengths: list[int]) -> None:
        """A round in which ``rows`` of a batch write: `feed` is given all that was not read."""

    def feed(
        self, batch: Any, rows: Sequence[int], starts: Sequence[int], pieces: Sequence[list[int]]
    ) -> Tensor:
        """Run over consecutive tokens of some requests, and write them to the cache.

        Args:
            batch: SGLang's ``ScheduleBatch``.
            rows: [R], requests of it.
            starts: [R], position of each one's first token.
            pieces: [R], its tokens, one or more.

        Returns:
            Logits behind each request's last token, [R, V].
        """
        counts = [len(piece) for piece in pieces]
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        step = decode_step(
            batch,
            self.draft_runner,
            [row for row, n in zip(rows, counts, strict=True) for _ in range(n)],
            [token for piece in pieces for token in piece],
            [at for start, end in zip(starts, ends, strict=True) for at in range(start, end)],
        )
        backend = ExtendBackend(self.pool, prefix_slots(batch, rows, ends), counts)
        context = ForwardContext(attn_backend=backend)
        with torch.no_grad(), forward_context(context, forward_batch=step):
            out = self.draft_runner.model.model(step.input_ids, step.positions, step)
            hidden = out[0] if isinstance(out, tuple) else out
            return self.logits(hidden[torch.tensor(counts).cumsum(0) - 1])
