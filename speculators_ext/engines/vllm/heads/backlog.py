"""Rows the target has kept and the head has not yet run over.

While drafting does not pay the head need not run at all; what it will need to catch up is noted
here, and costs little when it runs over many rows at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from speculators_ext.engines.vllm.request_options import with_request_options

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.model_states.interface import ModelState

__all__ = ["Backlog", "HeadRows", "with_backlog"]


class HeadRows(NamedTuple):
    """Consecutive rows of one request's head cache.

    Attributes:
        start: position of the first.
        tokens: int64 [n], the token *behind* each row, as EAGLE heads are fed.
        hidden: [n, H or layers * H], the target's hidden states at each row.
    """

    start: int
    tokens: torch.Tensor
    hidden: torch.Tensor


class Backlog:
    """Rows not yet run, by request slot."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[HeadRows]] = {}

    def add(self, slot: int, rows: HeadRows) -> None:
        """Note rows that follow those noted before."""
        pieces = self._pieces.setdefault(slot, [])
        if pieces and pieces[-1].start + len(pieces[-1].tokens) != rows.start:
            pieces.clear()  # the slot's request began anew
        pieces.append(rows)

    def size(self, slot: int) -> int:
        """Rows noted for a slot."""
        return sum(len(piece.tokens) for piece in self._pieces.get(slot, ()))

    def drop(self, slot: int) -> None:
        """Forget a slot whose request has left."""
        self._pieces.pop(slot, None)

    def take(self, slot: int) -> HeadRows:
        """All rows of a slot, which are then no longer noted."""
        pieces = self._pieces.pop(slot)
        if len(pieces) == 1:
            return pieces[0]
        return HeadRows(
            pieces[0].start,
            torch.cat([piece.tokens for piece in pieces]),
            torch.cat([piece.hidden for piece in pieces]),
        )


class _BacklogMixin:
    backlog: Backlog

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.backlog = Backlog()

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """A new owner of the slot: the head owes nothing to the last one."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        self.backlog.drop(req_index)


def with_backlog(state_cls: type[ModelState]) -> type[ModelState]:
    """A subclass of ``state_cls`` that keeps a head's backlog and each request's options."""
    if issubclass(state_cls, _BacklogMixin):
        return state_cls
    base = with_request_options(state_cls)
    return type(f"{state_cls.__name__}WithBacklog", (_BacklogMixin, base), {})
