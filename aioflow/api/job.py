"""The handle of a running job: its state, its end, and ways to communicate with it while it
runs.

`flow.run()` returns an `Entering`: a run that begins when `async with` enters it. Any other use of
an `Entering` raises an error that shows the right use.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Never, TypeVar

from aioflow.advice.hints import explained_methods, no_such_method
from aioflow.api.checkpoint_options import shown_path, store_url
from aioflow.api.job_streams import JobStreams
from aioflow.api.subscription import StateReader, Subscription
from aioflow.cluster.autoscaler import Autoscaler, LoadWindow, load_of
from aioflow.cluster.collector import collector_of_process
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.local import LocalCluster
from aioflow.core.aio import THREADSAFE, cancel_and_wait, close_within, wait_first
from aioflow.core.contexts import asynccontextmanager
from aioflow.core.errors import (
    AioflowError,
    CheckpointError,
    JobCanceled,
    JobFailed,
    describe_record,
)
from aioflow.core.system_host import SystemHost
from aioflow.core.timeunits import to_seconds
from aioflow.core.user_code import fold_traceback
from aioflow.graph.deployment import ExecutionState
from aioflow.io.memory import FunctionSource
from aioflow.io.pushing import PushInlet

if TYPE_CHECKING:
    from aioflow.api.options import RunOptions
    from aioflow.api.streams import DataStream
    from aioflow.cluster.gateways import RunningJob
    from aioflow.core.host import Host
    from aioflow.core.scope import TapPlace
    from aioflow.graph.job_graph import JobGraph, JobVertex
    from aioflow.graph.stream_graph import StreamGraph
    from aioflow.monitoring.view import Monitored

__all__ = ["Entering", "Job", "JobResult"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

WITHOUT_ASYNC = (
    "is entered by `async with flow.run() as job`, in an `async def`; a program without a loop of "
    "its own calls af.run(flow)"
)
AWAITED = (
    "is entered, not awaited: `async with flow.run() as job`; to wait for the end of the flow "
    "`await flow.execute()`"
)
NO_JOB = (
    "has no attribute {name!r}: it is no job before it is entered; write `async with flow.run() "
    "as job:` and job.{name} in its block, or `await flow.execute()`, which runs to the end"
)
NEVER_ENTERED = (
    "was never entered, so nothing ran: `async with flow.run() as job`, or `await flow.execute()`"
)

CANCEL_TIMEOUT_S = 60.0
"""Maximum time that leaving the block waits for the job to end, beyond `stop_timeout`. Tasks need
less time to close.
"""


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job that has ended.

    `duration_ms` is the wall-clock time from the job's creation to its end. `startup_ms` is the
    part of this time before all operators were open. `restarts` counts failovers. `savepoint` is
    the path of the savepoint with which the job was stopped, or None.
    """

    job_id: str
    name: str
    status: str
    duration_ms: int
    restarts: int
    metrics: dict[str, float] = field(repr=False)
    startup_ms: int = field(default=0, repr=False)
    savepoint: str | None = field(default=None, repr=False)


