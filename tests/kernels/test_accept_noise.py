from __future__ import annotations

import pytest
import torch

from speculators_ext.kernels.accept_noise import seeded_uniform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_definition(seed: int, position: int, stream: int) -> float:
    """The same in Python's integers, which never wrap by themselves."""

    def mix(bits: int) -> int:
        bits = (bits + 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return bits ^ bits >> 31

    return (mix((mix((mix(seed % 2**64) + position) % 2**64) + stream) % 2**64) >> 40) / 2**24


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("stream", [0, 3])
def test_it_is_a_function_of_its_counter(seed: int, stream: int) -> None:
    """Catches a signed shift and a product that does not wrap, on any device: ranks must agree."""
    positions = torch.tensor([0, 1, 7, 100_000], device=DEVICE)
    seeds = torch.full_like(positions, seed)
    got = seeded_uniform(seeds, positions, stream)
    assert got.dtype == torch.float32
    assert got.tolist() == [by_definition(seed, p, stream) for p in positions.tolist()]


@pytest.mark.statistical
@pytest.mark.parametrize("axis", ["seeds", "positions", "streams"])
def test_neighbours_are_independent(axis: str) -> None:
    """Catches counters that are added up: seed 1 at position 2 would repeat seed 2 at position 1.

    100 cells of (number, its neighbour's): at most a chi-square's mean plus 5 deviations.
    """
    count = torch.arange(40_000)
    zero = torch.zeros_like(count)
    draw = {
        "seeds": lambda shift: seeded_uniform(count + shift, zero),
        "positions": lambda shift: seeded_uniform(zero, count + shift),
        "streams": lambda shift: seeded_uniform(zero, count, stream=shift),
    }[axis]
    cells = (draw(0) * 10).long() * 10 + (draw(1) * 10).long()
    seen = torch.bincount(cells, minlength=100).double()
    assert float(((seen - 400) ** 2 / 400).sum()) < 99 + 5 * 198**0.5
