"""The simulated network: bytes come whole and in order, cut anywhere; links and machines fail as
TCP knows it.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from aioflow.core.host import Host
from aioflow.testing import NetworkOptions, simulate
from aioflow.testing.simulation import SimulatedHost

DATA = bytes(range(256))


class Recorder(asyncio.Protocol):
    """Keeps what it receives and how its connection ended."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.chunks.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(exc)


class Server:
    """Starts a process that listens on port 7 and keeps its protocols where the test can see
    them.
    """

    def __init__(self, host: SimulatedHost, name: str = "server") -> None:
        self.accepted: list[Recorder] = []
        host.sim.spawn(name, self._main)

    async def _main(self, host: Host) -> None:
        def accept() -> Recorder:
            self.accepted.append(Recorder())
            return self.accepted[-1]

        await host.net.listen(accept, "0.0.0.0", 7)
        await asyncio.get_running_loop().create_future()


async def connected(host: SimulatedHost) -> tuple[Recorder, Recorder]:
    """Return both ends of a connection to a fresh server."""
    server = Server(host)
    await asyncio.sleep(0.1)
    _, client = await host.net.connect(Recorder, "server", 7)
    await asyncio.sleep(0.1)
    return client, server.accepted[0]


def test_frames_are_split_and_joined_at_every_byte_yet_none_is_lost_or_moved() -> None:
    async def main(host: SimulatedHost) -> list[int]:
        client, server = await connected(host)
        for start in range(0, len(DATA), 16):
            client.transport.write(DATA[start : start + 16])
            await asyncio.sleep(0.0005)
        client.transport.close()
        await server.ended
        assert b"".join(server.chunks) == DATA
        ends, position = [], 0
        for chunk in server.chunks:
            position += len(chunk)
            ends.append(position)
        return ends

    network = NetworkOptions(split_rate=0.5)
    cuts = {end for seed in range(100) for end in simulate(main, seed, network=network).value}
    assert cuts == set(range(1, len(DATA) + 1))


def test_data_flows_both_ways_and_close_is_an_orderly_end() -> None:
    async def main(host: SimulatedHost) -> None:
        client, server = await connected(host)
        client.transport.write(b"question")
        server.transport.writelines([b"ans", b"wer"])
        assert client.transport.get_extra_info("peername") == ("server", 7)
        await asyncio.sleep(1)
        assert b"".join(server.chunks) == b"question"
        assert b"".join(client.chunks) == b"answer"
        client.transport.close()
        assert client.transport.is_closing()
        assert await client.ended is None
        assert await server.ended is None

    for seed in range(10):
        simulate(main, seed)


def test_half_closed_connection_still_carries_the_answer() -> None:
    async def main(host: SimulatedHost) -> bytes:
        async def answer(child: SimulatedHost) -> None:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                question = await reader.read()
                writer.write(question.upper())
                writer.close()

            async with await asyncio.start_server(serve, port=7) as server:
                await server.serve_forever()

        host.sim.spawn("server", answer)
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("server", 7)
        writer.write(b"question")
        writer.write_eof()
        answered = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answered

    assert simulate(main, 1).value == b"QUESTION"


def test_slow_reader_stops_the_writer_at_the_window_and_releases_it() -> None:
    window = 4096

    async def main(host: SimulatedHost) -> tuple[int, int]:
        started = asyncio.Event()
        go_on = asyncio.Event()
        received = 0

        async def slow(child: SimulatedHost) -> None:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                nonlocal received
                started.set()
                await go_on.wait()
                while data := await reader.read(1000):
                    received += len(data)
                writer.close()

            async with await asyncio.start_server(serve, port=7, limit=512) as server:
                await server.serve_forever()

        host.sim.spawn("server", slow)
        await asyncio.sleep(0.1)
        _, writer = await asyncio.open_connection("server", 7)
        writer.transport.set_write_buffer_limits(high=1024)
        sent = 0

        async def send() -> None:
            nonlocal sent
            for _ in range(1000):
                writer.write(bytes(100))
                await writer.drain()
                sent += 100
            writer.close()

        sending = asyncio.create_task(send())
        await started.wait()
        await asyncio.sleep(30)
        stuck_at = sent
        go_on.set()
        await sending
        await asyncio.sleep(1)
        return stuck_at, received

    for seed in range(5):
        stuck_at, received = simulate(main, seed, network=NetworkOptions(window_bytes=window)).value
        # The window, what the stream reader takes before it pauses (twice its limit, and one read),
        # the write buffer.
        assert window <= stuck_at <= 2 * window + 1024 + 1024 + 100
        assert received == 100_000


