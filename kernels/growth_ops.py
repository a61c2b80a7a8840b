"""The steps of tree growth as a device runs them: kernels on GPUs, torch on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from speculators_ext.kernels.tree_build import expand_frontier
from speculators_ext.kernels.tree_build_ref import expand_frontier_ref, rerank_candidates_ref
from speculators_ext.kernels.tree_rerank import rerank_candidates

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from speculators_ext.kernels.tree_build_ref import Frontier, PaddedTree

__all__ = ["KERNELS", "REFERENCES", "GrowthOps", "growth_ops"]


class GrowthOps(NamedTuple):
    """Two functions of the arguments of ``expand_frontier`` and ``rerank_candidates``."""

    expand: Callable[..., Frontier]
    rerank: Callable[..., PaddedTree]


KERNELS = GrowthOps(expand_frontier, rerank_candidates)
REFERENCES = GrowthOps(expand_frontier_ref, rerank_candidates_ref)


def growth_ops(device: torch.device) -> GrowthOps:
    """The references on a CPU, where kernels run in Triton's interpreter only; else the kernels."""
    return REFERENCES if device.type == "cpu" else KERNELS
