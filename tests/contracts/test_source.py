"""The contract of every source: each element exactly once, from every position, without blocking,
and with all resources released.

A connector takes part by an entry in `SOURCES`: a function of a directory that gives a source that
ends by itself and its elements in order. Sources of several splits are read split after split, so
the order is that of the splits.
"""

from __future__ import annotations

import asyncio
import csv as csv_module
import gzip
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from aioflow.io.brokers.kafka_topics import kafka
from aioflow.io.brokers.nats_streams import nats
from aioflow.io.brokers.rabbitmq_queues import rabbitmq
from aioflow.io.brokers.redis_streams import redis
from aioflow.io.capture.mysql_change_source import mysql_changes
from aioflow.io.capture.postgres_change_source import postgres_changes
from aioflow.io.files.csv_files import csv
from aioflow.io.files.json_files import jsonl
from aioflow.io.files.line_files import lines
from aioflow.io.generating import datagen
from aioflow.io.hybrid_source import hybrid
from aioflow.io.memory import as_source
from aioflow.io.pushing import push
from aioflow.io.tables.mysql_tables import mysql
from aioflow.io.tables.sqlite_tables import sqlite
from aioflow.operators.source import BaseSource, Source, Split
from tests.io.driver import (
    PATIENCE_S,
    Context,
    SinkContext,
    next_batch,
    read_all,
    system_context,
    take,
    write_all,
)
from tests.io.kafka.brokers import Brokers, MockCluster, kafka_cluster, produced
from tests.io.mysql_server import LOGGED, MysqlServer, mysql_server
from tests.io.postgres_server import PostgresServer, postgres_server
from tests.io.servers import (
    RabbitmqServer,
    Server,
    nats_server,
    published,
    rabbitmq_declared,
    rabbitmq_server,
    redis_server,
)

COUNT = 23


def _numbers(position: int | None = None) -> Iterator[tuple[int, int]]:
    for i in range(position or 0, COUNT):
        yield i, i + 1


async def _async_numbers(position: int | None = None) -> AsyncIterator[tuple[int, int]]:
    for pair in _numbers(position):
        yield pair


class _Reiterable:
    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT))


def _lines(directory: Path) -> tuple[Source[Any], list[Any]]:
    (directory / "a.txt").write_text("".join(f"line {i}\n" for i in range(COUNT)))
    return lines(directory / "a.txt"), [f"line {i}" for i in range(COUNT)]


def _many_files(directory: Path) -> tuple[Source[Any], list[Any]]:
    for name, part in (("a", range(5)), ("b", range(0)), ("c", range(5, COUNT))):
        (directory / f"{name}.txt").write_text("".join(f"{i}\n" for i in part))
    return lines(directory), [str(i) for i in range(COUNT)]


def _ranges(directory: Path) -> tuple[Source[Any], list[Any]]:
    (directory / "a.txt").write_text("".join(f"{i}\n" for i in range(COUNT)))
    return lines(directory / "a.txt", split_bytes=10), [str(i) for i in range(COUNT)]


def _compressed(directory: Path) -> tuple[Source[Any], list[Any]]:
    (directory / "a.txt.gz").write_bytes(
        gzip.compress("".join(f"{i}\n" for i in range(COUNT)).encode())
    )
    return lines(directory / "a.txt.gz"), [str(i) for i in range(COUNT)]


def _jsonl(directory: Path) -> tuple[Source[Any], list[Any]]:
    (directory / "a.jsonl").write_text("\n\n".join(f'{{"i": {i}}}' for i in range(COUNT)))
    return jsonl(directory / "a.jsonl"), [{"i": i} for i in range(COUNT)]


