"""Hook 3 for ``mtp_reuse``: the target's own MTP module drafts, see ``heads`` for a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_prefill_inputs

from speculators_ext.engines.vllm.attention.packed_rows import replace_backends
from speculators_ext.engines.vllm.drafts import make_unused_certain
from speculators_ext.engines.vllm.heads.speculator import HeadSpeculator
from speculators_ext.engines.vllm.heads.tree_speculator import TreeSpeculator
from speculators_ext.engines.vllm.heads.vllm_head import VllmHead
from speculators_ext.engines.vllm.log import logger, warn_untried_on_gpus
from speculators_ext.engines.vllm.mtp_reuse.calibrate import choose_norms, encode_prompts
from speculators_ext.engines.vllm.mtp_reuse.chains import ChainSteps
from speculators_ext.engines.vllm.mtp_reuse.clock import ReuseClock
from speculators_ext.engines.vllm.mtp_reuse.module import MtpModule
from speculators_ext.engines.vllm.mtp_reuse.reduced_head import make_reduced_head
from speculators_ext.engines.vllm.ranks import decided_on_rank_0
from speculators_ext.engines.vllm.trees.devices import use_tree_backends
from speculators_ext.engines.vllm.trees.tree_clock import Plan
from speculators_ext.proposers.mtp_norms import HiddenNorms, find_norms
from speculators_ext.proposers.mtp_reuse import StopRule, draft_chains
from speculators_ext.tree import DraftTree

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.engines.vllm.heads.speculator import Roots

__all__ = ["ChainReuseSpeculator", "TreeReuseSpeculator", "build_speculator"]

_ATTENTION = "speculators_ext.engines.vllm.attention"


def build_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> HeadSpeculator:
    """The speculator for our config; called before the target's layers are built."""
    config: Any = vllm_config.speculative_config
    if config.method_config.topk > 1:
        use_tree_backends(device, "mtp_reuse")
        return TreeReuseSpeculator(vllm_config, device, req_states)
    if device.type == "cpu":
        replace_backends({"CPU_MLA": f"{_ATTENTION}.decode_rows_mla.DecodeRowsCPUMLABackend"})
    else:
        warn_untried_on_gpus("mtp_reuse")
    return ChainReuseSpeculator(vllm_config, device, req_states)


class _ReuseSpeculator(HeadSpeculator):
    """What chains and trees of a reused module share: its inputs, outputs and vocabulary."""

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

    def head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's states before or after its final norm."""
        return self.module.first(hidden)

    def head_output(self, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The module's states for the output head, and those to recycle."""
        return self.module.read(out)

    def _kept_rows(
        self, input_batch: InputBatch, sampled: list[int], rejected: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        rows, counts = super()._kept_rows(input_batch, sampled, rejected)
        if self.module.reduced is not None:
            self.module.reduced.vocabulary.count(input_batch.input_ids[rows].long())
        return rows, counts


class _TargetStep(NamedTuple):
    """What the runner hands over of the target's step, beside the batch."""

    attn_metadata: Any
    slot_mappings: Any
    hidden: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor
    next_prefill_tokens: torch.Tensor


class ChainReuseSpeculator(_ReuseSpeculator, MTPSpeculator):
    """Drafts a chain a request, each as long as it pays.

    Args:
        vllm_config: holds our speculative config.
        device: of the target.
        req_states: the runner's request table, read only.
    """

    _clock: ReuseClock

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        super().__init__(vllm_config, device, req_states)
        self._async = vllm_config.scheduler_config.async_scheduling
        self._stepwise = device.type == "cpu"
        self._clock = ReuseClock(
            self.num_speculative_steps,
            adaptive=self._options.adaptive,
            fixed_launches=not self._stepwise,
        )
        self._rule = StopRule(self._options.min_path_probability)
        self._drafted: dict[str, list[float]] = {}
        self._num_rows = 0
        self._target_step: _TargetStep | None = None
        self._kept: Any = None
        self._kept_lengths: list[int] = []
        self._at_once = False

    def propose(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `HeadSpeculator.propose`; under async scheduling unused slots hold a valid id.

        There every slot is verified, and what reaches the input ids is embedded unchecked.
        """
        self._target_step = None
        if not kwargs.get("dummy_run"):
            self._target_step = _TargetStep(*args[:3], *args[4:8])
            if self.draft_logits is not None:
                temperature, seeds = args[8:10]
                slots = input_batch.idx_mapping
                self._copy_request_inputs(input_batch.num_reqs, slots, temperature, seeds)
                make_unused_certain(self.draft_logits, slots)
        drafts = super().propose(input_batch, *args, **kwargs)
        return drafts.clamp_(min=0) if self._async else drafts

    def _note_kept_rows(
        self,
        input_batch: InputBatch,
        hidden_states: list[torch.Tensor],
        next_tokens: torch.Tensor,
        sampled: list[int],
        rejected: list[int],
    ) -> list[int]:
        """Leave the rows to `_draft`, which knows whether the module runs over them at once."""
        self._learn(input_batch, sampled)
        self._kept = (input_batch, hidden_states, next_tokens, sampled, rejected)
        count = input_batch.num_reqs
        widths = np.diff(input_batch.query_start_loc_np[: count + 1])
        stops = input_batch.num_computed_tokens_np[:count] + widths
        self._kept_lengths = (stops - rejected).tolist()
        return self._kept_lengths

    def _draft(self, input_batch: InputBatch, caps: list[int], *args: Any) -> dict[int, DraftTree]:
        slots, backlog = input_batch.idx_mapping_np.tolist(), self._state.backlog
        sampled, rejected = self._kept[3:]
        # A few rejected rows more cost less than metadata of our own.
        self._at_once = (
            self._stepwise
            and all(caps)
            and not input_batch.has_prefill
            and sum(rejected) <= len(caps)
            and not any(backlog.size(slot) for slot in slots)
        )
        if not self._at_once:
            super()._note_kept_rows(*self._kept)
        elif self.module.reduced is not None:
            self._kept_rows(input_batch, sampled, rejected)
        return super()._draft(input_batch, caps, *args)

    def _extend(
        self, input_batch: InputBatch, rows: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """With the target's own metadata where the module has just the target's step to run."""
        if not self._at_once or self._target_step is None:
            return super()._extend(input_batch, rows)
        hidden, features = self._forward_as_target(input_batch, self._target_step)
        last = self.last_token_indices[: len(rows)]
        ends = hidden[last]
        return ends, ends if features is hidden else features[last], self._kept_lengths

    def _forward_as_target(
        self, input_batch: InputBatch, step: _TargetStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The module over all rows of the target's step, those rejected too: [n, H] each."""
        prepare_prefill_inputs(
            self.last_token_indices, self.current_draft_step, self.input_buffers, input_batch,
            step.num_sampled, step.num_rejected, step.last_sampled, step.next_prefill_tokens,
            self.max_num_reqs,
        )  # fmt: skip
        count, buffers = input_batch.num_tokens, self.input_buffers
        self._prepare_eplb_forward(count)
        with set_forward_context(
            step.attn_metadata, self.vllm_config, num_tokens=count, slot_mapping=step.slot_mappings
        ):
            out = self.model(
                input_ids=buffers.input_ids[:count],
                positions=buffers.positions[:count],
                hidden_states=self.head_input(step.hidden[:count]),
            )
        return self.head_output(out)

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """[n, V], tokens outside the draft vocabulary at -inf: the law of probabilistic drafts."""
        logits, reduced = self.module.logits(hidden_states), self.module.reduced
        if reduced is None:
            return logits
        full = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        return full.index_copy_(1, reduced.vocabulary.ids, logits)

    def plan(self, num_rows: int) -> Plan:
        """How long chains may be; what one more draft is worth goes to the stop rule."""
        depth, self._rule.worth = decided_on_rank_0(self._clock.plan(num_rows))
        self._num_rows = num_rows
        return Plan(depth, 0.0, 0.0)

    def grow(self, input_batch: InputBatch, roots: Roots, plan: Plan) -> list[DraftTree]:
        """A chain from each root."""
        if self.module.reduced is not None:
            self.module.reduced.update()
        limits = [min(pair) for pair in zip(roots.max_drafts, roots.max_levels, strict=True)]
        chains, steps = draft_chains(
            ChainSteps(self, input_batch.idx_mapping[roots.rows], roots.lengths),
            roots.hidden, roots.features, limits, self._rule,
            num_rows=self._num_rows, stepwise=self._stepwise,
        )  # fmt: skip
        self._clock.ran(steps)
        for row, chain in zip(roots.rows, chains, strict=True):
            self._drafted[input_batch.req_ids[row]] = chain.probabilities
        return [
            DraftTree.of([root, *chain.tokens], list(range(-1, len(chain.tokens))))
            for root, chain in zip(roots.tokens.tolist(), chains, strict=True)
        ]

    def _learn(self, input_batch: InputBatch, sampled: list[int]) -> None:
        """Tell the stop rule what became of the last drafts."""
        scheduled, verified = input_batch.num_draft_tokens_per_req, []
        if scheduled is not None:
            for row, req_id in enumerate(input_batch.req_ids):
                given = self._drafted.get(req_id, [])[: int(scheduled[row])]
                if given and sampled[row] > 0:
                    verified.append((given, min(sampled[row] - 1, len(given))))
        self._rule.observe(verified)
        self._drafted = {}


class _ModuleHead(VllmHead):
    module: MtpModule

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.module.logits(hidden)

    def read(self, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.module.read(out)


class TreeReuseSpeculator(_ReuseSpeculator, TreeSpeculator, MTPSpeculator):
    """Drafts trees, a level of the module's own states after another."""

    _head_type = _ModuleHead

    def _make_head(self, input_batch: InputBatch, roots: Roots) -> VllmHead:
        head = super()._make_head(input_batch, roots)
        assert isinstance(head, _ModuleHead)
        head.module = self.module
        if self.module.reduced is not None:
            self.module.reduced.update()
            head.draft_to_target = self.module.reduced.vocabulary.offsets
        return head
