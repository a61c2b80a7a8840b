"""What chains and trees of a reused module share: its inputs, outputs and vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from speculators_ext.engines.vllm.heads.speculator import HeadSpeculator
from speculators_ext.engines.vllm.log import logger
from speculators_ext.engines.vllm.mtp_reuse.calibrate import choose_norms, encode_prompts
from speculators_ext.engines.vllm.mtp_reuse.module import MtpModule
from speculators_ext.engines.vllm.mtp_reuse.reduced_head import make_reduced_head
from speculators_ext.proposers.mtp_norms import HiddenNorms, find_norms

if TYPE_CHECKING:
    from torch import nn
    from vllm.v1.worker.gpu.input_batch import InputBatch

__all__ = ["ReuseSpeculator"]


class ReuseSpeculator(HeadSpeculator):
    """Loads the module, and feeds and reads it as the settings say."""

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> Any:
        """vLLM's MTP model, and around it what it is fed and drafts with."""
        model = super().load_draft_model(target_model, target_attn_layer_names)  # type: ignore[safe-super]
        known = find_norms(self.vllm_config.model_config.architectures)
        first = self._options.first_hidden or known.first
        recycled = self._options.recycled_hidden or known.recycled
        self.module = MtpModule(model, target_model, HiddenNorms(first, recycled))
        self._target = target_model
        logger.info("mtp_reuse: first_hidden=%s, recycled_hidden=%s", first, recycled)
        if self._options.draft_vocab_size is not None:
            self.module.reduced = make_reduced_head(
                model, self.vllm_config, self._options.draft_vocab_size
            )
        return model

    def set_attn(self, model_state: Any, *args: Any, **kwargs: Any) -> None:
        """Calibrate as soon as there are caches to do it in, where that is asked."""
        super().set_attn(model_state, *args, **kwargs)
        if self._options.calibrate:
            model_state.when_cached = self._calibrate

    @torch.inference_mode()
    def _calibrate(self) -> None:
        prompts = encode_prompts(self.vllm_config.model_config)
        self.module.choose(choose_norms(self, self._target, prompts[: self.max_num_reqs]))

    def run_head(
        self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, part: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A module over n rows: states for the output head, and those to recycle."""
        fed = hidden if part else self.module.first(hidden)
        return self.module.run(tokens, positions, fed, part)

    def _kept_rows(
        self, input_batch: InputBatch, sampled: list[int], rejected: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        rows, counts = super()._kept_rows(input_batch, sampled, rejected)
        if self.module.reduced is not None:
            self.module.reduced.vocabulary.count(input_batch.input_ids[rows].long())
        return rows, counts
