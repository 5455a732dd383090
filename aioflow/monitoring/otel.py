"""Exports all metrics of a job to OpenTelemetry (`pip install 'aioflow[otel]'`).

    export = OpenTelemetryExport()  # Uses the meter provider that the program has set.
    async with flow.run() as job, export.watching(job):
        ...

Metrics are read on the loop, once a second. The provider's metric readers have threads of their
own, and get the values that were read last. So the loop never waits for an exporter, and no other
thread accesses a task. The name of an instrument is a scope and Flink's name of the metric. It is
in lower case, as the SDK requires: flink.taskmanager.job.task.numrecordsin. A task's counts are
counters, and all other metrics are gauges. The attributes name the job, task and operator of a
value. NaN and infinities are left out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider

from aioflow.core.aio import cancel_and_wait
from aioflow.core.contexts import asynccontextmanager
from aioflow.core.system_host import SystemHost
from aioflow.monitoring.metrics import job_metrics, labels_of
from aioflow.monitoring.monitor import Monitor
from aioflow.monitoring.options import MonitorOptions
from aioflow.monitoring.view import monitored

__all__ = ["OpenTelemetryExport", "flush"]

logger = logging.getLogger(__name__)

EVERY_S = 1.0

NAME_CHARACTERS_MAX = 255

_UNFIT = re.compile(r"[^A-Za-z0-9_.\-/]")

_COUNTED = re.compile(
    r"(.*\.)?(num(records|laterecords|bytes|buffers|firedtimers)\w*(?<!persecond)"
    r"|accumulate\w+|slowcallbacks)"
)

Attributes = dict[str, str | int]
Reading = dict[str, list[Observation]]
"""The observations of one reading, by the name of their instrument."""


class OpenTelemetryExport:
    """Exports metrics of jobs through a meter provider.

    The instrument of a metric is made when the metric is first read. One export serves any number
    of jobs, on one loop.
    """

    def __init__(self, meter_provider: MeterProvider | None = None) -> None:
        """Makes the export. None means the meter provider that the program has set globally."""
        self._provider = meter_provider or get_meter_provider()
        self._meter = self._provider.get_meter("aioflow")
        self._known: set[str] = set()
        self._readings: dict[object, Reading] = {}
        """The last reading of each watched job or cluster. A new reading replaces it as a whole,
        because other threads use it.
        """

    @asynccontextmanager
    async def watching(self, job_or_cluster: Any) -> AsyncIterator[None]:
        """Exports the metrics of a job, or of all jobs of a JobManager, while the `async with`
        block lasts.

        The last values are flushed at the end.
        """
        monitor = Monitor(monitored(job_or_cluster), MonitorOptions())
        key = object()
        monitor.process.start()
        reading = asyncio.get_running_loop().create_task(
            self._keep_reading(key, monitor), name="metrics for OpenTelemetry"
        )
        try:
            yield
        finally:
            await cancel_and_wait([reading])
            try:
                monitor.expire()
                self._read(key, monitor)
                await flush(self._provider)
            finally:
                del self._readings[key]
                await monitor.close()

    async def _keep_reading(self, key: object, monitor: Monitor) -> None:
        while True:
            try:
                self._read(key, monitor)
            except Exception:
                logger.exception(
                    "the metrics could not be read; the next reading is in %g s", EVERY_S
                )
            await asyncio.sleep(EVERY_S)

    def _read(self, key: object, monitor: Monitor) -> None:
        reading: Reading = {}
        for scope, name, value, attributes in _values(monitor):
            if math.isfinite(value):
                instrument = _UNFIT.sub("_", f"{scope}.{name}".lower())[:NAME_CHARACTERS_MAX]
                reading.setdefault(instrument, []).append(Observation(value, attributes))
        self._readings = {**self._readings, key: reading}
        for name in [name for name in reading if name not in self._known]:
            self._known.add(name)
            make = (
                self._meter.create_observable_counter
                if _COUNTED.fullmatch(name)
                else self._meter.create_observable_gauge
            )
            make(name, callbacks=[partial(self._observe, name)])

    def _observe(self, name: str, options: CallbackOptions) -> Iterable[Observation]:
        """Returns the last values of the instrument `name`. A metric reader calls it in its own
        thread.
        """
        return [
            observation
            for reading in self._readings.values()
            for observation in reading.get(name, ())
        ]


async def flush(provider: Any) -> None:
    """Flushes a provider of the SDK. The call blocks, so it runs in a thread. The thread belongs to
    a new host, because the host of a job that has ended is closed already.
    """
    force_flush = getattr(provider, "force_flush", None)
    if force_flush is None:
        return
    host = SystemHost()
    try:
        await host.blocking(force_flush)
    finally:
        await host.close()


def _values(monitor: Monitor) -> Iterator[tuple[str, str, float, Attributes]]:
    """Yields the scope, the name, the value and the attributes of every metric."""
    now_ms = monitor.host.clock.wall_ms()
    yield from _all("flink.jobmanager", monitor.cluster_metrics(), {})
    for worker in monitor.workers():
        yield from _all(
            "flink.taskmanager", monitor.watched.worker_metrics(worker.id), {"tm_id": worker.id}
        )
    for view in monitor.jobs():
        job: Attributes = {"job_id": view.id, "job_name": view.name}
        yield from _all("flink.jobmanager.job", job_metrics(view, now_ms), job)
        index = monitor.metrics(view)
        for (vertex_id, subtask), metrics in index.all().items():
            vertex = view.graph.vertex(vertex_id)
            task: Attributes = {
                **job,
                "task_id": view.vertex_ids[vertex_id],
                "task_name": vertex.name,
                "subtask_index": subtask,
            }
            for name, value in metrics.items():
                operator, metric = index.operator_of(vertex_id, name)
                more, metric = labels_of(metric)
                if operator:
                    yield (
                        "flink.taskmanager.job.task.operator",
                        metric,
                        value,
                        {**task, "operator_name": operator, **more},
                    )
                    continue
                yield "flink.taskmanager.job.task", metric, value, {**task, **more}


def _all(
    scope: str, metrics: Mapping[str, float], attributes: Attributes
) -> Iterator[tuple[str, str, float, Attributes]]:
    for name, value in metrics.items():
        yield scope, name, value, attributes
