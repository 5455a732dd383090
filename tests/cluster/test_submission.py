"""How a command finds the JobManager that leads."""

from __future__ import annotations

import asyncio

import pytest

from aioflow.cluster.leadership import LeaderRetrieval
from aioflow.cluster.rpc import RpcServer
from aioflow.cluster.submission import ClusterClient
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.protocol.handshake import PeerRole

SECRET = b"s" * 32


async def test_a_leader_that_has_no_time_to_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine an answer may take long: that is no reason to refuse a command."""
    monkeypatch.setattr("aioflow.cluster.leadership.ANSWER_S", 1.0)
    asked, is_free = 0, asyncio.Event()

    async def leader() -> str:
        nonlocal asked
        asked += 1
        if asked == 1:
            await is_free.wait()
        return "here"

    host = SystemHost()
    server = RpcServer(
        host,
        SECRET,
        Codec(),
        frozenset([PeerRole.SUBMITTER]),
        lambda _: {"leader": leader},
        lambda _: None,
    )
    where = LeaderRetrieval((("127.0.0.1", await server.listen()),))
    async with ClusterClient(host, where, SECRET) as client:
        assert client.address == where.addresses[0]
    assert asked > 1
    is_free.set()
    await server.close()
    await host.close()


async def test_a_leader_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error without a text does not help."""
    monkeypatch.setattr("aioflow.cluster.leadership.ANSWER_S", 0.05)
    monkeypatch.setattr("aioflow.cluster.submission.LEADER_TIMEOUT_S", 0.0)
    is_free = asyncio.Event()

    async def leader() -> str:
        await is_free.wait()
        return "here"

    host = SystemHost()
    server = RpcServer(
        host,
        SECRET,
        Codec(),
        frozenset([PeerRole.SUBMITTER]),
        lambda _: {"leader": leader},
        lambda _: None,
    )
    port = await server.listen()
    with pytest.raises(
        TimeoutError,
        match=f"the jobmanager at 127.0.0.1:{port} does not answer: it is stopped, .* or none",
    ):
        async with ClusterClient(host, LeaderRetrieval((("127.0.0.1", port),)), SECRET):
            pass
    is_free.set()
    await server.close()
    await host.close()