@explained_methods
class Job:
    """A started job. All methods must be called on the loop that runs it."""

    def __init__(self, graph: StreamGraph, job_graph: JobGraph, options: RunOptions) -> None:
        self._opened_ms = 0
        """Wall-clock time at which all operators were open."""
        self._job_graph = job_graph
        self._streams = JobStreams(graph, job_graph, options.subscribe)
        self._options = options
        self._own_host = options.host is None
        self._host = SystemHost() if options.host is None else options.host
        self._cluster = _cluster(self._host, job_graph, options)
        self._runner: asyncio.Task[JobStatus] | None = None
        self._end_callbacks: list[Callable[[], None]] = []
        self.monitor_url: str | None = None
        """URL of the dashboard, None without `monitor=`."""
        self._stop_asked = False
        self._gathering: dict[tuple[TapPlace, ...], Subscription[Any]] = {}
        self._result: JobResult | None = None
        self._told_of_uids = False
        self._awaited = 0
        """Number of calls that wait for the end of the job, and raise its error if it fails."""
        self._loop = asyncio.get_running_loop()
        self.entered: object = None
        """The `Entering` that was entered. The reference keeps the `Entering` alive in a notebook,
        where no variable may refer to it. Its deletion would cancel the job.
        """

    def _repr_html_(self) -> str:
        """Shows status and numbers of the job at this moment in a notebook."""
        from aioflow.api.drawing import show_job

        return show_job(repr(self), self._job_graph, self.metrics(), self.monitor_url)

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.id[:8]}, {self.status.value})"

    @property
    def id(self) -> str:
        """Id of the job: 32 hex digits, new for each run."""
        return self._cluster.job_id

    @property
    def name(self) -> str:
        """Name of the flow."""
        return self._job_graph.name

    @property
    def status(self) -> JobStatus:
        """Status of the job: an `af.JobStatus`, a string such as RUNNING, FINISHED or FAILED."""
        return self._cluster.job_master.status

    @property
    def graph(self) -> JobGraph:
        """The graph of tasks that the job runs now."""
        return self._cluster.job_master.executions.graph

    def monitored(self) -> Monitored:
        """Returns the view of the job for `af.monitor_app(job)`."""
        from aioflow.monitoring.view import MonitoredJob  # Imports what only an endpoint needs.

        return MonitoredJob(self._cluster, str(self._options.state))

    def unready_reasons(self, *, intervals: int = 5) -> list[str]:
        """Returns why the job is not ready; an empty list if it is.

        A job is ready if its status and all its tasks are RUNNING, and a checkpoint completed
        within the last `intervals` checkpoint intervals (at least 30 s). `/readyz` of the
        monitoring endpoint answers with the same reasons.
        """
        from aioflow.monitoring.rest_probes import unready_reasons

        watched = self.monitored()
        (view,) = watched.jobs()
        return unready_reasons(view, watched.host.clock.wall_ms(), intervals)

    # The life of the job, driven by Flow.run.

    @asynccontextmanager
    async def monitoring(self) -> AsyncIterator[None]:
        """Serves the monitoring endpoint inside the block if `monitor=` was given.

        The endpoint is available before the first task starts. Raises OSError if it cannot listen.
        """
        if self._options.monitor is None:
            yield
            return
        from aioflow.monitoring.app import serving

        async with serving(self, self._options.monitor, self._options.monitor_options) as url:
            self.monitor_url = url
            yield

    async def start(self) -> None:
        """Deploys the job, and waits until every operator is open. Raises the error of an operator
        that failed to open.
        """
        for stream in self._options.subscribe:
            key = self._streams.places(stream)
            self._gathering[key] = Subscription(
                self._cluster.task_executor, self.id, key, buffer=None, overflow="error"
            )
        # Closes the inlets before `_run` ends: while workers and checkpoints close, `put` would
        # accept elements that are never read.
        self._cluster.job_master.terminated.add_done_callback(lambda _: self._close_inlets())
        self._runner = asyncio.get_running_loop().create_task(self._run(), name=f"job {self.name}")
        started = self._cluster.job_master.started
        try:
            await wait_first([self._runner, started])
        except BaseException:
            await self.abort()
            raise
        self._opened_ms = self._host.clock.wall_ms()
        if not started.done() or self.status is JobStatus.FAILED:
            await self._ended()
            self._raise_error()

    async def _run(self) -> JobStatus:
        create_task = asyncio.get_running_loop().create_task
        helpers = []
        if isinstance(self._options.workers, Autoscaler):
            work = self._autoscale(self._options.workers)
            helpers.append(create_task(work, name=f"scale {self.name}"))
        collector = collector_of_process()
        if collector is not None:
            helpers.append(create_task(collector.collect(), name="collect garbage"))
        try:
            return await self._cluster.run()
        finally:
            await cancel_and_wait(helpers)
            self._close_inlets()
            for _, inlet in self._streams.inlets():
                await inlet.close_journal()
            for callback in self._end_callbacks:
                callback()
            if self._own_host:
                await self._host.close()

    def _close_inlets(self) -> None:
        over = self._described()
        for name, inlet in self._streams.inlets():
            inlet.end(f"{over}: nothing can be put into {name!r} any more")

    def _described(self) -> str:
        error = self._cluster.job_master.error
        has_error = error is not None and self.status is JobStatus.FAILED
        why = f" with {describe_record(error)}" if has_error else ""
        return f"job {self.name!r} ({self.id}) is {self.status.value}{why}"

    def log_failure(self) -> None:
        """Logs the failure of the job, unless a `wait` or the end of a block is about to raise
        it."""
        error = self._cluster.job_master.error
        if self.status is JobStatus.FAILED and error is not None and not self._awaited:
            logger.error(
                "%s and does not restart; calls of its handle raise, and so does leaving the "
                "block of flow.run()",
                self._described(),
                exc_info=fold_traceback(error),
            )

    async def leave(self) -> None:
        """Ends the job when `async with flow.run()` is left normally. Raises the error of a failed
        job.

        The error is raised even if `wait()`, `stop()` or a subscription has already raised it: a
        subscriber that handles the error must not hide it from the rest of the program.
        """
        self._awaited += 1
        if not self.status.is_terminal and not self._job_graph.bounded:
            cut_off = self._functions_cut_off()
            try:
                # If this call is cancelled, the job still ends before it returns, because nothing
                # may outlive the block. `stop` limits its own time.
                await close_within(
                    self.stop(),
                    self._options.stop_timeout_s + CANCEL_TIMEOUT_S,
                    what=f"job {self.name}",
                )
            finally:
                self._warn_of_cut_off(cut_off)
        await self._ended()
        self.raise_failure()

    def _functions_cut_off(self) -> list[JobVertex]:
        """Returns the vertices of source functions that have not ended, and that a later run cannot
        continue.

        The job cannot know whether a function ever ends. So its source counts as endless and is
        stopped.
        """
        executions = self._cluster.job_master.executions.executions
        resumed = self._options.checkpoints is not None
        return [
            vertex
            for vertex in self._job_graph.vertices
            if isinstance(source := vertex.head.source, FunctionSource)
            and not (resumed and source.replayable)
            and executions[vertex.id, 0].state is not ExecutionState.FINISHED
        ]

    def _warn_of_cut_off(self, vertices: list[JobVertex]) -> None:
        metrics = self.metrics() if vertices else {}
        for vertex in vertices:
            read = metrics.get(f"{vertex.metrics_name(0)}.numRecordsIn", 0)
            logger.warning(
                "job %s: the block of flow.run() was left before source function %r had ended: it "
                "was stopped after %d elements, "
                "as an endless one; to read it to its end, `await job.wait()` in the block, or "
                "`await flow.execute()`; "
                "where a stop is meant, `await job.stop()` says so",
                self.name,
                vertex.head.name,
                read,
            )

    async def abort(self) -> None:
        """Cancels the job, and waits until everything is released.

        Used when an exception leaves `async with flow.run()`. The caller raises that exception. If
        that exception is a JobNotRunning because the job failed, the caller raises the job's own
        error instead.
        """
        self._cluster.job_master.cancel()
        await self._ended()

    async def _ended(self) -> None:
        """Waits for the runner, however it ends.

        Cancelling this call cancels the job, but the call still waits for the end of the job.
        """
        assert self._runner is not None
        cancelled: asyncio.CancelledError | None = None
        while not self._runner.done():
            try:
                await wait_first([self._runner])
            except asyncio.CancelledError as caught:
                cancelled = caught
                self._cluster.job_master.cancel()
        if cancelled is not None:
            _ = self._runner.cancelled() or self._runner.exception()  # The cancellation wins.
            raise cancelled
        if not self._runner.cancelled() and (error := self._runner.exception()) is not None:
            raise fold_traceback(error)

    def raise_failure(self) -> None:
        """Raises the error of the job if it has failed."""
        if self.status is JobStatus.FAILED:
            self._raise_error()

    def _raise_error(self) -> None:
        error = self._cluster.job_master.error
        if error is None:
            raise JobFailed(f"job {self.name!r} ({self.id}) failed")
        raise fold_traceback(error)

    # For users.

    async def wait(self) -> JobResult:
        """Waits for the end of the job, and returns its result.

        Raises the job's own error if it failed, JobCanceled if it was cancelled. Cancelling this
        call cancels only the wait.
        """
        self._check_loop("wait()")
        assert self._runner is not None
        self._awaited += 1
        try:
            await wait_first([self._runner])
        finally:
            self._awaited -= 1
        self.raise_failure()
        if self.status is JobStatus.CANCELED:
            raise JobCanceled(
                f"job {self.name!r} ({self.id}) was cancelled while its result was awaited"
            )
        await self._ended()
        if self._result is None:  # Made once, because rates go on falling after the end.
            self._result = self._sum_up()
        return self._result

    async def cancel(self) -> None:
        """Cancels the job, and waits until its tasks have ended.

        Does nothing if the job is over.
        """
        self._check_loop("cancel()")
        self._cluster.job_master.cancel()
        await self._ended()

    async def stop(
        self, savepoint: str | PathLike[str] | Literal[False] | None = None, drain: bool = False
    ) -> str | None:
        """Stops the job gracefully: ends its sources, and processes everything that they have
        emitted.

        After `stop_timeout` the job is cancelled. With checkpoints the job ends with a savepoint,
        and this call returns its path. The savepoint lies under the store, or below the directory
        `savepoint`. With `savepoint=False` none is taken, and a later run continues from the last
        checkpoint. Returns None if there is no savepoint: without checkpoints, or if `stop_timeout`
        expired first, which is logged as a warning.

        With `drain`, event time ends too: open windows fire and functions finish. Closing the
        operators may take 30 s more, also after a cancellation. Raises CheckpointError if the
        savepoint cannot be stored, and the job's own error if it failed meanwhile.
        """
        self._check_loop("stop()")
        assert self._runner is not None
        directory = self._directory(savepoint, "savepoint") if savepoint else None
        if savepoint is not False:
            self._warn_of_derived_uids()
        self._cluster.job_master.stop(
            drain=drain, savepoint=savepoint is not False, directory=directory
        )
        refused = self._cluster.job_master.stop_refused
        await wait_first([self._runner, refused], timeout_s=self._options.stop_timeout_s)
        if refused.done() and not self._runner.done():
            await refused
        if not self._runner.done():
            kept = (
                ""
                if self._cluster.job_master.stopped_with is None
                else ", though its savepoint is complete"
            )
            logger.warning(
                "job %s did not stop within %s%s, it is cancelled",
                self.name,
                self._options.stop_timeout,
                kept,
            )
            self._cluster.job_master.cancel()
        await self._ended()
        if self._cluster.job_master.stop_error is not None:
            raise self._cluster.job_master.stop_error
        if self._options.checkpoints is not None:
            self.raise_failure()
        return self._stopped_with()

    async def savepoint(
        self,
        directory: str | PathLike[str] | None = None,
        *,
        path: str | PathLike[str] | None = None,
    ) -> str:
        """Takes a savepoint while the job goes on, and returns its path.

        The savepoint holds every element that `put` had accepted before the call. To this end, the
        push sources first read these elements, for at most the `timeout` of checkpoints. The engine
        never deletes a savepoint. The savepoint gets a new directory under the store, or below
        `directory`, a path or URL. `path` is another name of `directory`; the returned path lies
        below it. Raises CheckpointError if the savepoint fails, and JobNotRunning if the job ends
        first.
        """
        self._check_loop("savepoint()")
        if directory is not None and path is not None:
            raise TypeError(
                "savepoint() got both directory= and path=, which are two names of one thing"
            )
        directory = path if directory is None else directory
        where = None if directory is None else self._directory(directory, "directory")
        self._warn_of_derived_uids()
        await self._inputs_read()
        return shown_path(await self._cluster.job_master.savepoint(where))

    async def savepoints(self) -> list[str]:
        """Returns the paths of the savepoints of this flow that are under the store, oldest
        first.
        """
        return [shown_path(url) for url in await self._cluster.job_master.savepoints()]

    async def checkpoint(self) -> int:
        """Takes a checkpoint now, and waits until it is completed.

        Returns the number of this checkpoint, or of a newer checkpoint that completed first. Raises
        the same errors as `savepoint`.
        """
        self._check_loop("checkpoint()")
        return await self._cluster.job_master.checkpoint()

    async def rescale(
        self,
        operator: DataStream[Any] | str | None = None,
        parallelism: int | None = None,
        *,
        workers: int | None = None,
    ) -> None:
        """Changes the parallelism of the running job, and returns once all new tasks run.

        `rescale(parallelism=4)` replaces the parallelism of the flow. Operators with a parallelism
        of their own keep theirs. `rescale("uid", 4)` changes the task that contains an operator,
        given by its uid or its output stream. `rescale(workers=4)` is for a job with `workers=N`.
        The parallelism of the flow then changes in the same ratio, up to `max_parallelism`, unless
        `parallelism` is given too.

        The job keeps its id, its handle and its subscriptions. The tasks stop at a checkpoint and
        go on from there, so no element is lost or processed twice. Sources are paused from the
        barrier of that checkpoint until the new tasks run. Raises GraphError for a parallelism
        above `max_parallelism` or an unknown uid, RescaleError if the job cannot be rescaled now,
        and JobNotRunning if it has ended. Cancelling this call does not stop the rescaling.
        """
        self._check_loop("rescale()")
        if operator is None and parallelism is None and workers is None:
            raise TypeError(
                "rescale() needs parallelism=, or a uid and its parallelism, or workers="
            )
        of_operators: dict[str, int] = {}
        if operator is not None:
            if parallelism is None:
                if isinstance(operator, int):
                    raise TypeError(
                        f"rescale({operator!r}) names no operator: for the parallelism of the flow "
                        f"write rescale(parallelism={operator!r})"
                    )
                raise TypeError(f"rescale({operator!r}) needs the parallelism of that operator too")
            of_operators[self._streams.uid_of(operator)], parallelism = parallelism, None
        await self._cluster.rescale(parallelism, of_operators, workers)

    async def _autoscale(self, options: Autoscaler) -> None:
        """Rescales the job as its load requires, until cancelled."""
        window, before = LoadWindow(options), options.min
        while True:
            await asyncio.sleep(options.sample_s)
            workers = self._cluster.worker_count
            if self.status is not JobStatus.RUNNING or workers != before:
                window.forget()
                before = workers
                continue
            load = load_of(self.graph, self._cluster.metrics(), workers)
            wanted = window.observe(workers, load)
            if wanted is None:
                continue
            logger.info("job %s goes on with %d workers instead of %d", self.name, wanted, workers)
            try:
                await self._cluster.rescale(None, {}, wanted)
                before = wanted
            except AioflowError as error:
                logger.warning("job %s still has %d workers: %s", self.name, workers, error)

    async def _inputs_read(self) -> None:
        """Waits until the push sources have read all elements that were put before this call.

        A barrier that begins afterwards follows these elements. If the wait exceeds the `timeout`
        of checkpoints, logs a warning and returns.
        """
        name = ""
        try:
            async with asyncio.timeout(to_seconds(self._options.timeout, "timeout")):
                for name, inlet in self._streams.inlets():  # noqa: B007  # The warning names it.
                    await inlet.caught_up()
        except TimeoutError:
            logger.warning(
                "the savepoint of job %s lacks the last elements that were put into %r: they were "
                "not read within timeout=%r, because the flow is slower than its input; wait with "
                "put(durable=True), or give a longer timeout=",
                self.name,
                name,
                self._options.timeout,
            )

    def _warn_of_derived_uids(self) -> None:
        """Warns, once in a job, of operators whose state is stored under a derived uid.

        State in a savepoint is found by uid, and a derived uid may change with the graph.
        """
        if self._told_of_uids or self._options.checkpoints is None or self.status.is_terminal:
            return
        self._told_of_uids = True
        names = self._streams.with_derived_uids()
        if names:
            logger.warning(
                "the savepoint of job %s keeps the state of %s under uids derived from the graph: "
                "once the flow changes before them it may "
                "not be found again; give them uid=",
                self.name,
                ", ".join(names),
            )

    def _directory(self, given: str | PathLike[str], option: str) -> str:
        if self._options.checkpoints is None:
            raise CheckpointError(
                f"job {self.name!r} has no checkpoints, so no savepoint can be made of it: run it "
                "with checkpoints=URL"
            )
        return store_url(given, option)

    def metrics(self) -> dict[str, float]:
        """Returns all metrics now, by dotted name: task, operator, metric."""
        return dict(self._cluster.metrics())

    def subscribe(
        self, stream: DataStream[T], buffer: int = 1000, overflow: str = "drop_oldest"
    ) -> Subscription[T]:
        """Returns a subscription to the elements of `stream` from now on.

        Use it as `async with job.subscribe(s) as rows: async for row in rows`. A slow reader never
        slows the job down. When `buffer` rows wait, `overflow` drops the oldest or the newest
        (counted in `rows.dropped`), or ends the subscription with an error. After a restart the
        subscription may repeat the rows since the last checkpoint.

        Sources that produce columns read only the fields that the flow uses. So this raises
        GraphError for such a stream, unless `run(subscribe=[stream])` announced the subscription.
        """
        self._check_loop("subscribe()")
        key = self._streams.places(stream)
        if buffer is None:
            raise ValueError(
                "buffer must be at least 1 row, got None: a reader that fell behind would fill "
                "the memory"
            )
        gathered = self._gathering.pop(key, None)
        if gathered is not None:
            gathered.bound(buffer, overflow)
            return self._attach(gathered)
        self._streams.check_whole(stream, key)
        return self._attach(
            Subscription(
                self._cluster.task_executor, self.id, key, buffer=buffer, overflow=overflow
            )
        )

    def _attach(self, subscription: Subscription[T]) -> Subscription[T]:
        subscription.of_job(self)
        self._end_callbacks.append(subscription.wake)
        return subscription

    def detach(self, subscription: Subscription[Any]) -> None:
        """Stops notifying a closed subscription."""
        if subscription.wake in self._end_callbacks:
            self._end_callbacks.remove(subscription.wake)

    def state(self, stream: DataStream[Any] | str) -> StateReader:
        """Returns a reader of an operator's keyed state. `stream` is the operator's output or its
        uid.

        The reader's methods `get(key)` and `items()` read the state while the job runs. The state
        of windows cannot be read; subscribe to the results of the windows instead.
        """
        self._check_loop("state()")
        if isinstance(stream, str):
            node_id = self._streams.node_with_uid(stream)
        else:
            node_id = self._streams.one_node(
                stream, "has no state of its own: read that of an operator before or behind it"
            )
        return StateReader(self._cluster, self._job_graph, node_id)

    def input(self, stream: DataStream[T]) -> PushInlet[T]:
        """Returns the inlet of a stream that begins at `af.io.push()`.

        Use it as `await job.input(events).put(event)`, which waits under back pressure. Accepted
        elements are replayed after a restart of the job. Elements in the journal are also replayed
        by the next run after this process has died (see `af.io.push`).
        """
        return self._streams.inlet(stream)

    def _check_loop(self, call: str) -> None:
        """Raises RuntimeError if this is not the loop that runs the job.

        A call from another loop would never wake up, and would wake the job's loop from the wrong
        thread.
        """
        if asyncio._get_running_loop() is not self._loop:
            raise RuntimeError(
                f"{call} of job {self.name!r} was called outside of the loop that runs it: "
                f"{THREADSAFE.format('...')}"
            )

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the job ends, or at once if the job has already ended."""
        if self.status.is_terminal:
            callback()
        else:
            self._end_callbacks.append(callback)

    def _sum_up(self) -> JobResult:
        times = self._cluster.job_master.timestamps_ms
        duration = times[self.status] - times[JobStatus.CREATED]
        return JobResult(
            self.id,
            self.name,
            self.status.value,
            duration,
            self._cluster.job_master.executions.restarts,
            self.metrics(),
            min(max(0, self._opened_ms - times[JobStatus.CREATED]), duration),
            self._stopped_with(),
        )

    def _stopped_with(self) -> str | None:
        return shown_path(url) if (url := self._cluster.job_master.stopped_with) else None


class Entering(AbstractAsyncContextManager[Job]):
    """A run of `flow` that has not begun. It can be entered once."""

    _is_told = True
    """Whether the run was entered, or an error has already explained the wrong use."""

    def __init__(self, flow: str, running: AbstractAsyncContextManager[Job]) -> None:
        self._flow = flow
        self._running = running
        self._is_told = False

    def __repr__(self) -> str:
        state = "entered" if self._is_told else "not entered: async with flow.run() as job"
        return f"<run of flow {self._flow!r}, {state}>"

    async def __aenter__(self) -> Job:
        self._is_told = True
        job = await self._running.__aenter__()
        job.entered = self
        return job

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        return await self._running.__aexit__(*exc_info)

    def _tell(self, text: str) -> str:
        self._is_told = True
        return f"flow.run() of {self._flow!r} {text}"

    def __enter__(self) -> Never:
        raise TypeError(self._tell(WITHOUT_ASYNC))

    def __exit__(self, *exc_info: object) -> None:
        """Does nothing. Without this method, `with` would not call `__enter__`."""

    def __await__(self) -> Any:
        raise TypeError(self._tell(AWAITED))

    if not TYPE_CHECKING:  # Hidden from type checkers, which know all real methods.

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # Copying, pickling and introspection ask for these.
                raise no_such_method(self, name)
            raise AttributeError(self._tell(NO_JOB.format(name=name)), name=None, obj=None)

    def __del__(self) -> None:
        if not self._is_told:
            warnings.warn(self._tell(NEVER_ENTERED), RuntimeWarning, stacklevel=1, source=self)


def _cluster(host: Host, graph: JobGraph, options: RunOptions) -> RunningJob:
    if options.on is not None:
        settings = options.checkpoint_settings()
        return options.on.start(
            host, graph, options.restart, options.task_options(graph.name), settings
        )
    if not options.worker_count:
        return LocalCluster(
            host,
            graph,
            options.restart,
            options.task_options(graph.name),
            options.checkpoint_settings(),
        )
    from aioflow.cluster.embedded import EmbeddedCluster  # Loads what only processes need.

    return EmbeddedCluster(
        host,
        graph,
        options.restart,
        options.task_options(graph.name),
        options.worker_count,
        options.heartbeat,
        options.checkpoint_settings(),
    )
