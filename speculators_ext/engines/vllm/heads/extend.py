"""The head's own cache: extended over the rows the target kept, with the target's hidden states.

In path order and at target positions, token t + 1 at position t, as EAGLE heads are trained. Draft
nodes never write to the cache, so the head reads no prefix of its own making.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import (
    TargetDependentARSpeculator,
)

from speculators_ext.proposers.head_rounds import HeadRows

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

__all__ = ["ExtendingSpeculator"]

_NO_GRAPH = CUDAGraphMode.NONE


class ExtendingSpeculator(TargetDependentARSpeculator):
    """What vLLM's EAGLE and MTP speculators build on, with an extend that may lag behind."""

    _state: Any = None
    """The model state, which holds the backlog."""

    def head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head reads beside its tokens, [n, H], of what the target hands out, [n, ...]."""
        return hidden

    def run_head(
        self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, part: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The head over n rows, in the forward context that is set.

        Args:
            tokens: int32 [n], the dtype of vLLM's own buffers: compiled heads were compiled for it.
            positions: int64 [n].
            hidden: [n, ...], of the target, or of the part before.
            part: of a head that has several, each with a cache of its own.

        Returns:
            What `compute_logits` takes and what the head goes on from, [n, H] each.
        """
        out = self.model(
            input_ids=tokens, positions=positions, hidden_states=self.head_input(hidden)
        )
        return out if isinstance(out, tuple) else (out, out)

    def accepted_paths(self) -> dict[int, torch.Tensor]:
        """Local rows the step accepted, int32 [depth + 1], of each batch row that had a tree."""
        return {}

    def _note_kept_rows(
        self,
        input_batch: InputBatch,
        hidden_states: list[torch.Tensor],
        next_tokens: torch.Tensor,
        sampled: list[int],
        rejected: list[int],
    ) -> list[int]:
        """Put every row the target kept on the head's backlog, in path order.

        Returns:
            The number of tokens each request has in the caches.
        """
        slots, starts = input_batch.idx_mapping_np.tolist(), input_batch.num_computed_tokens_np
        rows, counts = self._kept_rows(input_batch, sampled, rejected)
        if input_batch.num_tokens == input_batch.num_reqs:  # a plain step: a row of each
            tokens, states = next_tokens, [own[: len(slots)].clone() for own in hidden_states]
        else:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self.device)
            tokens[:-1] = input_batch.input_ids[rows[1:]]
            last = np.cumsum(counts) - 1
            tokens[torch.from_numpy(last).to(tokens.device)] = next_tokens
            states = [own[rows] for own in hidden_states]
        hidden = states[0] if len(states) == 1 else torch.cat(states, dim=-1)
        lengths, end = [], 0
        for slot, start, count in zip(slots, starts.tolist(), counts, strict=True):
            own, end = slice(end, end + count), end + count
            self._state.backlog.add(slot, HeadRows(start, tokens[own], hidden[own]))
            lengths.append(start + count)
        return lengths

    def _kept_rows(
        self, input_batch: InputBatch, sampled: list[int], rejected: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Rows of the batch that stay, [n] int64 in path order, and how many each request has."""
        paths = self.accepted_paths()
        start = input_batch.query_start_loc_np.tolist()
        kept, counts = [], []
        for row in range(input_batch.num_reqs):
            if row in paths:
                rows = (start[row] + paths[row][: sampled[row]].long()).tolist()
            else:
                rows = list(range(start[row], start[row + 1] - rejected[row]))
            kept += rows
            counts.append(len(rows))
        return torch.tensor(kept, device=self.device), counts

    def _extend(
        self, input_batch: InputBatch, rows: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Run the head over the backlog of some of the batch's requests.

        Returns:
            What `compute_logits` takes and the head's features, [len(rows), H] each, at every
            request's last row; and the number of tokens each request has in the head's cache.
        """
        slots = input_batch.idx_mapping_np[rows].tolist()
        noted = [self._state.backlog.take(slot) for slot in slots]
        outs = self._run(input_batch.idx_mapping[rows], noted)
        hidden, features = (torch.stack([out[side][-1] for out in outs]) for side in (0, 1))
        return hidden, features, [piece.start + len(piece.tokens) for piece in noted]

    def _run(
        self, idx_mapping: torch.Tensor, pieces: list[HeadRows], part: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A part of the head over rows of some requests, in as many forwards as buffers need.

        Returns:
            For each piece what `compute_logits` takes and the head's features, [its rows, H] each.
        """
        done: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in pieces]
        left = list(enumerate(pieces))
        while left:
            now, left = self._fitting(left)
            of = torch.tensor([index for index, _ in now])
            sides = self._forward(idx_mapping[of], [piece for _, piece in now], part)
            counts = [len(piece.tokens) for _, piece in now]
            for (index, _), *out in zip(now, *(side.split(counts) for side in sides), strict=True):
                done[index].append((out[0], out[1]))
        return [outs[0] if len(outs) == 1 else _joined(outs) for outs in done]

    def _fitting(
        self, left: list[tuple[int, HeadRows]]
    ) -> tuple[list[tuple[int, HeadRows]], list[tuple[int, HeadRows]]]:
        """As many rows as buffers hold, and the rest."""
        room, now, later = self.max_num_tokens, [], []
        for index, piece in left:
            count = min(len(piece.tokens), room)
            room -= count
            if count:
                now.append((index, HeadRows(piece.start, *(side[:count] for side in piece[1:]))))
            if count < len(piece.tokens):
                rest = (side[count:] for side in piece[1:])
                later.append((index, HeadRows(piece.start + count, *rest)))
        return now, later

    def _forward(
        self, idx_mapping: torch.Tensor, pieces: list[HeadRows], part: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward over consecutive rows of some requests, n in all: two tensors [n, H]."""
        counts = [len(piece.tokens) for piece in pieces]
        ends = np.cumsum([0, *counts]).astype(np.int32)
        lengths = [piece.start + count for piece, count in zip(pieces, counts, strict=True)]
        total, num_reqs, buffers = int(ends[-1]), len(pieces), self.input_buffers
        buffers.query_start_loc[: num_reqs + 1].copy_(torch.from_numpy(ends))
        buffers.seq_lens[:num_reqs].copy_(torch.tensor(lengths))
        starts = np.asarray([piece.start for piece in pieces])
        positions = buffers.positions[:total]
        positions.copy_(torch.from_numpy(np.arange(total) + np.repeat(starts - ends[:-1], counts)))
        hidden = torch.cat([piece.hidden for piece in pieces])
        self.block_tables.gather_block_tables(idx_mapping, num_reqs_padded=num_reqs)
        slots = self.block_tables.compute_slot_mappings(
            idx_mapping, buffers.query_start_loc[: num_reqs + 1], positions, total
        )
        self.draft_max_seq_len = max(lengths)
        metadata = self._build_attn_metadata(
            num_reqs=num_reqs,
            batch_desc=BatchExecutionDescriptor(
                cg_mode=_NO_GRAPH, num_tokens=total, num_reqs=num_reqs, uniform_token_count=None
            ),
            query_start_loc_np=ends,
            seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
            step=0,
        )
        self._prepare_eplb_forward(total)
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=total,
            slot_mapping=build_slot_mappings_by_layer(slots, self.kv_cache_config),
        ):
            tokens = torch.cat([piece.tokens for piece in pieces]).int()
            return self.run_head(tokens, positions, hidden, part)


def _joined(
    outs: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, features = zip(*outs, strict=True)
    return torch.cat(hidden), torch.cat(features)
