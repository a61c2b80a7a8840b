"""A round of chains: the module follows the target, then drafts as long as that pays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from speculators_ext.engines.vllm.drafts import UNUSED_DRAFT, make_unused_certain
from speculators_ext.engines.vllm.mtp_reuse.chains import ChainSteps, DecodeBuffers
from speculators_ext.engines.vllm.mtp_reuse.clock import ReuseClock
from speculators_ext.engines.vllm.mtp_reuse.reuse import ReuseSpeculator
from speculators_ext.engines.vllm.ranks import decided_on_rank_0
from speculators_ext.engines.vllm.request_options import DEFAULT_OPTIONS
from speculators_ext.proposers.head_rounds import MAX_BACKLOG
from speculators_ext.proposers.mtp_reuse import StopRule, draft_chains

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    from speculators_ext.engines.vllm.heads.speculator import TargetStep
    from speculators_ext.proposers.mtp_reuse import Chain

__all__ = ["ChainReuseSpeculator"]

_SPARE_ROWS = 3


class _Verified(NamedTuple):
    """What the target's step left, on the host, by row of the batch.

    Attributes:
        slots: of the requests.
        sampled: accepted drafts + 1, 0 for unfinished prompts.
        rejected: drafts.
        lengths: tokens in the caches.
    """

    slots: list[int]
    sampled: list[int]
    rejected: list[int]
    lengths: list[int]


class _Extended(NamedTuple):
    """Requests the module has caught up with, R of them.

    Attributes:
        rows: of the batch.
        hidden: [R, H], what the output head takes, at each one's last row.
        features: [R, H], what is recycled from there.
        lengths: tokens in the module's cache.
        gathered: vLLM's block tables hold those of these requests, in this order.
    """

    rows: list[int]
    hidden: torch.Tensor
    features: torch.Tensor
    lengths: list[int]
    gathered: bool


class ChainReuseSpeculator(ReuseSpeculator, MTPSpeculator):
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
        self._unused = 0 if vllm_config.scheduler_config.async_scheduling else UNUSED_DRAFT
        self._stepwise = device.type == "cpu"
        self._clock = ReuseClock(
            self.num_speculative_steps,
            adaptive=self._options.adaptive,
            fixed_launches=not self._stepwise,
        )
        self._rule = StopRule(self._options.min_path_probability)
        self._drafted: dict[str, list[float]] = {}
        self._decode_buffers: dict[int, DecodeBuffers] = {}

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """Drop what was kept of other caches."""
        super().set_attn(*args, **kwargs)
        self._decode_buffers = {}

    def decode_buffers(self, count: int) -> DecodeBuffers:
        """What a decode step of ``count`` requests is described with."""
        if count not in self._decode_buffers:
            self._decode_buffers[count] = DecodeBuffers(self, count)
        return self._decode_buffers[count]

    def make_steps(
        self, idx_mapping: torch.Tensor, lengths: Sequence[int], *, gathered: bool
    ) -> ChainSteps:
        """The steps of one round; see `ChainSteps`."""
        return ChainSteps(self, idx_mapping, lengths, gathered=gathered)

    def draft_round(self, input_batch: InputBatch, step: TargetStep) -> torch.Tensor:
        """As `HeadSpeculator.draft_round`; under async scheduling unused slots hold a valid id.

        There every slot is verified, and what reaches the input ids is embedded unchecked.
        """
        self._clock.begin(input_batch)
        verified = self._read(input_batch, step)
        self._learn(input_batch, verified.sampled)
        if self.draft_logits is not None:
            slots = input_batch.idx_mapping
            self._copy_request_inputs(input_batch.num_reqs, slots, step.temperature, step.seeds)
            make_unused_certain(self.draft_logits, slots)
        num_rows = sum(count > 0 for count in verified.sampled)
        depth, self._rule.worth = decided_on_rank_0(self._clock.plan(num_rows))
        caps = self._limits(input_batch, verified.sampled, verified.lengths, depth)
        extended = self._extend_for(caps, input_batch, step, verified)
        chains = self._draft(caps, input_batch, step, extended, num_rows) if extended else {}
        self._clock.end(input_batch, step.num_sampled, caps)
        return self._as_tensor(chains, input_batch.num_reqs)

    def _read(self, input_batch: InputBatch, step: TargetStep) -> _Verified:
        sampled, rejected = step.num_sampled.tolist(), step.num_rejected.tolist()
        starts = input_batch.query_start_loc_np.tolist()
        computed = input_batch.num_computed_tokens_np.tolist()
        lengths = [
            computed[row] + starts[row + 1] - starts[row] - count
            for row, count in enumerate(rejected)
        ]
        return _Verified(input_batch.idx_mapping_np.tolist(), sampled, rejected, lengths)

    def _learn(self, input_batch: InputBatch, sampled: list[int]) -> None:
        """Tell the stop rule what became of the last drafts."""
        scheduled, verified = input_batch.num_draft_tokens_per_req, []
        if scheduled is not None and self._drafted:
            for row, count in enumerate(scheduled.tolist()):
                given = self._drafted.get(input_batch.req_ids[row], [])[:count]
                if given and sampled[row] > 0:
                    verified.append((given, min(sampled[row] - 1, len(given))))
        self._rule.observe(verified)
        self._drafted = {}

    def _extend_for(
        self, caps: list[int], input_batch: InputBatch, step: TargetStep, verified: _Verified
    ) -> _Extended | None:
        """Let the module catch up with requests that draft, and those it lags far behind."""
        backlog, slots = self._state.backlog, verified.slots
        if self._follows_target(caps, verified):
            if self.module.reduced is not None:
                self._kept_rows(input_batch, verified.sampled, verified.rejected)
            kept = input_batch.num_tokens - sum(verified.rejected)
            with self._clock.extending(sum(verified.sampled), kept):
                hidden, features = self._follow_target(input_batch, step, verified)
            return _Extended(list(range(len(caps))), hidden, features, verified.lengths, True)
        self._note_kept_rows(
            input_batch, step.hidden, step.next_tokens(input_batch), verified.sampled,
            verified.rejected,
        )  # fmt: skip
        sizes = [backlog.size(slot) for slot in slots]
        rows = [row for row, cap in enumerate(caps) if cap or sizes[row] >= MAX_BACKLOG]
        if not rows:
            return None
        new = sum(min(sizes[row], verified.sampled[row]) for row in rows if caps[row])
        with self._clock.extending(new, sum(sizes[row] for row in rows)):
            hidden, features, lengths = self._extend(input_batch, rows)
        return _Extended(rows, hidden, features, lengths, False)

    def _follows_target(self, caps: list[int], verified: _Verified) -> bool:
        """Whether the module has the target's step to run and nothing else.

        A few rejected rows more cost less than metadata of our own.
        """
        return (
            self._stepwise
            and any(caps)
            and sum(verified.rejected) <= len(caps) + _SPARE_ROWS
            and not any(self._state.backlog.size(slot) for slot in verified.slots)
        )

    def _follow_target(
        self, input_batch: InputBatch, step: TargetStep, verified: _Verified
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The module over all rows of the target's step, with its metadata: [num_reqs, H] each."""
        count, stops = input_batch.num_tokens, input_batch.query_start_loc_np.tolist()[1:]
        ends = [stop - 1 - less for stop, less in zip(stops, verified.rejected, strict=True)]
        last = torch.from_numpy(np.asarray(ends))
        tokens = input_batch.input_ids[:count].roll(-1)
        tokens[last] = step.next_tokens(input_batch).int()
        self._prepare_eplb_forward(count)
        with set_forward_context(
            step.attn_metadata, self.vllm_config, num_tokens=count, slot_mapping=step.slot_mappings
        ):
            hidden, features = self.run_head(
                tokens, input_batch.positions[:count], step.hidden[0][:count], 0
            )
        ends_hidden = hidden[last]
        return ends_hidden, ends_hidden if features is hidden else features[last]

    def _draft(
        self,
        caps: list[int],
        input_batch: InputBatch,
        step: TargetStep,
        extended: _Extended,
        num_rows: int,
    ) -> dict[int, Chain]:
        """A chain of each request that may draft, by row of the batch."""
        rows, options, most = extended.rows, self._state.request_options, self.num_speculative_steps
        most = most if step.most is None else min(most, step.most)
        slots = input_batch.idx_mapping_np.tolist()
        limits = [
            min(caps[row], options.get(slots[row], DEFAULT_OPTIONS).limit(most)) if caps[row] else 0
            for row in rows
        ]
        if not any(limits):
            return {}
        if self.module.reduced is not None:
            self.module.reduced.update()
        own = input_batch.idx_mapping if extended.gathered else input_batch.idx_mapping[rows]
        steps = self.make_steps(own, extended.lengths, gathered=extended.gathered)
        with self._clock.drafting(0):
            chains, count = draft_chains(
                steps, extended.hidden, extended.features, limits, self._rule,
                num_rows=num_rows, stepwise=self._stepwise,
            )  # fmt: skip
            self._clock.ran(count)
        for row, chain in zip(rows, chains, strict=True):
            self._drafted[input_batch.req_ids[row]] = chain.probabilities
        return dict(zip(rows, chains, strict=True))

    def _as_tensor(self, chains: dict[int, Chain], num_reqs: int) -> torch.Tensor:
        drafts = self.draft_tokens[:num_reqs]
        if not chains:
            return drafts.fill_(self._unused)
        unused = [self._unused] * self.num_speculative_steps
        filled = [
            (chains[row].tokens + unused)[: len(unused)] if row in chains else unused
            for row in range(num_reqs)
        ]
        return drafts.copy_(torch.from_numpy(np.asarray(filled)))

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        """[n, V], tokens outside the draft vocabulary at -inf: the law of probabilistic drafts."""
        logits, reduced = self.module.logits(hidden_states, spec_step_idx), self.module.reduced
        if reduced is None:
            return logits
        full = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        return full.index_copy_(1, reduced.vocabulary.ids, logits)
