"""Admission to the data plane: no peer without the secret, no peer in another role, no peer that
takes too long.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import Broken, NotAuthenticated
from aioflow.core.system_host import SystemHost
from aioflow.network.admission import SILENCE_MS, WAITING_MAX
from aioflow.network.connection import (
    HANDSHAKE_TIMEOUT_S,
    AuthenticatedConnection,
    ConnectionOwner,
    close_all,
    fresh_nonce,
)
from aioflow.network.security import is_loopback
from aioflow.protocol.framing import CONTROL_PLANE, DATA_PLANE, Frame, FrameEncoder, FrameType
from aioflow.protocol.handshake import ClientHandshake, PeerRole, ServerHandshake
from aioflow.testing import simulate
from aioflow.testing.simulation import SimulatedHost
from tests.network.planes import ADDRESS, SECRET, Planes, Reader, until

HELLO = FrameEncoder().encode(FrameType.HELLO, body=b"a1")


class Stranger(asyncio.Protocol):
    """Connects by hand, and keeps what it hears."""

    def __init__(self, *first: bytes) -> None:
        self.first = first
        self.heard = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        for data in self.first:
            transport.write(data)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


class Peer:
    """An owner that keeps what it is told."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.lost: list[Exception | None] = []
        self.connected = 0

    def on_connected(self, connection: AuthenticatedConnection) -> None:
        self.connected += 1

    def on_frames(self, connection: AuthenticatedConnection, frames: list[Frame]) -> None:
        self.frames += frames

    def on_writable(self, connection: AuthenticatedConnection) -> None: ...

    def on_connection_lost(
        self, connection: AuthenticatedConnection, error: Exception | None
    ) -> None:
        self.lost.append(error)


async def dial(planes: Planes, *first: bytes) -> Stranger:
    _, stranger = await planes.host.net.connect(lambda: Stranger(*first), ADDRESS, planes.own_port)
    return stranger


async def dial_as(
    planes: Planes, role: PeerRole = PeerRole.DATA, secret: bytes = SECRET
) -> tuple[AuthenticatedConnection, Peer]:
    peer = Peer()
    handshake = ClientHandshake(secret, role, fresh_nonce(planes.host))
    _, connection = await planes.host.net.connect(
        lambda: AuthenticatedConnection(handshake, DATA_PLANE, peer), ADDRESS, planes.own_port
    )
    return connection, peer


