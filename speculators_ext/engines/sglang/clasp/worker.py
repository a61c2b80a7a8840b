"""The speculative worker of ``CLASP``.

A round: [search a skip set] -> draft token by token through the kept layers, on the target's own
KV pool -> verify all drafts in one target forward, which overwrites every slot the drafts wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_spec

from speculators_ext.engines.sglang.chains import chain_verify_input
from speculators_ext.engines.sglang.clasp.requested import clasp_settings
from speculators_ext.engines.sglang.log import log_method
from speculators_ext.engines.sglang.round_clock import RoundClock
from speculators_ext.engines.sglang.skipping.own_layers import OwnLayers
from speculators_ext.engines.sglang.worker import RoundWorker
from speculators_ext.proposers.drafting import clamp_ids, exit_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["ClaspWorker"]


class ClaspWorker(RoundWorker):
    """Drafts with the target's own layers; see the module's docstring for a round.

    Args:
        server_args: SGLang's.
        gpu_id: unused, there is no second model.
        nccl_port: unused.
        target_worker: runs the target.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self._config = clasp_settings(server_args)
        most = get_spec().speculative_num_steps
        super().__init__(target_worker, None, most, tail=self._config.search_window)
        self._own = OwnLayers(self._runner, self._config)
        self._sets = self._own.sets
        self._vocab_size = target_worker.model_config.vocab_size
        self._clock = RoundClock(
            self._most, self._config.refresh_interval, adaptive=self._config.adaptive
        )
        self._clock.time_on(self._runner.device)
        log_method("CLASP", self._most, self._config)

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
        caps, drafts = self._draft(batch, lengths)
        bonus = batch.spec_info.bonus_tokens
        batch.spec_info = chain_verify_input(bonus, drafts, lengths, self._last, self.verify_shape)
        result = self.run_verify(batch, on_publish, grammar_barrier)
        self._note(batch, caps, drafts, result)
        return result

    def _prefill(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None) -> Any:
        self._clock.interrupt()
        result = self.run_prefill(batch, on_publish)
        for req, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=True):
            self._known.start(req, token)
        return result

    def _note(self, batch: Any, caps: list[int], drafts: list[list[int]], result: Any) -> None:
        """Remember what was accepted."""
        counts = result.accept_lens.tolist()
        tokens = result.next_token_ids.view(len(counts), -1).tolist()
        for req, row, count in zip(batch.reqs, tokens, counts, strict=True):
            self._known.extend(req.rid, row[:count])
        made = [len(ids) for ids in drafts]
        accepted = [min(count - 1, n) for count, n in zip(counts, made, strict=True)]
        self._clock.verified(caps, made, accepted)

    def _draft(self, batch: Any, lengths: list[int]) -> tuple[list[int], list[list[int]]]:
        """Drafts of every request, and how many each was allowed."""
        names = [req.rid for req in batch.reqs]
        present = set(names)
        self._known.forget_absent(present.__contains__)
        self._sets.forget_absent(present.__contains__)
        self._clock.begin(names)
        caps = [
            self._known.limit(req, length, self._most, self._last)
            for req, length in zip(batch.reqs, lengths, strict=True)
        ]
        depth = self._clock.depth(len(names))
        caps = [min(cap, depth) for cap in caps]
        rows = [row for row, cap in enumerate(caps) if cap > 0]
        drafts: list[list[int]] = [[] for _ in names]
        if rows:
            wanting = [names[row] for row in rows]
            if self._sets.due(wanting):
                with self._clock.searching():
                    self._own.search(batch, rows, lengths, self._known)
            tokens = batch.spec_info.bonus_tokens.tolist()
            for kept, members in self._sets.groups(wanting):
                group = [rows[member] for member in members]
                self._draft_rows(batch, kept, group, caps, lengths, tokens, drafts)
        self._sets.count_round()
        self._clock.end_drafting()
        return caps, drafts

    def _draft_rows(
        self,
        batch: Any,
        kept: tuple[int, ...],
        rows: list[int],
        caps: list[int],
        lengths: list[int],
        tokens: list[int],
        drafts: list[list[int]],
    ) -> None:
        """Draft token by token; a row leaves at its limit or when it is unsure."""
        while rows:
            depth = len(drafts[rows[0]])
            feed = [drafts[row][-1] if depth else tokens[row] for row in rows]
            positions = [lengths[row] + depth for row in rows]
            with self._clock.drafting(depth):
                logits = self._own.logits(batch, kept, rows, feed, positions)
                drawn = exit_mask(logits, self._config.exit_threshold)
                ids = clamp_ids(drawn.tokens, self._vocab_size).tolist()
                sure = drawn.keep.tolist()
            for row, token in zip(rows, ids, strict=True):
                drafts[row].append(token)
            rows = [
                row
                for row, going in zip(rows, sure, strict=True)
                if going and caps[row] > depth + 1
            ]
