"""Noise for acceptance: one uniform number a (seed, position, stream), the same on every rank.

A counter is mixed into random bits by integer arithmetic alone (SplitMix64's finaliser, Steele, Lea
and Flood, OOPSLA 2014), once for each of its three parts. So a number depends on nothing but its
counter: not on the batch, the device, or what was drawn before. In torch, on any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["seeded_uniform"]

_STEP = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def seeded_uniform(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2**-24.

    Nodes of one depth may share a number where each makes a draw of its own (``accept_tree``):
    give them their depth's position. Coins of siblings must differ: give each its row's number.

    Args:
        seeds: int64, a request's seed.
        positions: int64 of a shape that goes with it.
        stream: what tells draws at one position apart, such as coins and bonus tokens.

    Returns:
        float32 of the common shape.
    """
    bits = _mix(_mix(_mix(seeds.long()) + positions.long()) + stream)
    return ((bits >> 40) & (2**24 - 1)).to(torch.float32) * 2.0**-24


def _mix(bits: Tensor) -> Tensor:
    bits = bits + _STEP
    for shift, factor in _ROUNDS:
        bits = (bits ^ _shift_right(bits, shift)) * factor
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Shift as if unsigned: torch carries the sign along."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
