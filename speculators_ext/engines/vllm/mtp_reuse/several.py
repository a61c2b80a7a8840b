"""Targets with several MTP modules: module m drafts m + 1 tokens ahead, with a cache of its own.

At row i module m takes the token m + 1 behind it and what module m - 1 made of row i (DeepSeek-V3,
arXiv 2412.19437, equations 21 to 23). A row whose token is not known yet waits, and is run with the
drafts in the meantime: so module m runs over its last m rows anew in every draft step. Behind the
last module's own draft it is fed its own output, as one module is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from speculators_ext.engines.vllm.mtp_reuse.chain_speculator import ChainReuseSpeculator
from speculators_ext.engines.vllm.mtp_reuse.chains import ChainSteps
from speculators_ext.proposers.head_rounds import HeadRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.worker.gpu.input_batch import InputBatch

__all__ = ["SeveralReuseSpeculator"]


class _Waiting(NamedTuple):
    """A row that the module before has made and whose token is not known.

    Attributes:
        owner: id of the request.
        position: of the row.
        hidden: [1, H].
    """

    owner: str
    position: int
    hidden: torch.Tensor


class SeveralReuseSpeculator(ChainReuseSpeculator):
    """Drafts chains with one module after another."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._waiting: dict[tuple[int, int], _Waiting] = {}  # by module and request slot

    def _follows_target(self, *args: Any) -> bool:
        return False

    def make_steps(
        self, idx_mapping: torch.Tensor, lengths: Sequence[int], *, gathered: bool
    ) -> ChainSteps:
        """One round of chains, the first steps of which are of the modules behind the first."""
        slots = idx_mapping.tolist()
        waiting = [
            [self._waiting.get((part, slot)) for part in range(1, self.module.count)]
            for slot in slots
        ]
        return _SeveralSteps(self, idx_mapping, lengths, waiting)

    def _extend(
        self, input_batch: InputBatch, rows: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The first module over the backlog, and each behind it over rows whose token is known."""
        slots = input_batch.idx_mapping_np[rows].tolist()
        noted = [self._state.backlog.take(slot) for slot in slots]
        outs = self._run(input_batch.idx_mapping[rows], noted)
        hidden, features = (torch.stack([out[side][-1] for out in outs]) for side in (0, 1))
        made = [HeadRows(n.start, n.tokens, o[1]) for n, o in zip(noted, outs, strict=True)]
        owners = [(slot, input_batch.req_ids[row]) for slot, row in zip(slots, rows, strict=True)]
        for part in range(1, self.module.count):
            made = self._settle(part, input_batch.idx_mapping[rows], owners, made)
        return hidden, features, [piece.start + len(piece.tokens) for piece in noted]

    def _settle(
        self,
        part: int,
        idx_mapping: torch.Tensor,
        owners: list[tuple[int, str]],
        made: list[HeadRows],
    ) -> list[HeadRows]:
        """Run a module over what the one before it made.

        Args:
            part: the module.
            idx_mapping: [R], slots of the requests.
            owners: [R], slot and id of each.
            made: [R], rows of the module before, and the tokens it was given with them.

        Returns:
            What this module made of them; fewer rows, as the last of each waits.
        """
        ready = []
        for (slot, owner), rows in zip(owners, made, strict=True):
            before = self._waiting.pop((part, slot), None)
            start, tokens, hidden = rows.start, rows.tokens[1:], rows.hidden
            if before is not None and before[:2] == (owner, start - 1):
                start, tokens = start - 1, rows.tokens
                hidden = torch.cat([before.hidden, hidden])
            if len(hidden):
                last = start + len(hidden) - 1
                self._waiting[part, slot] = _Waiting(owner, last, hidden[-1:])
            ready.append(HeadRows(start, tokens, hidden[:-1]))
        own = [index for index, rows in enumerate(ready) if len(rows.tokens)]
        outs = self._run(idx_mapping[own], [ready[index] for index in own], part) if own else []
        for index, (_, recycled) in zip(own, outs, strict=True):
            ready[index] = ready[index]._replace(hidden=recycled)
        return ready


class _SeveralSteps(ChainSteps):
    """As `ChainSteps`; the steps up to the last module's own run over rows that wait.

    Args:
        speculator: whose modules, buffers and block tables are used.
        idx_mapping: [R] int64, the requests' slots.
        lengths: [R], tokens each request has in the first module's cache.
        waiting: [R], of each the row that waits for each module behind the first, where one does.
    """

    def __init__(
        self,
        speculator: Any,
        idx_mapping: torch.Tensor,
        lengths: Sequence[int],
        waiting: list[list[_Waiting | None]],
    ) -> None:
        # The last module's rows wait for count - 1 tokens more than the first one's.
        super().__init__(
            speculator, idx_mapping, [length - speculator.module.count + 1 for length in lengths]
        )
        self._waits = waiting
        self._made: dict[int, torch.Tensor] = {}
        self._drafts: list[list[torch.Tensor]] = [[] for _ in lengths]

    def advance(
        self, rows: Sequence[int], tokens: torch.Tensor, features: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step over the drafts just chosen, of the next module while there is one."""
        part, of = step + 1, self._of
        if part >= of.module.count:
            return super().advance(rows, tokens, features, step)
        pieces = []
        for row, token in zip(rows, tokens.split(1), strict=True):
            self._drafts[row].append(token)
            pieces.append(self._unknown_rows(row, part))
        outs = of._run(self._idx_mapping[rows], pieces, part)
        for row, (_, made) in zip(rows, outs, strict=True):
            self._made[row] = made
        hidden, recycled = (torch.stack([out[side][-1] for out in outs]) for side in (0, 1))
        return hidden, recycled

    def _unknown_rows(self, row: int, part: int) -> HeadRows:
        """The rows of a request that a module has not been run over with their tokens.

        The first of them waits; the others were made by the module before, in this round.
        """
        waits, made = self._waits[row][part - 1], self._made.get(row)
        known = [side for side in (waits and waits.hidden, made) if side is not None]
        hidden = torch.cat(known)
        drafts = torch.cat(self._drafts[row])[-len(hidden) :]
        end = self._lengths[row] + self._of.module.count - 1
        return HeadRows(end - len(hidden), drafts, hidden)
