"""Topics of Kafka on a broker of Apache Kafka: values, where to begin, refusals, and brokers that
are away. Where Maven Central is out of reach, the mock cluster of librdkafka serves.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import DescribeConfigsResponse_v1
from aiokafka.protocol.commit import (
    OffsetFetchRequest,
    OffsetFetchResponse_v1,
    OffsetFetchResponse_v3,
)

import aioflow as af
from aioflow.core.errors import GraphError, MalformedInput, StateError
from aioflow.io.brokers import kafka_client
from aioflow.io.brokers.kafka_client import KafkaRecord
from aioflow.io.brokers.kafka_topics import PAGE_RECORDS, kafka
from tests.integration.log_flows import KEYS, Count, Number, counted, mistakes, run, until
from tests.integration.processes import eventually
from tests.io.driver import Context, SinkContext, next_batch, read_all, take
from tests.io.kafka.brokers import (
    BROKERS_REMEDY,
    SASL,
    Brokers,
    MockCluster,
    ended,
    kafka_brokers,
    kafka_cluster,
    produced,
    settled,
)
from tests.needs import unreachable

SECRET = "s3cret-word"
PATIENCE_S = 60.0

KafkaCluster = Brokers | MockCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    with kafka_cluster() as running:
        yield running


@pytest.fixture
def brokers(cluster: KafkaCluster) -> Brokers:
    if isinstance(cluster, MockCluster):
        unreachable("brokers of Kafka", BROKERS_REMEDY)
    return cluster


async def write(sink: Any, ctx: SinkContext, records: list[Any]) -> None:
    writer = sink.writer(ctx)
    try:
        await writer.open()
        writer.write_batch(records, None)
        assert await writer.prepare(1) == []
    finally:
        await writer.close()


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
    cluster: KafkaCluster, name: str, ctx: SinkContext, options: Any, records: Any
) -> None:
    await write(kafka(cluster.bootstrap, name, key=lambda value: "same", **options), ctx, records)
    assert await read_all(kafka(cluster.bootstrap, name, until="latest", **options), ctx) == records


async def test_a_key_decides_the_partition_and_whole_records_have_it(
    cluster: KafkaCluster, name: str, ctx: SinkContext
) -> None:
    numbers = [Number(n) for n in range(50)]
    await write(
        kafka(cluster.bootstrap, name, Number, key=lambda number: str(number.n % 5)), ctx, numbers
    )
    read: list[KafkaRecord] = await read_all(
        kafka(cluster.bootstrap, name, Number, records=True, until="latest"), ctx
    )
    assert sorted(record.value for record in read) == numbers
    assert all(
        record.key == str(record.value.n % 5).encode() and record.topic == name for record in read
    )
    places = {
        record.key: {other.partition for other in read if other.key == record.key}
        for record in read
    }
    assert all(len(partitions) == 1 for partitions in places.values())
    assert len({partition for partitions in places.values() for partition in partitions}) > 1


async def test_splits_are_partitions_and_records_have_times(
    cluster: KafkaCluster, name: str, ctx: Context
) -> None:
    await produced(cluster, name, [(0, b"1"), (3, b"2")])
    source = kafka(cluster.bootstrap, name)
    splits = await source.discover()
    assert [split.id for split in splits] == [f"{name}-{number}" for number in range(4)]
    reader: Any = source.reader(ctx)
    await reader.open(splits)
    seen = {}
    while len(seen) < 2:
        (value,) = await next_batch(reader) or []
        seen[reader.current_split] = value
        assert all(time > 1_600_000_000_000 for time in reader.timestamps)
    assert seen == {f"{name}-0": 1, f"{name}-3": 2}
    assert not reader.finished
    assert reader.pending_records == 0
    await reader.close()


async def test_partitions_that_are_found_later_are_read_too(
    cluster: KafkaCluster, name: str, ctx: Context
) -> None:
    """The reader goes on in those that it has."""
    await produced(cluster, name, [(0, b"1"), (3, b"2")])
    source = kafka(cluster.bootstrap, name)
    splits = await source.discover()
    reader: Any = source.reader(ctx)
    await reader.open(splits[:2])
    assert await take(reader, 1) == [1]
    await reader.open(splits[2:])
    assert await take(reader, 1) == [2]
    await produced(cluster, name, [(0, b"3")])
    assert await take(reader, 1) == [3]
    assert reader.position(f"{name}-0") == 2
    await reader.close()


async def test_source_begins_at_the_given_place(
    cluster: KafkaCluster, name: str, ctx: Context
) -> None:
    await produced(cluster, name, [(0, b"1"), (0, b"2")])
    for start, expected in (("earliest", [1, 2]), ("latest", [])):
        assert (
            await read_all(kafka(cluster.bootstrap, name, start=start, until="latest"), ctx)
            == expected
        )
    later = kafka(cluster.bootstrap, name, start="latest")
    splits = await later.discover()
    await produced(cluster, name, [(0, b"3")])
    reader: Any = later.reader(ctx)
    await reader.open(splits)
    assert await take(reader, 1) == [3]
    await reader.close()


async def test_it_begins_at_a_time(brokers: Brokers, name: str, ctx: Context) -> None:
    """Each partition begins at its first record of that time; one without is read from its end."""
    await produced(brokers, name, [])
    producer = AIOKafkaProducer(bootstrap_servers=brokers.bootstrap)
    await producer.start()
    for partition, time in ((0, 1_000), (0, 2_000), (0, 3_000), (1, 2_500), (2, 1_500)):
        await producer.send_and_wait(name, b"%d" % time, partition=partition, timestamp_ms=time)
    await producer.stop()
    second = datetime.fromtimestamp(2, UTC)
    for start in (2_000, second, second - timedelta(microseconds=999)):
        source = kafka(brokers.bootstrap, name, start=start, until="latest")
        assert [split.position for split in await source.discover()] == [1, 0, 1, 0]
        assert sorted(await read_all(source, ctx)) == [2_000, 2_500, 3_000]


@pytest.mark.parametrize("transactions", [False, True])
async def test_headers_are_those_of_the_record(
    brokers: Brokers, name: str, ctx: SinkContext, transactions: bool
) -> None:
    await produced(brokers, name, [])
    ctx.flow_name = name
    sink = kafka(
        brokers.bootstrap,
        name,
        headers=lambda n: {"kind": "even", "raw": b"\0"} if n % 2 == 0 else {},
        transactions=transactions,
    )
    if transactions:
        await committer_of(sink).commit(await prepared(sink, ctx, [1, 2]))
        await settled(brokers, name)
    else:
        await write(sink, ctx, [1, 2])
    source = kafka(brokers.bootstrap, name, records=True, until="latest", options=READING)
    headers = {
        record.value: list(map(tuple, record.headers)) for record in await read_all(source, ctx)
    }
    assert headers == {1: [], 2: [("kind", b"even"), ("raw", b"\0")]}


@pytest.mark.parametrize("headers", [None, [("a", "b")], {"a": 1}, {1: "b"}])
async def test_headers_of_another_type_are_refused(
    cluster: KafkaCluster, name: str, ctx: SinkContext, headers: Any
) -> None:
    await produced(cluster, name, [])
    sink = kafka(cluster.bootstrap, name, headers=lambda n: headers)
    with pytest.raises(TypeError, match="expected a mapping of names to text or bytes"):
        await write(sink, ctx, [1])


async def test_a_group_is_notified_of_completed_checkpoints(
    cluster: KafkaCluster, name: str, ctx: Context
) -> None:
    await produced(cluster, name, [(0, b"1"), (0, b"2"), (0, b"3")])
    source = kafka(cluster.bootstrap, name, group=f"group-{name}")
    reader: Any = source.reader(ctx)
    splits = await source.discover()
    await reader.open(splits)
    await take(reader, 2, max_records=2)
    reader.checkpoint(1)
    await take(reader, 1, max_records=1)
    reader.checkpoint_completed(1)
    async with asyncio.timeout(PATIENCE_S):
        while (await kafka(cluster.bootstrap, name, group=f"group-{name}").discover())[
            0
        ].position != 2:
            await asyncio.sleep(0.05)
    await reader.close()
    assert await read_all(
        kafka(cluster.bootstrap, name, group=f"group-{name}", until="latest"), ctx
    ) == [3]


async def test_a_group_is_notified_at_the_end_too_and_one_at_the_first_offset_begins_there(
    cluster: KafkaCluster, name: str, ctx: Context
) -> None:
    await produced(cluster, name, [])
    source = kafka(cluster.bootstrap, name, start="latest", group=f"group-{name}")
    reader: Any = source.reader(ctx)
    await reader.open(await source.discover())
    reader.checkpoint(1)
    reader.checkpoint_completed(1)
    await reader.close()
    await produced(cluster, name, [(0, b"1"), (0, b"2")])
    again = kafka(cluster.bootstrap, name, start="latest", until="latest", group=f"group-{name}")
    reader = again.reader(ctx)
    await reader.open(await again.discover())
    assert await take(reader, 3) == [1, 2]
    reader.checkpoint(2)
    reader.checkpoint_completed(2)
    await reader.close()
    assert (await kafka(cluster.bootstrap, name, group=f"group-{name}").discover())[0].position == 2


async def test_partitions_that_come_after_the_job_begin_at_their_beginning(
    cluster: KafkaCluster, name: str
) -> None:
    """These are partitions of a topic that the job has read: their content is newer than the
    job.
    """
    await produced(cluster, name, [(0, b"1"), (3, b"2")])
    source = kafka(cluster.bootstrap, name, start="latest")
    first = await source.discover()
    assert [split.position for split in first] == [1, 0, 0, 1]
    assert [split.position for split in await source.discover()] == [0, 0, 0, 0]
    known = [split.id for split in first[:3]]
    assert source.finder.recognise(first[:3], first) == (
        known,
        [af.Split(f"{name}-3", 0, [name, 3, None])],
    )
    other = af.Split("other-0", 7, ["other", 0, None])
    assert source.finder.recognise([other], first) == (["other-0"], first), (
        "a topic that is read for the first time begins as it is told"
    )
    source.finder.forget()
    assert [split.position for split in await source.discover()] == [1, 0, 0, 1]


async def test_topics_that_match_a_pattern_are_read_also_those_that_come_later(
    cluster: KafkaCluster, name: str, ctx: Context
) -> None:
    source = kafka(cluster.bootstrap, re.compile(f"{name}-[a-z]"), start="latest")
    assert await source.discover() == []
    source.finder.forget()
    await produced(cluster, f"{name}-a", [(0, b"1")])
    await produced(cluster, f"{name}-a2", [(0, b"2")])
    first = await source.discover()
    assert [split.payload[0] for split in first] == [f"{name}-a"] * 4
    assert first[0].position == 1
    reader: Any = source.reader(ctx)
    await reader.open(first)
    await produced(cluster, f"{name}-b", [(1, b"3")])
    known = {split.id for split in first}
    later = [split for split in await source.discover() if split.id not in known]
    assert [split.position for split in later] == [0] * 4
    assert source.finder.recognise(first, [*first, *later]) == ([s.id for s in first], later)
    await reader.open(later)
    assert await take(reader, 1) == [3]
    await reader.close()
    bounded = kafka(cluster.bootstrap, re.compile("none-of-these"), until="latest")
    with pytest.raises(GraphError, match="no topic matches the pattern"):
        await bounded.discover()


async def test_a_start_at_the_offsets_of_a_group_needs_them(
    cluster: KafkaCluster, name: str, ctx: Context
) -> None:
    await produced(cluster, name, [(0, b"1"), (0, b"2")])
    with pytest.raises(GraphError, match="start='group' needs group="):
        kafka(cluster.bootstrap, name, start="group")
    source = kafka(cluster.bootstrap, name, start="group", group=f"g-{name}", until="latest")
    with pytest.raises(GraphError, match=f"has no offset for '{name}-0'"):
        await source.discover()
    before = kafka(cluster.bootstrap, name, group=f"g-{name}")
    reader: Any = before.reader(ctx)
    await reader.open(await before.discover())
    assert await take(reader, 1, max_records=1) == [1]
    reader.checkpoint(1)
    reader.checkpoint_completed(1)
    await reader.close()
    assert await read_all(source, ctx) == [2]


async def test_each_partition_has_a_metric_of_its_lag(
    cluster: KafkaCluster, name: str, ctx: Context
) -> None:
    await produced(cluster, name, [(0, b"1"), (0, b"2"), (0, b"3"), (1, b"4")])
    source = kafka(cluster.bootstrap, name)
    reader: Any = source.reader(ctx)
    await reader.open((await source.discover())[:1])
    assert await take(reader, 1, max_records=1) == [1]
    assert ctx.runtime.metrics.snapshot()[f"recordsLag.{name}-0"] == 2
    await take(reader, 2)
    assert ctx.runtime.metrics.snapshot()[f"recordsLag.{name}-0"] == 0
    await reader.close()


async def test_a_broker_that_starts_after_the_job_is_waited_for(
    name: str, ctx: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aioflow.io.backoff.START_PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr("aioflow.io.backoff.START_BACKOFF_S", (0.01, 0.01))
    tries = 0
    start = kafka_client.start_consumer

    async def counted_start(config: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 3:
            raise GraphError("the third attempt")
        return await start(config)

    monkeypatch.setattr(kafka_client, "start_consumer", counted_start)
    with pytest.raises(GraphError, match="the third attempt"):
        await kafka("127.0.0.1:1", name).discover()
    assert tries == 3
    # The warning of the second attempt would follow the first too soon.
    assert sum("trying again for" in record.message for record in caplog.records) == 1


async def test_malformed_records_count_once(
    cluster: KafkaCluster, name: str, ctx: SinkContext
) -> None:
    await produced(cluster, name, [(0, b'{"n":1}'), (0, b"{"), (0, None), (0, b'{"n":4}')])
    with pytest.raises(MalformedInput, match=r"kafka partition .*-0, offset 1: "):
        await read_all(kafka(cluster.bootstrap, name, Number, until="latest"), ctx)
    bad = af.OutputTag[Any]("bad")
    assert await read_all(
        kafka(cluster.bootstrap, name, Number, until="latest", on_error=bad), ctx
    ) == [Number(1), None, Number(4)]
    assert [failed.value for _, failed in ctx.sides] == [b"{"]


async def test_impossible_options_are_refused(
    cluster: KafkaCluster, name: str, ctx: SinkContext
) -> None:
    bootstrap = cluster.bootstrap
    with pytest.raises(GraphError, match="there is no topic 'nowhere'"):
        await kafka(bootstrap, "nowhere").discover()
    with pytest.raises(GraphError, match="aiokafka does not take what options= says"):
        await kafka(bootstrap, name, options={"colour": 1}).discover()
    with pytest.raises(GraphError, match="names 2 topics"):
        await write(kafka(bootstrap, ["a", "b"]), ctx, [1])
    with pytest.raises(TypeError, match="key= gave a int for 1"):
        sink = kafka(bootstrap, name, key=lambda value: 7)  # type: ignore[arg-type, return-value]
        await write(sink, ctx, [1])
    for make, message in (
        (lambda: kafka("kafka://me:secret@host", "t"), "expected brokers as 'HOST:PORT'"),
        (lambda: kafka(bootstrap, []), "expected the name of a topic"),
        (
            lambda: kafka(bootstrap, 3),  # type: ignore[arg-type]
            "topic is 3, expected the name of a topic",
        ),
        (lambda: kafka(3, "t"), "expected brokers as 'HOST:PORT'"),  # type: ignore[arg-type]
        (lambda: kafka(bootstrap, "t", start="earlyest"), "did you mean 'earliest'"),
        (
            lambda: kafka(bootstrap, "t", start=datetime(2026, 1, 1)),
            "an aware datetime or ms since 1970",
        ),
        (lambda: kafka(bootstrap, "t", start=-1), "start is -1"),
        (lambda: kafka(bootstrap, "t", until="now"), "expected 'latest' or None"),
        (
            lambda: kafka(bootstrap, "t", key="id"),  # type: ignore[arg-type]
            "expected a function of a record",
        ),
        (lambda: kafka(bootstrap, "t", Number, format="text"), "a type is made of JSON alone"),
    ):
        with pytest.raises(GraphError, match=message):
            make()


async def test_no_brokers_are_an_error_of_the_start_and_a_password_is_never_shown(
    name: str, ctx: SinkContext, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    options = {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "me",
        "sasl_plain_password": SECRET,
    }
    source = kafka("127.0.0.1:1", name, options=options)
    shown = [repr(source)]
    for attempt in (source.discover(), write(source, ctx, [1])):
        with pytest.raises(Exception, match="Unable to bootstrap") as caught:
            await attempt
        shown += [str(caught.value), *getattr(caught.value, "__notes__", ())]
    stream = af.Flow("secret").source(source)
    stream.sink(source)
    shown.append(str(stream.explain()))
    assert SECRET not in "".join(shown) + caplog.text


def as_user(user: str, password: str) -> dict[str, Any]:
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": user,
        "sasl_plain_password": password,
    }


async def test_wrong_passwords_and_missing_rights_are_clear_errors(
    brokers: Brokers, name: str, ctx: SinkContext, caplog: pytest.LogCaptureFixture
) -> None:
    with kafka_brokers(is_open=False, **SASL) as closed:
        bootstrap = closed.bootstrap
        writing = {"transactions": True, "options": as_user("me", "word")}
        ctx.flow_name = name
        for options in (as_user("me", SECRET), as_user("eve", SECRET)):
            wrong = kafka(bootstrap, name, options=options)
            for attempt in (wrong.discover(), write(wrong, ctx, [1])):
                with pytest.raises(
                    GraphError, match=r"do not accept the user .*SaslAuth"
                ) as caught:
                    await attempt
                assert SECRET not in str(caught.value)
        with pytest.raises(GraphError, match="the user has no right to describe it"):
            await kafka(bootstrap, name, options=as_user("me", "word")).discover()
        with pytest.raises(Exception, match=r"(?i)authoriz|right"):
            await prepared(kafka(bootstrap, name, **writing), ctx, [1])
    assert SECRET not in caplog.text


async def test_offsets_that_are_gone_are_an_error(
    cluster: KafkaCluster, name: str, ctx: Context
) -> None:
    await produced(cluster, name, [(0, b"1")])
    with pytest.raises(StateError, match="the next records are not there any more"):
        await read_all(
            kafka(cluster.bootstrap, name), ctx, [af.Split(f"{name}-0", 9, [name, 0, None])]
        )


@pytest.mark.parametrize("transactions", [False, True])
async def test_a_topic_that_does_not_exist_and_is_not_made_is_refused(
    cluster: KafkaCluster,
    name: str,
    ctx: SinkContext,
    transactions: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mock cluster makes each that it is asked for: so it is not asked."""

    async def partitions_for(producer: Any, topic: str) -> set[int]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    monkeypatch.setattr("aiokafka.AIOKafkaProducer.partitions_for", partitions_for)
    monkeypatch.setattr("aioflow.io.brokers.kafka_client.TOPIC_TIMEOUT_S", 0.0)
    with pytest.raises(GraphError, match=r"there is no topic .*: make it first"):
        await write(kafka(cluster.bootstrap, "none-" + name, transactions=transactions), ctx, [1])


