"""The end of a TaskManager's attempts to register, and its return."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from aioflow.cluster.dispatcher import UnknownJob
from aioflow.cluster.jobmanager_peers import TaskManagerCalls
from aioflow.cluster.leadership import LeaderRetrieval
from aioflow.cluster.rpc import RpcConnection, RpcServer
from aioflow.cluster.taskmanager import TaskManager, TaskManagerOptions
from aioflow.core.errors import Broken, Closed, JobNotRunning
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.protocol.handshake import PeerRole

SECRET = b"s" * 32


@asynccontextmanager
async def jobmanager(
    register: Callable[..., Any], **handlers: Callable[..., Any]
) -> AsyncIterator[LeaderRetrieval]:
    """Leads, and answers registrations by `register(connection, ...)`."""

    def on_peer(connection: RpcConnection) -> dict[str, Callable[..., Any]]:
        def registering(*args: Any) -> Any:
            return register(connection, *args)

        return {
            "leader": lambda: "here",
            "register": registering,
            "heartbeat": ignore,
            "alive": ignore,
            **handlers,
        }

    server = RpcServer(
        SystemHost(), SECRET, Codec(), frozenset([PeerRole.TASKMANAGER]), on_peer, lambda _: None
    )
    port = await server.listen()
    try:
        yield LeaderRetrieval((("127.0.0.1", port),))
    finally:
        await server.close()


def ignore(*args: Any) -> None: ...


async def test_a_jobmanager_that_goes_while_a_taskmanager_registers_is_waited_for() -> None:
    """I6: the leader knew the secret, so there is no reason to give up.

    The TaskManager returns to the next leader.
    """
    host = SystemHost()
    connections: list[RpcConnection] = []
    registered = asyncio.Event()

    def register(connection: RpcConnection, *args: Any) -> int:
        connections.append(connection)
        if len(connections) == 1:
            connection.abort(Closed("this jobmanager leads no more"))
        else:
            registered.set()
        return len(connections)

    async with jobmanager(register) as where:
        manager = TaskManager(host, SECRET, TaskManagerOptions(jobmanagers=where, reconnect_s=0.01))
        running = asyncio.ensure_future(manager.run())
        async with asyncio.timeout(60):
            await registered.wait()
        manager.stop()
        await running
    await host.close()


async def test_a_taskmanager_whose_secret_is_not_known_gives_up() -> None:
    """It would never be let in."""
    host = SystemHost()
    async with jobmanager(ignore) as where:
        with pytest.raises(Broken):
            await TaskManager(host, b"t" * 32, TaskManagerOptions(jobmanagers=where)).run()
    await host.close()


async def test_taskmanager_bound_to_one_jobmanager_ends_with_it() -> None:
    """I6: it was started for this JobManager and names it; another leader does not know it."""
    host = SystemHost()
    registered: asyncio.Queue[tuple[RpcConnection, str]] = asyncio.Queue()

    def register(connection: RpcConnection, worker_id: str, *report: object) -> int:
        registered.put_nowait((connection, worker_id))
        return 1

    async with jobmanager(register) as where:
        manager = TaskManager(
            host, SECRET, TaskManagerOptions(jobmanagers=where, follows=False), "worker-7"
        )
        assert manager.heard_at is None
        running = asyncio.ensure_future(manager.run())
        async with asyncio.timeout(60):
            connection, worker_id = await registered.get()
            assert worker_id == "worker-7"
            while manager.heard_at is None:
                await asyncio.sleep(0.01)
            connection.abort(Closed("this jobmanager is gone"))
            await running
        assert registered.empty()
        assert manager.heard_at is not None, "a thread that watches it needs to know when it was"
    await host.close()


async def test_taskmanager_bound_to_one_jobmanager_says_that_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioflow.cluster.taskmanager.FIND_S", 0.05)
    host = SystemHost()
    async with jobmanager(ignore) as where:
        pass
    with pytest.raises(ConnectionError):
        await TaskManager(
            host, SECRET, TaskManagerOptions(jobmanagers=where, follows=False, reconnect_s=0.01)
        ).run()
    await host.close()


async def test_one_without_a_jobmanager_says_so_seldom_and_once_when_it_has_found_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It tries every few milliseconds here: a log line for each try would hide everything else."""
    host = SystemHost()
    tries = 0
    registered = asyncio.Event()

    def register(connection: RpcConnection, *args: Any) -> int:
        nonlocal tries
        tries += 1
        if tries <= 30:
            connection.abort(Closed("this jobmanager leads no more"))
        else:
            registered.set()
        return tries

    with caplog.at_level("INFO", logger="aioflow.cluster.taskmanager"):
        async with jobmanager(register) as where:
            manager = TaskManager(
                host, SECRET, TaskManagerOptions(jobmanagers=where, slots=3, reconnect_s=0.001)
            )
            running = asyncio.ensure_future(manager.run())
            async with asyncio.timeout(60):
                await registered.wait()
                while "is registered" not in caplog.text:
                    await asyncio.sleep(0.01)
            manager.stop()
            await running
    await host.close()
    waits = [
        record.getMessage()
        for record in caplog.records
        if "waits for the jobmanager at" in record.getMessage()
    ]
    assert 1 <= len(waits) <= 6, "as many as one minute has"
    assert "now:" not in waits[0]
    found = [
        record.getMessage() for record in caplog.records if "is registered" in record.getMessage()
    ]
    assert len(found) == 1
    assert re.search(
        r"is registered with 3 slots at 127\.0\.0\.1:\d+, after \d+ s without a jobmanager$",
        found[0],
    )