@pytest.mark.parametrize(("fin_rate", "error"), [(0.0, ConnectionResetError), (1.0, type(None))])
def test_kill_breaks_or_ends_the_connections_of_the_process(fin_rate: float, error: type) -> None:
    async def main(host: SimulatedHost) -> Exception | None:
        client, _ = await connected(host)
        host.sim.kill("server")
        return await client.ended

    ended = simulate(main, 1, network=NetworkOptions(dead_fin_rate=fin_rate)).value
    assert type(ended) is error


def test_bytes_sent_before_a_kill_still_arrive() -> None:
    async def main(host: SimulatedHost) -> bytes:
        server = Server(host)
        await asyncio.sleep(0.1)

        async def send(child: SimulatedHost) -> None:
            _, sender = await child.net.connect(Recorder, "server", 7)
            sender.transport.write(DATA)
            child.sim.kill("sender")

        host.sim.spawn("sender", send)
        await asyncio.sleep(2)
        return b"".join(server.accepted[0].chunks)

    for seed in range(10):
        assert simulate(main, seed).value == DATA


def test_power_loss_leaves_the_peer_with_a_half_open_connection() -> None:
    async def main(host: SimulatedHost) -> tuple[bool, Exception | None, float]:
        client, _ = await connected(host)
        host.sim.power("server")
        await asyncio.sleep(3600)
        noticed = client.ended.done()
        before = host.clock.monotonic()
        client.transport.write(b"anyone?")
        error = await client.ended
        return noticed, error, host.clock.monotonic() - before

    noticed, error, after = simulate(main, 1).value
    assert not noticed
    assert isinstance(error, TimeoutError)
    assert 6 <= after < 10


def test_machine_that_came_back_resets_a_connection_that_it_does_not_know() -> None:
    async def main(host: SimulatedHost) -> Exception | None:
        client, _ = await connected(host)
        host.sim.power("server")
        await asyncio.sleep(1)
        host.sim.restart("server")
        await asyncio.sleep(1)
        client.transport.write(b"still there?")
        return await client.ended

    assert isinstance(simulate(main, 1).value, ConnectionResetError)


def test_cut_link_holds_packets_until_it_heals() -> None:
    async def main(host: SimulatedHost) -> None:
        client, server = await connected(host)
        host.sim.network.cut("main", "server")
        client.transport.write(DATA)
        await asyncio.sleep(3)
        assert server.chunks == []
        host.sim.network.heal("main", "server")
        await asyncio.sleep(2)
        assert b"".join(server.chunks) == DATA
        assert not client.ended.done()

    for seed in range(5):
        simulate(main, seed)


def test_cut_of_one_way_holds_packets_of_that_way_alone_and_no_connection_is_made() -> None:
    async def main(host: SimulatedHost) -> None:
        client, server = await connected(host)
        host.sim.network.cut("main", "server", one_way=True)
        client.transport.write(b"lost")
        server.transport.write(b"heard")
        await asyncio.sleep(0.3)
        assert (client.chunks, server.chunks) == ([b"heard"], [])
        assert host.sim.network.is_cut("server", "main")
        with pytest.raises(TimeoutError):
            await host.net.connect(Recorder, "server", 7)
        host.sim.network.heal("server", "main")
        await asyncio.sleep(5)
        assert server.chunks == [b"lost"]

    simulate(main, 1)