async def test_server_that_is_no_broker_is_reported(
    name: str, ctx: SinkContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aioflow.io.brokers.kafka_client.SILENT_AFTER_S", 0.0)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        other = kafka(f"127.0.0.1:{port}", name, options={"request_timeout_ms": 200})
        for attempt in (other.discover(), write(other, ctx, [1])):
            with pytest.raises(ConnectionError, match=f"no broker of Kafka answers there .*{port}"):
                await attempt
    assert "no broker has answered yet" in caplog.text


async def test_brokers_that_are_away_lose_and_double_nothing_that_is_read(
    cluster: KafkaCluster, name: str, ctx: Context, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"request_timeout_ms": 1_000, "retry_backoff_ms": 50}
    await produced(cluster, name, [(0, b"1")])
    source = kafka(cluster.bootstrap, name, options=options)
    reader: Any = source.reader(ctx)
    await reader.open(await source.discover())
    assert await take(reader, 1) == [1]
    caplog.clear()  # A topic that was just made is unknown to a broker for a while.
    cluster.pause()
    try:
        waiting = asyncio.create_task(next_batch(reader))
        async with asyncio.timeout(PATIENCE_S):
            while not any(
                record.name.startswith("aiokafka") and record.levelno >= logging.WARNING
                for record in caplog.records
            ):
                await asyncio.sleep(0.05)
        assert not waiting.done()
    finally:
        cluster.resume()
    await produced(cluster, name, [(0, b"2"), (0, b"3")])
    found = [*(await waiting or [])]  # Both, if they came in one fetch.
    assert [*found, *await take(reader, 2 - len(found))] == [2, 3]
    await reader.close()


async def closed_windows(
    cluster: KafkaCluster, name: str, count: int, **options: Any
) -> list[tuple[int, int]]:
    """The first windows of 10 s of the numbers in a topic, each by its start and how many it
    has.
    """
    flow = af.Flow("windows")
    strategy = af.WatermarkStrategy.monotonous_timestamps(
        timestamp=lambda number: number.n, **options
    )
    numbers = flow.source(kafka(cluster.bootstrap, name, Number), watermarks=strategy)
    windows = numbers.key_by(lambda number: 0).window(af.tumbling("10s")).aggregate(af.count())
    closed: list[tuple[int, int]] = []
    async with asyncio.timeout(PATIENCE_S), windows.execute_and_collect() as results:
        async for result in results:
            closed.append((result.start, result.value))
            if len(closed) == count:
                break
    return closed


async def test_event_time_is_that_of_the_slowest_partition(
    cluster: KafkaCluster, name: str
) -> None:
    """The others are far ahead of 1: nothing of it is late."""
    ahead = [(partition, b'{"n":%d}' % (60_000 + n)) for n in range(5) for partition in (0, 2, 3)]
    await produced(
        cluster, name, [*ahead, *((1, b'{"n":%d}' % n) for n in range(0, 50_000, 10_000))]
    )
    assert await closed_windows(cluster, name, 4) == [
        (start, 1) for start in range(0, 40_000, 10_000)
    ]


async def test_partitions_without_records_hold_event_time_back_for_a_while_only(
    cluster: KafkaCluster, name: str
) -> None:
    await produced(cluster, name, [(1, b'{"n":%d}' % n) for n in range(0, 50_000, 10_000)])
    closed = asyncio.create_task(closed_windows(cluster, name, 4, idle_after="500ms"))
    number = 50_000
    while not closed.done():  # This one is never idle for long.
        await produced(cluster, name, [(1, b'{"n":%d}' % number)])
        number += 1
    assert await closed == [(start, 1) for start in range(0, 40_000, 10_000)]


async def test_a_partition_that_is_ahead_waits_for_one_that_is_behind(
    cluster: KafkaCluster, name: str
) -> None:
    """G4.5"""
    count = 3 * PAGE_RECORDS
    far = b"1000000000"
    await produced(cluster, name, [(0, b"0"), (1, b"0"), (2, far), (3, far)])
    producer = AIOKafkaProducer(bootstrap_servers=cluster.bootstrap)
    await producer.start()
    times: Any = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda value: value)
    aligned = times.with_alignment("partitions", "1s", every="5ms")
    flow = af.Flow("aligned")
    rows: list[int] = []
    flow.source(kafka(cluster.bootstrap, name), watermarks=aligned).sink(rows.append)
    try:
        async with flow.run() as job, asyncio.timeout(PATIENCE_S):
            await eventually(lambda: len(rows) == 4)
            limits: Any = job._cluster.job_master._limits  # type: ignore[attr-defined]
            await eventually(lambda: {mark for _, mark in limits._sent.values()} == {999})
            sent = [
                await producer.send(name, b"%d" % (n * 1_000), partition=0) for n in range(1, count)
            ]
            for one in sent:
                await one
            await eventually(lambda: len(rows) > 4)
            await asyncio.sleep(0.2)  # Time in which the rest would come.
            assert len(rows) <= 4 + PAGE_RECORDS
            await producer.send_and_wait(name, b"%d" % (count * 1_000), partition=1)
            await eventually(lambda: len(rows) == count + 4)
    finally:
        await producer.stop()


