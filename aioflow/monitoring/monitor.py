"""The state that the handlers of one endpoint share, and `Call`, a request as handlers see it.

`Monitor` holds the view of the jobs, their metrics now and over the last ten minutes, and the
requested operations.

`Operations` runs requested operations that take long: savepoints, checkpoints and stops. Each
operation is one task, found by the id of its request. Repeating a request with the same id has no
effect.

`Sampler` reads all metrics once a second for the streams of events, and keeps the last ten minutes
of every metric in memory for plots. All series have the same times. A series is a ring buffer of
doubles. It holds NaN for times when the metric did not exist.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from array import array
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import AioflowError, Broken
from aioflow.inspection.process import ProcessInspector
from aioflow.monitoring.answers import BadRequest, Forbidden, NotFound, Unavailable
from aioflow.monitoring.metrics import MetricIndex, job_metrics
from aioflow.monitoring.prometheus import Exposition, Style

if TYPE_CHECKING:
    from aiohttp import web

    from aioflow.core.host import Host
    from aioflow.graph.job_graph import JobVertex
    from aioflow.monitoring.options import MonitorOptions
    from aioflow.monitoring.view import JobView, Monitored, WorkerView
    from aioflow.network.http_limits import Door

__all__ = [
    "POINTS_MAX",
    "Call",
    "Monitor",
    "Operations",
    "Sampler",
    "SeriesBuffer",
    "check_request_id",
]

RUNNING_MAX = 64
KEPT_MAX = 300
"""Maximum number of operations that are kept. The oldest finished operations are dropped first."""

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")


class Operations:
    """The requested operations of one endpoint, found by the ids of their requests."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], asyncio.Task[Any]] = {}

    def find(self, job_id: str, kind: str, request_id: str) -> asyncio.Task[Any]:
        """Returns the asyncio task of a requested operation. Raises NotFound if it is unknown."""
        operation = self._known.get((job_id, kind, request_id))
        if operation is None:
            raise NotFound(f"there is no {kind} request {request_id[:40]!r} of job {job_id[:40]}")
        return operation

    def known(self, job_id: str, kind: str, request_id: str) -> bool:
        return (job_id, kind, request_id) in self._known

    async def begin(
        self, job_id: str, kind: str, request_id: str, work: Coroutine[Any, Any, Any]
    ) -> None:
        """Starts `work` for a new request. Raises Unavailable if too many operations are under way.

        If `work` raises an AioflowError before it first waits, this call raises the error, and the
        request is forgotten.
        """
        over = [key for key, operation in self._known.items() if operation.done()]
        if len(self._known) - len(over) >= RUNNING_MAX:
            work.close()
            raise Unavailable(f"{RUNNING_MAX} requests are under way already; wait for one of them")
        for key in over[: max(len(self._known) - KEPT_MAX + 1, 0)]:
            del self._known[key]
        task = asyncio.get_running_loop().create_task(work, name=f"{kind} {request_id[:8]}")
        task.add_done_callback(_retrieved)
        self._known[job_id, kind, request_id] = task
        await asyncio.sleep(0)
        if (
            task.done()
            and not task.cancelled()
            and isinstance(error := task.exception(), AioflowError)
        ):
            self._known.pop((job_id, kind, request_id), None)
            raise error

    async def close(self) -> None:
        await cancel_and_wait(
            [operation for operation in self._known.values() if not operation.done()]
        )


