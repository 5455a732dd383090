"""Calls over real connections: their order, their ends, and who is let in."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aioflow.cluster.rpc import RpcConnection, RpcServer, connect_rpc
from aioflow.core.errors import Broken, RemoteError, RemoteProtocolError, TypeNotSupported
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.network.admission import WAITING_MAX
from aioflow.network.security import SecuredHost, Security
from aioflow.protocol.handshake import PeerRole
from tests.network.certificates import Authority

SECRET = b"s" * 32
Handlers = dict[str, Callable[..., Any]]


class Pair:
    """A server, one peer, and what each noticed."""

    def __init__(self) -> None:
        self.closed: list[RpcConnection] = []
        self.client_closed = asyncio.Event()
        self.accepted: list[RpcConnection] = []


@asynccontextmanager
async def serving(
    handlers: Handlers, host: Host | None = None
) -> AsyncIterator[tuple[RpcServer, int, Pair]]:
    pair = Pair()

    def on_peer(connection: RpcConnection) -> Handlers:
        pair.accepted.append(connection)
        return handlers

    server = RpcServer(
        host or SystemHost(),
        SECRET,
        Codec(),
        frozenset([PeerRole.TASKMANAGER]),
        on_peer,
        pair.closed.append,
    )
    port = await server.listen()
    try:
        yield server, port, pair
    finally:
        await server.close()


@asynccontextmanager
async def connected(
    handlers: Handlers, own: Handlers | None = None
) -> AsyncIterator[tuple[RpcConnection, Pair]]:
    async with serving(handlers) as (_, port, pair):
        connection = await connect_rpc(
            SystemHost(),
            SECRET,
            Codec(),
            PeerRole.TASKMANAGER,
            ("127.0.0.1", port),
            own or {},
            lambda _: pair.client_closed.set(),
        )
        try:
            yield connection, pair
        finally:
            await connection.close()
            await pair.client_closed.wait()


async def test_a_call_returns_what_the_handler_does_and_raises_what_it_raises() -> None:
    async def later(n: int) -> int:
        await asyncio.sleep(0)
        return n + 1

    def refuse(n: int) -> None:
        raise ValueError("no", n)

    async with connected({"later": later, "refuse": refuse}) as (connection, _):
        assert await connection.call("later", 1) == 2
        with pytest.raises(ValueError, match="no") as raised:
            await connection.call("refuse", 3)
        assert raised.value.args == ("no", 3)


async def test_calls_and_notifications_begin_in_the_order_in_which_they_were_made() -> None:
    """A cancel must not overtake the deployment that it cancels, although the deployment was not
    awaited yet.
    """
    heard: list[Any] = []

    async def slow(n: int) -> None:
        await asyncio.sleep(0)

    def deploy(n: int) -> None:
        heard.append(("deploy", n))

    async with connected(
        {"slow": slow, "deploy": deploy, "cancel": lambda n: heard.append(("cancel", n))}
    ) as (connection, _):
        answers = []
        for n in range(50):
            answers.append(connection.call("deploy", n))
            answers.append(connection.call("slow", n))
            connection.notify("cancel", n)
        for answer in answers:
            await answer

    assert heard == [(what, n) for n in range(50) for what in ("deploy", "cancel")]


async def test_both_sides_may_call() -> None:
    async with connected({}, own={"double": lambda n: n * 2}) as (_, pair):
        await pair.accepted[0].opened
        assert await pair.accepted[0].call("double", 4) == 8


async def test_a_result_that_cannot_travel_is_the_callers_error() -> None:
    async with connected({"strange": object}) as (connection, _):
        with pytest.raises(TypeNotSupported, match="strange"):
            await connection.call("strange")
        assert connection.is_open


async def test_an_unknown_method_is_the_callers_error_and_the_connection_stays() -> None:
    async with connected({"there": lambda: 1}) as (connection, _):
        with pytest.raises(RemoteProtocolError, match="'nowhere', which is not offered"):
            await connection.call("nowhere")
        assert await connection.call("there") == 1


async def test_an_error_of_a_class_that_is_not_loaded_is_a_remote_error() -> None:
    def fail() -> None:
        class Local(Exception):
            pass

        raise Local("only there")

    async with connected({"fail": fail}) as (connection, _):
        with pytest.raises(RemoteError, match="only there"):
            await connection.call("fail")


async def test_a_notification_that_fails_closes_the_connection() -> None:
    def fail() -> None:
        raise ValueError("unheard")

    async with connected({"fail": fail}) as (connection, pair):
        connection.notify("fail")
        await pair.client_closed.wait()
        assert not connection.is_open
        assert len(pair.closed) == 1


async def test_a_handler_whose_caller_is_gone_is_cancelled() -> None:
    """Its answer would have no receiver, and a thousand callers that come and go would leave a
    thousand handlers behind.
    """
    began, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        began.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    async with connected({"endless": endless}) as (connection, _):
        answer = asyncio.ensure_future(connection.call("endless"))
        await began.wait()
        connection.abort(Broken("the caller leaves"))
        with pytest.raises(Broken, match="the caller leaves"):
            await answer
        async with asyncio.timeout(20):
            await ended.wait()


async def test_open_calls_end_broken_when_the_connection_does() -> None:
    never = asyncio.Event()

    async with connected({"wait": never.wait}) as (connection, pair):
        answer = connection.call("wait")
        waiting = asyncio.create_task(answer)
        await asyncio.sleep(0)
        while not pair.accepted[0]._answering:
            await asyncio.sleep(0)
        pair.accepted[0].abort(Broken("over"))
        with pytest.raises(Broken, match=r"the connection to 127\.0\.0\.1"):
            await waiting
        with pytest.raises(Broken, match="the call was not made"):
            connection.call("wait")
        connection.notify("wait")  # Dropped.


async def test_request_ends_once_there_is_an_answer_or_can_be_none() -> None:
    go, never = asyncio.Event(), asyncio.Event()

    def refuse() -> None:
        raise ValueError("no")

    async with connected({"go": go.wait, "refuse": refuse, "wait": never.wait}) as (
        connection,
        pair,
    ):
        refused, gone, begun = (
            connection.ask("refuse"),
            connection.ask("go"),
            connection.ask("wait"),
        )
        await refused
        assert not gone.done()
        go.set()
        await gone
        assert not begun.done()
        pair.accepted[0].abort(Broken("over"))
        await begun
        assert connection.ask("go").done(), "no call is possible any more"


async def test_nothing_is_heard_of_a_peer_that_was_cut_off() -> None:
    heard: list[int] = []

    async with connected({"say": heard.append}) as (connection, pair):
        connection.notify("say", 1)
        while not heard:
            await asyncio.sleep(0)
        for n in range(2, 20):
            connection.notify("say", n)
        pair.accepted[0].abort(Broken("given up"))
        await pair.client_closed.wait()

    assert heard == [1]


@pytest.mark.parametrize("is_tls", [False, True])
async def test_a_server_is_closed_when_its_connections_are(is_tls: bool, tmp_path: Path) -> None:
    """TLS says goodbye before its socket closes: a loop that ends meanwhile would leave the
    socket open.
    """
    tls = Authority(tmp_path).issue("peer").load() if is_tls else None
    host = SecuredHost(SystemHost(), Security(tls=tls))
    client_closed = asyncio.Event()
    async with serving({"greet": lambda: "hello"}, host) as (server, port, pair):
        client = await connect_rpc(
            host,
            SECRET,
            Codec(),
            PeerRole.TASKMANAGER,
            ("127.0.0.1", port),
            {},
            lambda _: client_closed.set(),
        )
        assert await client.call("greet") == "hello"

        await server.close()

        assert pair.closed == pair.accepted
    await client_closed.wait()


async def test_nothing_stays_of_a_connection_whose_tls_handshake_fails(tmp_path: Path) -> None:
    host = SecuredHost(SystemHost(), Security(tls=Authority(tmp_path).issue("server").load()))
    accepted: weakref.WeakSet[RpcConnection] = weakref.WeakSet()

    def on_peer(connection: RpcConnection) -> Handlers:
        accepted.add(connection)
        return {}

    server = RpcServer(
        host, SECRET, Codec(), frozenset([PeerRole.TASKMANAGER]), on_peer, lambda _: None
    )
    port = await server.listen()
    came = 0
    for _ in range(3):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.read()
        came += len(accepted)
        writer.close()
        await writer.wait_closed()
    gc.collect()
    assert came
    assert not accepted
    await server.close()


@pytest.mark.parametrize(
    ("secret", "role"), [(b"x" * 32, PeerRole.TASKMANAGER), (SECRET, PeerRole.DATA)]
)
async def test_peer_with_another_secret_or_role_is_not_let_in(
    secret: bytes, role: PeerRole
) -> None:
    async with serving({}) as (_, port, pair):
        with pytest.raises(Broken):
            await connect_rpc(
                SystemHost(), secret, Codec(), role, ("127.0.0.1", port), {}, lambda _: None
            )
    assert pair.closed == []


async def test_strangers_are_bounded_and_closed_with_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R31."""
    async with serving({}) as (server, port, _):
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(WAITING_MAX + 3)]
        for reader, _ in streams[:3]:
            async with asyncio.timeout(60):
                while await reader.read(1000):
                    pass
        assert len(server._waiting) == WAITING_MAX
        assert "the RPC server refused a connection from 127.0.0.1:" in caplog.text
        await server.close()
        for reader, writer in streams:
            async with asyncio.timeout(60):
                try:
                    while await reader.read(1000):
                        pass
                except ConnectionResetError:
                    pass
            writer.close()
        await server.close()  # Idempotent.
