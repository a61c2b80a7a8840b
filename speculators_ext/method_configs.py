"""The settings of each method: one pydantic model a method, immutable and strict."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field, field_validator, model_validator

from speculators_ext.errors import ConfigError
from speculators_ext.settings import MethodConfig, SkipConfig

__all__ = [
    "ClaspConfig",
    "Eagle2Config",
    "MtpReuseConfig",
    "ReasoningStepConfig",
    "TreeConfig",
]


class ClaspConfig(SkipConfig):
    """Self-speculation with layers skipped (CLaSp, arXiv 2505.24196)."""

    exit_threshold: float = Field(
        0.7,
        ge=0.0,
        le=1.0,
        description="A row stops drafting once its top-1 probability is below this; 0 never stops.",
    )
    adaptive: bool = Field(
        True, description="Draft only as deep as pays on this machine, down to not at all."
    )


class TreeConfig(MethodConfig):
    """Settings of every method that grows draft trees (EAGLE-2, arXiv 2406.16858)."""

    depth: int = Field(
        5, ge=1, le=16, description="Levels of the draft tree: the most drafts one path can hold."
    )
    topk: int = Field(
        4, ge=1, le=32, description="Nodes a level expands, and children of each of them."
    )
    min_path_probability: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="A node is verified only if the head gives its path at least this probability.",
    )
    min_level_probability: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Another level is grown only if the nodes it would grow from, of one request "
        "on average, have at least this probability together (on CPUs).",
    )
    adaptive: bool = Field(
        True, description="Draft only as many levels as pay on this machine, down to none."
    )

    @property
    def num_candidates(self) -> int:
        """Nodes one round of growth scores, the root not counted."""
        return self.topk + (self.depth - 1) * self.topk**2


class Eagle2Config(TreeConfig):
    """Context-dependent draft trees of an EAGLE head (EAGLE-2, arXiv 2406.16858)."""


class MtpReuseConfig(TreeConfig):
    """The target's own multi-token-prediction module, run several times a step.

    DeepSeek-V3's module (arXiv 2412.19437, section 2.2) was trained for one step; reused, it is
    right less often from step to step (70 / 11 / 2 % on MiMo-7B, arXiv 2509.18362). With ``topk`` 1
    it drafts a chain, with more a tree.
    """

    first_hidden: Literal["pre", "post"] | None = Field(
        None,
        description="The target's hidden state that enters the first step: before or after the "
        "final norm; null takes what is known for the architecture.",
    )
    recycled_hidden: Literal["pre", "post"] | None = Field(
        None,
        description="The module's own hidden state that enters its next step: before or after its "
        "final norm; null takes what is known for the architecture.",
    )
    calibrate: bool = Field(
        False,
        description="Measure the acceptance of every choice of the two hidden states on a few "
        "built-in prompts at load, log the table and take the best.",
    )
    topk: int = Field(
        1,
        ge=1,
        le=32,
        description="1 drafts a chain; more a tree: nodes a level expands, and children of each.",
    )
    min_path_probability: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="A draft is verified only if the chance that it and all drafts before it are "
        "accepted is at least this; 'adaptive' adds what a draft is measured to cost.",
    )
    draft_vocab_size: int | None = Field(
        None,
        ge=2,
        description="Tokens the module may draft: those most seen in the traffic; null is all.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> MtpReuseConfig:
        for key in ("depth", "min_level_probability"):
            if self.topk == 1 and key in self.model_fields_set:
                raise ConfigError(
                    f"{key}={getattr(self, key)} belongs to trees and topk=1 drafts a chain; "
                    "accepted: topk > 1 (num_speculative_tokens is the length of a chain); "
                    "remove it"
                )
        if self.calibrate and self.first_hidden and self.recycled_hidden:
            raise ConfigError(
                "calibrate=true has nothing to choose where first_hidden and recycled_hidden are "
                "both given; accepted: at most one of the two beside it; remove one or calibrate"
            )
        return self


JUDGE_SUFFIX = (
    "\n\nIs the last step above free of mistakes? From 0 (wrong) to 9 (surely right) I give it a"
)


# On 800 problems of the tiny world (`benchmarks/reasoning_step.py --calibrate 800`) `score` at 7,
# the paper's, loses 1.4 points, and 0.6 where it is strictest; `logprob` loses nothing down to -6.
# There SmolLM2 lets twice as many wrong numbers pass as at -4 (`benchmarks/reasoning_step_auc.py`).
_THRESHOLDS = {"score": 7.0, "logprob": -4.0, "exact": 0.0}
_RANGES = {"score": (0.0, 10.0), "logprob": (-1000.0, 0.0)}
"""Of thresholds. A mean of digits is at most 9, so above 9 no step passes."""


class ReasoningStepConfig(MethodConfig):
    """Whole steps of a small model, or of the target with layers skipped, which the target judges;
    not lossless, and never on by itself.

    After SpecReason (arXiv 2504.07891). A lenient judge costs accuracy: there, going from a
    threshold of 3 to one of 7 gained 4 to 18 points on hard problems.
    """

    lossy: bool = Field(
        False,
        description="Must be true: the text is no longer what the target alone would write.",
    )
    judge: Literal["score", "logprob", "exact"] = Field(
        "score",
        description="'score' asks the target for a digit behind the step; 'logprob' looks at the "
        "step's log-probabilities, for free; 'exact' lets nothing pass, so it is lossless.",
    )
    threshold: float | None = Field(
        None,
        description="A step passes from here on: a digit's mean, 0 to 9 ('score', null is 7; above "
        "9 none passes), or the least log-probability of its tokens in nats ('logprob', null is "
        "-4); not with 'exact'.",
    )
    mean_logprob: float | None = Field(
        None,
        le=0.0,
        ge=-1000.0,
        description="With 'logprob' also the mean over a step's tokens must be at least this.",
    )
    delimiter: str = Field(
        "\n\n", min_length=1, max_length=32, description="Text that ends a step."
    )
    min_step_tokens: int = Field(
        1, ge=1, description="A delimiter ends a step only after so many tokens of it."
    )
    first_exact: int = Field(
        0, ge=0, description="So many first steps of a reasoning are the target's own."
    )
    reasoning_start: str | None = Field(
        None,
        description="Token that opens the reasoning, outside of which nothing is judged; null "
        "takes the reasoning parser's, or judges from the output's start.",
    )
    reasoning_end: str | None = Field(
        None, description="Token that closes the reasoning; null takes the reasoning parser's."
    )
    judge_suffix: str = Field(
        JUDGE_SUFFIX,
        min_length=1,
        description="What 'score' puts behind a step before it reads the digit; for another "
        "chat template or language, write your own.",
    )
    clasp: SkipConfig | None = Field(
        None,
        description="Without a small model: which of its layers the target skips while it writes "
        "steps itself; null takes the target's preset.",
    )

    @property
    def passes_from(self) -> float:
        """The threshold, or the judge's own."""
        return _THRESHOLDS[self.judge] if self.threshold is None else self.threshold

    @property
    def least_threshold(self) -> float:
        """What a request may lower its own threshold to; below it, it is served exactly."""
        return _RANGES[self.judge][0] if self.judge in _RANGES else float("-inf")

    @field_validator("lossy", mode="before")
    @classmethod
    def _check_consent(cls, value: object) -> object:
        if value is not True:
            given = json.dumps(value) if value is False or value is None else repr(value)
            raise ConfigError(
                f"lossy={given}: 'reasoning_step' takes steps that the target judges sound but "
                "would not have written, so the text changes; accepted: true; set it if that is "
                "what you want, or choose a lossless method"
            )
        return value

    @model_validator(mode="after")
    def _check_together(self) -> ReasoningStepConfig:
        if self.mean_logprob is not None and self.judge != "logprob":
            raise ConfigError(
                f"mean_logprob={self.mean_logprob} belongs to judge='logprob', not to "
                f"{self.judge!r}; accepted: judge='logprob' beside it; choose that or remove it"
            )
        if self.threshold is not None:
            self._check_threshold(self.threshold)
        return self

    def _check_threshold(self, given: float) -> None:
        """A threshold on another judge's scale lets everything pass, or nothing."""
        if self.judge not in _RANGES:
            raise ConfigError(
                f"threshold={given:g} has no effect with judge={self.judge!r}, which lets nothing "
                "pass; accepted: no threshold; remove it, or choose judge='score' or 'logprob'"
            )
        low, high = _RANGES[self.judge]
        if not low <= given <= high:
            raise ConfigError(
                f"threshold={given:g} is not on the scale of judge={self.judge!r}; accepted: a "
                f"number from {low:g} to {high:g}; correct it or leave it out for "
                f"{_THRESHOLDS[self.judge]:g}"
            )