def _csv(directory: Path) -> tuple[Source[Any], list[Any]]:
    rows = [{"i": str(i), "text": f'two\nlines "{i}"'} for i in range(COUNT)]
    with (directory / "a.csv").open("w", newline="") as file:
        writer = csv_module.DictWriter(file, ["i", "text"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return csv(directory / "a.csv"), rows


def _push(directory: Path) -> tuple[Source[Any], list[Any]]:
    source = push(capacity=COUNT).for_run()
    assert source.inlet is not None
    source.inlet._append(list(range(COUNT)), None)
    source.inlet.close()
    return source, list(range(COUNT))


def _sqlite(directory: Path) -> tuple[Source[Any], list[Any]]:
    with closing(sqlite3.connect(directory / "a.db")) as connection, connection:
        connection.execute("CREATE TABLE numbers (i INTEGER)")
        connection.executemany("INSERT INTO numbers VALUES (?)", [(i,) for i in range(COUNT)])
    return sqlite(directory / "a.db", "numbers"), [{"i": i} for i in range(COUNT)]


def _hybrid(directory: Path) -> tuple[Source[Any], list[Any]]:
    """Two files of 5 lines, then the rest: a source that begins where the files end."""
    for name, part in (("a", range(3)), ("b", range(3, 5))):
        (directory / f"{name}.txt").write_text("".join(f"{i}\n" for i in part))
    return (
        hybrid(lines(directory), lambda end: [str(i) for i in range(int(end.last) + 1, COUNT)]),
        [str(i) for i in range(COUNT)],
    )


def _redis(directory: Path, server: Server) -> tuple[Source[Any], list[Any]]:
    names = [f"{directory.name}-{letter}" for letter in "abc"]
    for name, part in zip(names, (range(5), range(5, 6), range(6, COUNT)), strict=True):
        for i in part:
            server.ask(f"XADD {name} * i {i}")
    return redis(f"redis://127.0.0.1:{server.port}", names, until="latest"), [
        {"i": str(i)} for i in range(COUNT)
    ]


def _nats(directory: Path, server: Server) -> tuple[Source[Any], list[Any]]:
    name = directory.name.replace("[", "-").replace("]", "-")
    asyncio.run(published(server, name, [b'{"i":%d}' % i for i in range(COUNT)]))
    return nats(f"nats://127.0.0.1:{server.port}", name, until="latest"), [
        {"i": i} for i in range(COUNT)
    ]


def _rabbitmq(directory: Path, server: RabbitmqServer) -> tuple[Source[Any], list[Any]]:
    """A stream: a queue has no positions."""

    async def filled() -> None:
        await rabbitmq_declared(server.url, directory.name, stream=True)
        async with system_context() as context:
            sink = rabbitmq(server.url, directory.name)
            await write_all(sink, SinkContext(context.host), [{"i": i} for i in range(COUNT)])

    asyncio.run(filled())
    return rabbitmq(server.url, directory.name, stream=True, until="latest"), [
        {"i": i} for i in range(COUNT)
    ]


def _kafka(directory: Path, cluster: Brokers | MockCluster) -> tuple[Source[Any], list[Any]]:
    name = "".join(sign if sign.isalnum() else "-" for sign in directory.name)
    asyncio.run(produced(cluster, name, [(2, b'{"i":%d}' % i) for i in range(COUNT)]))
    return kafka(cluster.bootstrap, name, until="latest"), [{"i": i} for i in range(COUNT)]


def _mysql(directory: Path, server: MysqlServer) -> tuple[Source[Any], list[Any]]:
    name = "".join(sign if sign.isalnum() else "_" for sign in directory.name.lower())[-40:]
    dsn = server.create(name)
    server.query(name, f"CREATE TABLE numbers AS SELECT seq AS i FROM seq_1_to_{COUNT}")
    return mysql(dsn, "numbers", key="i"), [{"i": i} for i in range(1, COUNT + 1)]


class _Rows(BaseSource[Any]):
    """The rows of changes alone: their places in the log are the server's."""

    bounded = True

    def __init__(self, changes: BaseSource[Any]) -> None:
        self._changes = changes

    async def discover(self) -> list[Split]:
        return await self._changes.discover()

    def reader(self, ctx: Any) -> Any:
        reader: Any = self._changes.reader(ctx)
        poll = reader.poll_batch

        def poll_batch(max_records: int) -> list[Any] | None:
            batch = poll(max_records)
            return None if batch is None else [change.after for change in batch]

        reader.poll_batch = poll_batch
        return reader


def _postgres_changes(directory: Path, server: PostgresServer) -> tuple[Source[Any], list[Any]]:
    """Transactions of 1 to 11 rows."""
    name = "".join(sign if sign.isalnum() else "_" for sign in directory.name.lower())[-40:]
    dsn = server.create(name)
    server.query(name, "CREATE TABLE numbers (i INT PRIMARY KEY)")
    source = postgres_changes(dsn, "numbers", slot=name, snapshot=False, until="latest")
    asyncio.run(_made(source))
    for first, last in ((0, 4), (5, 5), (6, 6), (7, 11), (12, COUNT - 1)):
        server.query(name, f"INSERT INTO numbers SELECT generate_series({first}, {last})")
    return _Rows(source), [{"i": i} for i in range(COUNT)]


def _mysql_changes(directory: Path, server: MysqlServer) -> tuple[Source[Any], list[Any]]:
    """Transactions of 1 to 11 rows. The source begins with a snapshot, which is empty."""
    name = "".join(sign if sign.isalnum() else "_" for sign in directory.name.lower())[-40:]
    dsn = server.create(name)
    server.query(name, "CREATE TABLE numbers (i INT PRIMARY KEY)")
    source = mysql_changes(dsn, "numbers", until="latest")
    for first, last in ((0, 4), (5, 5), (6, 6), (7, 11), (12, COUNT - 1)):
        server.query(name, f"INSERT INTO numbers SELECT seq FROM seq_{first}_to_{last}")
    return _Rows(source), [{"i": i} for i in range(COUNT)]


async def _made(source: Any) -> None:
    """Makes the slot."""
    async with system_context() as context:
        assert await read_all(source, context) == []


SERVERS: dict[
    str, tuple[Callable[[], Any], Callable[[Path, Any], tuple[Source[Any], list[Any]]]]
] = {
    "kafka": (kafka_cluster, _kafka),
    "mysql": (mysql_server, _mysql),
    "mysql changes": (lambda: mysql_server(*LOGGED), _mysql_changes),
    "nats": (nats_server, _nats),
    "postgres changes": (
        lambda: postgres_server(wal_level="logical", max_replication_slots="40"),
        _postgres_changes,
    ),
    "rabbitmq": (rabbitmq_server, _rabbitmq),
    "redis": (redis_server, _redis),
}
"""Sources that need a server: the function that starts the server, and the function that fills
it.
"""

SOURCES: dict[str, Callable[[Path], tuple[Source[Any], list[Any]]]] = {
    "list": lambda directory: (as_source(list(range(COUNT))), list(range(COUNT))),
    "range": lambda directory: (as_source(range(COUNT)), list(range(COUNT))),
    "reiterable": lambda directory: (as_source(_Reiterable()), list(range(COUNT))),
    "function": lambda directory: (as_source(_numbers), list(range(COUNT))),
    "async function": lambda directory: (as_source(_async_numbers), list(range(COUNT))),
    "datagen": lambda directory: (
        datagen(lambda i: i * i, count=COUNT),
        [i * i for i in range(COUNT)],
    ),
    "lines": _lines,
    "many files": _many_files,
    "ranges of a file": _ranges,
    "compressed": _compressed,
    "jsonl": _jsonl,
    "csv": _csv,
    "push": _push,
    "sqlite": _sqlite,
    "hybrid": _hybrid,
}

SEVERAL_SPLITS = {
    "many files": _many_files,
    "ranges of a file": _ranges,
    "many generators": lambda directory: (datagen(str, count=COUNT, splits=3), list(range(COUNT))),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Any]]:
    """The servers that were started."""
    with ExitStack() as stack:
        yield _Started(stack)


class _Started(dict[str, Any]):
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __missing__(self, name: str) -> Any:
        self[name] = server = self._stack.enter_context(SERVERS[name][0]())
        return server


@pytest.fixture(
    params=[*SOURCES, *(pytest.param(name, marks=pytest.mark.integration) for name in SERVERS)]
)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Source[Any], list[Any]]:
    if request.param in SERVERS:
        servers: dict[str, Any] = request.getfixturevalue("servers")
        return SERVERS[request.param][1](tmp_path, servers[request.param])
    return SOURCES[request.param](tmp_path)


