"""Acceptance of drafted steps, inside vLLM's rejection sampler.

vLLM's own sampler names one token after every draft, exactly as it would in plain decoding at that
position: processed logits, noise keyed by the request's seed and the position. Drafts equal to
these tokens are accepted, so an unjudged step leaves the text the target's, greedy or sampled. A
complete step that differs goes to the judge, with the logits as the target gave them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from speculators_ext.engines.vllm.ranks import tensor_from_rank_0
from speculators_ext.engines.vllm.reasoning_step.book import COUNTERS
from speculators_ext.proposers.step_judges import OpenSteps
from speculators_ext.verification.steps import count_exact, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from speculators_ext.engines.vllm.reasoning_step.book import StepBook
    from speculators_ext.request_options import RequestOptions

__all__ = ["StepRejectionSampler"]


class StepRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler, in which a judge may let a whole step pass.

    Args:
        sampler: vLLM's sampler, which draws the target's token at each position.
        spec_config: ours.
        device: of the logits.
        book: what was drafted, and the judge.
        options: a request slot's own options.
    """

    def __init__(
        self,
        sampler: Any,
        spec_config: Any,
        device: torch.device,
        book: StepBook,
        options: Callable[[int], RequestOptions],
    ) -> None:
        super().__init__(sampler, spec_config, device)
        self._book = book
        self._options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Verify a batch; see vLLM's."""
        COUNTERS.verify_forwards += 1
        output = super().__call__(*args, **kwargs)
        self._book.report()
        return output

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen, processed_logits = self.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            return_logprobs=True,
        )
        chosen = chosen.view(-1)
        drafted = verify_draft_sampled.long()
        exact = count_exact(drafted, chosen, cu_num_logits)
        passed = self._judge(
            logits, drafted, chosen, pos, cu_num_logits, idx_mapping, idx_mapping_np, exact
        )
        tokens, counts = settle(
            drafted, chosen, cu_num_logits, exact, passed, self.num_speculative_steps + 1
        )
        return processed_logits, tokens, counts

    def _judge(
        self,
        logits: torch.Tensor,
        drafted: torch.Tensor,
        chosen: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        slots: np.ndarray,
        exact: torch.Tensor,
    ) -> torch.Tensor:
        """Which requests' steps pass although they differ, bool [requests]."""
        passed = torch.zeros_like(exact, dtype=torch.bool)
        starts, matched = cu_num_logits.tolist(), tensor_from_rank_0(exact).tolist()
        last_positions = pos[cu_num_logits[1:].long() - 1].tolist()
        opened = []
        for row, slot in enumerate(slots.tolist()):
            drafts = starts[row + 1] - starts[row] - 1
            if drafts and self._book.may_judge(slot, drafts, last_positions[row]):
                COUNTERS.drafted += 1
                if matched[row] < drafts:
                    opened.append(row)
                else:
                    COUNTERS.agreed += 1
        if not opened:
            return passed
        began = time.perf_counter()
        steps = self._open_steps(logits, drafted, pos, starts, opened, idx_mapping)
        asked = [self._book.threshold_of(self._options(int(slots[row]))) for row in opened]
        numbers = self._book.judge.numbers(steps).to(passed.device)
        sound = tensor_from_rank_0(numbers >= numbers.new_tensor(asked)).tolist()
        COUNTERS.judge_seconds += time.perf_counter() - began
        COUNTERS.judged += len(opened)
        for row, good in zip(opened, sound, strict=True):
            if good:
                passed[row] = True
                own = slice(starts[row], starts[row + 1] - 1)
                differ = chosen[own] != drafted[own.start + 1 : own.stop + 1]
                COUNTERS.tokens_against += int(differ.sum())
                COUNTERS.accepted += 1
        return passed

    def _open_steps(
        self,
        logits: torch.Tensor,
        drafted: torch.Tensor,
        pos: torch.Tensor,
        starts: list[int],
        opened: list[int],
        idx_mapping: torch.Tensor,
    ) -> OpenSteps:
        def logprobs() -> tuple[torch.Tensor, torch.Tensor]:
            rows = [list(range(starts[row], starts[row + 1] - 1)) for row in opened]
            flat = torch.tensor([r for own in rows for r in own], device=logits.device)
            owners = torch.tensor(
                [index for index, own in enumerate(rows) for _ in own], device=logits.device
            )
            law = torch.log_softmax(logits[flat].float(), dim=-1)
            return law.gather(1, drafted[flat + 1, None])[:, 0], owners

        def digit_logits() -> torch.Tensor:
            read = self._book.digit_logits
            assert read is not None
            last = torch.tensor([starts[row + 1] - 1 for row in opened], device=pos.device)
            return read(idx_mapping[opened], pos[last])

        return OpenSteps(len(opened), logprobs, digit_logits)
