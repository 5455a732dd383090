"""The protocol between a service and Spark's tasks, with the tasks played by threads: no Java
here.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from aioflow.core.errors import Broken, NotAuthenticated, RemoteProtocolError, RestoreError
from aioflow.core.system_host import SystemHost
from aioflow.network.security import TlsFiles
from aioflow.protocol.handshake import ClientHandshake, PeerRole
from aioflow.spark.bridge.channels import ChannelListener
from aioflow.spark.bridge.executor import ServiceAddress, TaskChannel
from aioflow.spark.bridge.frames import (
    FrameKind,
    Hello,
    Sealer,
    decode_words,
    encode_words,
    parse_header,
)
from aioflow.spark.bridge.settings import Reach
from aioflow.spark.bridge.transfers import WINDOW, Arrival, InboundStream, OutboundStream, Progress
from tests.network.certificates import Authority

WITHIN_S = 60.0


def batches(count: int, rows: int = 3, first: int = 0) -> list[pa.RecordBatch]:
    return [
        pa.record_batch(
            {"n": pa.array(range(first + i * rows, first + (i + 1) * rows), pa.int64())}
        )
        for i in range(count)
    ]


def numbers(found: list[Arrival] | list[pa.RecordBatch]) -> list[int]:
    return [
        n
        for one in found
        for n in (one.batch if isinstance(one, Arrival) else one).column(0).to_pylist()
    ]


@asynccontextmanager
async def listening(tls: TlsFiles | None = None) -> AsyncIterator[ChannelListener]:
    host = SystemHost()
    listener = ChannelListener(host, Reach("127.0.0.1", tls))
    try:
        await listener.open()
        yield listener
    finally:
        await listener.close()
        await host.close()


def push(
    where: ServiceAddress,
    stream: str,
    what: list[pa.RecordBatch],
    partition: int = 0,
    attempt: int = 0,
) -> int:
    with TaskChannel(where, Hello("push", stream, partition, attempt)) as channel:
        return channel.start.rows if channel.start.done else channel.push(what)


async def in_thread(fn: Callable[[], object]) -> object:
    async with asyncio.timeout(WITHIN_S):
        return await asyncio.to_thread(fn)


async def taken(stream: InboundStream, rows: int) -> list[Arrival]:
    """Returns the arriving rows, up to the given number."""
    found: list[Arrival] = []
    async with asyncio.timeout(WITHIN_S):
        while sum(one.batch.num_rows for one in found) < rows:
            await stream.wait()
            while (arrival := stream.take()) is not None:
                found.append(arrival)
    return found


async def test_pushed_batches_arrive_in_order_with_the_progress_around_them() -> None:
    async with listening() as listener:
        stream = InboundStream()
        name = listener.add(stream)
        sent = asyncio.create_task(
            in_thread(lambda: push(listener.where, name, batches(20), partition=3))
        )
        found = await taken(stream, 60)

        assert await sent == 60
        assert numbers(found) == list(range(60)) and {one.partition for one in found} == {3}
        assert [one.before for one in found][1:] == [one.after for one in found][:-1]
        assert stream.progress(3) == Progress(60, found[-1].after.chain, True)


async def test_a_task_sends_no_more_than_the_window_until_something_is_taken() -> None:
    async with listening() as listener:
        stream = InboundStream()
        name = listener.add(stream)
        given: list[int] = []

        def watched() -> Iterator[pa.RecordBatch]:
            for batch in batches(30):
                given.append(batch.num_rows)
                yield batch

        pushing = in_thread(lambda: push(listener.where, name, watched()))  # type: ignore[arg-type]
        with_thread = asyncio.create_task(pushing)
        async with asyncio.timeout(WITHIN_S):
            while len(stream) < WINDOW or len(given) < WINDOW + 1:
                await asyncio.sleep(0.01)
        for _ in range(20):  # All other data in transit has had its turn.
            await asyncio.sleep(0)
        assert len(stream) == WINDOW and len(given) == WINDOW + 1

        await taken(stream, 90)
        assert await with_thread == 90


async def test_an_attempt_that_comes_after_one_that_died_goes_on_where_that_was() -> None:
    async with listening() as listener:
        stream = InboundStream()
        name = listener.add(stream)

        def dies() -> Iterator[pa.RecordBatch]:
            yield from batches(3)
            raise OSError("the machine is gone")

        with pytest.raises(OSError, match="the machine is gone"):
            await in_thread(
                lambda: push(listener.where, name, dies(), attempt=1)  # type: ignore[arg-type]
            )
        sent = asyncio.create_task(
            in_thread(lambda: push(listener.where, name, batches(10), attempt=2))
        )
        found = await taken(stream, 30)

        assert await sent == 30
        assert numbers(found) == list(range(30))


async def test_a_second_attempt_waits_for_the_first_and_then_has_nothing_to_do() -> None:
    async with listening() as listener:
        stream = InboundStream()
        name = listener.add(stream)
        first = asyncio.create_task(
            in_thread(lambda: push(listener.where, name, batches(WINDOW + 2), attempt=1))
        )
        async with asyncio.timeout(WITHIN_S):
            while not len(stream):
                await asyncio.sleep(0.01)
        second = asyncio.create_task(
            in_thread(lambda: push(listener.where, name, batches(WINDOW + 2), attempt=2))
        )
        async with asyncio.timeout(WITHIN_S):
            while len(listener._channels) < 2:  # The first cannot be through: it waits for credit.
                await asyncio.sleep(0.01)
        found = await taken(stream, 3 * (WINDOW + 2))

        assert await first == await second == 3 * (WINDOW + 2)
        assert numbers(found) == list(range(3 * (WINDOW + 2)))


async def test_a_large_batch_comes_in_pieces_and_a_later_attempt_cuts_it_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioflow.spark.bridge.executor.PIECE_BYTES", 80)  # Ten rows.
    async with listening() as listener:
        stream = InboundStream()
        name = listener.add(stream)
        sent = asyncio.create_task(
            in_thread(lambda: push(listener.where, name, batches(2, rows=25)))
        )
        found = await taken(stream, 50)
        await sent
        again = InboundStream({0: found[1].after})
        name = listener.add(again)
        sent = asyncio.create_task(
            in_thread(lambda: push(listener.where, name, batches(2, rows=25)))
        )

        assert [one.batch.num_rows for one in found] == [10, 10, 5, 10, 10, 5]
        assert numbers(await taken(again, 30)) == list(range(20, 50))
        assert await sent == 50


async def test_a_partition_that_was_taken_in_part_goes_on_behind_that() -> None:
    async with listening() as listener:
        stream = InboundStream()
        name = listener.add(stream)
        sent = asyncio.create_task(in_thread(lambda: push(listener.where, name, batches(4))))
        before = await taken(stream, 12)
        await sent
        again = InboundStream({0: before[1].after})
        name = listener.add(again)
        sent = asyncio.create_task(in_thread(lambda: push(listener.where, name, batches(4))))

        assert numbers(await taken(again, 6)) == list(range(6, 12))
        assert await sent == 12


@pytest.mark.parametrize(
    "other",
    [batches(4, first=1), batches(3, rows=4), batches(1)],
    ids=["other rows", "other batches", "fewer rows"],
)
async def test_a_partition_that_gives_other_rows_than_before_is_an_error_that_advises(
    other: list[pa.RecordBatch],
) -> None:
    async with listening() as listener:
        stream = InboundStream()
        name = listener.add(stream)
        sent = asyncio.create_task(in_thread(lambda: push(listener.where, name, batches(4))))
        before = await taken(stream, 12)
        await sent
        again = InboundStream({0: before[1].after})
        name = listener.add(again)

        with pytest.raises(RuntimeError, match="does not give again the 6 rows"):
            await in_thread(lambda: push(listener.where, name, other))
        async with asyncio.timeout(WITHIN_S):
            await again.wait()
        with pytest.raises(
            RestoreError,
            match=r"partition 0 of the DataFrame was read up to row 6 .* sort it, or save it",
        ):
            again.take()


async def test_a_task_that_does_not_know_the_secret_is_not_let_in() -> None:
    async with listening() as listener:
        name = listener.add(InboundStream())
        stranger = ServiceAddress(listener.where.host, listener.where.port, bytes(32))

        with pytest.raises((NotAuthenticated, Broken)):
            await in_thread(lambda: push(stranger, name, batches(1)))
        async with asyncio.timeout(WITHIN_S):
            while not listener.rejected:
                await asyncio.sleep(0.01)


async def test_a_task_for_a_stream_that_is_over_gets_an_error_that_says_so() -> None:
    async with listening() as listener:
        name = listener.add(InboundStream())
        listener.remove(name)

        with pytest.raises(Broken, match="does not wait for this task any more"):
            await in_thread(lambda: push(listener.where, name, batches(1)))


async def test_removing_a_stream_ends_its_tasks() -> None:
    async with listening() as listener:
        stream = InboundStream()
        name = listener.add(stream)
        sent = asyncio.create_task(in_thread(lambda: push(listener.where, name, batches(100))))
        async with asyncio.timeout(WITHIN_S):
            while not len(stream):
                await asyncio.sleep(0.01)
        listener.remove(name)

        with pytest.raises((Broken, OSError)):
            await sent


def prove(peer: socket.socket, where: ServiceAddress) -> None:
    handshake = ClientHandshake(where.secret, PeerRole.EXECUTOR, bytes(range(32)))
    peer.sendall(handshake.start())
    while handshake.done is None:
        answer = handshake.receive(peer.recv(1000))
        if answer:
            peer.sendall(answer)


async def test_frames_may_be_cut_anywhere() -> None:
    async with listening() as listener:
        stream = InboundStream()
        name = listener.add(stream)
        (batch,) = batches(1)
        body = batch.serialize()
        seal = Sealer().seal
        frames = [
            seal(FrameKind.HELLO, encode_words("push", name, 0, 0)),
            seal(FrameKind.SCHEMA, memoryview(batch.schema.serialize())),
            seal(FrameKind.BATCH, bytes(4), memoryview(body)),
            seal(FrameKind.END, encode_words(3)),
        ]
        data = b"".join(bytes(piece) for frame in frames for piece in frame)

        def byte_by_byte() -> bytes:
            with socket.create_connection(
                (listener.where.host, listener.where.port), WITHIN_S
            ) as peer:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                prove(peer, listener.where)
                for i in range(len(data)):
                    peer.send(data[i : i + 1])
                said = b""
                while bytes([0, 0, 0, 0, FrameKind.ACK]) not in said:
                    said += peer.recv(1000)
                return said

        answer = asyncio.create_task(in_thread(byte_by_byte))
        found = await taken(stream, 3)
        await answer
        assert numbers(found) == [0, 1, 2] and stream.progress(0).done


@pytest.mark.parametrize(
    "frames",
    [
        [(FrameKind.CREDIT, encode_words(1))],
        [(FrameKind.HELLO, encode_words("push"))],
        [(FrameKind.HELLO, b"\xc1")],
        [(FrameKind.HELLO, encode_words("pull", "NAME", 0, 0))],
        [(FrameKind.HELLO, encode_words("push", "NAME", -1, 0))],
        [(FrameKind.HELLO, encode_words("push", "NAME", 0, 0)), (FrameKind.BATCH, bytes(100))],
        [(FrameKind.HELLO, encode_words("push", "NAME", 0, 0)), (FrameKind.SCHEMA, b"nothing")],
        [(FrameKind.HELLO, encode_words("push", "NAME", 0, 0)), (FrameKind.END, encode_words(7))],
        [(FrameKind.HELLO, encode_words("push", "NAME", 0, 0)), (FrameKind.ACK, b"")],
    ],
    ids=[
        "no hello",
        "half a hello",
        "garbage",
        "wrong op",
        "no partition",
        "no schema",
        "bad schema",
        "wrong count",
        "ack",
    ],
)
async def test_a_task_that_says_what_it_must_not_is_closed_and_nothing_else_happens(
    frames: list[tuple[FrameKind, bytes]],
) -> None:
    async with listening() as listener:
        stream = InboundStream()
        name = listener.add(stream)

        def talk() -> bytes:
            with socket.create_connection(
                (listener.where.host, listener.where.port), WITHIN_S
            ) as peer:
                prove(peer, listener.where)
                for kind, body in frames:
                    body = body.replace(encode_words("NAME")[1:], encode_words(name)[1:])
                    for piece in Sealer().seal(kind, body):
                        try:
                            peer.sendall(piece)
                        except OSError:
                            return b""  # It was closed already.
                said = b""
                while True:
                    try:
                        data = peer.recv(1000)
                    except ConnectionError:
                        return said
                    if not data:
                        return said
                    said += data

        await in_thread(talk)
        assert not len(stream) and stream.progress(0) == Progress()


def test_a_frame_that_was_changed_on_the_way_is_refused() -> None:
    key = bytes(32)
    header, body, mac = Sealer(key).seal(FrameKind.END, b"abc")
    Sealer(key).check(bytes(header), bytes(body), bytes(mac))

    with pytest.raises(RemoteProtocolError, match="changed on the way"):
        Sealer(key).check(bytes(header), b"abd", bytes(mac))
    replayed = Sealer(key)
    replayed.check(bytes(header), bytes(body), bytes(mac))
    with pytest.raises(RemoteProtocolError, match="changed on the way"):
        replayed.check(bytes(header), bytes(body), bytes(mac))


def test_a_body_above_its_limit_is_refused_by_its_header() -> None:
    with pytest.raises(RemoteProtocolError, match="takes 1000000 bytes, expected up to 65536"):
        parse_header((1_000_000).to_bytes(4, "big") + bytes([FrameKind.END]))
    with pytest.raises(RemoteProtocolError, match="of kind 77"):
        parse_header(bytes(4) + bytes([77]))
    with pytest.raises(RemoteProtocolError, match=r"expected \(int\)"):
        decode_words(FrameKind.END, encode_words("x"), int)


async def test_each_task_pulls_its_partition_from_the_beginning_as_often_as_it_is_run() -> None:
    async with listening() as listener:

        async def give(partition: int) -> AsyncGenerator[pa.RecordBatch, None]:
            for batch in batches(5, first=100 * partition):
                yield batch

        stream = OutboundStream(give)
        name = listener.add(stream)

        def pull(partition: int) -> list[int]:
            with TaskChannel(listener.where, Hello("pull", name, partition, 0)) as channel:
                return numbers(list(channel.pull()))

        assert await in_thread(lambda: pull(1)) == list(range(100, 115))
        assert await in_thread(lambda: pull(0)) == list(range(15))
        assert await in_thread(lambda: pull(1)) == list(range(100, 115))
        await stream.close()


async def test_no_more_is_made_for_a_task_than_it_has_credit_for() -> None:
    async with listening() as listener:
        made = 0

        async def give(partition: int) -> AsyncGenerator[pa.RecordBatch, None]:
            nonlocal made
            for batch in batches(50):
                made += 1
                yield batch

        stream = OutboundStream(give)
        name = listener.add(stream)
        first, go_on = threading.Event(), threading.Event()

        def slow() -> list[int]:
            found: list[pa.RecordBatch] = []
            with TaskChannel(listener.where, Hello("pull", name, 0, 0)) as channel:
                for batch in channel.pull():
                    found.append(batch)
                    first.set()
                    go_on.wait(WITHIN_S)
            return numbers(found)

        pulled = asyncio.create_task(in_thread(slow))
        async with asyncio.timeout(WITHIN_S):
            while not (first.is_set() and made > WINDOW):
                await asyncio.sleep(0.01)
        for _ in range(20):
            await asyncio.sleep(0)
        assert made == WINDOW + 1  # One is ready, and waits for credit.
        go_on.set()
        assert await pulled == list(range(150))
        await stream.close()


async def test_failure_while_a_partition_is_made_fails_the_task_with_its_reason() -> None:
    async with listening() as listener:

        async def give(partition: int) -> AsyncGenerator[pa.RecordBatch, None]:
            yield batches(1)[0]
            raise LookupError("the file is gone")

        stream = OutboundStream(give)
        name = listener.add(stream)

        def pull() -> None:
            with TaskChannel(listener.where, Hello("pull", name, 0, 0)) as channel:
                list(channel.pull())

        with pytest.raises(Broken, match="LookupError: the file is gone"):
            await in_thread(pull)
        assert isinstance(stream.error, LookupError)
        await stream.close()


async def test_nothing_listens_off_loopback_in_plain_text_by_default() -> None:
    host = SystemHost()
    with pytest.raises(
        NotAuthenticated,
        match=(
            r"executors on other machines and 192\.0\.2\.7 would cross .* in plain text: give "
            r".*tls="
        ),
    ):
        await ChannelListener(host, Reach("192.0.2.7")).open()
    await host.close()


async def test_rows_cross_over_tls_both_ways(tmp_path: Path) -> None:
    async with listening(Authority(tmp_path).issue("service")) as listener:
        inbound = InboundStream()
        name = listener.add(inbound)
        sent = asyncio.create_task(in_thread(lambda: push(listener.where, name, batches(20))))
        assert numbers(await taken(inbound, 60)) == list(range(60))
        assert await sent == 60
        assert all(
            channel._transport.get_extra_info("cipher")
            for channel in listener._channels
            if channel._transport is not None
        )

        async def give(partition: int) -> AsyncGenerator[pa.RecordBatch, None]:
            for batch in batches(20):
                yield batch

        stream = OutboundStream(give)
        name = listener.add(stream)

        def pull() -> list[int]:
            with TaskChannel(listener.where, Hello("pull", name, 0, 0)) as channel:
                return numbers(list(channel.pull()))

        assert await in_thread(pull) == list(range(60))
        await stream.close()


async def test_other_rows_than_before_are_an_error_over_tls_too(tmp_path: Path) -> None:
    """The task closes its half at once, and reads what is on its way."""
    async with listening(Authority(tmp_path).issue("service")) as listener:
        stream = InboundStream({0: Progress(6, 1)})
        name = listener.add(stream)

        with pytest.raises(RuntimeError, match="does not give again the 6 rows"):
            await in_thread(lambda: push(listener.where, name, batches(4)))
        async with asyncio.timeout(WITHIN_S):
            await stream.wait()
        with pytest.raises(RestoreError, match="partition 0 of the DataFrame"):
            stream.take()


@pytest.mark.expects_asyncio_errors  # In debug mode it logs a handshake that fails.
@pytest.mark.parametrize(
    "has_certificate", [True, False], ids=["of another authority", "in plain text"]
)
async def test_peer_without_a_certificate_of_the_authority_is_not_let_in(
    tmp_path: Path, has_certificate: bool
) -> None:
    async with listening(Authority(tmp_path).issue("service")) as listener:
        name = listener.add(InboundStream())
        stranger = Authority(tmp_path, "stranger").issue("another") if has_certificate else None
        where = replace(listener.where, tls=stranger)

        with pytest.raises((OSError, Broken)):  # An error of TLS is an OSError.
            await in_thread(lambda: push(where, name, batches(1)))


async def test_file_that_is_no_certificate_is_named() -> None:
    with pytest.raises(
        NotAuthenticated, match=r"TLS cannot use the authority /no/such\.pem: no such file"
    ):
        async with listening(
            TlsFiles(certificate="/no/such.crt", key="/no/such.key", authority="/no/such.pem")
        ):
            raise AssertionError("no listener")
