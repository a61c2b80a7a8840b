"""Which drafted steps pass in a verification, and what was counted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from speculators_ext.engines.sglang.log import logger
from speculators_ext.proposers.reasoning_step import StepCounters
from speculators_ext.proposers.step_judges import JUDGES, OpenSteps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from speculators_ext.config import ReasoningStepConfig
    from speculators_ext.engines.sglang.reasoning_step.counts_page import CountsPage
    from speculators_ext.engines.sglang.reasoning_step.suffix import SuffixForward

__all__ = ["Candidate", "StepJudging"]

_LOG_SECONDS = 10.0


class Candidate(NamedTuple):
    """What was drafted for one request.

    Attributes:
        drafts: how many tokens.
        threshold: from where on a judge takes them; None where they are no whole step, where the
            suffix has no room behind them, or where the request is exact.
        last: position of the last of them.
    """

    drafts: int
    threshold: float | None
    last: int


class StepJudging:
    """Lets whole steps of a batch pass.

    Args:
        options: the method's settings.
        suffix: asks the target for a digit; None where the judge does not.
        page: shows the counters; None shows them in the log only.
    """

    def __init__(
        self,
        options: ReasoningStepConfig,
        suffix: SuffixForward | None = None,
        page: CountsPage | None = None,
    ) -> None:
        self.counters = StepCounters()
        self._judge = JUDGES[options.judge](options.mean_logprob)
        self._suffix, self._page = suffix, page
        self._logged = (time.monotonic(), 0)

    def choose(
        self,
        batch: Any,
        rows: Sequence[Candidate],
        logits: Tensor,
        candidates: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        """The tokens to accept against.

        Args:
            batch: SGLang's ``ScheduleBatch`` of R requests, whose drafts have KV by now.
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
            numbers = self._numbers(opened, batch, rows, logits, candidates)
            self.counters.judge_seconds += time.perf_counter() - began
            chosen = self._pass(opened, numbers, rows, candidates, chosen)
        self._report()
        return chosen

    def _numbers(
        self,
        opened: list[int],
        batch: Any,
        rows: Sequence[Candidate],
        logits: Tensor,
        candidates: Tensor,
    ) -> list[float]:
        """What the judge says of the steps of the requests ``opened``."""
        width, counts = candidates.shape[1], [rows[at].drafts for at in opened]
        device = logits.device

        def logprobs() -> tuple[Tensor, Tensor]:
            starts = [at * width for at in opened]
            pairs = zip(starts, counts, strict=True)
            flat = torch.tensor([at for start, n in pairs for at in range(start, start + n)])
            owners = torch.tensor([owner for owner, n in enumerate(counts) for _ in range(n)])
            law = torch.log_softmax(logits[flat.to(device)].float(), dim=-1)
            tokens = candidates.flatten().long()[flat.to(device) + 1]
            return law.gather(1, tokens[:, None])[:, 0], owners.to(device)

        def digit_logits() -> Tensor:
            assert self._suffix is not None
            lasts = [rows[at].last for at in opened]
            found = self._suffix.digit_logits(batch, opened, lasts)
            self.counters.judge_forwards = self._suffix.forwards
            return found

        return self._judge.numbers(OpenSteps(len(opened), logprobs, digit_logits)).tolist()

    def _pass(
        self,
        opened: list[int],
        numbers: list[float],
        rows: Sequence[Candidate],
        candidates: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        self.counters.judged += len(opened)
        chosen = chosen.clone()
        for at, number in zip(opened, numbers, strict=True):
            n, threshold = rows[at].drafts, rows[at].threshold
            if threshold is not None and number >= threshold:
                step = candidates[at, 1 : n + 1].to(chosen.dtype)
                self.counters.tokens_against += int((step != chosen[at, :n]).sum())
                self.counters.accepted += 1
                chosen[at, :n] = step
        return chosen

    def _report(self) -> None:
        if self._page is not None:
            self._page.show(self.counters)
        self._log()

    def _log(self) -> None:
        then, seen = self._logged
        now = time.monotonic()
        if now - then >= _LOG_SECONDS and self.counters.drafted > seen:
            self._logged = now, self.counters.drafted
            logger.warning("reasoning_step: %s", self.counters.line())
