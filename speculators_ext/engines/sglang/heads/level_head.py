"""The head as growth sees it: one forward of SGLang's draft model a level, writing no KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_ext.engines.sglang.heads.attention import LevelBackend
from speculators_ext.engines.sglang.heads.draft_model import prefix_slots
from speculators_ext.engines.sglang.verify_shape import runs_kernels

if TYPE_CHECKING:
    from torch import Tensor

    from speculators_ext.engines.sglang.heads.attention_gpu import KernelLevelBackend
    from speculators_ext.engines.sglang.heads.worker import HeadWorker
    from speculators_ext.proposers.eagle2 import Level
    from speculators_ext.proposers.head_rounds import Roots

__all__ = ["LevelHead"]


def _backend(worker: HeadWorker) -> type[LevelBackend | KernelLevelBackend]:
    """By our kernel where the target's attention is by kernels too."""
    if not runs_kernels(worker.target_worker.model_runner):
        return LevelBackend
    from speculators_ext.engines.sglang.attention_gpu import reads_pool
    from speculators_ext.engines.sglang.heads.attention_gpu import KernelLevelBackend

    return KernelLevelBackend if reads_pool(worker.model.pool) else LevelBackend


class LevelHead:
    """A round of draft levels of some of a batch's requests.

    Args:
        worker: whose draft model runs.
        batch: SGLang's ``ScheduleBatch``.
        roots: of the requests that draft.
        num_places: nodes a request may run in a round.
    """

    def __init__(self, worker: HeadWorker, batch: Any, roots: Roots, num_places: int) -> None:
        self.draft_to_target = worker.draft_to_target
        self.num_steps = 0
        self._worker, self._batch = worker, batch
        self._rows, self._lengths = roots.rows, roots.lengths
        slots = prefix_slots(batch, roots.rows, roots.lengths)
        self._backend = _backend(worker)(worker.model.pool, slots, num_places)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V_draft]."""
        return self._worker.head_logits(hidden)

    def step(self, level: Level) -> tuple[Tensor, Tensor]:
        """Run a level; token t+1 sits at position t, as EAGLE heads are trained."""
        self.num_steps += 1
        self._backend.level = level
        owners = level.requests.tolist()
        out = self._worker.model.run(
            self._backend,
            self._batch,
            [self._rows[owner] for owner in owners],
            level.tokens,
            [self._lengths[owner] + level.depth - 1 for owner in owners],
            level.features,
        )
        return self._worker.head_output(out)
