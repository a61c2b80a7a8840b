"""What every speculative worker of ours does alike: the target's prefill and its verification."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_worker_common import run_eagle_verify

from speculators_ext.engines.sglang.chains import BonusInput
from speculators_ext.engines.sglang.gpus import warn_untried
from speculators_ext.engines.sglang.request_rows import KnownRequests
from speculators_ext.engines.sglang.verify_shape import verify_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from speculators_ext.engines.sglang.verify_shape import VerifyShape

__all__ = ["RoundWorker"]


class RoundWorker(BaseSpecWorker):
    """Runs the target for a method that drafts; a method adds drafting and its own memory.

    Args:
        target_worker: runs the target.
        draft_worker: holds the draft model; None where there is no second one.
        most: drafts of a round, at most.
        tail: how many of a request's newest tokens the method reads.
        least_threshold: of a lossy method, the least that a request may set.
    """

    def __init__(
        self,
        target_worker: Any,
        draft_worker: Any,
        most: int,
        *,
        tail: int = 1,
        least_threshold: float | None = None,
    ) -> None:
        super().__init__()
        self._target_worker, self._draft_worker = target_worker, draft_worker
        self._runner = target_worker.model_runner
        self._most = most
        self._last = target_worker.model_config.context_len - 1
        self._known = KnownRequests(tail, least_threshold)
        if self.on_gpu:
            warn_untried(get_spec().speculative_algorithm)

    @property
    def on_gpu(self) -> bool:
        """Whether the target runs on a GPU."""
        return self._runner.device != "cpu"

    @property
    def verify_shape(self) -> VerifyShape:
        """How drafts are laid out for the attention that verifies them."""
        return verify_shape(self._runner, self._most)

    def run_prefill(
        self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None, **kwargs: Any
    ) -> Any:
        """Run the target over prompts; ``kwargs`` are of its ``forward_batch_generation``."""
        result = self.target_worker.forward_batch_generation(batch, **kwargs)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        result.next_draft_input = BonusInput(bonus_tokens=result.next_token_ids)
        return result

    def run_verify(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Any,
        *,
        moves: bool = False,
    ) -> Any:
        """Verify ``batch.spec_info`` in one target forward.

        Args:
            batch: SGLang's ``ScheduleBatch``.
            on_publish: told the new lengths.
            grammar_barrier: SGLang's.
            moves: whether accepted rows may stand apart, so that their KV must move together.
        """
        result = run_eagle_verify(
            batch,
            target_worker=self.target_worker,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            plan_stream=None,
            plan_stream_ctx=contextlib.nullcontext(),
            topk=2 if moves else 1,
            num_draft_tokens=batch.spec_info.draft_token_num,
            device=self._runner.device,
            metadata_ready_pre_pad=False,
            finalize_tree_path=moves,
            grammar_barrier=grammar_barrier,
        )
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        result.next_draft_input = BonusInput(bonus_tokens=result.next_draft_input.bonus_tokens)
        return result