async def test_records_are_counted_once_when_the_job_is_cancelled_and_rescaled(
    cluster: KafkaCluster, name: str, ctx: SinkContext, tmp_path: Path
) -> None:
    """The offsets are in the checkpoint; what is written at least once may come twice, with the
    same count.
    """
    total = 1_200
    await produced(cluster, f"{name}-in", [(n % 3, b'{"n":%d}' % n) for n in range(total)])
    await produced(cluster, f"{name}-out", [])

    def flow(parallelism: int) -> af.Flow:
        sink = kafka(cluster.bootstrap, f"{name}-out", Count, key=lambda count: str(count.key))
        return counted(
            kafka(cluster.bootstrap, f"{name}-in", Number), sink, parallelism=parallelism
        )

    async def rows() -> list[Count]:
        return await read_all(kafka(cluster.bootstrap, f"{name}-out", Count, until="latest"), ctx)

    async def length() -> int:
        return len(set(await rows()))

    async with run(flow(2), tmp_path) as job:
        await until(length, 300)
        await job.cancel()
    async with run(flow(3), tmp_path):
        await until(length, total)
    assert mistakes(sorted(set(await rows())), total) == []
    assert max(row.count for row in await rows()) == -(-total // KEYS)


# Transactions. The mock cluster takes them, and forgets the offsets that they commit: what a real
# broker would remember is planted. It neither aborts nor fences: tests of that need the fixture
# `brokers`.

READING: dict[str, Any] = {"check_crcs": False}
"""The mock cluster writes marks of transactions without a checksum."""


async def prepared(sink: Any, ctx: SinkContext, records: list[Any]) -> list[Any]:
    writer = sink.writer(ctx)
    try:
        await writer.open()
        writer.write_batch(records, None)
        committables: list[Any] = msgspec.msgpack.decode(
            msgspec.msgpack.encode(await writer.prepare(1))
        )
        return committables
    finally:
        await writer.close()


async def committed(cluster: KafkaCluster, name: str, ctx: Context) -> list[Any]:
    source = kafka(cluster.bootstrap, name, until="latest", options=READING)
    return await read_all(source, ctx)


def transactional(brokers: Brokers, name: str, ctx: SinkContext, **arguments: Any) -> Any:
    ctx.flow_name = name
    return kafka(brokers.bootstrap, name, transactions=True, **arguments)


async def test_a_transaction_holds_what_a_checkpoint_covers_and_is_not_repeated(
    brokers: Brokers, name: str, ctx: SinkContext
) -> None:
    """Its records are on the brokers before the checkpoint, but no consumer reads them yet."""
    await produced(brokers, name, [])
    sink = transactional(brokers, name, ctx, key=lambda value: "same")
    committer = sink.committer()
    writer = sink.writer(ctx)
    await writer.open()
    seen: list[int] = []
    for checkpoint, records in enumerate(([1, 2], [3]), 1):
        writer.write_batch(records, None)
        committables = await writer.prepare(checkpoint)
        assert await read_uncommitted(brokers, name) == [*seen, *records]
        assert await committed(brokers, name, ctx) == seen
        for _ in range(2):
            await committer.commit(committables)
            await committer.abort(committables)
        seen += records
        await settled(brokers, name)
        assert await committed(brokers, name, ctx) == seen
    assert await writer.prepare(3) == []
    await writer.close()


async def read_uncommitted(brokers: Brokers, name: str) -> list[Any]:
    """What is in a topic, with the records of open transactions."""
    consumer = AIOKafkaConsumer(bootstrap_servers=brokers.bootstrap)
    await consumer.start()
    try:
        partitions = [TopicPartition(name, number) for number in range(4)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning()
        ends = await consumer.end_offsets(partitions)
        values = []
        while any([await consumer.position(one) < ends[one] for one in partitions]):
            for records in (await consumer.getmany(timeout_ms=50)).values():
                values += [msgspec.json.decode(record.value) for record in records]
        return sorted(values)
    finally:
        await consumer.stop()


async def test_a_prepared_transaction_is_committed_by_another_process_once(
    brokers: Brokers, name: str, ctx: SinkContext
) -> None:
    """The attempt that prepared it died. The second one committed it, and died before it could
    tell; meanwhile its id was used again.
    """
    await produced(brokers, name, [])
    one = await prepared(transactional(brokers, name, ctx), ctx, [1])
    second = transactional(brokers, name, ctx)
    committer = second.committer()
    await committer.commit(one)
    writer = second.writer(ctx)
    await writer.open()
    writer.write_batch([2], None)
    two = await writer.prepare(2)
    await committer.commit(two)
    writer.write_batch([3], None)
    await writer.flush()
    third = transactional(brokers, name, ctx).committer()
    for again in (committer, third):
        await again.commit(one)
        await again.commit(two)
    await writer.close()
    await settled(brokers, name)
    assert sorted(await committed(brokers, name, ctx)) == [1, 2]


async def test_transactions_that_an_attempt_left_open_are_aborted_by_the_next(
    brokers: Brokers, name: str, ctx: SinkContext
) -> None:
    """Those after the restored checkpoint; the one that it covers stays prepared."""
    # aiokafka retrieves no error of the transaction that was fenced.
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    await produced(brokers, name, [])
    sink = transactional(brokers, name, ctx)
    gone = sink.writer(ctx)
    await gone.open()
    kept: list[Any] = []
    for checkpoint in (1, 2, 3):
        gone.write_batch([checkpoint], None)
        kept.append(await gone.prepare(checkpoint))
    gone.write_batch([4], None)
    await gone.flush()
    later_sink = transactional(brokers, name, ctx)
    later = later_sink.writer(ctx)
    later.restored(1)
    await later.open()
    later.write_batch([5], None)
    five = await later.prepare(4)
    committer = later_sink.committer()
    await committer.commit(kept[0])
    await committer.commit(five)
    await settled(brokers, name)
    assert sorted(await committed(brokers, name, ctx)) == [1, 5]
    gone.write_batch([6], None)
    with pytest.raises(StateError, match="another attempt, or another program"):
        await gone.prepare(5)
    await gone.close()
    await later.close()


async def test_a_transaction_that_timed_out_is_an_error_that_says_what_was_lost(
    brokers: Brokers, name: str, ctx: SinkContext
) -> None:
    await produced(brokers, name, [])
    sink = transactional(brokers, name, ctx, transaction_timeout="1s")
    committables = await prepared(sink, ctx, [1, 2])
    await settled(brokers, name)  # The brokers look for old transactions every second here.
    with pytest.raises(
        StateError, match=r"of checkpoint 1, and its 2 records are lost: .*transaction_timeout='1s'"
    ):
        await sink.committer().commit(committables)
    assert await committed(brokers, name, ctx) == []


async def test_a_timeout_that_the_brokers_do_not_allow_is_refused(
    brokers: Brokers, name: str, ctx: SinkContext
) -> None:
    await produced(brokers, name, [])
    sink = transactional(brokers, name, ctx, transaction_timeout="1h")
    with pytest.raises(GraphError, match=r"raise transaction\.max\.timeout\.ms of the brokers"):
        await prepared(sink, ctx, [1])


@pytest.mark.parametrize("transactions", [False, True])
async def test_a_function_chooses_the_topic_of_each_record(
    brokers: Brokers, name: str, ctx: SinkContext, transactions: bool
) -> None:
    for kind in ("even", "odd"):
        await produced(brokers, f"{name}-{kind}", [])
    ctx.flow_name = name
    sink = kafka(
        brokers.bootstrap,
        lambda n: f"{name}-{'odd' if n % 2 else 'even'}",
        key=str,
        transactions=transactions,
    )
    if transactions:
        await committer_of(sink).commit(await prepared(sink, ctx, list(range(10))))
    else:
        await write(sink, ctx, list(range(10)))
    for kind, first in (("even", 0), ("odd", 1)):
        await settled(brokers, f"{name}-{kind}")
        values = await committed(brokers, f"{name}-{kind}", ctx)
        assert sorted(values) == list(range(first, 10, 2))
    with pytest.raises(GraphError, match="a source reads topics by their names"):
        await sink.discover()
    wrong = kafka(brokers.bootstrap, lambda n: n)
    with pytest.raises(TypeError, match="topic= gave 7 for 7, expected the name of a topic"):
        await write(wrong, ctx, [7])


def committer_of(sink: Any) -> Any:
    committer = sink.committer()
    assert committer is not None
    return committer


@pytest.mark.parametrize(
    "answer",
    [OffsetFetchResponse_v3(0, [], 14), OffsetFetchResponse_v1([("topic", [(0, -1, "", 16)])])],
    ids=["as a whole", "of a partition"],
)
async def test_a_coordinator_that_does_not_tell_is_asked_again(
    brokers: Brokers, name: str, ctx: SinkContext, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    """The coordinator loads its data, or another has taken over: it has not said that nothing is
    committed.
    """
    await produced(brokers, name, [])
    committables = await prepared(transactional(brokers, name, ctx), ctx, [1])
    committer = transactional(brokers, name, ctx).committer()
    answers = [answer]
    send = AIOKafkaAdminClient._send_request

    async def answered(self: Any, request: Any, node_id: Any = None) -> Any:
        if isinstance(request, OffsetFetchRequest) and answers:
            return answers.pop(0)
        return await send(self, request, node_id)

    monkeypatch.setattr(AIOKafkaAdminClient, "_send_request", answered)
    with pytest.raises(ConnectionError, match="does not tell its offsets now"):
        await committer.commit(committables)
    await committer.commit(committables)
    await settled(brokers, name)
    assert await committed(brokers, name, ctx) == [1]


async def test_a_record_that_no_broker_takes_fails_before_the_checkpoint(
    brokers: Brokers, name: str, ctx: SinkContext
) -> None:
    await produced(brokers, name, [])
    sink = transactional(brokers, name, ctx)
    with pytest.raises(ValueError, match="see max_request_size"):
        await prepared(sink, ctx, ["x" * 1_100_000])


async def test_a_record_that_the_topic_does_not_take_fails_before_the_checkpoint(
    brokers: Brokers, name: str, ctx: SinkContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mock brokers does not tell; what a real broker says is planted."""
    entry = ("max.message.bytes", "2000", False, 5, False, [])

    async def described(self: Any, resources: Any) -> Any:
        return [DescribeConfigsResponse_v1(0, [(0, None, 2, name, [entry])])]

    monkeypatch.setattr(AIOKafkaAdminClient, "describe_configs", described)
    await produced(brokers, name, [])
    sink = transactional(brokers, name, ctx)
    with pytest.raises(ValueError, match=r"max\.message\.bytes of the topic"):
        await prepared(sink, ctx, ["x" * 1_900])
    assert len(await prepared(sink, ctx, ["x" * 1_400])) == 1


async def test_a_job_with_transactions_writes_everything_once(
    brokers: Brokers, name: str, ctx: SinkContext, tmp_path: Path
) -> None:
    """Over many checkpoints, the last of them with the end."""
    total = 900
    await produced(brokers, f"{name}-in", [(n % 3, b'{"n":%d}' % n) for n in range(total)])
    await produced(brokers, f"{name}-out", [])
    source = kafka(brokers.bootstrap, f"{name}-in", Number, until="latest")
    sink = kafka(brokers.bootstrap, f"{name}-out", Count, transactions=True)
    async with run(counted(source, sink, parallelism=2), tmp_path) as job:
        await job.wait()
    await settled(brokers, f"{name}-out")
    rows = await read_all(
        kafka(brokers.bootstrap, f"{name}-out", Count, until="latest", options=READING), ctx
    )
    assert mistakes(rows, total) == []


@pytest.mark.parametrize("transactions", [False, True])
async def test_few_records_reach_the_brokers_without_a_checkpoint(
    brokers: Brokers, name: str, tmp_path: Path, transactions: bool
) -> None:
    await produced(brokers, name, [])
    numbers: asyncio.Queue[int] = asyncio.Queue()
    flow = af.Flow(name)
    flow.source(af.io.queue(numbers)).sink(
        kafka(brokers.bootstrap, name, transactions=transactions)
    )
    more = {"checkpoints": f"file://{tmp_path}/checkpoints", "every": "1h"} if transactions else {}
    async with flow.run(**more) as job:
        for n in range(2):
            await numbers.put(n)
            async with asyncio.timeout(PATIENCE_S):
                while len(await read_uncommitted(brokers, name)) <= n:
                    await asyncio.sleep(0.02)
        await job.cancel()


async def test_the_example_of_the_documentation_runs(
    brokers: Brokers, ctx: SinkContext, tmp_path: Path
) -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "kafka.md"
    program = tmp_path / "orders.py"
    program.write_text(page.read_text().split('```py title="orders.py"\n')[1].split("```")[0])
    orders = [(0, 6_000), (1, 500), (0, 5_000)]
    bodies = [(n, b'{"customer":"c%d","cents":%d}' % (n, cents)) for n, cents in orders]
    await produced(brokers, "orders", bodies)
    for topic in ("small", "large"):
        await produced(brokers, topic, [])
    command = [sys.executable, str(program), brokers.bootstrap, f"file://{tmp_path}/checkpoints"]
    run = await asyncio.create_subprocess_exec(*command)
    assert await run.wait() == 0
    await ended(brokers)
    read = [await committed(brokers, topic, ctx) for topic in ("small", "large")]
    assert [sorted(values) for values in read] == [[["c0", 6_000], ["c1", 500]], [["c0", 11_000]]]


PROGRAM = """
import sys
import aioflow as af
from tests.integration.log_flows import Count, Number, counted

brokers, name, folder, workers = sys.argv[1:]
source = af.io.kafka(brokers, f"{name}-in", Number, until="latest")
sink = af.io.kafka(brokers, f"{name}-out", Count, transactions=True)
flow = counted(source, sink, parallelism=2, per_second=400)
if __name__ == "__main__":
    more = {"workers": int(workers)} if workers != "0" else {}
    restart = af.fixed_delay(1000, "50ms")
    af.run(flow, checkpoints=f"file://{folder}", every="200ms", restart=restart, **more)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", [0, 2])
async def test_kills_of_the_program_and_of_the_broker_leave_the_output_exact(
    brokers: Brokers, name: str, ctx: SinkContext, tmp_path: Path, workers: int
) -> None:
    """The program is killed three times, each after new output; the broker is killed once."""
    total = 9_000
    await produced(brokers, f"{name}-in", [(n % 4, b'{"n":%d}' % n) for n in range(total)])
    await produced(brokers, f"{name}-out", [])
    command = [sys.executable, "-c", PROGRAM, brokers.bootstrap, name, str(tmp_path), str(workers)]

    async def rows() -> list[Count]:
        source = kafka(brokers.bootstrap, f"{name}-out", Count, until="latest")
        return await read_all(source, ctx)

    async def length() -> int:
        return len(await rows())

    for kill in range(4):
        seen = await length()
        program = await asyncio.create_subprocess_exec(*command)
        try:
            if kill == 3:
                assert await program.wait() == 0
                break
            await until(length, min(total, seen + total // 6))
            if kill == 1:
                brokers.kill()
                await asyncio.sleep(1)
                await asyncio.to_thread(brokers.restart)
                await until(length, min(total, await length() + total // 6))
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
    await settled(brokers, f"{name}-out")
    assert mistakes(await rows(), total) == []


@pytest.fixture
def three(brokers: Brokers) -> Iterator[Brokers]:
    with kafka_brokers(3) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_each_of_three_brokers_is_killed_before_and_after_a_prepare(
    three: Brokers, name: str, ctx: SinkContext
) -> None:
    """One of them is the coordinator. A partition without a leader takes no records for longer than
    `request_timeout_ms`.
    """
    ctx.flow_name = name
    expected: list[int] = []
    await produced(three, name, [])
    options = {"request_timeout_ms": 5_000}
    sink = kafka(three.bootstrap, name, key=str, transactions=True, options=options)
    writer, committer = sink.writer(ctx), committer_of(sink)
    await writer.open()
    kills = [(victim, before) for victim in range(3) for before in (True, False)]
    for checkpoint, (victim, before) in enumerate(kills, 1):
        values = list(range(len(expected), len(expected) + 200))
        writer.write_batch(values[:100], None)
        await writer.flush()
        if before:
            three.kill(victim)
        writer.write_batch(values[100:], None)
        committables = await writer.prepare(checkpoint)
        if not before:
            three.kill(victim)
        await committer.commit(committables)
        expected += values
        await asyncio.to_thread(three.restart, victim)
    await settled(three, name)
    assert sorted(await committed(three, name, ctx)) == expected
    await writer.close()
