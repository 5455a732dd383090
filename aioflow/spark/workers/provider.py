"""Starts workers in Spark's executors, and runs their JobManager in this program.

Each worker is one Spark job with one task, in a separate thread and job group.

    requested --Spark starts the task, and the worker registers--> present
              --the job fails, or the worker does not register in time--> reported as failed
    present   --the worker is released, dies or is given up--> its job has ended

The ResourceManager alone decides which worker is started again, and when. Spark does not retry
these tasks, and an attempt that it starts anyway ends at once. A worker that is given up is ended
by cancelling its job group, so that it does not hold its core for ever.

The JobManager runs in a separate thread and event loop. Its workers end if they do not hear from it
for some seconds, and a program may block its own loop for longer. The JobManager exists only for
this run: no other JobManager competes for its lease, and its files are deleted at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from aioflow.checkpoint.lease import LeaseOptions
from aioflow.cluster.heartbeat import HeartbeatOptions
from aioflow.cluster.jobmanager import JobManager, JobManagerOptions
from aioflow.core.aio import cancel_and_wait, wait_all, wait_first
from aioflow.core.errors import Broken
from aioflow.core.system_host import SystemHost
from aioflow.network.security import SecuredHost
from aioflow.spark.failures import SparkError
from aioflow.spark.package import ship_aioflow
from aioflow.spark.workers.worker import LACKS, SERVED

if TYPE_CHECKING:
    from aioflow.cluster.gateways import WorkerProvider
    from aioflow.core.host import Host
    from aioflow.network.security import Security
    from aioflow.spark.bridge.session import SparkBridge
    from aioflow.spark.workers.worker import WorkerTask

__all__ = [
    "EXIT_S",
    "START_TIMEOUT_S",
    "START_TRIES",
    "EmbeddedJobManager",
    "SparkProvider",
]

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Maximum time from the submission of a worker's Spark job to its registration. A cluster may
have to start an executor first.
"""

START_TRIES = 3
"""Number of successive failed starts after which the cluster counts as unable to start a worker."""

EXIT_S = 5.0
"""Maximum time for a worker to end by itself before its Spark job is cancelled."""


class CannotStart(SparkError):
    """No worker can start on the executors of this session, and a retry would not help."""


