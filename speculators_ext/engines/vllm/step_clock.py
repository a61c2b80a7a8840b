"""Times a round and feeds the depth controller, so that drafting stays worth its cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from speculators_ext.config import ClaspConfig

__all__ = ["StepClock"]


class StepClock:
    """Measures target steps, draft steps and searches; answers how deep to draft next."""

    def __init__(self, max_depth: int, options: ClaspConfig) -> None:
        self._max_depth = max_depth
        self._adaptive = options.adaptive

    def depth(self, num_rows: int) -> int:
        """How many tokens to draft at most in this round."""
        return self._max_depth

    def observe_target_step(self, now, input_batch, num_sampled, num_rejected, limits) -> None:
        pass

    def observe_search(self, seconds: float) -> None:
        pass

    def observe_draft_step(self, num_rows: int, seconds: float) -> None:
        pass

    def finish(self, drafts, unused) -> None:
        pass
