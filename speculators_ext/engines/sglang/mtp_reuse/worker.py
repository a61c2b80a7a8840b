"""The speculative workers of ``MTP_REUSE``: chains, or trees where ``topk`` is more than 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.runtime_context import get_spec

from speculators_ext.engines.sglang.heads.level_head import LevelHead
from speculators_ext.engines.sglang.heads.tree_worker import TreeWorker
from speculators_ext.engines.sglang.heads.worker import HeadWorker
from speculators_ext.engines.sglang.log import log_method, logger
from speculators_ext.engines.sglang.mtp_reuse.clock import ReuseClock
from speculators_ext.engines.sglang.mtp_reuse.module import MtpModule
from speculators_ext.engines.sglang.mtp_reuse.requested import mtp_reuse_settings
from speculators_ext.proposers.eagle2 import Level
from speculators_ext.proposers.head_rounds import Plan
from speculators_ext.proposers.mtp_norms import HiddenNorms, find_norms
from speculators_ext.proposers.mtp_reuse import StopRule, draft_chains
from speculators_ext.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from speculators_ext.proposers.head_rounds import HeadRows, Roots
    from speculators_ext.proposers.mtp_reuse import Choice

__all__ = ["ChainReuseWorker", "TreeReuseWorker"]


class _ReuseWorker(HeadWorker):
    """What chains and trees of a reused module share: its inputs, outputs and vocabulary."""

    module: MtpModule

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Allot caches; the module shares the target's embedding and head from then on."""
        super().alloc_memory_pool(*args, **kwargs)
        config = self.target_worker.model_config
        known = find_norms(config.hf_config.architectures or ())
        norms = HiddenNorms(
            self._options.first_hidden or known.first,
            self._options.recycled_hidden or known.recycled,
        )
        self.module = MtpModule(self.model, self.target_worker.model_runner.model, norms)
        logger.info("MTP_REUSE: first_hidden=%s, recycled_hidden=%s", *norms)
        if self._options.draft_vocab_size is not None:
            ends = getattr(config.hf_config, "eos_token_id", None)
            always = [ends] if isinstance(ends, int) else list(ends or ())
            self.module.reduce(self._options.draft_vocab_size, always)

    @property
    def draft_to_target(self) -> Tensor | None:
        """What to add to a slot of the draft vocabulary to get its token."""
        vocabulary = self.module.vocabulary
        return None if vocabulary is None else vocabulary.offsets

    def head_input(self, hidden: Tensor) -> Tensor:
        """The target's states before or after its final norm."""
        return self.module.first(hidden)

    def head_output(self, out: Any) -> tuple[Tensor, Tensor]:
        """The module's states for the output head, and those to recycle."""
        return out, self.module.recycled(out)

    def head_logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V_draft]."""
        return self.module.logits(hidden)

    def keep(self, rid: str, rows: HeadRows) -> None:
        """Leave rows to the module, and count their tokens."""
        super().keep(rid, rows)
        if self.module.vocabulary is not None:
            self.module.vocabulary.count(rows.tokens)


class _ChainSteps:
    """One round of some requests' chains: levels of one node."""

    def __init__(self, head: LevelHead, module: MtpModule) -> None:
        self._head, self._module = head, module

    def choose(self, hidden: Tensor, rows: Sequence[int], step: int) -> Choice:
        """The likeliest token behind each row."""
        return self._module.draft(hidden)

    def advance(
        self, rows: Sequence[int], tokens: Tensor, features: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """The module over the drafts just chosen, each behind all drafts before it."""
        count, device = len(rows), tokens.device
        return self._head.step(
            Level(
                depth=step + 1,
                requests=torch.tensor(list(rows), device=device),
                places=torch.full((count,), step, device=device),
                tokens=tokens,
                features=features,
                sees=torch.ones(count, step + 1, dtype=torch.bool, device=device),
            )
        )


class ChainReuseWorker(_ReuseWorker):
    """Drafts a chain a request, each as long as it pays.

    Args:
        server_args: SGLang's.
        gpu_id: SGLang's.
        nccl_port: SGLang's.
        target_worker: runs the target.
    """

    _clock: ReuseClock

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        options = mtp_reuse_settings(server_args)
        clock = ReuseClock(get_spec().speculative_num_steps, adaptive=options.adaptive)
        super().__init__(options, clock, server_args, gpu_id, nccl_port, target_worker)
        self._rule = StopRule(options.min_path_probability)
        self._given: dict[str, list[float]] = {}
        self._num_rows = 0
        log_method("MTP_REUSE", self._most, options)

    def plan(self, num_rows: int) -> Plan:
        """How long chains may be; what one more draft is worth goes to the stop rule."""
        depth, self._rule.worth = self._clock.plan(num_rows)
        self._num_rows = num_rows
        return Plan(depth, 0.0, 0.0)

    def grow(self, batch: Any, roots: Roots, plan: Plan) -> list[DraftTree]:
        """A chain from each root."""
        self.module.update()
        limits = [min(pair) for pair in zip(roots.max_drafts, roots.max_levels, strict=True)]
        head = LevelHead(self, batch, roots, self._most)
        chains, steps = draft_chains(
            _ChainSteps(head, self.module), roots.hidden, roots.features, limits, self._rule,
            num_rows=self._num_rows,
        )  # fmt: skip
        self._clock.ran(steps)
        for row, chain in zip(roots.rows, chains, strict=True):
            self._given[batch.reqs[row].rid] = chain.probabilities
        return [
            DraftTree.of([root, *chain.tokens], list(range(-1, len(chain.tokens))))
            for root, chain in zip(roots.tokens.tolist(), chains, strict=True)
        ]

    def note_outcome(
        self, batch: Any, caps: list[int], trees: list[DraftTree], paths: list[list[int]]
    ) -> None:
        """Tell the clock and the stop rule."""
        made = [len(tree) - 1 for tree in trees]
        accepted = [len(path) - 1 for path in paths]
        self._clock.verified(caps, made, accepted)
        given = [self._given.get(req.rid, []) for req in batch.reqs]
        self._rule.observe(
            [(own[:n], hits) for own, n, hits in zip(given, made, accepted, strict=True) if n]
        )
        self._given = {}


class TreeReuseWorker(_ReuseWorker, TreeWorker):
    """Drafts trees, a level of the module's own states after another.

    Args:
        server_args: SGLang's.
        gpu_id: SGLang's.
        nccl_port: SGLang's.
        target_worker: runs the target.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        options = mtp_reuse_settings(server_args)
        TreeWorker.__init__(self, options, server_args, gpu_id, nccl_port, target_worker)
        log_method("MTP_REUSE", self._most, options)

    def grow(self, batch: Any, roots: Roots, plan: Plan) -> list[DraftTree]:
        """A tree from each root."""
        self.module.update()
        return super().grow(batch, roots, plan)