@pytest.fixture
async def ctx() -> AsyncIterator[Context]:
    async with system_context() as context:
        context.replays = True
        yield context


async def test_every_element_comes_exactly_once_in_order(case: Any, ctx: Context) -> None:
    source, expected = case
    assert isinstance(source, Source)
    assert await read_all(source, ctx, max_records=4) == expected


@pytest.mark.parametrize("cut", [0, 1, 2, 4, 5, 6, 11, COUNT - 1, COUNT])
async def test_a_restart_at_a_position_goes_on_with_the_next_element(
    case: Any, ctx: Context, cut: int
) -> None:
    """A11.1: a position stands between two elements."""
    source, expected = case
    splits = await source.discover()
    reader = source.reader(ctx)
    await reader.open(splits)
    first = await take(reader, cut, 3)
    # Elements polled after the position was taken do not count.
    restored = [Split(split.id, reader.position(split.id), split.payload) for split in splits]
    await take(reader, 4)
    await reader.close()

    assert first + await read_all(source, ctx, restored) == expected


async def test_a_position_may_be_restored_twice(case: Any, ctx: Context) -> None:
    source, expected = case
    splits = await source.discover()
    taken: list[Any] = []
    for _ in range(4):
        reader = source.reader(ctx)
        await reader.open(splits)
        taken += await take(reader, 6, 4)
        splits = [Split(split.id, reader.position(split.id), split.payload) for split in splits]
        await reader.close()
    assert taken == expected


