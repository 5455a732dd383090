"""Queues and streams of RabbitMQ on a real server: values, acknowledgements after checkpoints,
refusals, and a server that dies in the middle.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiormq
import pytest

import aioflow as af
from aioflow.core.errors import Broken, GraphError, MalformedInput, StateError
from aioflow.io.brokers.mqtt_topics import mqtt
from aioflow.io.brokers.rabbitmq_client import RabbitmqMessage
from aioflow.io.brokers.rabbitmq_queues import rabbitmq
from aioflow.io.brokers.writers import PIECE_MESSAGES
from tests.integration.log_flows import Count, Number, counted, mistakes, run
from tests.io.driver import (
    PATIENCE_S,
    SinkContext,
    next_batch,
    read_all,
    take,
    write_all,
)
from tests.io.servers import RabbitmqServer, mosquitto_server, rabbitmq_declared, rabbitmq_server

SECRET = "s3cret-word"


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitmqServer]:
    with rabbitmq_server() as running:
        yield running


@pytest.fixture
def url(server: RabbitmqServer) -> str:
    return server.url


async def waiting(url: str, queue: str) -> int:
    """The number of messages that wait in a queue."""
    connection = await aiormq.connect(url)
    channel = await connection.channel()
    answer = await channel.queue_declare(queue, passive=True)
    await connection.close()
    return int(answer.message_count or 0)


@pytest.mark.parametrize(
    ("options", "records"),
    [
        ({"type": Number}, [Number(1), Number(2**60)]),
        ({}, [{"a": [1, None]}, 7, "text", None]),
        ({"format": "text"}, ["", "ü"]),
        ({"format": "bytes"}, [b"\0\xff", b"", b"x" * (16 << 20)]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_values_come_out_as_they_went_in(
    url: str, name: str, ctx: SinkContext, options: Any, records: Any, stream: bool
) -> None:
    await rabbitmq_declared(url, name, stream=stream)
    await write_all(rabbitmq(url, name, **options), ctx, records)
    until = "latest" if stream else "empty"
    source = rabbitmq(url, name, stream=stream, until=until, **options)
    assert await read_all(source, ctx) == records


async def test_records_have_what_the_sink_gave_them(
    server: RabbitmqServer, url: str, name: str, ctx: SinkContext
) -> None:
    await rabbitmq_declared(url, name, f"{name}-2")
    connection = await aiormq.connect(url)
    channel = await connection.channel()
    await channel.exchange_declare(name, exchange_type="topic")
    await channel.queue_bind(name, name, "number.#")
    await channel.queue_bind(f"{name}-2", name, "other")
    await connection.close()
    sink = rabbitmq(
        url,
        exchange=name,
        routing_key=lambda n: f"number.{n}" if n < 3 else "other",
        headers=lambda n: {"n": n, "text": "ü", "none": None},
        message_id=lambda n: f"id-{n}",
    )
    await write_all(sink, ctx, [1, 2, 3])
    source = rabbitmq(url, [name, f"{name}-2"], records=True, until="empty")
    read = await read_all(source, ctx)
    assert sorted(read) == [
        RabbitmqMessage(n, f"id-{n}", False, key, name, {"n": n, "text": "ü", "none": None}, None)
        for n, key in ((1, "number.1"), (2, "number.2"), (3, "other"))
    ]
    plain = await read_all(rabbitmq(url, name, records=True, until="empty"), ctx)
    assert [one.redelivered for one in plain] == [True, True], "no checkpoint covers them"


async def test_only_what_a_completed_checkpoint_covers_is_acknowledged(
    url: str, name: str, ctx: SinkContext
) -> None:
    await rabbitmq_declared(url, name)
    await write_all(rabbitmq(url, name), ctx, list(range(10)))
    source = rabbitmq(url, name)
    splits = await source.discover()
    reader: Any = source.reader(ctx)
    await reader.open(splits)
    assert await take(reader, 3) == [0, 1, 2]
    reader.checkpoint(1)
    assert await take(reader, 2) == [3, 4]
    reader.checkpoint(2)
    assert await take(reader, 5) == [5, 6, 7, 8, 9]
    assert reader.position(name) is None
    reader.checkpoint_completed(1)
    await reader.close()
    reader = rabbitmq(url, name, records=True).reader(ctx)
    await reader.open(splits)
    again = await take(reader, 7)
    assert [(one.value, one.redelivered) for one in again] == [(n, True) for n in range(3, 10)]
    reader.checkpoint(3)
    reader.checkpoint_completed(3)
    await reader.close()
    assert await waiting(url, name) == 0


async def test_without_checkpoints_a_message_is_acknowledged_when_it_is_polled(
    url: str, name: str, ctx: SinkContext
) -> None:
    ctx.checkpointing = False
    await rabbitmq_declared(url, name)
    await write_all(rabbitmq(url, name), ctx, list(range(4)))
    reader: Any = rabbitmq(url, name).reader(ctx)
    await reader.open([af.Split(name)])
    assert await take(reader, 3) == [0, 1, 2]
    await reader.close()
    assert await waiting(url, name) == 1


async def test_the_server_sends_no_more_than_the_window(
    url: str, name: str, ctx: SinkContext
) -> None:
    """A slow flow holds at most `prefetch` messages."""
    await rabbitmq_declared(url, name)
    await write_all(rabbitmq(url, name), ctx, list(range(40)))
    reader: Any = rabbitmq(url, name, prefetch=10).reader(ctx)
    await reader.open([af.Split(name)])
    assert await take(reader, 10) == list(range(10))
    assert reader.poll_batch(10) is None
    assert await waiting(url, name) == 30
    reader.checkpoint(1)
    reader.checkpoint_completed(1)
    assert await take(reader, 10) == list(range(10, 20))
    await reader.close()


async def test_stream_begins_where_it_is_told_and_is_not_read_beyond_its_end(
    url: str, name: str, ctx: SinkContext
) -> None:
    await rabbitmq_declared(url, name, stream=True)
    count = 2 * PIECE_MESSAGES + 7
    assert await read_all(rabbitmq(url, name, stream=True, until="latest"), ctx) == []
    await write_all(rabbitmq(url, name), ctx, list(range(count)))
    for start, expected in (
        ("earliest", list(range(count))),
        (count - 2, [count - 2, count - 1]),
        ("latest", []),
    ):
        source = rabbitmq(url, name, stream=True, start=start, until="latest", prefetch=300)
        assert await read_all(source, ctx) == expected
    later = rabbitmq(url, name, stream=True, start="latest")
    splits = await later.discover()
    await write_all(rabbitmq(url, name), ctx, [count])
    reader: Any = later.reader(ctx)
    await reader.open(splits)
    assert await take(reader, 1) == [count]
    assert reader.position(name) == count + 1
    assert not reader.finished
    await reader.close()
    with pytest.raises(StateError, match=f"was read up to 9998, and its last .* ever is {count}"):
        await read_all(rabbitmq(url, name, stream=True), ctx, [af.Split(name, 9999)])


async def test_malformed_messages_count_once(url: str, name: str, ctx: SinkContext) -> None:
    await rabbitmq_declared(url, name, stream=True)
    bodies = [b'{"n":1}', b"{", b'{"n":"x"}', b'{"n":4}']
    await write_all(rabbitmq(url, name, format="bytes"), ctx, bodies)
    read: dict[str, Any] = {"stream": True, "until": "latest"}
    with pytest.raises(MalformedInput, match=r"rabbitmq queue '.*', message 1: "):
        await read_all(rabbitmq(url, name, Number, **read), ctx)
    bad = af.OutputTag[Any]("bad")
    source = rabbitmq(url, name, Number, on_error=bad, **read)
    assert await read_all(source, ctx) == [Number(1), Number(4)]
    assert [failed.value for _, failed in ctx.sides] == [b"{", b'{"n":"x"}']


async def test_a_server_that_refuses_is_an_error_that_says_what_to_do(
    server: RabbitmqServer, url: str, name: str, ctx: SinkContext
) -> None:
    """Within ten seconds, and without the password."""
    await rabbitmq_declared(url, name)
    await rabbitmq_declared(url, f"{name}-s", stream=True)
    server.evaluate(
        f'rabbit_auth_backend_internal:add_user(<<"poor">>, <<"{SECRET}">>, <<"test">>),'
        'rabbit_auth_backend_internal:set_permissions(<<"poor">>, <<"/">>, <<>>, <<>>, <<>>,'
        ' <<"test">>).'
    )
    poor = f"amqp://poor:{SECRET}@127.0.0.1:{server.port}"
    began = time.monotonic()
    for source, message, written in (
        (rabbitmq(f"amqp://guest:{SECRET}@127.0.0.1:{server.port}", name), "Login was refused", 1),
        (rabbitmq(f"{url}/none", name), "does not open the virtual host", 1),
        (rabbitmq(url, "nowhere"), "no queue 'nowhere'.*declare it first", 1),
        (rabbitmq(url, f"{name}-s"), "is a stream: give stream=True", 0),
        (rabbitmq(url, name, stream=True, start="latest"), "leave out stream=True", 0),
        (rabbitmq(f"amqp://guest:{SECRET}@127.0.0.1:1", name), "answers at 127.0.0.1:1 ", 1),
    ):
        attempts = [source.discover(), *([write_all(source, ctx, [1])] if written else [])]
        for attempt in attempts:
            with pytest.raises((GraphError, Broken), match=message) as caught:
                await attempt
            assert SECRET not in str(caught.value)
    for attempt, message in (
        (rabbitmq(poor, name).discover(), "access to queue .* refused for user 'poor'"),
        (write_all(rabbitmq(poor, name), ctx, [1]), "access to exchange .* refused"),
        (write_all(rabbitmq(url, exchange="none"), ctx, [1]), "no exchange 'none'"),
        (
            write_all(rabbitmq(url, exchange="amq.direct", routing_key="k"), ctx, [1]),
            "no queue takes a message with the routing key 'k' of the exchange 'amq.direct'",
        ),
        (write_all(rabbitmq(url, [name, "b"]), ctx, [1]), "names 2 queues"),
        (rabbitmq(url, exchange=name).discover(), "has no queue"),
    ):
        with pytest.raises(GraphError, match=message) as caught:
            await attempt
        assert SECRET not in str(caught.value)
    drops = rabbitmq(url, exchange="amq.direct", routing_key="k", mandatory=False)
    await write_all(drops, ctx, [1])
    with pytest.raises(TypeError, match="routing_key= gave 3 for 3, expected a text"):
        await write_all(rabbitmq(url, name, routing_key=lambda n: n), ctx, [3])
    with pytest.raises(TypeError, match="headers= gave"):
        await write_all(rabbitmq(url, name, headers=lambda n: {"a": object()}), ctx, [3])
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("stream", [False, True])
async def test_a_queue_that_the_server_still_recovers_is_waited_for(
    server: RabbitmqServer,
    url: str,
    name: str,
    ctx: SinkContext,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server knows such a queue as durable, and not yet as one that runs."""
    monkeypatch.setattr("aioflow.io.backoff.START_PATIENCE_S", PATIENCE_S)
    await rabbitmq_declared(url, name, stream=stream)
    source = rabbitmq(url, name, stream=stream, backoff="50ms")
    running: Any = source.writer(ctx)
    await running.open()

    async def while_it_recovers(what: Coroutine[Any, Any, Any]) -> Any:
        server.evaluate(
            f'Name = rabbit_misc:r(<<"/">>, queue, <<"{name}">>),'
            "[Queue] = mnesia:dirty_read(rabbit_queue, Name), ets:delete(rabbit_queue, Name),"
            "spawn(fun() -> timer:sleep(700), ets:insert(rabbit_queue, Queue) end)."
        )
        caplog.clear()
        result = await what
        assert "home node" in caplog.text
        return result

    splits = await while_it_recovers(source.discover())
    await while_it_recovers(write_all(source, ctx, [1]))
    running.write_batch([2], None)
    await while_it_recovers(running.flush())
    await running.close()
    reader: Any = source.reader(ctx)
    await reader.open(splits)
    assert await while_it_recovers(take(reader, 2)) == [1, 2]
    await reader.close()


