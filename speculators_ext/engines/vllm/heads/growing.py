"""A head's round that grows a draft from the bonus token of each request."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from speculators_ext.engines.vllm.drafts import UNUSED_DRAFT
from speculators_ext.engines.vllm.heads.speculator import HeadSpeculator
from speculators_ext.engines.vllm.ranks import decided_on_rank_0
from speculators_ext.engines.vllm.request_options import DEFAULT_OPTIONS
from speculators_ext.proposers.head_rounds import MAX_BACKLOG, Roots

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from speculators_ext.engines.vllm.heads.speculator import TargetStep
    from speculators_ext.proposers.head_rounds import Plan
    from speculators_ext.tree import DraftTree

__all__ = ["GrowingSpeculator"]


class GrowingSpeculator(HeadSpeculator):
    """Plans a round, extends the head, grows trees from the roots."""

    @property
    @abstractmethod
    def full_depth(self) -> int:
        """Levels of a tree that holds all K drafts."""

    @abstractmethod
    def plan(self, num_rows: int) -> Plan:
        """What ``num_rows`` decoding rows may draft in this round; decided on rank 0."""

    @abstractmethod
    def grow(self, input_batch: InputBatch, roots: Roots, plan: Plan) -> list[DraftTree]:
        """Draft from the roots, one tree or chain each; one of its root alone is no draft."""

    def note_drafts(self, input_batch: InputBatch, trees: dict[int, DraftTree]) -> None:
        """The round is over, with these drafts by row of the batch."""

    def draft_round(self, input_batch: InputBatch, step: TargetStep) -> torch.Tensor:
        """As `HeadSpeculator.draft_round`."""
        drafts = torch.full_like(self.draft_tokens[: input_batch.num_reqs], UNUSED_DRAFT)
        self._clock.begin(input_batch)
        sampled = step.num_sampled.tolist()
        next_tokens = step.next_tokens(input_batch)
        lengths = self._note_kept_rows(
            input_batch, step.hidden, next_tokens, sampled, step.num_rejected.tolist()
        )
        plan = decided_on_rank_0(self.plan(sum(count > 0 for count in sampled)))
        caps = self._limits(input_batch, sampled, lengths, plan.levels)
        trees = self._draft(input_batch, caps, sampled, next_tokens, step.most, plan)
        for row, tree in trees.items():
            drafts[row, : len(tree) - 1] = torch.from_numpy(tree.tokens[1:])
        self._clock.end(input_batch, step.num_sampled, caps)
        self.note_drafts(input_batch, trees)
        return drafts

    def _draft(
        self,
        input_batch: InputBatch,
        caps: list[int],
        sampled: list[int],
        next_tokens: torch.Tensor,
        num_speculative_tokens: int | None,
        plan: Plan,
    ) -> dict[int, DraftTree]:
        """Run the head over what it must catch up with, and draft, by row of the batch."""
        slots = input_batch.idx_mapping_np.tolist()
        backlog = self._state.backlog
        rows = [
            row for row, cap in enumerate(caps) if cap or backlog.size(slots[row]) >= MAX_BACKLOG
        ]
        if not rows:
            return {}
        growing = [index for index, row in enumerate(rows) if caps[row]]
        sizes = [backlog.size(slots[row]) for row in rows]
        new = sum(min(sizes[index], sampled[rows[index]]) for index in growing)
        with self._clock.extending(new, sum(sizes)):
            hidden, features, lengths = self._extend(input_batch, rows)
        if not growing:
            return {}
        with self._clock.drafting(0):
            if len(growing) < len(rows):
                hidden, features = hidden[growing], features[growing]
            rows = [rows[index] for index in growing]
            nodes = -(-self.num_speculative_steps * plan.levels // self.full_depth)
            options = self._state.request_options
            limits = [options.get(slots[row], DEFAULT_OPTIONS).limit(nodes) for row in rows]
            if num_speculative_tokens is not None:
                limits = [min(limit, num_speculative_tokens) for limit in limits]
            roots = Roots(
                rows, [lengths[index] for index in growing], next_tokens[rows], hidden, features,
                limits, [caps[row] for row in rows],
            )  # fmt: skip
            trees = self.grow(input_batch, roots, plan)
        return {row: tree for row, tree in zip(rows, trees, strict=True) if len(tree) > 1}
