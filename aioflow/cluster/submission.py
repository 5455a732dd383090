"""What a process of the user does with a cluster: submits jobs, follows them, asks for and ends
others.

The submitting process is a worker for what cannot leave it (results that it collects, inputs that
it pushes, functions of its own as sinks). Functions and classes of its own modules travel by value:
the processes of the cluster need not have its files, only the libraries.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import cloudpickle

from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.fencing import StaleLeader
from aioflow.cluster.rpc import RpcConnection
from aioflow.cluster.shipping import ship_job
from aioflow.cluster.whereabouts import NobodyLeads, Whereabouts, connect_to_leader
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import AioflowError, Broken, CheckpointError, Closed, NotAuthenticated
from aioflow.protocol.handshake import PeerRole

if TYPE_CHECKING:
    from aioflow.cluster.checkpoint_settings import CheckpointSettings
    from aioflow.cluster.restart import RestartPolicy
    from aioflow.core.host import Host
    from aioflow.core.ids import TapPlace
    from aioflow.graph.job_graph import JobGraph
    from aioflow.task.environment import TaskOptions

__all__ = ["ClusterClient", "JobLine", "NoJobManager", "Submission", "submission_of"]

logger = logging.getLogger(__name__)

LEADER_TIMEOUT_S = 60.0
"""How long a command waits while JobManagers can be reached and none leads, or none has time to
answer.
"""

RETRY_S = 0.2

ASK_S = 5.0
"""How often a JobManager is asked whether it still leads, while the end of a job is waited for."""

SILENCE_S = 30.0
"""A JobManager that does not answer for so long is stopped, or cut off: the next leader is
looked for.
"""

INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[1])}
)
"""Where modules lie that the processes of a cluster have too."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job, ready to be sent."""

    name: str
    content: bytes
    config: dict[str, Any]
    """What its JobMaster is told: plain data."""


@dataclass(frozen=True, slots=True)
class JobLine:
    """One job of a cluster, as it is listed.

    Times are wall clock, ms; `ended_ms` None while it runs.
    """

    job_id: str
    name: str
    status: JobStatus
    submitted_ms: int
    ended_ms: int | None
    error: str
    savepoint: str
    """URL of the savepoint that it was stopped with; empty if there is none."""
    tasks_running: int = 0
    tasks_finished: int = 0
    tasks: int = 0
    """All that it has; 0 where it has no JobMaster, not yet or no more."""
    slots_missing: int = 0
    """So many it waits for."""


def submission_of(
    graph: JobGraph,
    restart: RestartPolicy,
    options: TaskOptions,
    checkpoints: CheckpointSettings | None = None,
) -> Submission:
    """The job as bytes.

    Raises GraphError naming the operator that cannot travel, CheckpointError for a store that
    others cannot reach.
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
    """Nobody answers where the JobManagers should be. `what` is that without the remedy."""

    def __init__(self, where: Whereabouts, reason: OSError) -> None:
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
    """A connection to the JobManager that leads, as `async with`.

    Raises NoJobManager, or NotAuthenticated for a wrong secret.
    """

    def __init__(
        self,
        host: Host,
        where: Whereabouts,
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
        """Of the leader."""

    async def __aenter__(self) -> Self:
        try:
            await self._connect((NobodyLeads, TimeoutError), LEADER_TIMEOUT_S)
        except Broken as error:
            raise NotAuthenticated(
                f"the jobmanager at {self._where} does not know this secret, or is none ({error})"
            ) from error
        except (TimeoutError, FileNotFoundError):
            raise  # They say what is wrong, and where.
        except OSError as error:
            raise NoJobManager(self._where, error) from error
        return self

    async def connect_again(self, timeout_s: float) -> None:
        """After the end of the connection: find whoever leads now.

        Raises OSError or AioflowError when nobody is found in time.
        """
        await self._connect((OSError, AioflowError), timeout_s)

    async def _connect(self, passing: tuple[type[Exception], ...], timeout_s: float) -> None:
        """Errors that are `passing` are borne for `timeout_s`."""
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
        """Close at once: what waits for an answer fails."""
        if self._connection is not None:
            self._connection.abort(error)

    @property
    def connection(self) -> RpcConnection:
        assert self._connection is not None, "a client is used inside its async with"
        return self._connection

    async def submit(
        self,
        job_id: str,
        job: Submission,
        *,
        attach: bool = False,
        location: str = "",
        taps: dict[int, tuple[TapPlace, bool]] | None = None,
    ) -> int:
        """On return the job is stored, and runs. Returns the token of its JobMaster."""
        answer = self.connection.call(
            "submit", job_id, job.name, job.content, job.config, attach, location, taps or {}
        )
        return int(await answer)

    async def attach(
        self, job_id: str, *, location: str, taps: dict[int, tuple[TapPlace, bool]]
    ) -> int:
        """Follow a job that was submitted before.

        Returns the token of its JobMaster; raises UnknownJob.
        """
        return int(await self.connection.call("attach", job_id, location, taps))

    async def jobs(self) -> list[JobLine]:
        """Running jobs in order of submission, then ended ones."""
        return [_line(packed) for packed in await self.connection.call("jobs")]

    async def wait(self, job_id: str) -> JobLine:
        """The job once it has ended."""
        return _line(await self.connection.call("wait", job_id))

    async def follow(
        self, job_id: str, timeout_s: float, ask: Callable[[], Awaitable[None]] | None = None
    ) -> JobLine:
        """As `wait`, under whichever leader: one that goes away is followed by the next, which is
        looked for so long.

        `ask` is what is asked of the leader first, and of each that follows: a stop that one had
        taken up is not known to the next. Raises OSError or AioflowError if none is found, or if it
        does not know the job.
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
                except (Broken, StaleLeader, NobodyLeads) as error:
                    logger.warning("job %s is looked for under the next leader: %s", job_id, error)
                    await self.connect_again(timeout_s)
        finally:
            await cancel_and_wait([watching])

    async def watch_leader(self) -> None:
        """Hang up on a JobManager that is silent, or leads no more: it would never say how a job
        ends. The end is seen like any other.
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
        """End a job without a result."""
        await self.connection.call("cancel", job_id)

    async def stop(
        self,
        job_id: str,
        *,
        drain: bool = False,
        savepoint: bool = True,
        directory: str | None = None,
    ) -> None:
        """End the sources of a job; with checkpoints by a savepoint under the store, or at the
        URL `directory`.
        """
        await self.connection.call("stop", job_id, drain, savepoint, directory)

    async def savepoint(self, job_id: str, directory: str | None = None) -> str:
        """Make a savepoint under the store, or at the URL `directory`. Returns its URL."""
        return str(await self.connection.call("savepoint", job_id, directory))

    async def taskmanagers(self) -> list[tuple[str, int, int]]:
        """(id, slots, free slots) of each."""
        return [tuple(line) for line in (await self.connection.call("overview"))["taskmanagers"]]

    async def fenced_total(self) -> int:
        """How many messages of leaders, workers and attempts that were replaced the cluster has
        refused since this leader leads.
        """
        return int((await self.connection.call("overview"))["fenced_total"])

    async def shutdown(self) -> int:
        """End the leader and its TaskManagers.

        Its jobs stay stored. Returns the pid of the leader, on its machine.
        """
        return int(await self.connection.call("shutdown"))


def _line(packed: tuple[Any, ...]) -> JobLine:
    job_id, name, status, *rest = packed
    return JobLine(job_id, name, JobStatus(status), *rest)


@contextmanager
def _own_modules_by_value() -> Iterator[None]:
    """Meanwhile cloudpickle writes what is defined in modules of the user instead of their
    names.
    """
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