class _SlowSession:
    """A session that takes a while to close."""

    def __init__(self, *args: Any) -> None:
        self.token, self.location, self.has_run = args[4], "here:1", True
        self.closing, self.may_close = asyncio.Event(), asyncio.Event()
        self.is_closed = False
        sessions.append(self)

    async def open(self, bind: str) -> None: ...

    def tell_missed(self) -> None: ...

    async def close(self) -> None:
        self.closing.set()
        await self.may_close.wait()
        self.is_closed = True


sessions: list[_SlowSession] = []


async def test_a_session_that_is_being_closed_is_closed_before_its_taskmanager_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its tasks go on while the event loop is closed under them."""
    sessions.clear()
    monkeypatch.setattr("aioflow.cluster.taskmanager.JobSession", _SlowSession)
    monkeypatch.setattr("aioflow.cluster.taskmanager.load_job", lambda content: content)
    host, offered = SystemHost(), asyncio.Event()
    registered: asyncio.Queue[RpcConnection] = asyncio.Queue()

    def register(connection: RpcConnection, *args: Any) -> int:
        registered.put_nowait(connection)
        return 1

    def offer(worker_id: str, job: str, token: int, location: str, offers: Any) -> Any:
        offered.set()
        return [allocation_id for allocation_id, _ in offers], []

    handlers = {"open_job": lambda *args: (7, b""), "offer_slots": offer, "slot_freed": ignore}
    async with asyncio.timeout(60), jobmanager(register, **handlers) as where:
        manager = TaskManager(host, SECRET, TaskManagerOptions(jobmanagers=where))
        running = asyncio.ensure_future(manager.run())
        connection = await registered.get()
        await connection.call("request_slot", 0, "job", "allocation", "jm")
        await offered.wait()
        (session,) = sessions
        closing = asyncio.ensure_future(connection.call("close_job", "job"))
        await session.closing.wait()
        manager.stop()
        asyncio.get_running_loop().call_later(0.05, session.may_close.set)
        await running
        assert session.is_closed
        await asyncio.gather(closing, return_exceptions=True)
    await host.close()


def test_slot_on_its_way_to_a_job_that_has_ended_is_not_kept_for_it() -> None:
    """A TaskManager gives the slot back at JobNotRunning. For another error it asks again."""
    calls = TaskManagerCalls({}, cast("Any", ignore), lambda: None, ended={"old"})
    open_job = calls.handlers(cast("RpcConnection", None))["open_job"]
    with pytest.raises(JobNotRunning, match="job old has ended, it needs no slot"):
        open_job("tm-1", "old")
    with pytest.raises(UnknownJob, match="job new does not run here"):
        open_job("tm-1", "new")
