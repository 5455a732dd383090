"""The front door of a cluster: accepts jobs, and lets a JobMaster of its own run each job.

    submit -> stored -> INITIALIZING -> a JobMaster runs it -> ended for good: remembered
           -> cleaned up -> forgotten by the store

A Dispatcher lives as long as one leader. Entering the Dispatcher recovers the jobs that the
previous leader stored. Leaving it, or losing the lease, suspends every job for the next leader.
Invariants: a job is acknowledged only once it is stored. An id that ended for good never runs
again. The leftovers of a job are removed only after its end, never because a leader went away.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.job_store import EndedJob, PersistedJob
from aioflow.core.aio import OrderedTaskGroup
from aioflow.core.errors import CheckpointError, JobError, StaleLeader, message_of

if TYPE_CHECKING:
    from types import TracebackType

    from aioflow.cluster.job_store import JobStore
    from aioflow.cluster.leadership import Leadership
    from aioflow.core.host import Host

__all__ = [
    "Dispatcher",
    "DispatcherOptions",
    "DuplicateJobSubmission",
    "JobMasterFactory",
    "JobRunner",
    "JobView",
    "UnknownJob",
]

logger = logging.getLogger(__name__)


class DuplicateJobSubmission(JobError):
    """The error for a job whose id is already running, or has ended for good. Submit the job under
    a new id."""


class UnknownJob(JobError):
    """The error for an id that no running or remembered job has."""


class JobRunner(Protocol):
    """The interface of a JobMaster that a Dispatcher needs."""

    @property
    def status(self) -> JobStatus: ...

    @property
    def error(self) -> BaseException | None:
        """The error that failed the job; None if it has not failed."""

    @property
    def stopped_with(self) -> str | None:
        """URL of the savepoint with which the job ended; None if there is none."""

    @property
    def stop_error(self) -> BaseException | None:
        """The reason why the savepoint at the end of the job could not be taken; None if there is
        none."""

    async def run(self) -> JobStatus:
        """Runs the job to a terminal status.

        If cancelled, ends all tasks and leaves the job as it is, for the next leader.
        """

    def cancel(self) -> None: ...

    def stop(self, *, drain: bool, savepoint: bool, directory: str | None) -> None: ...


JobMasterFactory = Callable[[PersistedJob, int, bool], Awaitable[JobRunner]]
"""Function that makes the JobMaster of a job. Its arguments are the job, the fencing token, and
whether the job is recovered.

