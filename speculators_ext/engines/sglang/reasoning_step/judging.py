"""Which drafted steps pass in a verification, and what was counted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from speculators_ext.engines.sglang.log import logger
from speculators_ext.proposers.reasoning_step import StepCounters
from speculators_ext.proposers.step_judges import JUDGES, OpenSteps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from speculators_ext.config import ReasoningStepConfig

__all__ = ["Candidate", "StepJudging"]

_LOG_SECONDS = 10.0


class Candidate(NamedTuple):
    """What was drafted for one request: how many tokens, and from where on a judge takes them.

    ``threshold`` is None where the step is no whole one, or the request is exact.
    """

    drafts: int
    threshold: float | None


class StepJudging:
    """Lets whole steps of a batch pass.

    Args:
        options: the method's settings.
    """

    def __init__(self, options: ReasoningStepConfig) -> None:
        self.counters = StepCounters()
        self._judge = JUDGES[options.judge](options.mean_logprob)
        self._logged = (time.monotonic(), 0)

    def choose(
        self, rows: Sequence[Candidate], logits: Tensor, candidates: Tensor, chosen: Tensor
    ) -> Tensor:
        """The tokens to accept against.

        Args:
            rows: [R].
            logits: the target's, [R * W, V].
            candidates: int [R, W], each request's last token and its drafts.
            chosen: int [R, W], the target's own token behind each.

        Returns:
            ``chosen``, with the drafts themselves where a step passes.
        """
        self.counters.verify_forwards += any(row.drafts for row in rows)
        opened = []
        for at, row in enumerate(rows):
            if row.drafts and row.threshold is not None:
                self.counters.drafted += 1
                if bool((candidates[at, 1 : row.drafts + 1] == chosen[at, : row.drafts]).all()):
                    self.counters.agreed += 1
                else:
                    opened.append(at)
        if opened:
            began = time.perf_counter()
            chosen = self._pass(opened, rows, logits, candidates, chosen)
            self.counters.judge_seconds += time.perf_counter() - began
        self._log()
        return chosen

    def _pass(
        self,
        opened: list[int],
        rows: Sequence[Candidate],
        logits: Tensor,
        candidates: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        width, counts = candidates.shape[1], [rows[at].drafts for at in opened]

        def logprobs() -> tuple[Tensor, Tensor]:
            pairs = zip(opened, counts, strict=True)
            flat = torch.cat([torch.arange(n) + at * width for at, n in pairs])
            owners = torch.repeat_interleave(torch.arange(len(opened)), torch.tensor(counts))
            law = torch.log_softmax(logits[flat].float(), dim=-1)
            tokens = candidates.flatten().long()[flat + 1]
            return law.gather(1, tokens[:, None])[:, 0], owners

        def digit_logits() -> Tensor:
            raise NotImplementedError("'score' is refused before the engine starts")

        numbers = self._judge.numbers(OpenSteps(len(opened), logprobs, digit_logits))
        self.counters.judged += len(opened)
        chosen = chosen.clone()
        for at, n, number in zip(opened, counts, numbers.tolist(), strict=True):
            threshold = rows[at].threshold
            if threshold is not None and number >= threshold:
                step = candidates[at, 1 : n + 1].to(chosen.dtype)
                self.counters.tokens_against += int((step != chosen[at, :n]).sum())
                self.counters.accepted += 1
                chosen[at, :n] = step
        return chosen

    def _log(self) -> None:
        then, seen = self._logged
        now = time.monotonic()
        if now - then >= _LOG_SECONDS and self.counters.drafted > seen:
            self._logged = now, self.counters.drafted
            logger.warning("reasoning_step: %s", self.counters.line())