async def test_poll_gives_no_more_than_asked_for_and_never_an_empty_batch(
    case: Any, ctx: Context
) -> None:
    source, expected = case
    reader = source.reader(ctx)
    await reader.open(await source.discover())
    for value in expected:
        assert await next_batch(reader, 1) == [value]
    assert await next_batch(reader, 1) is None
    await reader.close()


async def test_a_finished_reader_stays_finished_and_wait_returns(case: Any, ctx: Context) -> None:
    source, expected = case
    reader = source.reader(ctx)
    await reader.open(await source.discover())
    assert not reader.finished
    await take(reader, len(expected) + 1)
    assert reader.finished
    async with asyncio.timeout(60):
        await reader.wait()
    assert reader.poll_batch(10) is None
    assert reader.finished
    await reader.close()


async def test_split_ids_are_unique_and_stable(case: Any, ctx: Context) -> None:
    source, _ = case
    ids = [split.id for split in await source.discover()]
    assert len(set(ids)) == len(ids) > 0
    assert [split.id for split in await source.discover()] == ids


async def test_readers_share_the_splits_without_losing_one(case: Any, ctx: Context) -> None:
    source, expected = case
    splits = await source.discover()
    dealt = [await read_all(source, ctx, splits[k::3]) for k in range(3)]
    assert sorted(map(repr, (value for part in dealt for value in part))) == sorted(
        map(repr, expected)
    )


async def test_a_reader_closes_before_it_was_opened_and_in_the_middle(
    case: Any, ctx: Context
) -> None:
    """Resources left behind (a thread, a file, a task) fail the test."""
    source, _ = case
    await source.reader(ctx).close()
    reader = source.reader(ctx)
    await reader.open(await source.discover())
    await next_batch(reader, 2)
    await reader.close()


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", ["mysql", "mysql changes", "nats", "postgres changes", "rabbitmq", "redis"]
)
async def test_a_source_waits_for_a_server_that_starts_later_than_the_job(
    servers: dict[str, Any],
    name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A server may take longer than the job waits, on a slow machine.
    monkeypatch.setattr("aioflow.io.backoff.START_PATIENCE_S", 3 * PATIENCE_S)
    server = servers[name]
    source, expected = await asyncio.to_thread(SERVERS[name][1], tmp_path, server)
    if isinstance(server, PostgresServer):
        await asyncio.to_thread(server.crash)
    else:  # RabbitMQ loses a stream of the last second when it is killed.
        await asyncio.to_thread(server.stop, signal.SIGTERM)
    async with system_context() as ctx, asyncio.timeout(3 * PATIENCE_S):
        found = asyncio.create_task(source.discover())
        while "trying again for" not in caplog.text:
            assert not found.done(), found.result()
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.start)
        assert await read_all(source, ctx, await found) == expected


@pytest.mark.parametrize("name", ["many files", "ranges of a file", "many generators"])
async def test_a_reader_of_several_splits_names_the_split_of_each_batch(
    name: str, tmp_path: Path, ctx: Context
) -> None:
    source, expected = SEVERAL_SPLITS[name](tmp_path)
    splits = await source.discover()
    assert len(splits) > 1
    reader: Any = source.reader(ctx)
    await reader.open(splits)
    counts = dict.fromkeys((split.id for split in splits), 0)
    while (batch := await next_batch(reader, 2)) is not None:
        counts[reader.current_split] += len(batch)
    assert reader.finished_splits == set(counts)
    alone = {split.id: len(await read_all(source, ctx, [split])) for split in splits}
    assert counts == alone
    assert sum(counts.values()) == len(expected)
    await reader.close()