An exception of the function fails the job.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherOptions:
    """Options of a Dispatcher.

    `archive_max` is the number of ended jobs that stay listed; of older jobs only the id is
    remembered. `retry_s` is the time in seconds before a failed write to the store is retried.
    """

    archive_max: int = 100
    retry_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job in a listing.

    Times are wall-clock ms. `cause` is the exception that failed the job; it is only set if the job
    ran in this process.
    """

    job_id: str
    name: str
    status: JobStatus
    submitted_ms: int
    ended_ms: int | None = None
    error: str = ""
    savepoint: str = ""
    cause: BaseException | None = None


@dataclass(slots=True)
class _Managed:
    job: PersistedJob
    accepted: asyncio.Future[None]
    over: asyncio.Future[JobView]
    runner: JobRunner | None = None
    cancelled: bool = False
    cancelling: asyncio.Task[StaleLeader | None] | None = None
    """Task that stores the cancellation, and then cancels the job. The task returns the error if
    storing was refused."""
    stop: Callable[[JobRunner], None] | None = None
    """A stop request that came before the job had a runner; None if there was none."""

    @property
    def status(self) -> JobStatus:
        if self.runner is not None:
            return self.runner.status
        return JobStatus.CANCELLING if self.cancelled else JobStatus.INITIALIZING

    def is_cancelled(self) -> bool:
        """Returns whether the job was cancelled. This is a method because the value may change in
        each await of the caller."""
        return self.cancelled

    def let_go(self, error: Exception) -> None:
        """Fails the futures of callers that wait for the job, because this process will not learn
        its end."""
        for future in (self.accepted, self.over):
            if not future.done():
                future.set_exception(error)
                future.exception()  # Marks it as retrieved; there may be no waiter.


async def _nothing_to_clean(job: EndedJob) -> None:
    return None


@dataclass(slots=True)
class Dispatcher:
    """Accepts jobs and runs each by a JobMaster. Use it as `async with`, inside
    `LeaderElection.run`.

    `clean_up` removes the leftovers of an ended job outside the job store. `clean_up` may be called
    more than once for a job.
    """

    host: Host
    store: JobStore
    leadership: Leadership
    factory: JobMasterFactory
    clean_up: Callable[[EndedJob], Awaitable[None]] = _nothing_to_clean
    options: DispatcherOptions = field(default_factory=DispatcherOptions)
    _group: OrderedTaskGroup = field(default_factory=OrderedTaskGroup)
    _jobs: dict[str, _Managed] = field(default_factory=dict)
    _ended: dict[str, JobStatus] = field(default_factory=dict)
    """The ids of all jobs that ended for good, each with the last status of the job."""
    _archive: dict[str, JobView] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        recovered = await self.store.recover()
        for job in sorted(recovered.ended, key=lambda job: (job.ended_ms, job.job_id)):
            self._remember(_view(job, None))
        await self._group.__aenter__()
        for job in recovered.to_clean_up:
            _ = self._group.create_task(self._finish_clean_up(job), name=f"clean up {job.job_id}")
        for persisted in recovered.jobs:
            logger.info("job %s (%s) is recovered", persisted.name, persisted.job_id)
            self._begin(self._manage(persisted), recovered=True)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._group.cancel_children()
        try:
            # An error of the body is raised as it is: the group would wrap it, although no child
            # caused it.
            if isinstance(error, Exception):
                await self._group.__aexit__(None, None, None)
            else:
                await self._group.__aexit__(kind, error, traceback)
        finally:
            for job_id, managed in self._jobs.items():
                managed.let_go(
                    StaleLeader(
                        f"this leader goes away while job {job_id} is {managed.status.value}; ask "
                        "the next one"
                    )
                )

    async def submit(self, job: PersistedJob) -> None:
        """Accepts a job. On return the job is stored, and it runs even if this leader goes away.

        A cancellation of the caller does not interrupt the submission. Raises
        DuplicateJobSubmission once a job with this id is stored, StaleLeader if this leader was
        replaced, or OSError if the store failed. After such an OSError the job does not run here.
        """
        self.leadership.check()
        known = self._jobs.get(job.job_id)
        if known is not None:
            await asyncio.shield(known.accepted)
            raise DuplicateJobSubmission(
                f"job {job.job_id} was submitted while it is {known.status.value} here; submit "
                "under a new id"
            )
        if job.job_id in self._ended:
            raise DuplicateJobSubmission(
                f"job {job.job_id} was submitted, and has ended as "
                f"{self._ended[job.job_id].value} before; submit under a new id"
            )
        # The id is taken from here on: the await below lets other submissions in.
        managed = self._manage(dataclasses.replace(job, submitted_ms=self.host.clock.wall_ms()))
        _ = self._group.create_task(self._accept(managed), name=f"submit {job.job_id}")
        await asyncio.shield(managed.accepted)

    def jobs(self) -> list[JobView]:
        """Returns running jobs in order of submission, then ended jobs, newest last."""
        return [self._view_of(managed) for managed in self._jobs.values()] + list(
            self._archive.values()
        )

    def job(self, job_id: str) -> JobView:
        """Returns one job.

        Raises UnknownJob if no job has this id, or if the job ended so long ago that only its id is
        remembered.
        """
        managed = self._jobs.get(job_id)
        if managed is not None:
            return self._view_of(managed)
        if job_id in self._archive:
            return self._archive[job_id]
        raise self._unknown(job_id)

    async def until_stored(self, job_id: str) -> None:
        """Waits until a job is stored. Raises UnknownJob if there is no such job, or the error of
        its submission."""
        managed = self._jobs.get(job_id)
        if managed is None:
            self.job(job_id)
        else:
            await asyncio.shield(managed.accepted)

    async def wait(self, job_id: str) -> JobView:
        """Waits for the final end of a job and returns the job.

        Raises UnknownJob if the job is not known. Raises StaleLeader if this leader goes away
        before the job ends.
        """
        managed = self._jobs.get(job_id)
        return self.job(job_id) if managed is None else await asyncio.shield(managed.over)

    async def cancel(self, job_id: str) -> None:
        """Ends a job without a result; an ended job stays as it is.

        The cancellation is stored, so the next leader does not run the job again. If the caller is
        cancelled meanwhile, the call still completes: a half-done cancellation would block the next
        caller. Raises UnknownJob if the job is not known, StaleLeader if this leader was replaced.
        """
        managed = self._jobs.get(job_id)
        if managed is None:
            self.job(job_id)
            return
        if not managed.cancelled:
            managed.cancelled = True
            managed.cancelling = self._group.create_task(
                self._cancel(managed), name=f"cancel {job_id}"
            )
        if (
            managed.cancelling is not None
            and (error := await asyncio.shield(managed.cancelling)) is not None
        ):
            raise error

    async def _cancel(self, managed: _Managed) -> StaleLeader | None:
        job_id = managed.job.job_id
        try:
            # The job may end meanwhile, before this write. The id has then ended, and the next
            # recovery removes the entry.
            await self.store.put(dataclasses.replace(managed.job, status=JobStatus.CANCELLING))
        except OSError as error:
            logger.warning(
                "the cancellation of job %s could not be stored, it is cancelled here only: %s",
                job_id,
                error,
            )
        except StaleLeader as error:
            return error
        if managed.runner is not None:
            managed.runner.cancel()
        return None

    def stop(
        self,
        job_id: str,
        *,
        drain: bool = False,
        savepoint: bool = True,
        directory: str | None = None,
    ) -> None:
        """Ends the sources of a job at their present positions; with `drain` event time ends too.

        See `JobMaster.stop`. Raises UnknownJob if the job is not known. Raises CheckpointError if
        `directory` is given for a job without checkpoints, even before the job has a runner.
        """

        def stop(runner: JobRunner) -> None:
            runner.stop(drain=drain, savepoint=savepoint, directory=directory)

        managed = self._jobs.get(job_id)
        if managed is None:
            self.job(job_id)
        elif directory is not None and not (managed.job.config.get("checkpoints") or {}).get(
            "store"
        ):
            name = managed.job.name
            raise CheckpointError(
                f"job {name!r} has no checkpoints, so no savepoint can be made of it: run it with "
                "checkpoints=URL"
            )
        elif managed.runner is None:
            managed.stop = stop
        else:
            stop(managed.runner)

    async def keep(self, job_id: str, **config: Any) -> None:
        """Stores changed settings of a running job, with which the next leader recovers it.

        A failure of the store is only logged, because the job goes on in this process. Raises
        StaleLeader if this leader was replaced.
        """
        managed = self._jobs.get(job_id)
        if managed is None or managed.cancelled:
            return
        managed.job = dataclasses.replace(managed.job, config={**managed.job.config, **config})
        try:
            await self.store.put(managed.job)
        except OSError as error:
            logger.warning(
                "the new %s of job %s could not be stored, the next leader does not know it: %s",
                ", ".join(config),
                job_id,
                error,
            )

    # One job.

    def _manage(self, job: PersistedJob) -> _Managed:
        loop = asyncio.get_running_loop()
        managed = _Managed(
            job,
            loop.create_future(),
            loop.create_future(),
            cancelled=job.status is JobStatus.CANCELLING,
        )
        self._jobs[job.job_id] = managed
        return managed

    async def _accept(self, managed: _Managed) -> None:
        try:
            await self.store.put(managed.job)
        except Exception as error:  # noqa: BLE001  # The submitter handles it; other jobs go on.
            del self._jobs[managed.job.job_id]
            managed.let_go(error)
            return
        self._begin(managed, recovered=False)

    def _begin(self, managed: _Managed, *, recovered: bool) -> None:
        managed.accepted.set_result(None)
        _ = self._group.create_task(self._run(managed, recovered), name=f"job {managed.job.job_id}")

    async def _run(self, managed: _Managed, recovered: bool) -> None:
        """Runs a job from INITIALIZING to its end.

        If the asyncio task that runs this is cancelled, the job is suspended: no end is stored and
        nothing is removed.
        """
        try:
            status, cause = await self._run_job_master(managed, recovered)
            told = cause
            if told is None and managed.runner is not None:
                told = managed.runner.stop_error
            job = EndedJob(
                job_id=managed.job.job_id,
                name=managed.job.name,
                status=status,
                submitted_ms=managed.job.submitted_ms,
                ended_ms=self.host.clock.wall_ms(),
                error="" if told is None else _told(told),
                savepoint=(managed.runner.stopped_with or "") if managed.runner is not None else "",
            )
            await self._stored(lambda: self.store.end(job), f"the end of job {job.job_id}")
            logger.info("job %s (%s) has ended as %s", job.name, job.job_id, status.value)
            del self._jobs[job.job_id]
            self._remember(_view(job, cause))
            managed.over.set_result(_view(job, cause))
            await self._finish_clean_up(job)
        except StaleLeader as error:
            logger.warning("job %s is left to the next leader: %s", managed.job.job_id, error)

    async def _run_job_master(
        self, managed: _Managed, recovered: bool
    ) -> tuple[JobStatus, BaseException | None]:
        if managed.is_cancelled():
            return JobStatus.CANCELED, None
        try:
            runner = await self.factory(managed.job, self.leadership.token, recovered)
            if managed.is_cancelled():
                return JobStatus.CANCELED, None
            managed.runner = runner
            if managed.stop is not None:
                managed.stop(runner)
            status = await runner.run()
        except StaleLeader:
            raise
        except Exception as error:
            logger.exception("job %s (%s) cannot run", managed.job.name, managed.job.job_id)
            return JobStatus.FAILED, error
        assert status.is_terminal, f"job master of {managed.job.job_id} ended with {status.value}"
        return status, runner.error if status is JobStatus.FAILED else None

    async def _finish_clean_up(self, job: EndedJob) -> None:
        """Cleans up after a job, then makes the store forget it.

        After a failure the next leader repeats the clean-up, because the store still has the job.
        """
        try:
            await self.clean_up(job)
            await self._stored(
                lambda: self.store.forget(job.job_id), f"the clean-up of job {job.job_id}"
            )
        except StaleLeader as error:
            logger.warning(
                "the clean-up of job %s is left to the next leader: %s", job.job_id, error
            )
        except Exception:
            logger.exception(
                "what job %s left behind cannot be removed now; the next leader tries again",
                job.job_id,
            )

    async def _stored(self, write: Callable[[], Awaitable[None]], what: str) -> None:
        """Repeats `write` until the store accepts it. The reason is that without a stored end the
        job would run again."""
        while True:
            try:
                await write()
                return
            except OSError as error:
                logger.warning(
                    "%s cannot be stored, tried again in %g s: %s",
                    what,
                    self.options.retry_s,
                    error,
                )
            await asyncio.sleep(self.options.retry_s)

    def _remember(self, view: JobView) -> None:
        self._ended[view.job_id] = view.status
        self._archive[view.job_id] = view
        while len(self._archive) > self.options.archive_max:
            del self._archive[next(iter(self._archive))]

    def _view_of(self, managed: _Managed) -> JobView:
        job = managed.job
        return JobView(
            job_id=job.job_id, name=job.name, status=managed.status, submitted_ms=job.submitted_ms
        )

    def _unknown(self, job_id: str) -> UnknownJob:
        if job_id in self._ended:
            return UnknownJob(
                f"job {job_id} has ended as {self._ended[job_id].value}, more is not kept of it"
            )
        return UnknownJob(f"job {job_id} is not known here; list the jobs, or submit it")


def _told(error: BaseException) -> str:
    """Formats an error and its notes, one per line. The notes say where the error happened."""
    notes = (note.removeprefix("aioflow: ") for note in getattr(error, "__notes__", ()))
    return "\n".join([f"{type(error).__name__}: {message_of(error)}", *notes])


def _view(job: EndedJob, cause: BaseException | None) -> JobView:
    return JobView(
        job_id=job.job_id,
        name=job.name,
        status=job.status,
        submitted_ms=job.submitted_ms,
        ended_ms=job.ended_ms,
        error=job.error,
        savepoint=job.savepoint,
        cause=cause,
    )
