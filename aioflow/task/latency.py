"""Latency markers: how long records take from a source to each operator.

A source sends a marker at each interval (`latency_tracking=`). A marker keeps its place among the
records of its channel and bypasses functions. Each task notes its age for all operators of its
chain. The task passes it on to one channel of each edge, in turn: else markers would multiply with
each exchange. The time that a record spends inside a window or an async call is not part of it.

Ages are differences of the wall clocks of two processes, and so only as right as those. After
Flink's LatencyMarker and LatencyStats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.elements import LatencyMarker

if TYPE_CHECKING:
    from aioflow.core.metrics import Histogram, MetricGroup

__all__ = ["LatencyEmitter", "LatencyStats"]


class LatencyStats:
    """A histogram of the ages of markers for each operator of a chain and each source.

    The worst p99 is a gauge of the task.
    """

    def __init__(
        self, task: MetricGroup, operators: Sequence[MetricGroup], now_ms: Callable[[], int]
    ) -> None:
        self._task = task
        self._operators = operators
        self._now_ms = now_ms
        self._histograms: dict[str, list[Histogram]] = {}

    def note(self, marker: LatencyMarker) -> None:
        """Notes the age of a marker that has come."""
        histograms = self._histograms.get(marker.source)
        if histograms is None:
            name = f"latency.{marker.source}"
            histograms = [metrics.histogram(name) for metrics in self._operators]
            if histograms and not self._histograms:
                self._task.gauge("latencyMsP99", self._p99)
            self._histograms[marker.source] = histograms
        age_ms = max(0, self._now_ms() - marker.emitted_ms)
        for histogram in histograms:
            histogram.update(age_ms)

    def _p99(self) -> float:
        return max(found[0].quantile(0.99) for found in self._histograms.values())


class LatencyEmitter:
    """Makes the markers of one source subtask, one at each interval.

    `schedule(timestamp_ms, callback)` registers a timer. `on_due()` is called for each marker.
    """

    def __init__(
        self,
        source: str,
        subtask: int,
        interval_ms: int,
        now_ms: Callable[[], int],
        schedule: Callable[[int, Callable[[int], None]], Any],
        on_due: Callable[[], None],
    ) -> None:
        self._source = source
        self._subtask = subtask
        self._interval_ms = interval_ms
        self._now_ms = now_ms
        self._schedule = schedule
        self._on_due = on_due
        self.due: LatencyMarker | None = None
        """The marker to be sent before the next records. Its age begins when it was due."""
        self._wait()

    def take(self) -> LatencyMarker:
        """Returns the marker that is due."""
        assert self.due is not None, "asked only for a marker that is due"
        marker, self.due = self.due, None
        return marker

    def _wait(self) -> None:
        self._schedule(self._now_ms() + self._interval_ms, self._on_time)

    def _on_time(self, _timestamp_ms: int) -> None:
        if self.due is None:
            self.due = LatencyMarker(self._now_ms(), self._source, self._subtask)
            self._on_due()
        self._wait()
