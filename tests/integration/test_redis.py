"""Streams of Redis on a real server: values, where to begin, refusals, and a server that dies in
the middle.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.errors import GraphError, MalformedInput, StateError
from aioflow.io.brokers.redis_streams import redis
from aioflow.io.formats import avro
from tests.integration.log_flows import Count, Number, counted, mistakes, run, until
from tests.io.driver import (
    Context,
    Runtime,
    SinkContext,
    next_batch,
    read_all,
    system_context,
    take,
    write_all,
)
from tests.io.registry.servers import small_registry
from tests.io.servers import Server, redis_server

SECRET = "s3cret-word"


@dataclasses.dataclass
class Reading:
    sensor: str
    value: float
    note: str | None = None
    good: bool = True


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with redis_server() as running:
        yield running


@pytest.fixture
def url(server: Server) -> str:
    server.ask("FLUSHALL")
    return f"redis://127.0.0.1:{server.port}"


@pytest.fixture
async def ctx() -> AsyncIterator[SinkContext]:
    async with system_context() as context:
        yield SinkContext(context.host, checkpointing=False)


@pytest.mark.parametrize(
    ("options", "type", "records"),
    [
        ({}, Reading, [Reading("a", 1.5), Reading("b", -2.0, "näh", False)]),
        ({}, Number, [Number(2**60), Number(-1)]),
        ({}, None, [{"a": "x", "b": ""}, {"c": "ü"}]),
        ({"field": "data"}, Reading, [Reading("a", 1.5, "x\ny")]),
        ({"field": "data"}, None, [{"a": [1, None, {"b": 2.5}]}, 7, "text", None]),
        ({"field": "data", "format": "text"}, None, ["", "ü"]),
        ({"field": "data", "format": "bytes"}, None, [b"\0\xff", b""]),
    ],
)
async def test_values_come_out_as_they_went_in(
    url: str, ctx: SinkContext, options: Any, type: Any, records: list[Any]
) -> None:
    await write_all(redis(url, "s", type, **options), ctx, records)
    assert await read_all(redis(url, "s", type, until="latest", **options), ctx) == records


async def test_bodies_of_a_registry_come_out_as_they_went_in(url: str, ctx: SinkContext) -> None:
    records = [Number(1), Number(2**60)]
    async with small_registry() as registry:
        format = avro(Number, registry=af.io.SchemaRegistry(registry.url))
        await write_all(redis(url, "s", field="f", format=format), ctx, records)
        assert (
            await read_all(redis(url, "s", field="f", format=format, until="latest"), ctx)
            == records
        )
        assert list(registry.subjects) == ["s-value"]


async def test_an_entry_has_the_time_of_its_id(server: Server, url: str, ctx: Context) -> None:
    for ms in (5, 7):
        server.ask(f"XADD s {ms}-1 n {ms}")
    source = redis(url, "s", until="latest")
    reader: Any = source.reader(ctx)
    await reader.open(await source.discover())
    await next_batch(reader)
    assert reader.timestamps == [5, 7]
    await reader.close()


async def test_source_begins_at_the_given_place(server: Server, url: str, ctx: Context) -> None:
    for n in range(1, 6):
        server.ask(f"XADD s {n}-0 n {n}")
    server.ask("XGROUP CREATE s here 4-0")
    for options, expected in (
        ({}, "12345"), ({"start": "latest"}, ""), ({"start": "2"}, "345"), ({"group": "here"}, "5"),
        ({"group": "new"}, "12345"),
    ):  # fmt: skip
        source = redis(url, "s", until="latest", **options)  # type: ignore[call-overload]
        assert "".join(entry["n"] for entry in await read_all(source, ctx)) == expected
    later = redis(url, "s", start="latest")
    splits = await later.discover()
    server.ask("XADD s 6-0 n 6")
    reader: Any = later.reader(ctx)
    await reader.open(splits)
    assert await take(reader, 1) == [{"n": "6"}]
    assert not reader.finished
    await reader.close()


async def test_a_group_is_notified_of_completed_checkpoints(
    server: Server, url: str, ctx: Context
) -> None:
    for n in range(1, 6):
        server.ask(f"XADD s {n}-0 n {n}")
    source = redis(url, "s", group="watched")
    reader: Any = source.reader(ctx)
    await reader.open(await source.discover())
    await take(reader, 3, max_records=3)
    reader.checkpoint(1)
    await take(reader, 1, max_records=1)
    reader.checkpoint_completed(1)
    async with asyncio.timeout(60):
        while "3-0" not in await asyncio.to_thread(server.ask, "XINFO GROUPS s"):
            await asyncio.sleep(0.01)
    await reader.close()
    assert await read_all(redis(url, "s", group="watched", until="latest"), ctx) == [
        {"n": "4"},
        {"n": "5"},
    ]


async def test_a_group_learns_where_a_job_ended(server: Server, url: str, tmp_path: Path) -> None:
    for n in range(1, 6):
        server.ask(f"XADD s {n}-0 n {n}")

    async def read(group: str, **options: Any) -> None:
        seen: list[Any] = []
        flow = af.Flow(group)
        flow.source(redis(url, "s", group=group, **options), uid="s").sink(seen.append)
        async with flow.run(checkpoints=f"file://{tmp_path}", every="1h") as job:
            if options:
                await job.wait()
                return
            async with asyncio.timeout(60):
                while len(seen) < 5:
                    await asyncio.sleep(0.01)
            await job.stop()

    await read("bounded", until="latest")
    await read("stopped")
    assert (await asyncio.to_thread(server.ask, "XINFO GROUPS s")).count("5-0") == 2


async def test_malformed_entries_count_once(server: Server, url: str, ctx: SinkContext) -> None:
    for n in ("1", "two", "3"):
        server.ask(f"XADD s * n {n}")
    server.ask("XADD s * other 4")
    with pytest.raises(
        MalformedInput, match=r"redis stream 's', entry \d+-\d: Expected `int`, got `str`"
    ):
        await read_all(redis(url, "s", Number, until="latest"), ctx)
    assert await read_all(redis(url, "s", Number, until="latest", on_error="skip"), ctx) == [
        Number(1),
        Number(3),
    ]
    bad = af.OutputTag[Any]("bad")
    assert await read_all(redis(url, "s", Number, until="latest", on_error=bad), ctx) == [
        Number(1),
        Number(3),
    ]
    assert [failed.value for _, failed in ctx.sides] == [b"n=two", b"other=4"]


async def test_impossible_options_are_refused(server: Server, url: str, ctx: SinkContext) -> None:
    server.ask("RPUSH list 1")
    with pytest.raises(GraphError, match="there is no stream 'nowhere' in this database"):
        await redis(url, "nowhere").discover()
    with pytest.raises(GraphError, match="the key 'list' holds a list, expected a stream"):
        await redis(url, "list").discover()
    with pytest.raises(GraphError, match="redis-py knows no option 'foo' of a URL"):
        await redis(f"{url}?foo=1", "s").discover()
    with pytest.raises(GraphError, match="the key 'list' holds a list, expected a stream"):
        await write_all(redis(url, "list"), ctx, [{"n": 1}])
    with pytest.raises(GraphError, match="names 2 streams, expected the one to write to"):
        await write_all(redis(url, ["a", "b"]), ctx, [{"n": 1}])
    for value, message in (
        (7, "got 7, expected a dict"),
        ({}, "got {}, expected a dict"),
        ({"n": [1]}, "whose field 'n' is a list"),
    ):
        with pytest.raises(TypeError, match=message):
            await write_all(redis(url, "s"), ctx, [value])
    with pytest.raises(TypeError, match="expected bytes"):
        await write_all(redis(url, "s", field="f", format="bytes"), ctx, ["text"])
    for make, message in (
        (lambda: redis("http://x", "s"), "expected a URL redis://HOST:PORT/DB"),
        (lambda: redis(url, []), "expected the name of a stream"),
        (
            lambda: redis(url, 3),  # type: ignore[call-overload]
            "stream is 3, expected the name of a stream",
        ),
        (lambda: redis(url, "s", start="earlyest"), "did you mean 'earliest'"),
        (lambda: redis(url, "s", until="now"), "expected 'latest' or None"),
        (lambda: redis(url, "s", format="text"), "name it by field="),
        (lambda: redis(url, "s", field="f", format="jason"), "did you mean 'json'"),
        (lambda: redis(url, "s", int), "expected a dataclass"),
        (lambda: redis(url, "s", maxlen=0), "maxlen is 0, expected a whole number of at least 1"),
    ):
        with pytest.raises(GraphError, match=message):
            make()


async def test_a_password_is_asked_for_and_never_shown(
    ctx: SinkContext, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "aioflow")
    with redis_server("--requirepass", SECRET) as server:
        good, bad = (f"redis://:{word}@127.0.0.1:{server.port}" for word in (SECRET, SECRET + "x"))
        await write_all(redis(good, "s"), ctx, [{"n": 1}])
        assert await read_all(redis(good, "s", until="latest"), ctx) == [{"n": "1"}]
        shown = [repr(redis(good, "s"))]
        for url in (bad, f"redis://127.0.0.1:{server.port}"):
            for attempt in (
                redis(url, "s").discover(),
                write_all(redis(url, "s"), ctx, [{"n": 1}]),
            ):
                with pytest.raises(GraphError, match="the server refuses") as caught:
                    await attempt
                shown.append(str(caught.value))
    flow = af.Flow("secret")
    stream = flow.source(redis(good, "s"))
    stream.sink(redis(good, "t"))
    shown.append(str(stream.explain()))
    assert SECRET not in "".join(shown) + caplog.text


async def test_a_stream_that_is_not_what_was_read_is_refused(
    server: Server, url: str, ctx: Context
) -> None:
    """Positions of a stream that was removed and begun again would pass over what is in it now."""
    ctx.replays = True
    server.ask("XADD s 9-0 n 9")
    source = redis(url, "s")
    reader: Any = source.reader(ctx)
    await reader.open(await source.discover())
    await take(reader, 1)
    (split,) = await source.discover()
    position = reader.position("s")
    await reader.close()
    server.ask("DEL s")
    server.ask("XADD s 3-0 n 3")
    reader = source.reader(ctx)
    await reader.open([af.Split(split.id, position)])
    with pytest.raises(StateError, match=r"read up to 9-0, and its last entry ever is 3-0"):
        await next_batch(reader)
    await reader.close()


async def test_stream_that_is_created_again_while_it_is_read_is_refused(
    server: Server, url: str, ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gives nothing of it, and says nothing."""
    monkeypatch.setattr("aioflow.io.brokers.redis_streams.BLOCK_MS", 10)
    monkeypatch.setattr("aioflow.io.brokers.redis_streams.LOOK_EVERY_S", 0.0)
    server.ask("XADD s 9-0 n 9")
    source = redis(url, "s")
    reader: Any = source.reader(ctx)
    await reader.open(await source.discover())
    assert await take(reader, 1) == [{"n": "9"}]
    server.ask("DEL s")
    server.ask("XADD s 3-0 n 3")
    async with asyncio.timeout(20):
        with pytest.raises(StateError, match=r"read up to 9-0, and its last entry ever is 3-0"):
            await next_batch(reader)
    await reader.close()


