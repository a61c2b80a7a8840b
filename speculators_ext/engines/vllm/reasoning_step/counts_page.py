"""The counters of `reasoning_step` on the server's /metrics page.

Steps are judged in the engine's process and the page is served by another one. A small file lies
between them: a row of float64 a data-parallel engine of this machine, made where the configuration
is checked, which is the page's process. vLLM shows no such page of ours where it serves with
several API processes; the log's line has the same numbers.
"""

from __future__ import annotations

import atexit
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily

from speculators_ext.proposers.reasoning_step import COUNTER_MEANINGS, METRIC_PREFIX, StepCounters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

__all__ = ["CountsWriter", "make_counts_file"]

_NAMES = tuple(COUNTER_MEANINGS)


def make_counts_file(engines: int) -> str:
    """The path of a new file for so many engines, whose sums the page shows until we end."""
    with tempfile.NamedTemporaryFile(prefix="speculators_ext_", delete=False) as file:
        file.write(bytes(8 * len(_NAMES) * engines))
    path = Path(file.name)
    atexit.register(path.unlink, missing_ok=True)
    if not _PAGE.paths:
        REGISTRY.register(_PAGE)
    _PAGE.paths.append(path)
    return str(path)


class CountsWriter:
    """Keeps an engine's row up to date.

    Args:
        path: of `make_counts_file`.
        engine: its rank among the data-parallel ones.
    """

    def __init__(self, path: str, engine: int) -> None:
        table = np.memmap(path, dtype=np.float64, mode="r+").reshape(-1, len(_NAMES))
        self._row = table[engine]

    def write(self, counters: StepCounters) -> None:
        """Totals since the engine's start."""
        counts = counters.as_dict()
        self._row[:] = [counts[name] for name in _NAMES]


class _Page:
    """What prometheus_client asks for the page."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def collect(self) -> Iterator[Metric]:
        """The sums over all engines, of files that nobody has swept away."""
        sums = np.zeros(len(_NAMES))
        for path in self.paths:
            if path.is_file():
                sums += np.fromfile(path).reshape(-1, len(_NAMES)).sum(axis=0)
        for name, total in zip(_NAMES, sums.tolist(), strict=True):
            yield CounterMetricFamily(METRIC_PREFIX + name, COUNTER_MEANINGS[name], value=total)


_PAGE = _Page()