async def test_a_queue_that_is_deleted_while_it_is_read_is_an_error_by_name(
    url: str, name: str, ctx: SinkContext
) -> None:
    await rabbitmq_declared(url, name)
    reader: Any = rabbitmq(url, name).reader(ctx)
    await reader.open([af.Split(name)])
    await write_all(rabbitmq(url, name), ctx, [1])
    assert await take(reader, 1) == [1]
    connection = await aiormq.connect(url)
    await (await connection.channel()).queue_delete(name)
    await connection.close()
    with pytest.raises(GraphError, match=f"no queue '{name}'"):
        await next_batch(reader)
    await reader.close()


def test_impossible_options_are_refused(url: str) -> None:
    for make, message in (
        (lambda: rabbitmq([], "q"), "expected the URL of a server"),
        (lambda: rabbitmq("http://h", "q"), "expected a URL amqp://"),
        (lambda: rabbitmq("amqp://h:port", "q"), "its port is no number"),
        (lambda: rabbitmq(url), "expected a queue to read or write"),
        (lambda: rabbitmq(url, ["a", "a"]), "different names"),
        (lambda: rabbitmq(url, "q", start="latest"), "needs stream=True"),
        (lambda: rabbitmq(url, "q", stream=True, start="lastest"), "did you mean 'latest'"),
        (lambda: rabbitmq(url, "q", until="latest"), "expected 'empty' for a queue"),
        (lambda: rabbitmq(url, "q", stream=True, until="empty"), "expected 'latest' for a stream"),
        (lambda: rabbitmq(url, "q", prefetch=0), "a whole number from 1 to 65535"),
        (lambda: rabbitmq(url, "q", headers={}), "expected a function"),  # type: ignore[arg-type]
        (lambda: rabbitmq(url, "q", routing_key=3), "expected a text"),  # type: ignore[arg-type]
    ):
        with pytest.raises(GraphError, match=message):
            make()


