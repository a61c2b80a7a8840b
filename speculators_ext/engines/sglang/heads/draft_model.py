"""The draft model as SGLang loads it beside the target, run over rows of our choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

from speculators_ext.engines.sglang.decode_steps import decode_step
from speculators_ext.engines.sglang.heads.attention import ExtendBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from speculators_ext.proposers.head_rounds import HeadRows

__all__ = ["DraftModel", "prefix_slots"]


def prefix_slots(batch: Any, rows: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
    """Cache slots of the first positions of some of a batch's requests, int64 [length] each."""
    table = batch.req_to_token_pool.req_to_token
    indices = batch.req_pool_indices[list(rows)].tolist()
    return [table[i, :n].long() for i, n in zip(indices, lengths, strict=True)]


class DraftModel(EagleDraftWorker):
    """Loads a head, shares the target's embedding with it and allots its cache, as for EAGLE.

    Drafting and the filling of the cache are not SGLang's.
    """

    def init_attention_backend(self) -> None:
        """None for draft steps: their attention is passed to `run`."""
        self.draft_attn_backend = self.draft_extend_attn_backend = None
        self.draft_runner.draft_attn_backend = None

    def init_cuda_graphs(self) -> None:
        """None: SGLang's are of its own drafting. What else is set up then is set up."""
        self.draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)

    @property
    def pool(self) -> Any:
        """The model's KV pool, whose slots are the target's."""
        return self.draft_runner.token_to_kv_pool

    @property
    def draft_to_target(self) -> Tensor | None:
        """int64 [V_draft], what to add to a draft id to get the target's; None: one vocabulary."""
        ids = self.hot_token_id
        return None if ids is None else ids - torch.arange(len(ids), device=ids.device)

    def run(
        self,
        backend: Any,
        batch: Any,
        rows: list[int],
        tokens: Tensor,
        positions: list[int],
        hidden: Tensor,
    ) -> Any:
        """The decoder over single rows, without its output layer.

        Args:
            backend: attends.
            batch: SGLang's ``ScheduleBatch``.
            rows: [n], whose request each row is.
            tokens: int64 [n].
            positions: [n].
            hidden: [n, H or layers * H], what each row reads beside its token.

        Returns:
            What the decoder returns: hidden states, or a pair of them and a list of others.
        """
        step = decode_step(
            batch,
            self.draft_runner,
            rows,
            tokens,
            positions,
            spec_info=EagleDraftInput(hidden_states=hidden),
            capture_hidden_mode=CaptureHiddenMode.LAST,
        )
        context = ForwardContext(attn_backend=backend)
        with torch.no_grad(), forward_context(context, forward_batch=step):
            return self.draft_runner.model.model(step.input_ids, step.positions, step)

    def extend(self, batch: Any, rows: Sequence[int], pieces: Sequence[HeadRows]) -> Any:
        """Run over what the target has kept, and write it to the cache.

        Args:
            batch: SGLang's ``ScheduleBatch``.
            rows: [R], requests of it.
            pieces: [R], consecutive rows of each, n in all.

        Returns:
            As `run`, [n, H], request after request.
        """
        counts = [len(piece.tokens) for piece in pieces]
        ends = [piece.start + n for piece, n in zip(pieces, counts, strict=True)]
        backend = ExtendBackend(self.pool, prefix_slots(batch, rows, ends), counts)
        return self.run(
            backend,
            batch,
            [row for row, n in zip(rows, counts, strict=True) for _ in range(n)],
            torch.cat([piece.tokens for piece in pieces]),
            [at for piece, end in zip(pieces, ends, strict=True) for at in range(piece.start, end)],
            torch.cat([piece.hidden for piece in pieces]),
        )

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """The output layer, or some rows of its weight: [n, H] -> [n, V_draft]."""
        model = self.draft_runner.model
        processor = model.logits_processor
        if rows is None:
            logits = processor._compute_lm_head(hidden, model.lm_head)
        else:
            logits = torch.nn.functional.linear(hidden, rows)
        if processor.logit_scale is not None:
            logits = logits * processor.logit_scale
        cap = processor.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits
