"""The user's side of a cluster: submits jobs and follows them to their end, and lists and ends
jobs.

The submitting process is a worker for parts of the job that cannot leave it: collected results,
pushed inputs, local functions as sinks. Functions and classes of its own modules are sent by value.
So the processes of the cluster need only the libraries, not the files of the submitting program.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import cloudpickle

from aioflow.cluster.dispatcher import DuplicateJobSubmission
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.leadership import LeaderRetrieval, NoLeader, connect_to_leader
from aioflow.cluster.rpc import RpcConnection
from aioflow.cluster.shipping import ship_job
from aioflow.core.aio import cancel_and_wait
from aioflow.core.contexts import contextmanager
from aioflow.core.errors import (
    AioflowError,
    Broken,
    CheckpointError,
    Closed,
    NotAuthenticated,
    StaleLeader,
)
from aioflow.protocol.handshake import PeerRole

if TYPE_CHECKING:
    from aioflow.checkpoint.instructions import CheckpointSettings
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.core.host import Host
    from aioflow.core.scope import TapPlace
    from aioflow.graph.job_graph import JobGraph
    from aioflow.task.environment import TaskOptions

__all__ = ["ClusterClient", "JobLine", "NoJobManager", "Submission", "submission_of"]

logger = logging.getLogger(__name__)

LEADER_TIMEOUT_S = 60.0
"""How long a command waits if JobManagers are reachable but none leads or answers."""

RETRY_S = 0.2

ASK_S = 5.0
"""Interval at which a JobManager is asked whether it still leads, while a client waits for the end
of a job."""

SILENCE_S = 30.0
"""Time without an answer after which a JobManager counts as stopped or cut off. The client then
looks for the next leader.
"""

INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[1])}
)
"""Directories of installed modules, which the processes of a cluster have too."""


@dataclass(frozen=True, slots=True)
class Submission:
    """An encoded job, ready to be sent."""

    name: str
    content: bytes
    config: dict[str, Any]
    """Settings for the JobMaster, as plain data."""


@dataclass(frozen=True, slots=True)
class JobLine:
    """One job of a cluster in a listing.

    Times are in wall-clock ms; `ended_ms` is None while the job runs.
    """

    job_id: str
    name: str
    status: JobStatus
    submitted_ms: int
    ended_ms: int | None
    error: str
    savepoint: str
    """URL of the savepoint with which the job was stopped; empty if there is none."""
    tasks_running: int = 0
    tasks_finished: int = 0
    tasks: int = 0
    """Number of all tasks; 0 while the job has no JobMaster."""
    slots_missing: int = 0
    """Number of slots that the job waits for."""


def submission_of(
    graph: JobGraph,
    restart: RestartPolicy,
    options: TaskOptions,
    checkpoints: CheckpointSettings | None = None,
) -> Submission:
    """Encodes a job for submission.

    Raises GraphError, naming the operator, if one cannot be pickled. Raises CheckpointError for a
    store that other processes cannot reach.
    """
    if checkpoints is not None:
        for option, url in (("checkpoints", checkpoints.store), ("restore", checkpoints.restore)):
            if url is not None and url.startswith("memory:"):
                raise CheckpointError(
                    f"{url} is the memory of one process, and a cluster has many: give {option}= "
                    "a directory or an object store that all "
                    "of them reach"
                )
    with _own_modules_by_value():
        config = {
            "restart": cloudpickle.dumps(restart),
            "checkpoints": None if checkpoints is None else asdict(checkpoints),
        }
        return Submission(graph.name, ship_job(graph, options), config)


class NoJobManager(ConnectionError):
    """The error if no JobManager answers at the given place. `what` is the error message without
    the advice."""

    def __init__(self, where: LeaderRetrieval, reason: OSError) -> None:
        is_plain = isinstance(reason, ConnectionRefusedError)
        self.what = (
            f"no jobmanager listens at {where}"
            if is_plain
            else f"no jobmanager can be reached at {where} ({reason})"
        )
        super().__init__(
            f"{self.what}: start a cluster with aioflow cluster start, or give the address of one "
            "that runs"
        )


class ClusterClient:
    """A connection to the leading JobManager. Use it as `async with`.

    Entering raises NoJobManager if there is none, or NotAuthenticated for a wrong secret.
    """

    def __init__(
        self,
        host: Host,
        where: LeaderRetrieval,
        secret: bytes,
        handlers: dict[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._host = host
        self._where = where
        self._secret = secret
        self._handlers = handlers or {}
        self._connection: RpcConnection | None = None
        self.on_closed: Callable[[], None] = lambda: None
        self.address = ("", 0)
        """Address of the leader."""

    async def __aenter__(self) -> Self:
        try:
            await self._connect((NoLeader, TimeoutError), LEADER_TIMEOUT_S)
        except Broken as error:
            raise NotAuthenticated(
                f"the jobmanager at {self._where} does not know this secret, or is none ({error})"
            ) from error
        except (TimeoutError, FileNotFoundError):
            raise  # The messages of these errors say what is wrong, and where.
        except OSError as error:
            raise NoJobManager(self._where, error) from error
        return self

    async def connect_again(self, timeout_s: float) -> None:
        """Connects to the current leader after the connection has ended.

        Raises OSError or AioflowError if no leader is found in time.
        """
        await self._connect((OSError, AioflowError), timeout_s)

    async def _connect(self, passing: tuple[type[Exception], ...], timeout_s: float) -> None:
        """Connects to the leader. Retries errors of the classes `passing` for `timeout_s`."""
        deadline = self._host.clock.monotonic() + timeout_s
        while True:
            try:
                self.address, self._connection = await connect_to_leader(
                    self._host,
                    self._secret,
                    PeerRole.SUBMITTER,
                    self._where,
                    self._handlers,
                    lambda _: self.on_closed(),
                )
                return
            except passing:
                if self._host.clock.monotonic() >= deadline:
                    raise
            await asyncio.sleep(RETRY_S)

    async def __aexit__(self, *exc_info: Any) -> None:
        assert self._connection is not None
        await self._connection.close()

    def hang_up(self, error: Exception) -> None:
        """Closes the connection at once. Calls that wait for an answer fail."""
        if self._connection is not None:
            self._connection.abort(error)

    @property
    def connection(self) -> RpcConnection:
        assert self._connection is not None, "a client is used inside its async with"
        return self._connection

    async def submit(self, job_id: str, job: Submission, timeout_s: float) -> None:
        """Submits a job. On return the job is stored and runs.

        If the leader goes away meanwhile, the job is submitted to the next leader under the same
        id. If a leader has the job already, it refuses the submission, and this counts as success.
        The search for a leader ends after `timeout_s` seconds, with the error of the last try.
        """
        deadline = self._host.clock.monotonic() + timeout_s
        may_be_known = False
        while True:
            try:
                await self._submit(job_id, job)
                return
            except DuplicateJobSubmission:
                if not may_be_known:
                    raise
                return
            except (Broken, StaleLeader, NoLeader) as error:
                if self._host.clock.monotonic() >= deadline:
                    raise
                logger.warning("job %s is submitted to the next leader: %s", job_id, error)
            may_be_known = True
            self.hang_up(Closed("this jobmanager leads no more"))
            await asyncio.sleep(RETRY_S)
            await self.connect_again(deadline - self._host.clock.monotonic())

    async def submit_attached(
        self, job_id: str, job: Submission, *, location: str, taps: dict[int, tuple[TapPlace, bool]]
    ) -> int:
        """Submits a job and attaches to it. On return the job is stored and runs.

        Returns the token of its JobMaster.
        """
        return await self._submit(job_id, job, attach=True, location=location, taps=taps)

    async def _submit(
        self,
        job_id: str,
        job: Submission,
        *,
        attach: bool = False,
        location: str = "",
        taps: dict[int, tuple[TapPlace, bool]] | None = None,
    ) -> int:
        answer = self.connection.call(
            "submit", job_id, job.name, job.content, job.config, attach, location, taps or {}
        )
        return int(await answer)

    async def attach(
        self, job_id: str, *, location: str, taps: dict[int, tuple[TapPlace, bool]]
    ) -> int:
        """Attaches to a job that was submitted before.

        Returns the token of its JobMaster. Raises UnknownJob if there is no such job.
        """
        return int(await self.connection.call("attach", job_id, location, taps))

    async def jobs(self) -> list[JobLine]:
        """Lists running jobs in order of submission, then ended jobs."""
        return [_line(packed) for packed in await self.connection.call("jobs")]

    async def wait(self, job_id: str) -> JobLine:
        """Waits for the end of a job."""
        return _line(await self.connection.call("wait", job_id))

    async def follow(
        self, job_id: str, timeout_s: float, ask: Callable[[], Awaitable[None]] | None = None
    ) -> JobLine:
        """Waits for the end of a job as `wait` does, but across changes of the leader.

        After a loss of the leader, the next leader is sought for `timeout_s`. `ask` sends the
        caller's request to the first leader and to each later one, because a new leader does not
        know of an earlier stop request. Raises OSError or AioflowError if no leader is found, or if
        the leader does not know the job.
        """
        watching = asyncio.get_running_loop().create_task(
            self.watch_leader(), name=f"leader of job {job_id[:8]}"
        )
        try:
            while True:
                try:
                    if ask is not None:
                        await ask()
                    return await self.wait(job_id)
                except (Broken, StaleLeader, NoLeader) as error:
                    logger.warning("job %s is looked for under the next leader: %s", job_id, error)
                    await self.connect_again(timeout_s)
        finally:
            await cancel_and_wait([watching])

    async def watch_leader(self) -> None:
        """Closes the connection to a JobManager that is silent, or that no longer leads.

        Such a JobManager would never report the end of a job. The caller then sees a lost
        connection as usual.
        """
        while True:
            await asyncio.sleep(ASK_S)
            connection = self.connection
            try:
                async with asyncio.timeout(SILENCE_S):
                    leader = await connection.call("leader")
            except TimeoutError:
                connection.abort(
                    Broken(f"the jobmanager at {self._where} has not answered for {SILENCE_S:g} s")
                )
            except AioflowError as error:  # Its end is seen already.
                logger.debug("it is not known who leads: %s", error)
            else:
                if leader not in ("", "here"):
                    connection.abort(Closed(f"the jobmanager at {leader} leads now"))

    async def cancel(self, job_id: str) -> None:
        """Ends a job without a result."""
        await self.connection.call("cancel", job_id)

    async def stop(
        self,
        job_id: str,
        *,
        drain: bool = False,
        savepoint: bool = True,
        directory: str | None = None,
    ) -> None:
        """Ends the sources of a job.

        With checkpoints the job ends with a savepoint, under the store or at the URL `directory`.
        """
        await self.connection.call("stop", job_id, drain, savepoint, directory)

    async def savepoint(self, job_id: str, directory: str | None = None) -> str:
        """Takes a savepoint under the store, or below the URL `directory`. Returns the savepoint's
        URL."""
        return str(await self.connection.call("savepoint", job_id, directory))

    async def checkpoint(self, job_id: str) -> int:
        """Takes a checkpoint of a job now. Returns the checkpoint's number."""
        return int(await self.connection.call("checkpoint", job_id))

    async def rescale(
        self, job_id: str, parallelism: int | None, of_operators: Mapping[str, int]
    ) -> None:
        """Changes the parallelism of a running job. Returns once all new tasks run."""
        await self.connection.call("rescale", job_id, parallelism, dict(of_operators))

    async def taskmanagers(self) -> list[tuple[str, int, int]]:
        """Returns (id, slots, free slots) of each TaskManager."""
        return [tuple(line) for line in (await self.connection.call("overview"))["taskmanagers"]]

    async def fenced_total(self) -> int:
        """Returns how many messages of replaced leaders, workers and attempts the cluster has
        refused.

        The count begins when the present leader began to lead.
        """
        return int((await self.connection.call("overview"))["fenced_total"])

    async def shutdown(self) -> int:
        """Ends the leader and its TaskManagers.

        The jobs stay stored. Returns the process id of the leader on its machine.
        """
        return int(await self.connection.call("shutdown"))


def _line(packed: tuple[Any, ...]) -> JobLine:
    job_id, name, status, *rest = packed
    return JobLine(job_id, name, JobStatus(status), *rest)


@contextmanager
def _own_modules_by_value() -> Iterator[None]:
    """Makes cloudpickle write the user's modules by value inside the block."""
    own = [
        module
        for name, module in list(sys.modules.items())
        if name != "__main__" and _is_own(module)
    ]
    known = cloudpickle.list_registry_pickle_by_value()
    registered = [
        module
        for module in own
        if module.__name__ not in known and sys.modules.get(module.__name__) is module
    ]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(module: Any) -> bool:
    file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    return isinstance(file, str) and file.endswith(".py") and not file.startswith(INSTALLED)
