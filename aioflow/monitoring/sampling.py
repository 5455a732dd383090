"""Reads all metrics once a second, for the plots and the streams of events."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import AioflowError
from aioflow.monitoring.rest_metrics import job_metrics
from aioflow.monitoring.series import SeriesBuffer

if TYPE_CHECKING:
    from aioflow.monitoring.monitor import Monitor
    from aioflow.monitoring.view import JobView

__all__ = ["Sampler"]

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