def rows(folder: Path) -> list[Any]:
    """The rows of the finished part files."""
    files = [one for one in folder.glob("*") if not one.name.startswith(".")]
    return [json.loads(line) for one in files for line in one.read_text().splitlines()]


async def test_the_example_of_the_page_counts_repeated_messages_once(
    url: str, tmp_path: Path, ctx: SinkContext
) -> None:
    page = Path(__file__).parents[2] / "docs/howto/queues.md"
    code = page.read_text().partition('title="orders.py"\n')[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": "orders"}
    exec(code, names)
    await rabbitmq_declared(url, "orders")
    orders = [{"shop": "a", "n": 1}, {"shop": "b", "n": 2}, {"shop": "a", "n": 3}]
    sink = rabbitmq(url, "orders", message_id=lambda order: str(order["n"]))
    for _ in range(2):  # The second time as after a crash.
        await write_all(sink, ctx, orders)
    with mosquitto_server() as broker:
        place = f"mqtt://127.0.0.1:{broker.port}"
        source = mqtt(place, "shops/+", client_id="test", records=True)
        reader: Any = source.reader(ctx)
        await reader.open(await source.discover(ctx.host))
        async with run(names["counts"](url, place), tmp_path):
            read = await take(reader, 3)
            await asyncio.sleep(0.3)  # For more, if repeated messages counted.
            assert reader.poll_batch(10) is None
        await reader.close()
    assert sorted((one.topic, one.value) for one in read) == [
        ("shops/a", ["a", 1]),
        ("shops/a", ["a", 2]),
        ("shops/b", ["b", 1]),
    ]


async def test_nothing_is_lost_when_server_and_job_die(
    server: RabbitmqServer, tmp_path: Path, ctx: SinkContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream counts exactly once. The messages of a queue come again, and their ids say so."""
    # The jobs may start while the server still recovers.
    monkeypatch.setattr("aioflow.io.backoff.START_PATIENCE_S", PATIENCE_S)
    total, url = 1_500, server.url
    await rabbitmq_declared(url, "numbers")
    await rabbitmq_declared(url, "stream", stream=True)
    for queue in ("numbers", "stream"):
        await write_all(rabbitmq(url, queue, Number), ctx, [Number(n) for n in range(total)])
    roll = af.io.RollPolicy(age_ms=50)
    counts, copies = tmp_path / "counts", tmp_path / "copies"

    def flows() -> list[af.Flow]:
        copied = af.Flow("copied")
        messages: Any = copied.source(
            rabbitmq(url, "numbers", Number, records=True), uid="numbers"
        ).throttle(600)
        messages.map(lambda one: {"n": one.value.n, "id": one.message_id}).sink(
            af.io.jsonl(copies, roll=roll), uid="copies"
        )
        stream = rabbitmq(url, "stream", Number, stream=True)
        return [copied, counted(stream, af.io.jsonl(counts, roll=roll), parallelism=2)]

    async def until(at_least: int) -> None:
        async with asyncio.timeout(120):
            while (
                len(rows(counts)) < at_least or len({row["n"] for row in rows(copies)}) < at_least
            ):
                await asyncio.sleep(0.05)

    async with AsyncExitStack() as stack:
        jobs = [await stack.enter_async_context(run(flow, tmp_path)) for flow in flows()]
        await until(100)
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        await until(500)
        for job in jobs:
            await job.cancel()
    async with AsyncExitStack() as stack:
        for flow in flows():
            await stack.enter_async_context(run(flow, tmp_path))
        await until(total)
    assert mistakes([Count(**row) for row in rows(counts)], total) == []
    ids = {row["id"] for row in rows(copies)}
    assert len(ids) == total, "a message that came twice has one id"
