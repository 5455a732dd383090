"""The state that the handlers of one endpoint share.

It holds the view of the jobs, their metrics, the requested operations, and the last ten minutes.

`Operations` runs requested operations that take long: savepoints, checkpoints and stops. Each
operation is one task, found by the id of its request. Repeating a request with the same id has no
effect.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import AioflowError, Broken
from aioflow.inspection.process import ProcessInspector
from aioflow.monitoring.calls import BadRequest, NotFound, Unavailable
from aioflow.monitoring.metric_index import MetricIndex
from aioflow.monitoring.prometheus import Exposition
from aioflow.monitoring.sampling import Sampler

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.monitoring.options import MonitorOptions
    from aioflow.monitoring.view import JobView, Monitored, WorkerView
    from aioflow.network.http_limits import Door

__all__ = ["Monitor", "Operation", "Operations", "check_request_id"]

RUNNING_MAX = 64
KEPT_MAX = 300
"""Maximum number of operations that are kept. The oldest finished ones are dropped first."""

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True)
class Operation:
    """A requested operation; `task` ends with its result or its error."""

    job_id: str
    kind: str
    request_id: str
    task: asyncio.Task[Any]


class Operations:
    """The requested operations of one endpoint, found by the ids of their requests."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], Operation] = {}

    def find(self, job_id: str, kind: str, request_id: str) -> Operation:
        """Returns a requested operation. Raises NotFound."""
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

        An AioflowError that `work` raises before it first waits is raised here, and the request is
        forgotten.
        """
        over = [key for key, operation in self._known.items() if operation.task.done()]
        if len(self._known) - len(over) >= RUNNING_MAX:
            work.close()
            raise Unavailable(f"{RUNNING_MAX} requests are under way already; wait for one of them")
        for key in over[: max(len(self._known) - KEPT_MAX + 1, 0)]:
            del self._known[key]
        task = asyncio.get_running_loop().create_task(work, name=f"{kind} {request_id[:8]}")
        task.add_done_callback(_retrieved)
        self._known[job_id, kind, request_id] = Operation(job_id, kind, request_id, task)
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
            [operation.task for operation in self._known.values() if not operation.task.done()]
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
        """Limit of the connections. None: the application is mounted in a server of the user."""
        self.streams = 0
        """Number of open streams of events."""
        self.sampler = Sampler(self)
        self.exposition = Exposition(self)
        self.operations = Operations()
        self.process = ProcessInspector(watched.host)
        """Inspector of this process."""
        self._metrics: dict[str, tuple[JobView, MetricIndex]] = {}

    def start(self) -> None:
        """Starts to read the metrics once a second."""
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
        """The name of the library of the running event loop, for example asyncio."""
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    def jobs(self) -> Sequence[JobView]:
        return self.watched.jobs()

    def job(self, job_id: str) -> JobView:
        """Returns the view of a job. Raises NotFound."""
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
        """Asks a process about itself (see `ProcessInspector.ask`). None is this process.

        Raises NotFound, Unavailable.
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