async def test_server_that_is_no_redis_is_reported(ctx: SinkContext) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(other, "127.0.0.1", 0)
    async with listening:
        source = redis(f"redis://:{SECRET}@127.0.0.1:{listening.sockets[0].getsockname()[1]}", "s")
        for attempt in (source.discover(), write_all(source, ctx, [{"n": 1}])):
            with pytest.raises(GraphError, match="does not speak the protocol of Redis") as caught:
                await attempt
            assert SECRET not in str(caught.value)


async def test_a_field_that_is_missing_is_called_so(server: Server, url: str, ctx: Context) -> None:
    server.ask("XADD s 1-0 m 1")
    with pytest.raises(
        MalformedInput, match=r"Number needs the field 'n', found 'm': give it a default"
    ):
        await read_all(redis(url, "s", Number, until="latest"), ctx)


async def test_a_stream_that_comes_later_is_waited_for(
    server: Server, url: str, ctx: Context
) -> None:
    source = redis(url, "s", must_exist=False, group="watched")
    reader: Any = source.reader(ctx)
    await reader.open(await source.discover())
    reader.checkpoint(1)
    reader.checkpoint_completed(1)
    async with asyncio.timeout(60):
        while reader.untold:  # A stream that does not exist has no reader to tell.
            await asyncio.sleep(0.01)
    server.ask("XADD s 1-0 n 1")
    assert await take(reader, 1) == [{"n": "1"}]
    reader.checkpoint(2)
    reader.checkpoint_completed(2)
    await reader.close()
    assert "1-0" in server.ask("XINFO GROUPS s")


