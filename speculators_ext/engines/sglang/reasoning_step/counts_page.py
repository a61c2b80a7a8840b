"""The counters of `reasoning_step` on SGLang's /metrics page.

SGLang's processes keep their metrics in files of a common folder, from which the page's process
sums them up (prometheus_client's multiprocess mode). Counters of the engine's process are on the
page as soon as they exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_observability

from speculators_ext.proposers.reasoning_step import COUNTER_MEANINGS, METRIC_PREFIX, StepCounters

if TYPE_CHECKING:
    from prometheus_client import Counter

__all__ = ["CountsPage"]


class CountsPage:
    """Shows an engine's counters where its server has a page (``--enable-metrics``)."""

    def __init__(self) -> None:
        self._shown = StepCounters().as_dict()
        self._counters: dict[str, Counter] = {}
        if get_observability().enable_metrics:
            # Where it is imported it decides by SGLang's environment where counters are kept.
            from prometheus_client import Counter

            self._counters = {
                name: Counter(METRIC_PREFIX + name, meaning)
                for name, meaning in COUNTER_MEANINGS.items()
            }

    def show(self, counters: StepCounters) -> None:
        """Totals since the engine's start."""
        if not self._counters:
            return
        counts = counters.as_dict()
        for name, counter in self._counters.items():
            if counts[name] != self._shown[name]:
                counter.inc(counts[name] - self._shown[name])
        self._shown = counts
