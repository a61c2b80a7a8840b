"""The judging suffix: one forward of the target behind the open steps of a batch.

It writes into the slots that the scheduler reserves for drafts (``num_lookahead_tokens``), behind
the last draft that was scheduled. Nothing is left of it: the next verification writes the same
positions before anything reads them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from speculators_ext.engines.vllm.reasoning_step.book import COUNTERS

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    from speculators_ext.proposers.step_tokens import JudgeSuffix

__all__ = ["SuffixForward"]


class SuffixForward:
    """Reads the target's logits of the digits behind the suffix.

    Args:
        speculator: lends its buffers and block tables, after `set_attn`.
        target: vLLM's model.
        suffix: S tokens and the digits.
    """

    def __init__(self, speculator: DraftModelSpeculator, target: Any, suffix: JudgeSuffix) -> None:
        # The same object, but for the layers it builds attention metadata for.
        self._on_target = copy.copy(speculator)
        self._on_target.attn_groups = speculator.target_attn_groups
        self._target = target
        device = speculator.device
        self._suffix = torch.tensor(suffix.ids, dtype=torch.int32, device=device)
        self._digits = torch.tensor(suffix.digits, device=device)
        self._ahead = torch.arange(1, len(suffix.ids) + 1, device=device)
        self._at_once = max(1, speculator.max_num_tokens // len(suffix.ids))

    @torch.inference_mode()
    def __call__(self, slots: torch.Tensor, last_positions: torch.Tensor) -> torch.Tensor:
        """Of n requests.

        Args:
            slots: [n], in the runner's request table.
            last_positions: int64 [n], of the last token of each step.

        Returns:
            fp32 [n, 10].
        """
        parts = zip(slots.split(self._at_once), last_positions.split(self._at_once), strict=True)
        return torch.cat([self._run(*part) for part in parts])

    def _run(self, slots: torch.Tensor, last_positions: torch.Tensor) -> torch.Tensor:
        COUNTERS.judge_forwards += 1
        state, width, count = self._on_target, len(self._suffix), len(slots)
        total, buffers = count * width, state.input_buffers
        positions = buffers.positions[:total]
        positions.copy_((last_positions[:, None] + self._ahead).flatten())
        lengths = last_positions + 1 + width
        buffers.seq_lens[:count].copy_(lengths)
        starts = torch.arange(count + 1, dtype=torch.int32, device=positions.device) * width
        buffers.query_start_loc[: count + 1].copy_(starts)
        tables = state.block_tables
        tables.gather_block_tables(slots, num_reqs_padded=count)
        mapping = tables.compute_slot_mappings(
            slots, buffers.query_start_loc[: count + 1], positions, total
        )
        metadata = state._build_uniform_attn_metadata(
            batch_desc=BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE,
                num_tokens=total,
                num_reqs=count,
                uniform_token_count=width,
            ),
            num_reqs=count,
            num_query_per_req=width,
            seq_lens_cpu_upper_bound=lengths.to("cpu", torch.int32),
            step=0,
        )
        with set_forward_context(
            metadata,
            state.vllm_config,
            num_tokens=total,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=build_slot_mappings_by_layer(mapping, state.kv_cache_config),
            batch_descriptor=BatchDescriptor(num_tokens=total),
        ):
            hidden = self._target(input_ids=self._suffix.repeat(count), positions=positions)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        logits = self._target.compute_logits(hidden[width - 1 :: width])
        return logits[:, self._digits].float()
