"""Reads all metrics once a second for the streams of events, and keeps the last ten minutes of
every metric in memory for plots.

All series have the same times. A series is a ring buffer of doubles. It holds NaN for times when
the metric did not exist.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import AioflowError
from aioflow.monitoring.rest_metrics import job_metrics

if TYPE_CHECKING:
    from aioflow.monitoring.monitor import Monitor
    from aioflow.monitoring.view import JobView

__all__ = ["Sampler", "POINTS_MAX", "SeriesBuffer"]

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


logger = logging.getLogger(__name__)

EVERY_S = 1.0


class Sampler:
    """The task that reads the metrics between `start` and `stop`. `tick` waits for the next
    reading.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._series: dict[str, SeriesBuffer] = {}
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[None] | None = None
        self.ticks = 0

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name="monitor sampling"
            )

    async def stop(self) -> None:
        """Stops the task, and ends streams that wait for the next reading."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait([task])
        if self._next is not None and not self._next.done():
            self._next.set_result(None)

    @property
    def runs(self) -> bool:
        return self._task is not None

    async def tick(self) -> None:
        """Waits for the next reading, or for the end of sampling."""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)

    def series(self, view: JobView) -> SeriesBuffer:
        """Returns the series of one job; empty before its first reading."""
        known = self._series.get(view.id)
        return known if known is not None else self._series.setdefault(view.id, SeriesBuffer())

    async def _run(self) -> None:
        while True:
            try:
                await self._monitor.watched.refresh()
            except (AioflowError, TimeoutError) as error:
                logger.debug("what is shown of the cluster is of a while ago: %r", error)
            except Exception:
                logger.exception(
                    "what is shown of the cluster could not be renewed; it is tried again in %g s",
                    EVERY_S,
                )
            try:
                self.sample()
            except Exception:
                logger.exception(
                    "the metrics could not be read; the next reading is in %g s", EVERY_S
                )
            await asyncio.sleep(EVERY_S)

    def sample(self) -> None:
        """Reads the metrics of all jobs once."""
        monitor = self._monitor
        now_ms = monitor.host.clock.wall_ms()
        views = monitor.jobs()
        for view in views:
            if view.status.is_terminal and view.id in self._series:
                continue  # The job has ended: keep its last ten minutes.
            names = view.vertex_ids
            values = {
                f"{names[vertex_id]}.{index}.{name}": value
                for (vertex_id, index), metrics in monitor.metrics(view).all().items()
                for name, value in metrics.items()
            }
            self.series(view).add(now_ms, {**job_metrics(view, now_ms), **values})
        shown = {view.id for view in views}
        self._series = {
            job_id: series for job_id, series in self._series.items() if job_id in shown
        }
        monitor.forget()
        self.ticks += 1
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
