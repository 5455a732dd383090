"""Streams of NATS JetStream on a real server: values, where to begin, refusals, and a server
that dies in the middle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import Broken, GraphError, MalformedInput, StateError
from aioflow.io.brokers.nats_streams import PIECE_MESSAGES, nats
from aioflow.io.formats import avro
from tests.integration.log_flows import Count, Number, counted, mistakes, run, until
from tests.io.driver import (
    Context,
    SinkContext,
    next_batch,
    read_all,
    system_context,
    take,
    write_all,
)
from tests.io.registry.servers import small_registry
from tests.io.servers import Server, nats_server, published

SECRET = "s3cret-word"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with nats_server() as running:
        yield running


@pytest.fixture
def url(server: Server) -> str:
    return f"nats://127.0.0.1:{server.port}"


@pytest.fixture
async def ctx() -> AsyncIterator[SinkContext]:
    async with system_context() as context:
        yield SinkContext(context.host, checkpointing=False)


@pytest.mark.parametrize(
    ("options", "records"),
    [
        ({"type": Number}, [Number(1), Number(2**60)]),
        ({}, [{"a": [1, None]}, 7, "text", None]),
        ({"format": "text"}, ["", "ü"]),
        ({"format": "bytes"}, [b"\0\xff", b""]),
    ],
)
async def test_values_come_out_as_they_went_in(
    server: Server, url: str, name: str, ctx: SinkContext, options: Any, records: Any
) -> None:
    await published(server, name)
    await write_all(nats(url, name, **options), ctx, records)
    source = nats(url, name, until="latest", **options)
    assert await read_all(source, ctx) == records
    reader: Any = source.reader(ctx)
    await reader.open(await source.discover())
    await next_batch(reader)
    assert all(time > 1_600_000_000_000 for time in reader.timestamps)
    await reader.close()


async def test_bodies_of_a_registry_come_out_as_they_went_in(
    server: Server, url: str, name: str, ctx: SinkContext
) -> None:
    records = [Number(1), Number(2**60)]
    async with small_registry() as registry:
        format = avro(Number, registry=af.io.SchemaRegistry(registry.url))
        await published(server, name)
        await write_all(nats(url, name, format=format), ctx, records)
        assert await read_all(nats(url, name, format=format, until="latest"), ctx) == records
        assert list(registry.subjects) == [f"{name}-value"]


async def test_many_messages_come_in_order_and_it_is_known_how_many_wait(
    server: Server, url: str, name: str, ctx: SinkContext
) -> None:
    await published(server, name)
    count = 6 * PIECE_MESSAGES + 7
    await write_all(nats(url, name), ctx, list(range(count)))
    assert await read_all(nats(url, name, until="latest"), ctx) == list(range(count))
    source = nats(url, name)
    reader: Any = source.reader(ctx)
    await reader.open(await source.discover())
    await take(reader, 10)
    assert reader.pending_records == count - 10
    await reader.close()


async def test_source_begins_at_the_given_place(
    server: Server, url: str, name: str, ctx: Context
) -> None:
    await published(server, name, [b"1", b"2", b"3"])
    for options, expected in (
        ({}, [1, 2, 3]),
        ({"start": "latest"}, []),
        ({"start": 1}, [2, 3]),
        ({"stream": name}, [1, 2, 3]),
    ):
        source = nats(url, name, until="latest", **options)  # type: ignore[arg-type]
        assert await read_all(source, ctx) == expected
    assert await read_all(nats(url, name, start=1_000, until="latest"), ctx) == []
    later = nats(url, name, start="latest")
    splits = await later.discover()
    await published(server, name, [b"4"])
    reader: Any = later.reader(ctx)
    await reader.open(splits)
    assert await take(reader, 1) == [4]
    assert not reader.finished
    await reader.close()


async def test_malformed_messages_count_once(
    server: Server, url: str, name: str, ctx: SinkContext
) -> None:
    await published(server, name, [b'{"n":1}', b"{", b'{"n":"x"}', b'{"n":4}'])
    with pytest.raises(MalformedInput, match=r"nats stream '.*', message 2: "):
        await read_all(nats(url, name, Number, until="latest"), ctx)
    bad = af.OutputTag[Any]("bad")
    assert await read_all(nats(url, name, Number, until="latest", on_error=bad), ctx) == [
        Number(1),
        Number(4),
    ]
    assert [failed.value for _, failed in ctx.sides] == [b"{", b'{"n":"x"}']


async def test_impossible_options_are_refused(
    server: Server, url: str, name: str, ctx: SinkContext
) -> None:
    await published(server, name)
    for source, message in (
        (nats(url, "nowhere"), "no stream takes the subject 'nowhere'"),
        (nats(url, name, stream="none"), "there is no stream 'none'"),
    ):  # fmt: skip
        with pytest.raises(GraphError, match=message):
            await source.discover()
        with pytest.raises(GraphError, match=message):
            await write_all(source, ctx, [1])
    other = nats(url, "foreign", stream=name)
    with pytest.raises(GraphError, match="does not take that subject"):
        await read_all(other, ctx)
    with pytest.raises(GraphError, match="no stream takes that subject, expected"):
        await write_all(other, ctx, [1])
    with pytest.raises(GraphError, match="has a wildcard"):
        await write_all(nats(url, f"{name}.*", stream=name), ctx, [1])
    with pytest.raises(ValueError, match="the server takes"):
        await write_all(nats(url, name), ctx, ["x" * 2_000_000])
    with pytest.raises(TypeError, match="expected bytes"):
        await write_all(nats(url, name, format="bytes"), ctx, ["text"])
    for make, message in (
        (lambda: nats([], "s"), "expected the URL of a server"),
        (lambda: nats(3, "s"), "expected the URL of a server"),  # type: ignore[arg-type]
        (lambda: nats(url, "a b"), "expected a subject"),
        (lambda: nats(url, "s", start="lastest"), "did you mean 'latest'"),
        (lambda: nats(url, "s", start=-1), "expected 'earliest'"),
        (lambda: nats(url, "s", until="now"), "expected 'latest' or None"),
        (lambda: nats(url, "s", Number, format="text"), "a type is made of JSON alone"),
    ):
        with pytest.raises(GraphError, match=message):
            make()


async def test_a_password_is_asked_for_and_never_shown(
    name: str, ctx: SinkContext, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with nats_server("--user", "me", "--pass", SECRET) as server:
        good, bad = (f"nats://me:{word}@127.0.0.1:{server.port}" for word in (SECRET, SECRET + "x"))
        plain = f"nats://127.0.0.1:{server.port}"
        shown = [repr(nats(good, name))]
        for source in (
            nats(bad, name),
            nats(plain, name),
            nats(plain, name, options={"user": "me", "password": SECRET + "x"}),
        ):
            for attempt in (source.discover(), write_all(source, ctx, [1])):
                with pytest.raises(GraphError, match="the server refuses") as caught:
                    await attempt
                shown.append(str(caught.value))
        for source in (
            nats(good, name),
            nats(plain, name, options={"user": "me", "password": SECRET}),
        ):
            with pytest.raises(GraphError, match="no stream takes the subject") as caught:
                await source.discover()
            shown.append(str(caught.value))
    stream = af.Flow("secret").source(nats(good, name))
    stream.sink(nats(good, name))
    shown.append(str(stream.explain()))
    assert SECRET not in "".join(shown) + caplog.text


async def test_a_stream_that_is_not_what_was_read_is_refused_and_what_was_removed_is_reported(
    server: Server, url: str, name: str, ctx: Context, caplog: pytest.LogCaptureFixture
) -> None:
    import nats as client

    await published(server, name, [b"1", b"2", b"3", b"4"])
    with pytest.raises(StateError, match="was read up to 9, and its last message ever is 4"):
        await read_all(nats(url, name), ctx, [af.Split(name, 9)])
    connection = await client.connect(url)
    await connection.jetstream().purge_stream(name, keep=1)
    await connection.close()
    assert await read_all(nats(url, name, until="latest"), ctx, [af.Split(name, 1, 4)]) == [
        4
    ]  # From an earlier checkpoint.
    assert "messages 2 to 3 were removed before they were read" in caplog.text


async def removed(url: str, name: str) -> None:
    import nats as client

    connection = await client.connect(url)
    try:
        await connection.jetstream().delete_stream(name)
    finally:
        await connection.close()


async def test_stream_that_was_created_again_and_is_longer_now_is_refused(
    server: Server, url: str, name: str, ctx: Context
) -> None:
    await published(server, name, [b"1", b"2"])
    (split,) = await nats(url, name, until="latest").discover()
    await removed(url, name)
    await published(server, name, [b"1", b"2", b"3", b"4"])
    with pytest.raises(
        StateError,
        match=r"was read up to 2 as the stream that was made at .*: what was read is of another",
    ):
        await read_all(nats(url, name, until="latest"), ctx, [af.Split(name, 2, split.payload)])


@pytest.mark.parametrize("again", [False, True])
async def test_a_stream_that_is_removed_while_it_is_read_is_an_error_by_name(
    server: Server, url: str, name: str, ctx: Context, again: bool
) -> None:
    await published(server, name, [b"1", b"2"])
    source = nats(url, name)
    reader: Any = source.reader(ctx)
    await reader.open(await source.discover())
    assert await take(reader, 2) == [1, 2]
    await removed(url, name)
    if again:
        await published(server, name, [b"3", b"4", b"5"])
    with pytest.raises(
        StateError if again else GraphError,
        match="is of another" if again else "is not there any more",
    ):
        await take(reader, 1)
    await reader.close()


async def test_a_reader_ends_although_the_library_loses_a_cancellation(
    server: Server, url: str, name: str, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio.wait_for in Python 3.11 loses a cancellation in the turn in which a message
    arrives.
    """
    from nats.js.client import JetStreamContext

    waits, genuine = asyncio.Event(), JetStreamContext.PullSubscription.fetch

    async def fetch(self: Any, *arguments: Any) -> Any:
        if waits.is_set():
            return await genuine(self, *arguments)
        waits.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            pass
        return []

    monkeypatch.setattr(JetStreamContext.PullSubscription, "fetch", fetch)
    await published(server, name, [b"1"])
    source = nats(url, name)
    reader: Any = source.reader(ctx)
    await reader.open(await source.discover())
    await waits.wait()
    closing = asyncio.ensure_future(reader.close())
    await asyncio.wait(
        [closing], timeout=20
    )  # A timeout that cancels would be lost like the first cancellation.
    assert closing.done()


