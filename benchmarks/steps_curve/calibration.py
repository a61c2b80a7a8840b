"""How lenient a judge's default threshold may be, on problems that the curve is not drawn on.

Each judge goes through its grid from strict to lenient and stops in front of the first threshold
that loses more than half a point of the plain target's accuracy; the last one before it is as
lenient as a default may be. To stop there, and not to take the most lenient one that happens to be
good, keeps luck with a few hundred problems out. What the defaults are, and why not all of them are
what is found here, stands beside them in `method_configs.py`.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from speculators_ext.assets.steps_world import draw_problem

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from speculators_ext.assets.steps_world import Problem

SEED = 11
OPERATIONS = (4, 5, 6)
MOST_LOST = 0.005
GRIDS = {
    "logprob": (-1.5, -2.0, -2.5, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -9.0),
    "score": (8.9, 8.85, 8.8, 8.75, 8.7, 8.6, 8.5, 8.0, 7.0, 5.0),
}
"""From strict to lenient."""


def calibration_problems(count: int, shown: Collection[Problem]) -> list[Problem]:
    """Problems that no model was trained on, all different and none of those in ``shown``."""
    rng = random.Random(SEED)
    found: list[Problem] = []
    used = set(shown)
    while len(found) < count:
        problem = draw_problem(rng, rng.choice(OPERATIONS), held_out=True)
        if problem not in used:
            used.add(problem)
            found.append(problem)
    return found


def most_lenient(accuracy: Mapping[float, float], plain: float) -> float | None:
    """The last of the thresholds (strict to lenient) before one that loses more than `MOST_LOST`
    against ``plain``; None where already the first one does.
    """
    chosen = None
    for threshold, right in accuracy.items():
        if plain - right > MOST_LOST + 1e-9:
            break
        chosen = threshold
    return chosen
