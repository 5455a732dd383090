"""The front door: takes jobs, has each run by a JobMaster of its own, and survives them all.

    submit -> stored -> INITIALIZING -> a JobMaster runs it -> ended for good: remembered
           -> cleaned up -> forgotten by the store

A Dispatcher is what one leader does with its time: entering it recovers what the leader before had
stored, leaving it (or losing the lease) suspends every job, which then belongs to the next leader.
Invariants: a job is acknowledged only when it is stored; an id that ended for good is never run
again; what a job left behind is removed only then, never because a leader went away.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.fencing import StaleLeader
from aioflow.cluster.job_store import EndedJob, PersistedJob
from aioflow.core.aio import OrderedTaskGroup
from aioflow.core.errors import CheckpointError, JobError, message_of

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
    """A job with this id runs, or has ended for good. Submit under a new id."""


class UnknownJob(JobError):
    """No job here has this id, and none that is remembered had."""


class JobRunner(Protocol):
    """What a Dispatcher asks of a JobMaster."""

    @property
    def status(self) -> JobStatus: ...

    @property
    def error(self) -> BaseException | None:
        """Why it failed."""

    @property
    def stopped_with(self) -> str | None:
        """URL of the savepoint that it ended with."""

    @property
    def stop_error(self) -> BaseException | None:
        """Why the savepoint that it should end with was not made."""

    async def run(self) -> JobStatus:
        """Run to a terminal status.

        Cancelled: end all tasks and leave the job as it is, for the next leader.
        """

    def cancel(self) -> None: ...

    def stop(self, *, drain: bool, savepoint: bool, directory: str | None) -> None: ...


JobMasterFactory = Callable[[PersistedJob, int, bool], Awaitable[JobRunner]]
"""Makes the JobMaster of a job: (job, fencing token, whether it is recovered).

What it raises fails the job.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherOptions:
    """`archive_max`: ended jobs that are still listed; older ones are only known by id.

    `retry_s`: between tries of a failing store.
    """

    archive_max: int = 100
    retry_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job as it is listed.

    Times by the wall clock; `cause` only where the job ran in this process.
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
    """Stores that it is cancelled, then cancels it. Gives why not."""
    stop: Callable[[JobRunner], None] | None = None
    """Asked to stop before it had a runner."""

    @property
    def status(self) -> JobStatus:
        if self.runner is not None:
            return self.runner.status
        return JobStatus.CANCELLING if self.cancelled else JobStatus.INITIALIZING

    def is_cancelled(self) -> bool:
        """Read anew after each await."""
        return self.cancelled

    def let_go(self, error: Exception) -> None:
        """Tell whoever waits that it will not be known here."""
        for future in (self.accepted, self.over):
            if not future.done():
                future.set_exception(error)
                future.exception()  # Nobody needs to wait.


async def _nothing_to_clean(job: EndedJob) -> None:
    return None


@dataclass(slots=True)
class Dispatcher:
    """Use as `async with`, inside `LeaderElection.run`.

    `clean_up` removes what a job left in other places; it may be called again.
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
    """Every id that ended for good."""
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
            # An error of the body leaves as it is: the group would wrap it, though no child had
            # anything to do with it.
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
        """Take a job. On return it is stored, and will run although this leader should go. It goes
        on if the caller is cancelled.

        Raises DuplicateJobSubmission, StaleLeader, or the OSError of a store that could not take
        it: then it does not run here.
        """
        self.leadership.check()
        known = self._jobs.get(job.job_id)
        if known is not None:
            raise DuplicateJobSubmission(
                f"job {job.job_id} was submitted while it is {known.status.value} here; submit "
                "under a new id"
            )
        if job.job_id in self._ended:
            raise DuplicateJobSubmission(
                f"job {job.job_id} was submitted, and has ended as "
                f"{self._ended[job.job_id].value} before; submit under a new id"
            )
        # From here on the id is taken: the await below lets others in.
        managed = self._manage(dataclasses.replace(job, submitted_ms=self.host.clock.wall_ms()))
        _ = self._group.create_task(self._accept(managed), name=f"submit {job.job_id}")
        await asyncio.shield(managed.accepted)

    def jobs(self) -> list[JobView]:
        """Running jobs in order of submission, then ended ones, newest last."""
        return [self._view_of(managed) for managed in self._jobs.values()] + list(
            self._archive.values()
        )

    def job(self, job_id: str) -> JobView:
        """Raises UnknownJob, also for a job that ended so long ago that only its id is
        remembered.
        """
        managed = self._jobs.get(job_id)
        if managed is not None:
            return self._view_of(managed)
        if job_id in self._archive:
            return self._archive[job_id]
        raise self._unknown(job_id)

    async def wait(self, job_id: str) -> JobView:
        """The job once it has ended for good.

        Raises UnknownJob, or StaleLeader when this leader goes away first.
        """
        managed = self._jobs.get(job_id)
        return self.job(job_id) if managed is None else await asyncio.shield(managed.over)

    async def cancel(self, job_id: str) -> None:
        """End a job without a result; an ended one stays as it is. Remembered: the next leader does
        not run it again.

        Raises UnknownJob, StaleLeader. It goes on if the caller is cancelled: half of it would keep
        whoever asks next from one that works.
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
            # It may end meanwhile, and this come last; its id is ended then, and the entry is
            # removed at the next recovery.
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
        """End the sources of a job where they are; with `drain` event time ends too. See
        `JobMaster.stop`.

        Raises UnknownJob, and CheckpointError for a `directory` of a job without checkpoints, also
        before it has a runner.
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
        except Exception as error:  # noqa: BLE001  # The submitter's to judge; other jobs go on.
            del self._jobs[managed.job.job_id]
            managed.let_go(error)
            return
        self._begin(managed, recovered=False)
        managed.accepted.set_result(None)

    def _begin(self, managed: _Managed, *, recovered: bool) -> None:
        _ = self._group.create_task(self._run(managed, recovered), name=f"job {managed.job.job_id}")

    async def _run(self, managed: _Managed, recovered: bool) -> None:
        """From INITIALIZING to its end.

        A cancellation of this task is a suspension: nothing is remembered, nothing removed.
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
        """What fails here is done again by the next leader, since the store has not forgotten
        the job.
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
        """Write until the store takes it: an end that is not remembered would run the job again."""
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
    """An error with its notes, which say where, a line each."""
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