async def test_a_read_ends_where_what_was_left_of_it_is_removed(
    server: Server, url: str, name: str, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nats as client

    monkeypatch.setattr("aioflow.io.brokers.nats_streams.PAGE_MESSAGES", 1)
    await published(server, name, [b"1", b"2", b"3"])
    source = nats(url, name, until="latest")
    reader: Any = source.reader(ctx)
    reader._capacity = 1  # It takes the next page when this one was polled.
    await reader.open(await source.discover())
    while not reader.pending_records:
        await reader.wait()
    connection = await client.connect(url)
    await connection.jetstream().purge_stream(name)
    await connection.close()
    assert await take(reader, 3) == [1]
    assert reader.finished
    await reader.close()


async def test_a_message_that_the_stream_does_not_take_fails_before_the_checkpoint(
    server: Server, url: str, name: str, ctx: SinkContext
) -> None:
    import nats as client

    ctx.checkpointing = True
    connection = await client.connect(url)
    await connection.jetstream().add_stream(name=name, subjects=[name], max_msg_size=200)
    await connection.close()
    sink = nats(url, name, format="text")
    writer, committer = sink.writer(ctx), sink.committer()
    await writer.open()
    with pytest.raises(
        ValueError, match=r"beside its headers the server takes \d+: see max_msg_size"
    ) as caught:
        writer.write_batch(["x" * 200], None)
    most = int(str(caught.value).partition("server takes ")[2].partition(":")[0])
    writer.write_batch(["x" * most], None)
    await committer.commit(await writer.prepare(1))
    await writer.close()
    await committer.close()
    assert await read_all(nats(url, name, format="text", until="latest"), ctx) == ["x" * most]


async def test_missing_nats_server_is_reported_without_a_password(name: str) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    other = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with other:
        port = other.sockets[0].getsockname()[1]
        sources = [
            nats(f"nats://me:{SECRET}@127.0.0.1:{port}", name, options={"connect_timeout": 0.1})
        ]
        sources.append(nats(f"nats://me:{SECRET}@127.0.0.1:1", name))  # Nothing listens there.
        for source, place in zip(sources, (port, 1), strict=True):
            with pytest.raises(
                Broken, match=f"no server of NATS answers at 127.0.0.1:{place}"
            ) as caught:
                await source.discover()
            assert SECRET not in str(caught.value)


async def test_a_server_without_jetstream_says_so(name: str) -> None:
    with nats_server() as server:
        server.restart_without("-js", "-sd")
        with pytest.raises((Broken, GraphError), match="no JetStream now"):
            await nats(f"nats://127.0.0.1:{server.port}", name, stream=name).discover()


async def test_a_repeated_commit_publishes_nothing_and_other_records_are_not_taken_for_it(
    server: Server, url: str, name: str, ctx: SinkContext
) -> None:
    """A job that was restored from an older savepoint counts through the same checkpoints again."""
    ctx.checkpointing = True
    await published(server, name)
    sink = nats(url, name)
    committer = sink.committer()
    for records in ([1, 2], [3, 4]):
        writer = sink.writer(ctx)
        await writer.open()
        writer.write_batch(records, None)
        prepared = await writer.prepare(1)
        await writer.close()
        for _ in range(3):
            await committer.commit(prepared)
    await committer.close()
    assert await read_all(nats(url, name, until="latest"), ctx) == [1, 2, 3, 4]


async def test_writing_waits_for_a_server_that_is_away(name: str, ctx: SinkContext) -> None:
    with nats_server() as server:
        await published(server, name)
        url = f"nats://127.0.0.1:{server.port}"
        writer = nats(url, name).writer(ctx)
        await writer.open()
        writer.write_batch([1], None)
        await writer.flush()
        server.stop()
        writer.write_batch([2], None)
        flush = asyncio.create_task(writer.flush())
        await asyncio.sleep(0)
        await asyncio.to_thread(server.start)
        await flush
        await writer.close()
        assert await read_all(nats(url, name, until="latest"), ctx) == [1, 2]


async def test_nothing_is_lost_or_doubled_when_server_and_job_die(
    tmp_path: Path, ctx: SinkContext
) -> None:
    """The server is killed while the job runs; then the job is cancelled, and goes on at another
    parallelism.
    """
    total = 1_500
    with nats_server() as server:
        url = f"nats://127.0.0.1:{server.port}"
        await published(server, "in")
        await published(server, "out")
        await write_all(nats(url, "in", Number), ctx, [Number(n) for n in range(total)])

        async def length() -> int:
            try:
                (split,) = await nats(url, "out", start="latest").discover()
            except Exception:
                return 0  # It is away.
            return int(split.position)

        def flow(parallelism: int) -> af.Flow:
            return counted(
                nats(url, "in", Number), nats(url, "out", Count), parallelism=parallelism
            )

        async with run(flow(2), tmp_path) as job:
            await until(length, 100)
            server.stop()
            await asyncio.to_thread(server.start)
            await until(length, 600)
            await job.cancel()
        async with run(flow(3), tmp_path):
            await until(length, total)
        assert mistakes(await read_all(nats(url, "out", Count, until="latest"), ctx), total) == []
