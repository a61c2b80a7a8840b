"""The speculative worker of methods that draft with a head of SGLang's: the round they share.

A round: the head extends its own cache over what the target has kept, with the target's hidden
states -> drafts grow from each request's bonus token, as the method has it -> all are verified in
one target forward, at one width -> the KV of accepted paths moves together.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec

from speculators_ext.engines.sglang.heads.draft_model import DraftModel
from speculators_ext.engines.sglang.trees import common_width, tree_verify_input
from speculators_ext.engines.sglang.worker import RoundWorker
from speculators_ext.proposers.head_rounds import MAX_BACKLOG, Backlog, HeadRows, Roots
from speculators_ext.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from speculators_ext.engines.sglang.round_clock import RoundClock
    from speculators_ext.proposers.head_rounds import Plan

__all__ = ["HeadWorker"]

ClockT = TypeVar("ClockT", bound="RoundClock")


class HeadWorker(RoundWorker, Generic[ClockT]):
    """Drafts with a head; see the module's docstring for a round.

    Args:
        options: the method's settings.
        clock: the method's, of its unit of drafting.
        server_args: SGLang's.
        gpu_id: SGLang's.
        nccl_port: SGLang's.
        target_worker: runs the target.
    """

    def __init__(
        self,
        options: Any,
        clock: ClockT,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: Any,
    ) -> None:
        self.model = DraftModel(server_args, gpu_id, nccl_port, target_worker)
        most = get_spec().speculative_num_draft_tokens - 1
        super().__init__(target_worker, self.model, most)
        self._options, self._clock = options, clock
        self._clock.time_on(self._runner.device)
        self._backlog: Backlog[str] = Backlog()
        self._missing: set[str] = set()
        self._newest: dict[str, int] = {}  # rows the last round kept

    @property
    def draft_to_target(self) -> Tensor | None:
        """int64 [V_draft], what to add to a draft id to get the target's; None: one vocabulary."""
        return self.model.draft_to_target

    @property
    def full_depth(self) -> int:
        """Levels of a tree that holds all drafts; a chain has as many as drafts."""
        return self._most

    def head_input(self, hidden: Tensor) -> Tensor:
        """What the head reads beside its tokens, [n, ...], of what the target hands out."""
        return hidden

    def head_output(self, out: Any) -> tuple[Tensor, Tensor]:
        """What `head_logits` takes and what the head goes on from, of what the head returned."""
        hidden, others = out if isinstance(out, tuple) else (out, [])
        return hidden, others[0] if others else hidden

    def head_logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V_draft]."""
        return self.model.logits(hidden)

    @abstractmethod
    def plan(self, num_rows: int) -> Plan:
        """What ``num_rows`` decoding rows may draft in this round."""

    @abstractmethod
    def grow(self, batch: Any, roots: Roots, plan: Plan) -> list[DraftTree]:
        """Draft from the roots, one tree or chain each; one of its root alone is no draft."""

    @abstractmethod
    def note_outcome(
        self, batch: Any, caps: list[int], trees: list[DraftTree], paths: list[list[int]]
    ) -> None:
        """The round is over: levels each request was allowed, its tree, its accepted rows."""

    def node_floor(self, num_rows: int) -> float:
        """What one more verified row costs a request, in tokens."""
        return 0.0

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Run a prefill, or one round of drafting and verification."""
        if not batch.forward_mode.is_decode():
            return self._prefill(batch, on_publish)
        lengths = batch.seq_lens.tolist()
        caps, trees = self._draft(batch, lengths)
        batch.spec_info = tree_verify_input(trees, lengths, self._last, self.verify_shape)
        moves = not all(tree.is_chain for tree in trees)
        result = self.run_verify(batch, on_publish, grammar_barrier, moves=moves)
        self._note(batch, lengths, caps, trees, result)
        return result

    def _prefill(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None) -> Any:
        self._clock.interrupt()
        result = self.run_prefill(batch, on_publish, capture_hidden_mode=CaptureHiddenMode.FULL)
        sampled = result.next_token_ids.tolist()
        hidden = result.logits_output.hidden_states.split(batch.extend_lens)
        ids = batch.input_ids.long().split(batch.extend_lens)
        for row, (req, token) in enumerate(zip(batch.reqs, sampled, strict=True)):
            self._known.start(req, token)
            unfinished = req is batch.chunked_req
            if unfinished and batch.chunked_req_next_prompt_token is not None:
                token = batch.chunked_req_next_prompt_token
            behind = torch.cat([ids[row][1:], ids[row].new_tensor([token])])
            self.keep(req.rid, HeadRows(batch.prefix_lens[row], behind, hidden[row].clone()))
            if unfinished or self._backlog.size(req.rid) >= MAX_BACKLOG:
                self.model.extend(batch, [row], [self._take(req.rid)])
        return result

    def keep(self, rid: str, rows: HeadRows) -> None:
        """Leave rows that the target has kept to the head."""
        self._backlog.add(rid, rows)

    def _take(self, rid: str) -> HeadRows:
        rows = self._backlog.take(rid)
        return rows._replace(hidden=self.head_input(rows.hidden))

    def _draft(self, batch: Any, lengths: list[int]) -> tuple[list[int], list[DraftTree]]:
        """A tree of every request, and the levels each was allowed."""
        names = [req.rid for req in batch.reqs]
        self._forget_absent(set(names))
        self._clock.begin(names)
        plan = self.plan(len(names))
        caps = [
            self._known.limit(req, length, plan.levels, self._last)
            if self._backlog.size(req.rid)
            else 0
            for req, length in zip(batch.reqs, lengths, strict=True)
        ]
        bonus = batch.spec_info.bonus_tokens.long()
        trees = [DraftTree.of([token], [-1]) for token in bonus.tolist()]
        for row, tree in self._draft_rows(batch, caps, lengths, bonus, plan).items():
            trees[row] = tree
        if self.verify_shape.width is None:
            width = common_width(trees, self.node_floor(len(names)))
            trees = [tree.cut(width) for tree in trees]
        self._clock.end_drafting()
        return caps, trees

    def _forget_absent(self, present: set[str]) -> None:
        """Drop what is known of requests that are gone.

        One whose prompt has just been run may not be in the batch yet: a round is waited for it.
        """
        self._known.forget_absent(present.__contains__)
        missing = set(self._backlog.owners()) - present
        for name in missing & self._missing:
            self._backlog.drop(name)
        self._missing = missing

    def _draft_rows(
        self, batch: Any, caps: list[int], lengths: list[int], bonus: Tensor, plan: Plan
    ) -> dict[int, DraftTree]:
        """Run the head over what it must catch up with, and draft, by row of the batch."""
        names = [req.rid for req in batch.reqs]
        sizes = [self._backlog.size(name) for name in names]
        rows = [row for row, cap in enumerate(caps) if cap or sizes[row] >= MAX_BACKLOG]
        if not rows:
            return {}
        growing = [index for index, row in enumerate(rows) if caps[row]]
        own = [rows[index] for index in growing]
        new = sum(min(sizes[row], self._newest.get(names[row], 0)) for row in own)
        with self._clock.extending(new, sum(sizes[row] for row in rows)):
            pieces = [self._take(names[row]) for row in rows]
            out = self.head_output(self.model.extend(batch, rows, pieces))
            ends = np.cumsum([len(piece.tokens) for piece in pieces]) - 1
            last = torch.tensor(ends[growing], device=bonus.device)
            hidden, features = (side[last] for side in out)
        if not growing:
            return {}
        with self._clock.drafting(0):
            nodes = -(-self._most * plan.levels // self.full_depth)
            roots = Roots(
                own, [lengths[row] for row in own], bonus[own], hidden, features,
                [self._known.wanted(batch.reqs[row], nodes) for row in own],
                [caps[row] for row in own],
            )  # fmt: skip
            trees = self.grow(batch, roots, plan)
        return dict(zip(own, trees, strict=True))

    def _note(
        self, batch: Any, lengths: list[int], caps: list[int], trees: list[DraftTree], result: Any
    ) -> None:
        """Remember what was accepted, and leave it to the head."""
        counts, num_reqs = result.accept_lens.tolist(), len(trees)
        width = batch.spec_info.draft_token_num
        tokens = result.next_token_ids.view(num_reqs, width)
        hidden = result.logits_output.hidden_states.view(num_reqs, width, -1)
        accepted, paths = result.accept_index.tolist(), []
        for row, (req, count) in enumerate(zip(batch.reqs, counts, strict=True)):
            kept = tokens[row, :count].long()
            self._known.extend(req.rid, kept.tolist())
            self.keep(req.rid, HeadRows(lengths[row], kept, hidden[row, :count].clone()))
            paths.append([number - row * width for number in accepted[row][:count]])
        self._newest = {req.rid: count for req, count in zip(batch.reqs, counts, strict=True)}
        self.note_outcome(batch, caps, trees, paths)
