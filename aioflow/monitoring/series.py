"""Keeps the last ten minutes of every metric in memory, one value a second, for plots.

All series have the same times. A series is a ring buffer of doubles. It holds NaN for times when
the metric did not exist.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence

__all__ = ["POINTS_MAX", "SeriesBuffer"]

POINTS_MAX = 600
"""Number of values in a series: ten minutes at one a second."""

SERIES_MAX = 2_000
"""Maximum number of series of a job, about 10 MB.

A job with more metrics keeps those that came first.
"""


class SeriesBuffer:
    """The series of one job. The names are `vertex.subtask.metric` for tasks, and `metric` for the
    whole job.
    """

    def __init__(self, points_max: int = POINTS_MAX, series_max: int = SERIES_MAX) -> None:
        self._points_max = points_max
        self._series_max = series_max
        self._times_ms: deque[int] = deque(maxlen=points_max)
        self._series: dict[str, array[float]] = {}
        self._next = 0

    @property
    def names(self) -> list[str]:
        return list(self._series)

    def add(self, now_ms: int, values: Mapping[str, float]) -> None:
        """Adds the values of all metrics that were read at `now_ms`."""
        column, series = self._next % self._points_max, self._series
        for name, value in values.items():
            ring = series.get(name)
            if ring is None:
                if len(series) >= self._series_max:
                    continue
                ring = series[name] = array("d", [math.nan]) * self._points_max
            ring[column] = value
        for name in series.keys() - values.keys():
            series[name][column] = math.nan
        self._times_ms.append(now_ms)
        self._next += 1

    def read(
        self, names: Sequence[str], since_ms: int = 0
    ) -> tuple[list[int], dict[str, list[float | None]]]:
        """Returns the times after `since_ms`, oldest first, and the values of each known metric.

        A value is None where the metric had no finite value.
        """
        times = list(self._times_ms)
        first = next((index for index, time in enumerate(times) if time > since_ms), len(times))
        begin = self._next - len(times)
        columns = [(begin + index) % self._points_max for index in range(first, len(times))]
        found: dict[str, list[float | None]] = {}
        for name in names:
            ring = self._series.get(name)
            if ring is not None:
                found[name] = [
                    value if math.isfinite(value := ring[column]) else None for column in columns
                ]
        return times[first:], found
