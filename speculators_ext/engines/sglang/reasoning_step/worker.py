"""The speculative worker of ``REASONING_STEP``.

A round: the small model reads what was kept and writes each request's step to its end, or the
target does with some of its layers skipped -> all steps are verified in one target forward -> a
judge may let whole steps pass that are not the target's own words.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_spec

from speculators_ext.engines.sglang.chains import chain_verify_input
from speculators_ext.engines.sglang.choices import choosing
from speculators_ext.engines.sglang.log import log_method, logger
from speculators_ext.engines.sglang.reasoning_step.counts_page import CountsPage
from speculators_ext.engines.sglang.reasoning_step.judging import Candidate, StepJudging
from speculators_ext.engines.sglang.reasoning_step.own_steps import OwnSteps
from speculators_ext.engines.sglang.reasoning_step.requested import (
    judge_suffix,
    load_tokenizer,
    reasoning_tokens,
    step_settings,
)
from speculators_ext.engines.sglang.reasoning_step.small_model import SmallModel
from speculators_ext.engines.sglang.reasoning_step.suffix import SuffixForward
from speculators_ext.engines.sglang.worker import RoundWorker
from speculators_ext.proposers.reasoning_step import (
    DelimiterWatch,
    DraftedStep,
    StepRules,
    StepSplitter,
    StepTracker,
)
from speculators_ext.proposers.step_tokens import find_span, token_texts

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from speculators_ext.config import ReasoningStepConfig

__all__ = ["ReasoningStepWorker"]


@dataclass
class _Entry:
    """A request: its tokens, prompt included, and how many of them the writer has read."""

    req: Any
    tokens: list[int]
    tracker: StepTracker
    exact: bool
    read: int = 0
    drafts: list[int] = field(default_factory=list)
    judgeable: bool = False


class ReasoningStepWorker(RoundWorker):
    """Drafts steps; see the module's docstring for a round.

    Args:
        server_args: SGLang's.
        gpu_id: SGLang's.
        nccl_port: SGLang's.
        target_worker: runs the target.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self._options = step_settings(server_args)
        skips = self._options.clasp
        small = SmallModel(server_args, gpu_id, nccl_port, target_worker) if skips is None else None
        super().__init__(
            target_worker,
            small,
            get_spec().speculative_num_steps,
            tail=1 if skips is None else skips.search_window,
            least_threshold=self._options.least_threshold,
        )
        vocab_size = target_worker.model_config.vocab_size
        self.writer: SmallModel | OwnSteps
        if skips is None:
            assert small is not None
            self.writer = small
        else:
            self.writer = OwnSteps(self._runner, skips, self._known, vocab_size)
        self._rules = _rules(server_args, self._options, target_worker.model_config.hf_eos_token_id)
        self._watch = DelimiterWatch(self._rules, self._most)
        suffix = judge_suffix(server_args, self._options)
        judge = None if suffix is None else SuffixForward(self._runner, suffix)
        self._judging = StepJudging(self._options, judge, CountsPage())
        # A step that ends here or later leaves the suffix no room in the model.
        self._end = self._last + 1 - (0 if suffix is None else len(suffix.ids))
        # Padding of one vocabulary beyond the other's is never drafted and never read.
        self._both = min(self.writer.vocab_size, vocab_size)
        self._entries: dict[str, _Entry] = {}
        self._missing: set[str] = set()
        log_method("REASONING_STEP", self._most, self._options)

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
        drafts = self._draft(batch, lengths)
        bonus = batch.spec_info.bonus_tokens
        batch.spec_info = chain_verify_input(bonus, drafts, lengths, self._last)
        rows = [
            self._candidate(req, len(own), length + len(own))
            for req, own, length in zip(batch.reqs, drafts, lengths, strict=True)
        ]
        with choosing(lambda *given: self._judging.choose(batch, rows, *given)):
            result = self.run_verify(batch, on_publish, grammar_barrier)
        self._note(batch, result)
        return result

    def _prefill(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None) -> Any:
        result = self.run_prefill(batch, on_publish)
        self._forget_ended()
        for req, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=True):
            self._known.start(req, token)
            output = [*req.output_ids, token]
            stops = frozenset(req.sampling_params.stop_token_ids or ())
            rules = replace(self._rules, stops=self._rules.stops | stops)
            prompt = list(req.origin_input_ids)
            self._entries[req.rid] = _Entry(
                req, [*prompt, *output], StepTracker(rules, prompt, output), _is_exact(req)
            )
        return result

    def _forget_ended(self) -> None:
        """Drop requests that ended, also those that never come to a round."""
        for name in [name for name, entry in self._entries.items() if entry.req.finished()]:
            self._entries.pop(name)
        self._known.forget_absent(lambda name: name in self._entries)

    def _forget_absent(self, present: set[str]) -> None:
        """Drop requests that are gone; one whose prompt has just been run may join a round late."""
        missing = set(self._entries) - present
        for name in missing & self._missing:
            self._entries.pop(name)
        self._missing = missing
        self._known.forget_absent(lambda name: name in present or name in self._entries)

    def _draft(self, batch: Any, lengths: list[int]) -> list[list[int]]:
        """A step of every request, or as much of it as may be drafted; empty where nothing is."""
        self._forget_absent({req.rid for req in batch.reqs})
        limits = {}
        for row, (req, length) in enumerate(zip(batch.reqs, lengths, strict=True)):
            entry = self._entries.get(req.rid)
            if entry is None or len(entry.tokens) != length + 1:
                continue
            entry.drafts, entry.judgeable = [], False
            limit = self._known.limit(req, length, self._most, self._last)
            if limit > 0:
                limits[row] = limit
        entries = {row: self._entries[batch.reqs[row].rid] for row in limits}
        self.writer.begin(batch, list(entries), lengths)
        self._write_steps(batch, limits, entries)
        return [entries[row].drafts if row in entries else [] for row in range(len(batch.reqs))]

    def _write_steps(self, batch: Any, limits: dict[int, int], entries: dict[int, _Entry]) -> None:
        walks = {row: DraftedStep(entry.tracker) for row, entry in entries.items()}
        rows = list(entries)
        starts = [entries[row].read for row in rows]
        pieces = [entries[row].tokens[entries[row].read :] for row in rows]
        while rows:
            logits = self.writer.feed(batch, rows, starts, pieces)
            going = []
            for row, token in zip(rows, logits[:, : self._both].argmax(-1).tolist(), strict=True):
                entry = entries[row]
                entry.drafts.append(token)
                if walks[row].push(token) and len(entry.drafts) < limits[row]:
                    going.append(row)
            rows = going
            # The first draft stands behind all tokens, and is read at that position.
            starts = [len(entries[row].tokens) + len(entries[row].drafts) - 1 for row in rows]
            pieces = [entries[row].drafts[-1:] for row in rows]
        for row, entry in entries.items():
            entry.judgeable = walks[row].judgeable
            warning = self._watch.note(walks[row], len(entry.drafts))
            if warning is not None:
                logger.warning(warning)

    def _candidate(self, req: Any, drafts: int, last: int) -> Candidate:
        entry = self._entries.get(req.rid)
        judgeable = entry is not None and entry.judgeable and not entry.exact
        if not judgeable or not drafts or last >= self._end:
            return Candidate(drafts, None, last)
        asked = self._known.options_of(req)
        if asked.exact:
            return Candidate(drafts, None, last)
        own = asked.threshold
        return Candidate(drafts, self._options.passes_from if own is None else own, last)

    def _note(self, batch: Any, result: Any) -> None:
        """Remember what was kept, and how far the writer has read it."""
        counts = result.accept_lens.tolist()
        tokens = result.next_token_ids.view(len(counts), -1).tolist()
        for req, row, count in zip(batch.reqs, tokens, counts, strict=True):
            kept = row[:count]
            self._known.extend(req.rid, kept)
            entry = self._entries.get(req.rid)
            if entry is None:
                continue
            if entry.drafts:
                # It has read its drafts but for the last.
                entry.read = len(entry.tokens) + min(count - 1, len(entry.drafts) - 1)
            entry.tokens += kept
            entry.tracker.feed(kept)


def _is_exact(req: Any) -> bool:
    """Whether the request's logits depend on the tokens before, or on more than the model."""
    params = req.sampling_params
    return bool(req.grammar is not None or params.logit_bias or req.custom_logit_processor)


def _rules(server_args: Any, options: ReasoningStepConfig, ends: Any) -> StepRules:
    tokenizer = load_tokenizer(server_args)
    eos = getattr(tokenizer, "eos_token_id", None)
    stops = {*(ends or ()), *(() if eos is None else (eos,))}
    return StepRules(
        StepSplitter(options.delimiter, token_texts(tokenizer)),
        find_span(tokenizer, *reasoning_tokens(options, server_args, tokenizer)),
        options.first_exact,
        options.min_step_tokens,
        frozenset(stops),
    )
