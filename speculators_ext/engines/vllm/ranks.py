"""What changes launches is decided once: on tensor-parallel rank 0, and broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from vllm.distributed.parallel_state import get_tp_group

if TYPE_CHECKING:
    import torch

__all__ = ["decided_on_rank_0", "tensor_from_rank_0"]

T = TypeVar("T")


def decided_on_rank_0(decision: T) -> T:
    """Rank 0's value of a host decision (a depth, a skip set) on every rank."""
    group = get_tp_group()
    return decision if group.world_size == 1 else group.broadcast_object(decision, src=0)


def tensor_from_rank_0(decision: torch.Tensor) -> torch.Tensor:
    """Rank 0's tensor on every rank; all ranks pass the same shape and dtype."""
    group = get_tp_group()
    return decision if group.world_size == 1 else group.broadcast(decision.contiguous(), src=0)