@dataclass(slots=True, eq=False)
class _Worker:
    id: str
    failed: Callable[[], object]
    came: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    left: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class SparkProvider:
    """A `WorkerProvider` that starts workers as Spark jobs.

    The provider is made, started and closed on the program's loop. The ResourceManager calls it
    from its own loop. `make(worker_id)` makes the task of a worker. The future `ready` is done once
    `workers` workers have registered. It is also done if some have registered and the others cannot
    start. It fails if no worker can start.
    """

    def __init__(
        self, bridge: SparkBridge, make: Callable[[str], WorkerTask], *, workers: int, slots: int
    ) -> None:
        self.workers = workers
        self.slots = slots
        self._bridge = bridge
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._workers: dict[str, _Worker] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._failures = 0
        self._closing = False
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.last_error: Exception | None = None
        """Error of the last start of a worker; None if that start succeeded."""

    @property
    def present(self) -> list[str]:
        """Returns the ids of the workers that are registered."""
        return [
            worker.id
            for worker in self._workers.values()
            if worker.came.done() and not worker.left.done()
        ]

    # Called by the ResourceManager, on its loop.

    def start_workers(self, count: int, failed: Callable[[], object]) -> None:
        self._here(self._start, count, failed)

    def registered(self, worker_id: str) -> None:
        self._here(self._on_registered, worker_id)

    def lost(self, worker_id: str, reason: str) -> None:
        self._here(self._on_lost, worker_id)

    def _here(self, call: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):
            # The program's loop is closed, because it ended without closing the provider.
            self._loop.call_soon_threadsafe(call, *args)

    # On the loop of the program.

    def begin_closing(self) -> None:
        """Starts no further workers, and treats workers that end from now on as released."""
        self._closing = True

    async def close(self) -> None:
        """Waits for the released workers to end, and cancels the jobs of workers that remain."""
        self.begin_closing()
        for worker in self._workers.values():
            if not worker.left.done():
                worker.left.set_result(None)
        await wait_all(list(self._tasks), timeout_s=2 * EXIT_S)
        await cancel_and_wait(list(self._tasks))
        if not self.ready.done():
            self.ready.cancel()

    def _start(self, count: int, failed: Callable[[], object]) -> None:
        for _ in range(0 if self._closing else count):
            worker = _Worker(f"spark-{next(self._numbers)}", failed)
            self._workers[worker.id] = worker
            task = self._loop.create_task(self._follow(worker), name=f"worker {worker.id}")
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    def _on_registered(self, worker_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.came.done():
            return
        worker.came.set_result(None)
        self._failures, self.last_error = 0, None
        if len(self.present) >= self.workers and not self.ready.done():
            self.ready.set_result(None)

    def _on_lost(self, worker_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None and not worker.left.done():
            worker.left.set_result(None)

    async def _follow(self, worker: _Worker) -> None:
        """Follows one worker from the start of its Spark job to its end."""
        job = self._loop.create_task(self._hold(worker), name=f"spark job of {worker.id}")
        try:
            await wait_first([job, worker.came, worker.left], timeout_s=START_TIMEOUT_S)
            if worker.came.done() and not job.done():
                await wait_first([job, worker.left])
            if worker.came.done() and not job.done():
                await wait_first([job], timeout_s=EXIT_S)
        finally:
            del self._workers[worker.id]
            ended = job.done()
            if not ended:
                await cancel_and_wait([job])
        error = job.exception() if ended and not job.cancelled() else None
        if worker.came.done():
            logger.info(
                "worker %s has ended%s", worker.id, f": {error}" if error is not None else ""
            )
        elif not self._closing:
            self._did_not_start(worker, error or self._timed_out(worker))

    async def _hold(self, worker: _Worker) -> None:
        """Runs the Spark job of one worker. Raises SparkError if the job failed, or the worker
        could not serve.
        """
        session = await self._bridge.session()
        outcome, details = await self._bridge.job(
            partial(_hold_worker, session.sparkContext, self._make(worker.id))
        )
        if outcome == LACKS:
            raise CannotStart(
                f"a worker cannot start in Spark: {details}. aioflow itself is shipped; pip "
                "install the others there, or set "
                "PYSPARK_PYTHON to a Python that has them"
            )
        if outcome != SERVED:
            raise SparkError(
                f"Spark started the task of {worker.id} a second time by itself ({details}), and "
                "this attempt ended at once"
            )

    def _timed_out(self, worker: _Worker) -> SparkError:
        return SparkError(
            f"Spark at {self._bridge.master} did not start {worker.id} within {START_TIMEOUT_S:g} "
            f"s, {len(self.present)} of "
            f"{self.workers} workers are there: each holds a core for as long as the flow runs; "
            "are that many cores free, and do "
            f"executors reach {self._bridge.address}?"
        )

    def _did_not_start(self, worker: _Worker, error: BaseException) -> None:
        self._failures = START_TRIES if isinstance(error, CannotStart) else self._failures + 1
        self.last_error = (
            error
            if isinstance(error, Exception)
            else SparkError(f"{worker.id} did not start: {error!r}")
        )
        logger.warning("worker %s did not start: %s", worker.id, error)
        if not self.ready.done():
            if self.present and not isinstance(error, CannotStart):
                logger.warning(
                    "%d of %d workers are there: the flow goes on with these, at a smaller "
                    "parallelism if no other comes",
                    len(self.present),
                    self.workers,
                )
                self.ready.set_result(None)
            elif self._failures >= START_TRIES:
                self.ready.set_exception(self.last_error)
                self.ready.exception()  # Retrieved even if there is no waiter yet.
        with contextlib.suppress(RuntimeError):  # The ResourceManager's loop is closed.
            worker.failed()


def _hold_worker(context: Any, task: WorkerTask) -> tuple[str, str]:
    """Runs the Spark job of one worker, in a thread of the bridge, for as long as the worker
    lives.
    """
    ship_aioflow(context)
    (result,) = context.parallelize([task.worker_id], 1).mapPartitions(task).collect()
    return result  # type: ignore[no-any-return]  # PySpark's types say list[Any].


ALONE = LeaseOptions(lease_s=86_400.0, renew_s=3_600.0, stop_s=60.0)
"""Options of a lease that practically never expires, for a JobManager without other candidates."""


@dataclass(slots=True)
class _Running:
    loop: asyncio.AbstractEventLoop
    manager: JobManager
    address: tuple[str, int]


class EmbeddedJobManager:
    """An embedded JobManager, used as an async context manager.

    `address` is the address to which workers and clients connect.
    """

    def __init__(
        self,
        host: Host,
        secret: bytes,
        bind: str,
        security: Security,
        provider: WorkerProvider,
        *,
        request_timeout_s: float,
        silence_s: float,
    ) -> None:
        """Stores the arguments. A worker that is silent for longer than `silence_s` seconds counts
        as lost.
        """
        self._host = host
        self._secret = secret
        self._bind = bind
        self._security = security
        self._provider = provider
        self._request_timeout_s = request_timeout_s
        self._heartbeat = HeartbeatOptions(timeout_s=silence_s, suspicion_s=0.0)
        self._running: _Running | None = None
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Future[None] = self._loop.create_future()
        self._thread: asyncio.Future[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        assert self._running is not None, "it listens inside its async with"
        return self._running.address

    async def __aenter__(self) -> Self:
        self._thread = self._host.blocking(self._run, dedicated=True, name="aioflow-jobmanager")
        try:
            await wait_first([self._listening, self._thread])
        except asyncio.CancelledError:
            await self._end()
            raise
        if not self._listening.done():
            self._thread.result()
            raise Broken("the jobmanager of this program ended before it listened")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        error = await self._end()
        if error is not None:
            raise error

    async def _end(self) -> BaseException | None:
        """Stops the JobManager as soon as possible. Returns the error that ended the JobManager, or
        None.
        """
        assert self._thread is not None, "it is entered"
        await wait_first([self._listening, self._thread])
        if self._running is not None and not self._thread.done():
            with contextlib.suppress(RuntimeError):
                # The loop is closed, because the JobManager has just ended by itself.
                self._running.loop.call_soon_threadsafe(self._running.manager.stop)
        await wait_first([self._thread])
        return self._thread.exception()

    # In the thread.

    def _run(self) -> None:
        data = tempfile.mkdtemp(prefix="aioflow-spark-workers-")
        try:
            asyncio.run(self._live(data))
        finally:
            shutil.rmtree(data, ignore_errors=True)

    async def _live(self, data: str) -> None:
        host = SecuredHost(SystemHost(), self._security)
        options = JobManagerOptions(
            data=data,
            bind=self._bind,
            port=0,
            request_timeout_s=self._request_timeout_s,
            lease=ALONE,
            heartbeat=self._heartbeat,
        )

        def on_listening(bind: str, port: int) -> None:
            self._running = _Running(asyncio.get_running_loop(), manager, (bind, port))
            self._loop.call_soon_threadsafe(self._on_listening)

        manager = JobManager(host, self._secret, options, on_listening, self._provider)
        try:
            await manager.run()
        finally:
            await host.close()

    # On the loop of the program.

    def _on_listening(self) -> None:
        if not self._listening.done():
            self._listening.set_result(None)