def test_processes_of_one_machine_can_be_parted() -> None:
    async def main(host: SimulatedHost) -> None:
        client, server = await connected(host)
        network = host.sim.network
        me = host.sim.loop.root.name
        network.part("server", me, one_way=True)
        client.transport.write(b"heard")
        server.transport.write(b"lost")
        await asyncio.sleep(0.3)
        assert (client.chunks, server.chunks) == ([], [b"heard"])
        with pytest.raises(TimeoutError):
            await host.net.connect(Recorder, "server", 7)
        network.join("server", me)
        await asyncio.sleep(5)
        assert client.chunks == [b"lost"]

    simulate(main, 1)


def test_cut_that_lasts_ends_the_sender_and_leaves_the_receiver_waiting() -> None:
    async def main(host: SimulatedHost) -> Exception | None:
        client, server = await connected(host)
        host.sim.network.isolate("server")
        client.transport.write(DATA)
        error = await client.ended
        assert not server.ended.done()
        host.sim.network.rejoin("server")
        server.transport.write(b"hello")
        assert isinstance(await server.ended, ConnectionResetError)
        return error

    assert isinstance(simulate(main, 1).value, TimeoutError)


def test_reset_breaks_both_ends_at_once() -> None:
    async def main(host: SimulatedHost) -> None:
        client, server = await connected(host)
        host.sim.network.reset("server", "main")
        assert isinstance(await client.ended, ConnectionResetError)
        assert isinstance(await server.ended, ConnectionResetError)

    simulate(main, 1)


def test_one_side_that_gives_up_leaves_the_other_half_open_until_it_sends() -> None:
    async def main(host: SimulatedHost) -> None:
        client, server = await connected(host)
        host.sim.network.cut("server", "main")
        host.sim.network.give_up("server", "main")
        host.sim.network.give_up(
            "server", "main"
        )  # A connection without its other side cannot be given up again.
        await asyncio.sleep(1)
        ends = [client, server]
        (gone,) = [end for end in ends if end.ended.done()]
        (half_open,) = [end for end in ends if end is not gone]
        assert isinstance(gone.ended.result(), TimeoutError)
        host.sim.network.heal("server", "main")
        await asyncio.sleep(10)
        assert not half_open.ended.done()
        half_open.transport.write(b"is anybody there")
        assert isinstance(await half_open.ended, ConnectionResetError)

    for seed in range(10):
        simulate(main, seed)


def test_slow_link_takes_the_factor_longer() -> None:
    async def main(host: SimulatedHost) -> tuple[float, float]:
        client, server = await connected(host)

        async def trip() -> float:
            before, count = host.clock.monotonic(), len(server.chunks)
            client.transport.write(b"x")
            while len(server.chunks) == count:
                await asyncio.sleep(0.0001)
            return host.clock.monotonic() - before

        usual = await trip()
        host.sim.network.slow("main", "server", 1000)
        return usual, await trip()

    usual, slow = simulate(main, 1, network=NetworkOptions(latency_s=(0.001, 0.001))).value
    assert usual < 0.01
    assert 1.0 <= slow < 1.1


def test_connecting_without_a_listener_is_refused_unknown_or_timed_out() -> None:
    async def main(host: SimulatedHost) -> float:
        with pytest.raises(socket.gaierror, match="no machine"):
            await host.net.connect(Recorder, "nowhere", 7)
        Server(host)
        await asyncio.sleep(0.1)
        with pytest.raises(ConnectionRefusedError):
            await host.net.connect(Recorder, "server", 8)
        host.sim.kill("server")
        with pytest.raises(ConnectionRefusedError):
            await host.net.connect(Recorder, "server", 7)
        host.sim.restart("server")
        host.sim.network.cut("main", "server")
        before = host.clock.monotonic()
        with pytest.raises(TimeoutError, match="server:7"):
            await host.net.connect(Recorder, "server", 7)
        return host.clock.monotonic() - before

    assert 3 <= simulate(main, 1).value < 3.1


