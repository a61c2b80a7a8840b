"""Hook 1: the speculative config of our methods, a subclass of vLLM's own.

It pins the built-in method whose scheduler contract a method rides (see ``Method.rides``). Left to
itself vLLM would guess the method again from names and model types, on every copy of the object.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from pydantic import SkipValidation  # noqa: TC002 - pydantic reads the annotation
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config as vllm_config_dataclass

from speculators_ext.config import METHODS

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig

__all__ = ["ExtSpeculativeConfig", "is_ours"]


@vllm_config_dataclass
class ExtSpeculativeConfig(SpeculativeConfig):
    """vLLM's SpeculativeConfig plus the name and validated options of one of our methods."""

    ext_method: str = "clasp"
    """Which of our methods this is; ``method`` holds the built-in it rides."""
    method_config: SkipValidation[Any] = None
    """The method's own options (its `MethodConfig`), validated before this object is built."""
    rides: str | None = None
    """The built-in ridden where the draft checkpoint decides it; None: the method's own."""
    counts_file: str | None = None
    """Where a method's engines write what the metrics page shows; None: nothing of their own."""

    def __post_init__(self) -> None:
        """Pin the built-in; a target that is its own draft model stands in for the checkpoint."""
        self.method = self.rides or METHODS[self.ext_method].rides  # type: ignore[assignment]
        if not (self.drafts_alone and self.method == "draft_model"):
            super().__post_init__()
            # vLLM leaves zeros here, which it refuses on a copy made by `replace`.
            self.prompt_lookup_max = self.prompt_lookup_min = None
            return
        self.model = self.target_model_config.model
        self.draft_model_config = _copy_model_config(self.target_model_config)
        self.draft_parallel_config = self.target_parallel_config
        self.draft_tensor_parallel_size = self.target_parallel_config.tensor_parallel_size

    @property
    def drafts_alone(self) -> bool:
        """Whether the target drafts for itself, by its method or for want of a draft model."""
        method = METHODS[self.ext_method]
        return method.drafts_alone or (
            method.model_optional and self.method_config.clasp is not None
        )

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Query slots a draft needs beyond the scheduled ones: none, drafts run by themselves; a
        draft model of its own reads one token more than the target."""
        return 1 if self.method == "draft_model" and not self.drafts_alone else 0

    def verify_equal_vocab_size_if_draft_model(self) -> None:
        """Nothing: tokenizers were compared, and padding beyond them may differ."""

    def __repr__(self) -> str:
        return (
            f"SpeculativeConfig(method={self.ext_method!r}, rides={self.method!r}, "
            f"num_spec_tokens={self.num_speculative_tokens}, "
            f"method_config={self.method_config.model_dump()})"
        )


def _copy_model_config(target: ModelConfig) -> ModelConfig:
    """A shallow copy: vLLM tells target and draft apart by identity."""
    return copy.copy(target)


def is_ours(speculative_config: Any) -> bool:
    """Whether this (possibly absent) speculative config names one of our methods."""
    return isinstance(speculative_config, ExtSpeculativeConfig)
