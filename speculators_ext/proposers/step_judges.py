"""Judges of drafted steps: each gives a step a number, and a step passes from a threshold on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from speculators_ext.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["JUDGES", "ExactJudge", "LogprobJudge", "OpenSteps", "ScoreJudge", "StepJudge"]


class OpenSteps(NamedTuple):
    """Complete steps, n >= 1 of them, that differ from what the target would have written.

    What a judge does not ask for is not computed.

    Attributes:
        num_steps: n.
        logprobs: the target's log-probabilities of all their tokens, fp32 [m], in nats, and the
            step of each, int64 [m].
        digit_logits: the target's logits of the digits 0 to 9 behind the judging suffix,
            fp32 [n, 10].
    """

    num_steps: int
    logprobs: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    digit_logits: Callable[[], torch.Tensor]


class StepJudge(Protocol):
    """Gives steps their numbers."""

    def numbers(self, steps: OpenSteps) -> torch.Tensor:
        """A number for each step, fp32 [n]; more is sounder."""


class ExactJudge:
    """Lets nothing pass, so that the method is lossless: the control."""

    def __init__(self, mean_logprob: float | None = None) -> None:
        del mean_logprob

    def numbers(self, steps: OpenSteps) -> torch.Tensor:
        """Minus infinity for all."""
        return torch.full((steps.num_steps,), float("-inf"))


class LogprobJudge:
    """The least log-probability that the target gives to a token of the step.

    Args:
        mean_logprob: a step whose mean is below this does not pass, whatever its least is.
    """

    def __init__(self, mean_logprob: float | None = None) -> None:
        self._mean = mean_logprob

    def numbers(self, steps: OpenSteps) -> torch.Tensor:
        """The minimum over each step's tokens, in nats."""
        logprobs, owners = steps.logprobs()
        start = logprobs.new_full((steps.num_steps,), float("inf"))
        least = start.scatter_reduce(0, owners, logprobs, "amin")
        if self._mean is None:
            return least
        mean = torch.zeros_like(start).scatter_reduce(
            0, owners, logprobs, "mean", include_self=False
        )
        return torch.where(mean >= self._mean, least, float("-inf"))


class ScoreJudge:
    """The digit, 0 to 9, that the target is expected to write behind the judging suffix."""

    def __init__(self, mean_logprob: float | None = None) -> None:
        del mean_logprob

    def numbers(self, steps: OpenSteps) -> torch.Tensor:
        """The mean of the digits under the target's law, other tokens left out."""
        law = torch.softmax(steps.digit_logits(), dim=-1)
        return law @ torch.arange(10, dtype=law.dtype, device=law.device)


JUDGES: Registry[type[ExactJudge] | type[LogprobJudge] | type[ScoreJudge]] = Registry("judge")
JUDGES.add("exact", ExactJudge)
JUDGES.add("logprob", LogprobJudge)
JUDGES.add("score", ScoreJudge)
