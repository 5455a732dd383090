"""The last ten minutes of every metric, once a second, in memory: plots need no other system.

One time axis for all series; a series is a ring of doubles. A metric is NaN at moments when it did
not exist.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence

__all__ = ["POINTS_MAX", "SeriesBuffer"]

POINTS_MAX = 600
"""Ten minutes at one a second."""

SERIES_MAX = 2_000
"""About 10 MB.

A job with more metrics keeps the ones that came first.
"""


class SeriesBuffer:
    """The series of one job. Names: `vertex.subtask.metric` for tasks, plain for the whole job."""

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
        """Add the values of one moment."""
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
        """Times, oldest first, and for each known name its values then; None where it had no
        value.
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