async def test_a_beginning_that_is_to_come_is_waited_for(
    server: Server, url: str, ctx: Context
) -> None:
    ctx.replays = True
    server.ask("XADD s 1-0 n 1")
    source = redis(url, "s", start="5-0")
    reader: Any = source.reader(ctx)
    await reader.open(await source.discover())
    server.ask("XADD s 5-0 n 5")
    server.ask("XADD s 6-0 n 6")
    assert await take(reader, 1) == [{"n": "6"}]
    await reader.close()


async def test_a_server_that_answers_nothing_is_given_up(
    ctx: SinkContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for every request. The next try finds out which commits succeeded."""
    ctx.checkpointing = True
    with redis_server() as server:
        sink = redis(f"redis://127.0.0.1:{server.port}", "s")
        writer, committer = sink.writer(ctx), sink.committer()
        await writer.open()
        writer.write_batch([{"n": 1}], None)
        committables = await writer.prepare(1)
        await writer.close()
        monkeypatch.setattr("aioflow.io.brokers.redis_client.ANSWER_TIMEOUT_S", 0.5)
        server.pause()
        late = sink.writer(ctx)
        try:
            for call in (
                sink.discover,
                late.open,
                lambda: committer.commit(committables),
                lambda: committer.abort(committables),
            ):
                async with asyncio.timeout(60):
                    with pytest.raises(OSError, match=r"the server has not answered for 0\.5 s"):
                        await call()
        finally:
            server.resume()
        await late.close()
        await committer.close()


async def test_a_sink_trims_its_stream(server: Server, url: str, ctx: SinkContext) -> None:
    await write_all(redis(url, "s", maxlen=100), ctx, [{"n": n} for n in range(2_000)])
    assert 100 <= int(server.ask("XLEN s")[1:]) < 400


async def test_a_database_that_was_emptied_is_no_commit(
    server: Server, url: str, ctx: SinkContext
) -> None:
    """Prepared output that is gone must not count as committed."""
    ctx.checkpointing = True
    sink = redis(url, "s")
    writer, committer = sink.writer(ctx), sink.committer()
    await writer.open()
    writer.write_batch([{"n": 1}], None)
    committables = await writer.prepare(1)
    server.ask("FLUSHALL")
    with pytest.raises(StateError, match="was set back or emptied since"):
        await committer.commit(committables)
    await writer.close()
    await committer.close()


async def test_writing_waits_for_a_server_that_is_away(
    ctx: SinkContext, caplog: pytest.LogCaptureFixture
) -> None:
    """Elements in hand are staged once, whichever answer was lost."""
    ctx.checkpointing = True
    caplog.set_level(logging.INFO, "aioflow.io.brokers.redis_sink")
    with redis_server() as server:
        sink = redis(f"redis://127.0.0.1:{server.port}", "s", Number)
        writer, committer = sink.writer(ctx), sink.committer()
        await writer.open()
        writer.write_batch([Number(1)], None)
        await writer.flush()
        server.stop()
        writer.write_batch([Number(2)], None)
        flush = asyncio.create_task(writer.flush())
        async with asyncio.timeout(60):
            while "trying again" not in caplog.text:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(server.start)
        await flush
        await committer.commit(await writer.prepare(1))
        await writer.close()
        await committer.close()
        source = redis(f"redis://127.0.0.1:{server.port}", "s", Number, until="latest")
        assert await read_all(source, ctx) == [Number(1), Number(2)]


async def test_nothing_is_lost_or_doubled_when_server_and_job_die(tmp_path: Path) -> None:
    """The server is killed while the job runs; then the job is cancelled, and goes on at another
    parallelism.
    """
    total, streams = 2_000, ["a", "b", "c"]
    with redis_server() as server:
        url = f"redis://127.0.0.1:{server.port}"
        async with system_context() as context:
            for i, name in enumerate(streams):
                ctx = SinkContext(context.host, runtime=Runtime(), checkpointing=False)
                await write_all(
                    redis(url, name, Number), ctx, [Number(n) for n in range(i, total, 3)]
                )

        async def length() -> int:
            return int((await asyncio.to_thread(server.ask, "XLEN out"))[1:])

        def flow(parallelism: int) -> af.Flow:
            return counted(
                redis(url, streams, Number), redis(url, "out", Count), parallelism=parallelism
            )

        async with run(flow(2), tmp_path) as job:
            await until(length, 200)
            server.stop()
            await asyncio.to_thread(server.start)
            await until(length, 800)
            await job.cancel()
        async with run(flow(3), tmp_path):
            await until(length, total)
        async with system_context() as context:
            rows = await read_all(redis(url, "out", Count, until="latest"), context)
        assert mistakes(rows, total) == []
        assert "aioflow" not in server.ask("KEYS *:staged:*")