def test_ports_belong_to_a_machine_and_are_free_again_after_close_and_kill() -> None:
    async def main(host: SimulatedHost) -> None:
        first = await host.net.listen(Recorder, "0.0.0.0", 0)
        second = await host.net.listen(Recorder, "0.0.0.0", 0)
        assert first.port != second.port
        with pytest.raises(OSError, match="taken by"):
            await host.net.listen(Recorder, "0.0.0.0", first.port)
        first.close()
        (await host.net.listen(Recorder, "0.0.0.0", first.port)).close()
        Server(host)
        await asyncio.sleep(0.1)
        host.sim.kill("server")
        Server(host, "server")
        await asyncio.sleep(0.1)
        transport, _ = await host.net.connect(Recorder, "server", 7)
        transport.close()

    assert simulate(main, 1).errors == []


def test_abort_resets_the_peer() -> None:
    async def main(host: SimulatedHost) -> None:
        client, server = await connected(host)
        client.transport.abort()
        assert await client.ended is None
        assert isinstance(await server.ended, ConnectionResetError)

    simulate(main, 1)


def test_closing_over_unread_bytes_resets_the_peer() -> None:
    async def main(host: SimulatedHost) -> None:
        client, server = await connected(host)
        server.transport.pause_reading()
        client.transport.write(DATA)
        await asyncio.sleep(0.1)
        server.transport.close()
        assert isinstance(await client.ended, ConnectionResetError)

    simulate(main, 1)


def test_paused_reading_delivers_nothing_and_resuming_delivers_all() -> None:
    async def main(host: SimulatedHost) -> None:
        client, server = await connected(host)
        server.transport.pause_reading()
        client.transport.write(DATA)
        client.transport.close()
        await asyncio.sleep(1)
        assert server.chunks == []
        assert not server.ended.done()
        server.transport.resume_reading()
        assert await server.ended is None
        assert b"".join(server.chunks) == DATA

    for seed in range(5):
        simulate(main, seed)


def test_buffered_protocol_receives_into_its_own_buffer() -> None:
    class Buffered(asyncio.BufferedProtocol):
        def __init__(self) -> None:
            self.buffer = bytearray(10)
            self.received = b""

        def get_buffer(self, sizehint: int) -> bytearray:
            return self.buffer

        def buffer_updated(self, nbytes: int) -> None:
            self.received += self.buffer[:nbytes]

    async def main(host: SimulatedHost) -> bytes:
        server = Server(host)
        await asyncio.sleep(0.1)
        transport, client = await host.net.connect(Buffered, "server", 7)
        await asyncio.sleep(0.1)
        server.accepted[0].transport.write(DATA)
        await asyncio.sleep(1)
        transport.close()
        return client.received

    assert simulate(main, 1).value == DATA


def test_paused_process_keeps_its_connections_and_finds_the_bytes_later() -> None:
    async def main(host: SimulatedHost) -> None:
        client, server = await connected(host)
        host.sim.pause("server")
        client.transport.write(DATA)
        _, late = await host.net.connect(Recorder, "server", 7)  # The kernel answers for it.
        await asyncio.sleep(30)
        assert server.chunks == []
        host.sim.resume("server")
        await asyncio.sleep(0.1)
        assert b"".join(server.chunks) == DATA
        assert not client.ended.done()
        assert not late.ended.done()

    simulate(main, 1)


def test_connect_that_is_given_up_leaves_no_connection() -> None:
    async def main(host: SimulatedHost) -> int:
        server = Server(host)
        await asyncio.sleep(0.1)
        given_up = 0
        for _ in range(30):
            try:
                async with asyncio.timeout(0.02):
                    transport, _ = await host.net.connect(Recorder, "server", 7)
                    transport.close()
            except TimeoutError:
                given_up += 1
        await asyncio.sleep(5)
        assert all(protocol.ended.done() for protocol in server.accepted)
        return given_up

    network = NetworkOptions(latency_s=(0.001, 0.02))
    assert sum(simulate(main, seed, network=network).value for seed in range(5)) > 10