def check_request_id(text: str) -> str:
    """Returns `text`. Raises BadRequest if a client's request id is not 32 hex digits."""
    if not _REQUEST_ID.fullmatch(text):
        raise BadRequest(f"triggerId is {text[:40]!r}, expected 32 hex digits, lower case")
    return text


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Marks the task's error as retrieved, because clients need not poll for it."""
    if not task.cancelled():
        task.exception()


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the endpoint: the parameters of its path, its query and its body.

    `body` is the decoded JSON of the request's body, or {} if there is none.
    """

    monitor: Monitor
    params: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, Any] = field(default_factory=dict)
    request: web.Request | None = None
    """Request of the client, for streaming answers. None if a test calls a handler directly."""

    @property
    def now_ms(self) -> int:
        return self.monitor.host.clock.wall_ms()

    @property
    def job(self) -> JobView:
        """The job that the path names. Raises NotFound if there is no such job."""
        return self.monitor.job(self.params["jobid"])

    @property
    def vertex(self) -> JobVertex:
        """The vertex that the path names. Raises NotFound if the job or the vertex is unknown."""
        job, vertex_id = self.job, self.params["vertexid"]
        vertex = job.vertex(vertex_id)
        if vertex is None:
            raise NotFound(
                f"job {job.id} has no vertex {vertex_id}; it has "
                f"{', '.join(job.vertex_ids.values())}"
            )
        return vertex

    @property
    def subtask(self) -> int:
        """The index of the subtask that the path names.

        Raises BadRequest if its index is not a number. Raises NotFound if the job, the vertex or
        the subtask is unknown.
        """
        vertex, index = self.vertex, self.number("subtaskindex")
        if index >= vertex.parallelism:
            raise NotFound(
                f"vertex {vertex.name!r} has no subtask {index}; it has {vertex.parallelism}, "
                "from 0"
            )
        return index

    @property
    def process(self) -> str | None:
        """Id of the process that the query names; None for the answering process."""
        return self.query.get("taskmanager") or None

    def number(self, name: str) -> int:
        """Returns the number in the path parameter `name`. Raises BadRequest for other text."""
        text = self.params[name]
        if not (text.isascii() and text.isdecimal()) or len(text) > 18:
            raise BadRequest(f"{name} is {text[:40]!r}, expected a number")
        return int(text)

    def wanted(self, name: str) -> list[str] | None:
        """Returns the items of the comma-separated query parameter `name`, None if missing."""
        text = self.query.get(name)
        return None if text is None else [part for part in text.split(",") if part]

    def require_data(self) -> None:
        """Raises Forbidden unless the caller may see records and state."""
        options = self.monitor.options
        given = None if self.request is None else self.request.headers.get("Authorization")
        if not options.show_data and not options.accepts(given):
            raise Forbidden(
                "records and state are shown with the token only, or to anybody where the "
                "endpoint has show_data=True"
            )

    def text(self, *names: str) -> str | None:
        """Returns the first of the body's fields `names` that is set; None if no field is set.

        Raises BadRequest if the value is not text.
        """
        for name in names:
            value = self.body.get(name)
            if value is not None:
                if not isinstance(value, str):
                    raise BadRequest(f"{name} is {value!r:.60}, expected text")
                return value
        return None

    def flag(self, name: str) -> bool:
        """Returns the boolean field `name` of the body; False if it is missing. Raises BadRequest
        for a value that is not a boolean.
        """
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"{name} is {value!r:.60}, expected true or false")
        return bool(value)


ASK_S = 30.0
"""Maximum time for another process to answer, in seconds. A flame graph takes ten seconds, and a
function may block the loop.
"""


class Monitor:
    """The state of one endpoint. All methods must be called on the event loop that serves the
    endpoint.
    """

    def __init__(self, watched: Monitored, options: MonitorOptions) -> None:
        self.watched = watched
        self.options = options
        self.cpu_count = os.cpu_count() or 1
        self.door: Door | None = None
        """Limits the number of connections. None if the application is mounted in a server of the
        user.
        """
        self.streams = 0
        """Number of open streams of events."""
        self.sampler = Sampler(self)
        self._pages: dict[Style, Exposition] = {}
        self.operations = Operations()
        self.process = ProcessInspector(watched.host)
        """Answers questions about this process, such as its threads."""
        self._metrics: dict[str, tuple[JobView, MetricIndex]] = {}

    def start(self) -> None:
        """Starts reading the metrics once a second."""
        self.sampler.start()
        self.process.start()

    async def close(self) -> None:
        """Stops the tasks of the endpoint."""
        await self.sampler.stop()
        await self.process.close()
        await self.operations.close()

    @property
    def host(self) -> Host:
        return self.watched.host

    @property
    def loop_name(self) -> str:
        """The name of the library that implements the running event loop, for example asyncio."""
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    def jobs(self) -> Sequence[JobView]:
        return self.watched.jobs()

    def job(self, job_id: str) -> JobView:
        """Returns the view of a job. Raises NotFound if no job has this id."""
        for view in self.watched.jobs():
            if view.id == job_id:
                return view
        raise NotFound(f"Job {job_id[:80]} not found")

    def workers(self) -> Sequence[WorkerView]:
        return self.watched.workers()

    def metrics(self, view: JobView) -> MetricIndex:
        """Returns the metrics of a job, by vertex and subtask."""
        known = self._metrics.get(view.id)
        if known is None or known[0] is not view:
            self.forget()
            known = self._metrics[view.id] = (
                view,
                MetricIndex(view.graph, view.read_metrics, self.host.clock.monotonic),
            )
        return known[1]

    def cluster_metrics(self) -> dict[str, float]:
        """Returns the metrics of the cluster, and of this process."""
        workers = self.workers()
        return {
            **self.watched.metrics(),
            "numRegisteredTaskManagers": len(workers),
            "numRunningJobs": sum(not view.status.is_terminal for view in self.jobs()),
            "taskSlotsAvailable": sum(worker.free_slots for worker in workers),
            "taskSlotsTotal": sum(worker.slots for worker in workers),
            **self.process.metrics(),
        }

    def worker_metrics(self) -> dict[str, Mapping[str, float]]:
        """Returns the metrics of each process that runs tasks, by its id, without the metrics of
        the tasks.
        """
        return {worker.id: self.watched.worker_metrics(worker.id) for worker in self.workers()}

    def page(self, style: Style = Style.PROMETHEUS) -> bytes:
        """Returns the page of all metrics for Prometheus."""
        if style not in self._pages:
            self._pages[style] = Exposition(self, style)
        return self._pages[style].page()

    def forget(self) -> None:
        """Drops the metrics of jobs that are no longer shown."""
        shown = {view.id for view in self.jobs()}
        self._metrics = {
            job_id: entry for job_id, entry in self._metrics.items() if job_id in shown
        }

    def expire(self) -> None:
        """Drops the cached readings, so that the next call reads again."""
        self._metrics.clear()

    async def ask(self, worker_id: str | None, what: str, *args: Any) -> Any:
        """Asks the process `worker_id` about itself, and returns the answer. None is this process.
        See `ProcessInspector.ask`.

        Raises NotFound for an unknown process, and Unavailable if the process cannot answer now.
        """
        worker = next((worker for worker in self.workers() if worker.id == worker_id), None)
        if worker_id is None or (worker is not None and worker.is_here):
            return await self.process.ask(what, *args)
        if worker is None:
            raise NotFound(f"no taskmanager {worker_id[:80]!r} is here; list them at /taskmanagers")
        try:
            async with asyncio.timeout(ASK_S):
                return await self.watched.ask_worker(worker_id, what, *args)
        except (TimeoutError, Broken) as error:
            raise Unavailable(
                f"taskmanager {worker_id} did not answer: {error or f'not within {ASK_S:g} s'}"
            ) from error

    async def ask_all(self, worker_ids: Iterable[str], what: str, *args: Any) -> list[Any]:
        """Asks several processes, and returns their answers in the order of their ids.

        Processes that cannot answer now are left out.
        """
        asked = [self.ask(worker_id, what, *args) for worker_id in sorted(worker_ids)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, NotFound | Unavailable):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]


POINTS_MAX = 600
"""Number of values in a series: ten minutes with one value a second."""

SERIES_MAX = 2_000
"""Maximum number of series of a job. They take about 10 MB.

If a job has more metrics, only the first metrics have series.
"""


class SeriesBuffer:
    """The series of one job, with the values of its metrics in the last ten minutes. A series is
    named `vertex.subtask.metric` for a task, and `metric` for the whole job.
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

        A value is None for times at which the metric had no finite value.
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
    """Reads the metrics of all jobs once a second, in an asyncio task that runs from `start` to
    `stop`. `tick` waits for the next reading.
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
        """Returns the series of one job. They are empty before the first reading of its metrics."""
        known = self._series.get(view.id)
        return known if known is not None else self._series.setdefault(view.id, SeriesBuffer())

    async def _run(self) -> None:
        while True:
            try:
                await self._monitor.watched.refresh()
            except (AioflowError, TimeoutError) as error:
                logger.debug(
                    "the view of the cluster is out of date, it could not be renewed: %r", error
                )
            except Exception:
                logger.exception(
                    "the view of the cluster could not be renewed; the next attempt is in %g s",
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