def on_sockets(main: Callable[[Planes], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Planes(SystemHost()) as planes:
            await main(planes)

    asyncio.run(run())


def in_virtual_time(main: Callable[[Planes], Awaitable[None]]) -> None:
    async def run(host: SimulatedHost) -> None:
        async with Planes(host) as planes:
            await main(planes)

    assert simulate(run, 1).errors == []


HTTP = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
GARBAGE = [
    b"\x00" * 4096,
    HTTP,
    b"\x16\x03\x01\x02\x00",
    b"aioF" + bytes(100),
    b"aioH\x02",
    b"aioH\x01\x63",
]


@pytest.mark.parametrize("data", GARBAGE, ids=["zeros", "http", "tls", "frame", "version", "role"])
def test_invalid_handshake_is_cut_off_without_an_answer(data: bytes) -> None:
    async def main(planes: Planes) -> None:
        stranger = await dial(planes, data)
        await stranger.ended
        assert stranger.heard == b""
        await until(lambda: planes.producer.waiting.rejected == 1)
        assert planes.producer.links == []

    on_sockets(main)


def test_a_wrong_key_is_refused_by_either_side() -> None:
    async def main(planes: Planes) -> None:
        connection, peer = await dial_as(planes, secret=b"x" * 32)
        await connection.closed
        assert peer.connected == 0
        assert isinstance(peer.lost[0], NotAuthenticated)
        # A client that does not mind whom it talks to cannot prove itself either.
        hello = ClientHandshake(b"x" * 32, PeerRole.DATA, b"n" * 32).start()
        stranger = await dial(planes, hello)
        await until(lambda: len(stranger.heard) == 64)
        stranger.transport.write(b"\x00" * 32 + HELLO)  # type: ignore[attr-defined]
        await stranger.ended
        assert planes.producer.waiting.rejected == 2
        assert planes.producer.links == []

    on_sockets(main)


def test_the_right_key_in_another_role_is_refused() -> None:
    async def main(planes: Planes) -> None:
        for role in PeerRole:
            if role is not PeerRole.DATA:
                connection, peer = await dial_as(planes, role)
                await connection.closed
                assert peer.connected == 0
        assert planes.producer.waiting.rejected == len(PeerRole) - 1

    on_sockets(main)


def test_a_conversation_that_was_overheard_opens_nothing_when_it_is_played_again() -> None:
    async def main(planes: Planes) -> None:
        client = ClientHandshake(SECRET, PeerRole.DATA, b"n" * 32)
        first = await dial(planes, hello := client.start())
        await until(lambda: len(first.heard) == 64)
        proof = client.receive(first.heard)
        first.transport.write(proof + HELLO)  # type: ignore[attr-defined]
        await until(lambda: len(planes.producer.links) == 1)
        assert planes.producer.waiting.rejected == 0
        again = await dial(planes, hello)
        await until(lambda: len(again.heard) == 64)
        again.transport.write(proof + HELLO)  # type: ignore[attr-defined]
        await again.ended
        assert planes.producer.waiting.rejected == 1
        assert len(planes.producer.links) == 1
        first.transport.close()
        await first.ended

    on_sockets(main)


def test_peer_that_sends_its_proof_too_early_is_refused() -> None:
    async def main(planes: Planes) -> None:
        stranger = await dial(
            planes, ClientHandshake(SECRET, PeerRole.DATA, b"n" * 32).start() + bytes(32)
        )
        await stranger.ended
        assert stranger.heard == b""

    on_sockets(main)


def test_a_slow_sender_a_half_handshake_and_silence_all_end_after_the_time_limit() -> None:
    async def main(planes: Planes) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        hello = ClientHandshake(SECRET, PeerRole.DATA, b"n" * 32).start()
        silent, half, slow = await dial(planes), await dial(planes, hello), await dial(planes)
        ended: list[float] = []
        for stranger in (silent, half, slow):
            stranger.ended.add_done_callback(lambda _: ended.append(loop.time() - start))
        for byte in hello:
            if not slow.ended.done():
                slow.transport.write(bytes([byte]))  # type: ignore[attr-defined]
                await asyncio.sleep(0.5)
        assert len(ended) == 3
        assert all(HANDSHAKE_TIMEOUT_S <= after < HANDSHAKE_TIMEOUT_S + 1 for after in ended)
        assert len(planes.producer.waiting) == 0
        assert planes.producer.waiting.rejected == 3

    in_virtual_time(main)


def test_a_peer_that_proves_itself_and_says_nothing_more_is_cut_off_too() -> None:
    async def main(planes: Planes) -> None:
        connection, peer = await dial_as(planes)
        await connection.closed
        assert peer.connected == 1
        assert planes.producer.waiting.rejected == 1
        assert planes.producer.links == []

    in_virtual_time(main)


def test_a_server_that_does_not_answer_is_given_up_by_the_client() -> None:
    async def main(host: SimulatedHost) -> None:
        listener = await host.net.listen(Stranger, ADDRESS, 0)
        peer = Peer()
        handshake = ClientHandshake(SECRET, PeerRole.DATA, b"n" * 32)
        _, connection = await host.net.connect(
            lambda: AuthenticatedConnection(handshake, DATA_PLANE, peer), ADDRESS, listener.port
        )
        await connection.closed
        assert "did not finish the handshake within 5 s" in str(peer.lost[0])
        listener.close()

    simulate(main, 1)


def test_oldest_of_too_many_waiting_peers_is_dropped_so_that_an_honest_one_gets_in() -> None:
    async def main(planes: Planes) -> None:
        strangers = [await dial(planes) for _ in range(WAITING_MAX + 30)]
        await until(lambda: planes.producer.waiting.rejected == 30)
        assert len(planes.producer.waiting) == WAITING_MAX
        assert all(stranger.ended.done() for stranger in strangers[:29])
        planes.partition().subpartitions[0].add(RecordBatch([1]))
        reader = Reader(planes.channel())
        await until(lambda: reader.records == [1])
        assert not any(stranger.ended.done() for stranger in strangers[-WAITING_MAX + 1 :])
        reader.channel.release()
        await planes.producer.close()
        for stranger in strangers:
            await stranger.ended

    on_sockets(main)


def test_a_flood_of_strangers_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main(planes: Planes) -> None:
        for _ in range(25):
            await (await dial(planes, b"\x00")).ended
        await until(lambda: planes.producer.waiting.rejected == 25)

    with caplog.at_level(logging.INFO):
        on_sockets(main)
    own = [
        record for record in caplog.records if record.name.startswith("aioflow")
    ]  # asyncio's debug mode logs too.
    first, rest = [record.message for record in own]
    assert re.match(r"the data plane refused a connection from 127.0.0.1:\d+: .+", first)
    assert rest == "the data plane refused 24 more connections, 25 in all"


def test_the_log_says_in_words_that_a_stranger_went_away(caplog: pytest.LogCaptureFixture) -> None:
    async def main(planes: Planes) -> None:
        stranger = await dial(planes)
        await until(lambda: len(planes.producer.waiting) == 1)
        stranger.transport.close()
        await until(lambda: planes.producer.waiting.rejected == 1)

    with caplog.at_level(logging.INFO):
        on_sockets(main)
    [record] = [record for record in caplog.records if record.name.startswith("aioflow")]
    assert record.message.endswith(": it ended before it had proved itself")


def test_three_hundred_hostile_connections_beside_a_running_channel_leave_no_trace() -> None:
    """The fixtures of every test look for descriptors and tasks that were left."""

    async def main(planes: Planes) -> None:
        partition = planes.partition(batches=64)
        reader = Reader(planes.channel())
        hello = ClientHandshake(SECRET, PeerRole.DATA, b"n" * 32).start()
        control = ClientHandshake(SECRET, PeerRole.TASKMANAGER, b"n" * 32).start()
        attacks = [*GARBAGE, hello + bytes(32), control, hello[:20], b""]
        ended: list[Stranger] = []
        for number in range(300):
            ended.append(await dial(planes, attacks[number % len(attacks)]))
            partition.subpartitions[0].add(RecordBatch([number]))
        await until(lambda: len(reader.records) == 300)
        assert reader.records == list(range(300))
        assert planes.link.resets == 0
        await planes.producer.close()
        for stranger in ended:
            await stranger.ended
        assert planes.producer.waiting.rejected >= 300 * 7 // 10

    on_sockets(main)


def test_peer_that_comes_while_the_listener_closes_is_turned_away() -> None:
    async def main(planes: Planes) -> None:
        dialling = [asyncio.ensure_future(dial(planes)) for _ in range(5)]
        await asyncio.sleep(0)
        await planes.producer.close()
        for result in await asyncio.gather(*dialling, return_exceptions=True):
            if isinstance(result, Stranger):
                await result.ended

    on_sockets(main)


def test_frames_of_another_plane_end_the_connection() -> None:
    async def main(planes: Planes) -> None:
        connection, _ = await dial_as(planes)
        await until(lambda: connection.encoder is not None)
        assert connection.encoder is not None
        connection.write([connection.encoder.encode(FrameType.RPC_REQUEST, body=b"\x90")])
        await connection.closed
        assert planes.producer.waiting.rejected == 1

    on_sockets(main)


@pytest.mark.parametrize(
    "frames",
    [
        [(FrameType.HEARTBEAT, b"")],
        [(FrameType.HELLO, b"")],
        [(FrameType.HELLO, b"../x")],
        [(FrameType.HELLO, b"a" * 65)],
        [(FrameType.HELLO, b"\xff")],
        [(FrameType.HELLO, b"a1"), (FrameType.HELLO, b"a1")],
    ],
    ids=["none", "empty", "path", "long", "not-ascii", "twice"],
)
def test_a_wrong_hello_ends_the_connection(frames: list[tuple[FrameType, bytes]]) -> None:
    async def main(planes: Planes) -> None:
        connection, _ = await dial_as(planes)
        await until(lambda: connection.encoder is not None)
        assert connection.encoder is not None
        connection.write([connection.encoder.encode(kind, body=body) for kind, body in frames])
        await connection.closed
        await until(lambda: planes.producer.links == [])

    on_sockets(main)


def test_a_newer_connection_of_a_link_ends_an_older_one_that_is_half_open() -> None:
    async def main(planes: Planes) -> None:
        older, newer = (await dial_as(planes))[0], (await dial_as(planes))[0]
        for connection in (older, newer):
            await until(lambda: connection.encoder is not None)  # noqa: B023
            assert connection.encoder is not None
            connection.write([connection.encoder.encode(FrameType.HELLO, body=b"a1")])
            await until(lambda: len(planes.producer.links) == 1)
        await older.closed
        assert not newer.closed.done()
        assert len(planes.producer.links) == 1
        newer.abort()
        await newer.closed

    on_sockets(main)


def test_closing_waits_for_what_was_written_but_not_for_a_peer_that_never_reads() -> None:
    async def main(host: SimulatedHost) -> None:
        class Deaf(AuthenticatedConnection):
            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                if self.encoder is not None:
                    self._transport.pause_reading()  # type: ignore[union-attr]

        far, near = Peer(), Peer()
        listener = await host.net.listen(
            lambda: Deaf(
                ServerHandshake(SECRET, b"m" * 32, frozenset([PeerRole.DATA])), CONTROL_PLANE, far
            ),
            ADDRESS,
            0,
        )
        handshake = ClientHandshake(SECRET, PeerRole.DATA, b"n" * 32)
        _, connection = await host.net.connect(
            lambda: AuthenticatedConnection(handshake, CONTROL_PLANE, near), ADDRESS, listener.port
        )
        await until(lambda: far.connected == 1)
        assert connection.encoder is not None
        for _ in range(3):
            connection.write([connection.encoder.encode(FrameType.RPC_NOTIFY, body=bytes(1 << 20))])
        assert not connection.is_writable
        start = asyncio.get_running_loop().time()
        await close_all([connection])
        assert asyncio.get_running_loop().time() - start == pytest.approx(2.0, abs=0.1)
        assert connection.closed.done()
        listener.close()

    simulate(main, 1)


def test_addresses_of_this_machine_are_distinguished_from_others() -> None:
    assert [is_loopback(a) for a in ("localhost", "::1", ("127.0.0.1", 1), ("127.8.0.1", 1))] == [
        True
    ] * 4
    assert [is_loopback(a) for a in ("10.0.0.1", ("192.168.0.1", 1), None, ("::2", 1))] == [
        False
    ] * 4


def test_a_link_cannot_be_made_with_a_stranger_that_took_the_port() -> None:
    """The consumer's side of a wrong key: its channel fails once the time is up, and says why."""

    async def main(host: SimulatedHost) -> None:
        async with Planes(host) as planes:
            listener = await host.net.listen(lambda: Stranger(bytes(64)), ADDRESS, 0)
            planes.port = listener.port
            reader = Reader(planes.channel())
            await until(lambda: reader.error is not None, 0.1)
            assert isinstance(reader.error, Broken)
            assert "did not prove that it knows the secret" in str(reader.error)
            listener.close()

    simulate(main, 1)


@pytest.mark.parametrize(("client", "gives_up_ms"), [("127.0.0.1", 0), ("127.0.0.2", SILENCE_MS)])
async def test_tcp_waits_for_a_program_of_this_machine_that_does_not_read(
    client: str, gives_up_ms: int
) -> None:
    """Unacknowledged data over a network counts as lost; on one machine TCP waits for a program
    that blocks its loop.
    """

    class Owner:
        def on_connection_lost(
            self, connection: AuthenticatedConnection, error: Exception | None
        ) -> None:
            ended.set()

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()
        handshake = ClientHandshake(SECRET, PeerRole.TASKMANAGER, bytes(32))
        connection = AuthenticatedConnection(handshake, DATA_PLANE, cast(ConnectionOwner, Owner()))
        transport, _ = await loop.create_connection(
            lambda: connection, *address, local_addr=(client, 0)
        )
        assert (
            transport.get_extra_info("socket").getsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
            )
            == gives_up_ms
        )
        transport.abort()
        await ended.wait()
