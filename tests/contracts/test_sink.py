"""The contract of every sink: each element at least once.

A committing sink shows nothing before the commit, and everything once after it.

A connector that commits takes part by an entry in `SINKS`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import obstore
import pytest
from obstore.store import MemoryStore, from_url

from aioflow.core.elements import RecordBatch
from aioflow.core.errors import StateError
from aioflow.core.signatures import call_with
from aioflow.io.brokers.kafka_sink import KafkaCommitter, KafkaWriter
from aioflow.io.brokers.kafka_topics import kafka
from aioflow.io.brokers.nats_streams import NatsCommitter, NatsWriter, nats
from aioflow.io.brokers.redis_sink import RedisCommitter, RedisWriter
from aioflow.io.brokers.redis_streams import RedisStreams, redis
from aioflow.io.files.csv_files import csv
from aioflow.io.files.json_files import jsonl
from aioflow.io.files.line_files import lines
from aioflow.io.queues import queue
from aioflow.io.standard_output import blackhole, stdout
from aioflow.io.tables.mysql_tables import MysqlTable, mysql
from aioflow.io.tables.postgres_tables import PostgresTable, postgres
from aioflow.io.tables.sqlite_tables import SqliteTable, sqlite
from aioflow.io.tables.table_sinks import TableCommitter, TableWriter
from aioflow.operators.call_pool import Retry
from aioflow.operators.sink import Sink, SinkOperator
from aioflow.state.operator_state import HeapOperatorStateBackend, redistribute
from aioflow.state.snapshot import OperatorSnapshot
from tests.io.driver import Runtime, SinkContext, read_all, system_context
from tests.io.kafka.brokers import (
    BROKERS_REMEDY,
    Brokers,
    MockCluster,
    ended,
    kafka_cluster,
    produced,
)
from tests.io.mysql_server import MysqlServer, mysql_server
from tests.io.postgres_server import PostgresServer, postgres_server
from tests.io.servers import (
    BUCKET,
    Server,
    nats_server,
    published,
    redis_server,
    s3_environment,
    s3_server,
)
from tests.needs import unreachable

CONNECTED = (
    TableWriter,
    TableCommitter,
    RedisWriter,
    RedisCommitter,
    NatsWriter,
    NatsCommitter,
    KafkaWriter,
    KafkaCommitter,
)
"""Sinks with connections, which end with the process."""


obstore.put(MemoryStore(), "first", b"")  # Its threads begin with its first call, and stay.


@pytest.fixture
async def ctx() -> AsyncIterator[SinkContext]:
    async with system_context() as context:
        yield SinkContext(context.host)


@dataclass
class Case:
    """A sink that commits, what it takes for a number, and the numbers that others see."""

    sink: Any
    record: Callable[[int], Any]
    seen: Callable[[], Awaitable[list[int]]]
    leftovers: Callable[[], list[str]]
    """Returns the sink's hidden files and staged rows."""
    ctx: SinkContext
    many: int = 300_000
    """Writes more elements than a writer holds in memory."""
    stages: bool = True
    """Whether anything is outside before the commit."""
    stages_begun: bool = True
    """Whether what was written is outside before it is prepared; uploads end at the barrier."""
    opened: list[Any] = field(default_factory=list)

    def writer(self) -> Any:
        self.opened.append(self.sink.writer(self.ctx))
        return self.opened[-1]

    def committer(self) -> Any:
        self.opened.append(call_with(self.sink.committer, self.ctx))
        return self.opened[-1]

    async def die(self) -> None:
        """Acts like the system when a process dies: connections end, files stay unchanged."""
        for one in self.opened:
            if isinstance(one, CONNECTED):
                await one.close()
        self.opened.clear()

    def records(self, *numbers: int) -> list[Any]:
        return [self.record(number) for number in numbers]


def files(
    make: Callable[[Path], Any], number: Callable[[Any], int], target: Path, ctx: SinkContext
) -> Case:
    async def seen() -> list[int]:
        if all(path.name.startswith(".") for path in target.iterdir()):
            return []
        return sorted(map(number, await read_all(make(target), ctx)))

    def hidden() -> list[str]:
        return [path.name for path in target.iterdir() if path.name.startswith(".")]

    return Case(make(target), lambda i: i, seen, hidden, ctx)


def objects(server: Server, name: str, ctx: SinkContext) -> Case:
    url = f"s3://{BUCKET}/{name}"

    def listed() -> list[str]:
        found = obstore.list(from_url(url)).collect()
        return [meta["path"] for meta in found]

    async def seen() -> list[int]:
        if all(path.startswith(".") for path in listed()):
            return []
        return sorted(map(int, await read_all(jsonl(url), ctx)))

    def hidden() -> list[str]:
        return [path for path in listed() if path.startswith(".")]

    return Case(jsonl(url), lambda i: i, seen, hidden, ctx, stages_begun=False)


def sqlite_table(target: Path, ctx: SinkContext, mode: Any = "append") -> Case:
    path = f"{target}.db"
    with closing(sqlite3.connect(path)) as connection:
        unique = " UNIQUE" if mode == "upsert" else ""
        connection.execute(f"CREATE TABLE numbers (n INTEGER NOT NULL{unique})")

    async def seen() -> list[int]:
        return sorted(row["n"] for row in await read_all(sqlite(path, "numbers"), ctx))

    def staged() -> list[str]:
        with closing(sqlite3.connect(path)) as connection:
            return [row[0] for row in connection.execute("SELECT batch FROM aioflow_staged")]

    key = "n" if mode == "upsert" else "rowid"
    sink = sqlite(path, "numbers", key=key, mode=mode)
    return Case(sink, lambda i: {"n": i}, seen, staged, ctx, many=5_000)


def postgres_table(
    server: PostgresServer, name: str, ctx: SinkContext, mode: Any = "append"
) -> Case:
    dsn = server.create(name)
    key = " PRIMARY KEY" if mode == "upsert" else ""
    server.query(name, f"CREATE TABLE numbers (n BIGINT NOT NULL{key})")

    async def seen() -> list[int]:
        connection = await asyncpg.connect(dsn)
        try:
            return sorted(row["n"] for row in await connection.fetch("SELECT n FROM numbers"))
        finally:
            await connection.close()

    def staged() -> list[str]:
        return server.query(name, "SELECT batch FROM aioflow_staged")

    sink = postgres(dsn, "numbers", mode=mode)
    return Case(sink, lambda i: {"n": i}, seen, staged, ctx, many=5_000)


def mysql_table(server: MysqlServer, name: str, ctx: SinkContext, mode: Any = "append") -> Case:
    dsn = server.create(name)
    key = " PRIMARY KEY" if mode == "upsert" else ""
    server.query(name, f"CREATE TABLE numbers (n BIGINT NOT NULL{key})")

    async def seen() -> list[int]:
        return sorted(map(int, server.query(name, "SELECT n FROM numbers")))

    def staged() -> list[str]:
        return server.query(name, "SELECT batch FROM aioflow_staged")

    sink = mysql(dsn, "numbers", mode=mode)
    return Case(sink, lambda i: {"n": i}, seen, staged, ctx, many=5_000)


def redis_stream(server: Server, name: str, ctx: SinkContext) -> Case:
    url = f"redis://127.0.0.1:{server.port}"

    async def seen() -> list[int]:
        read = await read_all(redis(url, name, until="latest", must_exist=False), ctx)
        return sorted(int(entry["n"]) for entry in read)

    def staged() -> list[str]:
        answer = server.ask(f"HKEYS aioflow:{{{name}}}:staged:{ctx.flow_name}/{ctx.uid}")
        return [line for line in answer.split("\r\n") if line and line[0] not in "*$"]

    return Case(redis(url, name), lambda i: {"n": i}, seen, staged, ctx, many=5_000)


async def nats_stream(server: Server, name: str, ctx: SinkContext) -> Case:
    url = f"nats://127.0.0.1:{server.port}"
    await published(server, name)

    async def seen() -> list[int]:
        return sorted(await read_all(nats(url, name, until="latest"), ctx))

    return Case(nats(url, name), lambda i: i, seen, list, ctx, many=5_000, stages=False)


async def kafka_topic(cluster: Brokers | MockCluster, name: str, ctx: SinkContext) -> Case:
    if isinstance(cluster, MockCluster):  # It neither aborts nor fences transactions.
        unreachable("brokers of Kafka", BROKERS_REMEDY)
    await produced(cluster, name, [])
    ctx.flow_name = (
        name  # The cluster stays, and a transactional id is that of the flow and its operator.
    )
    sink = kafka(cluster.bootstrap, name, transactions=True)

    async def seen() -> list[int]:
        await ended(cluster)
        return sorted(await read_all(kafka(cluster.bootstrap, name, until="latest"), ctx))

    return Case(sink, lambda i: i, seen, list, ctx, many=5_000, stages=False)


@pytest.fixture(scope="module")
def postgres_running() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@pytest.fixture(scope="module")
def mysql_running() -> Iterator[MysqlServer]:
    with mysql_server() as running:
        yield running


@pytest.fixture(scope="module")
def redis_running() -> Iterator[Server]:
    with redis_server() as running:
        yield running


@pytest.fixture(scope="module")
def nats_running() -> Iterator[Server]:
    with nats_server() as running:
        yield running


@pytest.fixture(scope="module")
def kafka_running() -> Iterator[Brokers | MockCluster]:
    with kafka_cluster() as running:
        yield running


@pytest.fixture
def s3_running(s3_store: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    for name, value in s3_environment(s3_store.port).items():
        monkeypatch.setenv(name, value)
    return s3_store


@pytest.fixture(scope="module")
def s3_store() -> Iterator[Server]:
    with s3_server() as running:
        yield running


SERVERS = {
    "s3": "s3_running",
    "postgres": "postgres_running",
    "postgres upsert": "postgres_running",
    "mysql": "mysql_running",
    "mysql upsert": "mysql_running",
    "redis": "redis_running",
    "nats": "nats_running",
    "kafka": "kafka_running",
}
"""The fixture of what a case needs."""

SINKS = [
    "lines",
    "jsonl",
    "csv",
    "sqlite",
    "sqlite upsert",
    *(pytest.param(name, marks=pytest.mark.integration) for name in SERVERS),
]


@pytest.fixture(params=SINKS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def database(request: pytest.FixtureRequest, kind: str) -> Any:
    """The server, where the case needs one."""
    return request.getfixturevalue(SERVERS[kind]) if kind in SERVERS else None


@pytest.fixture
async def case(kind: str, tmp_path: Path, database: Any, ctx: SinkContext) -> AsyncIterator[Case]:
    made = await make_case(kind, tmp_path, database, ctx)
    yield made
    for opened in made.opened:
        if hasattr(opened, "close"):
            await opened.close()


async def make_case(kind: str, tmp_path: Path, database: Any, ctx: SinkContext) -> Case:
    target = tmp_path / "out"
    match kind:
        case "lines":
            return files(lines, int, target, ctx)
        case "jsonl":
            return files(jsonl, int, target, ctx)
        case "csv":
            return files(lambda path: csv(path, header=False), lambda row: int(row[0]), target, ctx)
        case "sqlite":
            return sqlite_table(target, ctx)
        case "sqlite upsert":
            return sqlite_table(target, ctx, "upsert")
        case "nats":
            return await nats_stream(database, f"test{zlib.crc32(str(tmp_path).encode())}", ctx)
        case "kafka":
            return await kafka_topic(database, f"test{zlib.crc32(str(tmp_path).encode())}", ctx)
        case "s3":
            return objects(database, f"test{zlib.crc32(str(tmp_path).encode())}", ctx)
        case "redis":
            return redis_stream(database, f"test{zlib.crc32(str(tmp_path).encode())}", ctx)
        case _:
            name = f"test{zlib.crc32(str(tmp_path).encode())}"
            mode = "upsert" if kind.endswith(" upsert") else "append"
            table = mysql_table if kind.startswith("mysql") else postgres_table
            return table(database, name, ctx, mode)


def go_on(writer: Any) -> None:
    """Continues like a job restored from checkpoint 1; a writer may ignore this."""
    getattr(writer, "restored", lambda checkpoint_id: None)(1)


async def test_nothing_is_seen_before_the_commit_and_all_after_it(case: Case) -> None:
    seen = case.seen
    committer = case.committer()
    assert isinstance(case.sink, Sink)
    writer = case.writer()
    await writer.open()
    writer.write_batch(case.records(1, 2), None)
    await writer.flush()
    assert await seen() == []
    first = await writer.prepare(1)
    assert await seen() == []
    writer.write_batch(case.records(3), None)
    await committer.commit(first)
    assert await seen() == [1, 2]
    await committer.commit(await writer.prepare(2))
    assert await seen() == [1, 2, 3]
    assert await writer.prepare(3) == []
    await writer.close()


async def test_committing_and_aborting_again_changes_nothing(case: Case) -> None:
    seen = case.seen
    committer = case.committer()
    writer = case.writer()
    await writer.open()
    writer.write_batch(case.records(1), None)
    one = await writer.prepare(1)
    writer.write_batch(case.records(2), None)
    two = await writer.prepare(2)
    for _ in range(2):
        await committer.commit(one)
        await committer.abort(two)
    await committer.abort(one)
    assert await seen() == [1]
    await writer.close()


async def test_committables_are_plain_data(case: Case) -> None:
    """They travel in the checkpoint, and commit just as well when they return from it."""
    seen = case.seen
    committer = case.committer()
    writer = case.writer()
    await writer.open()
    writer.write_batch(case.records(1), None)
    committables = msgspec.msgpack.decode(msgspec.msgpack.encode(await writer.prepare(1)))
    await writer.close()
    await committer.commit(committables)
    assert await seen() == [1]


@pytest.mark.parametrize(
    "crash", ["after write", "after flush", "after prepare", "before commit ends"]
)
async def test_a_crash_between_the_steps_loses_and_repeats_nothing(case: Case, crash: str) -> None:
    """The attempt after the crash commits the content of the last completed checkpoint, and writes
    the rest again.
    """
    seen = case.seen
    committer = case.committer()
    writer = case.writer()
    await writer.open()
    writer.write_batch(case.records(1), None)
    completed = await writer.prepare(1)
    writer.write_batch(case.records(2), None)
    if crash == "after flush":
        await writer.flush()
    if crash in ("after prepare", "before commit ends"):
        await writer.prepare(2)
    if crash == "before commit ends":
        await committer.commit(completed)
    # The process is gone: its writer was not closed, and the data in its memory is lost.

    await committer.commit(completed)
    again = case.writer()
    go_on(again)
    await again.open()
    again.write_batch(case.records(2), None)
    await committer.commit(await again.prepare(2))
    await committer.commit(completed)
    assert await seen() == [1, 2]
    await again.close()
    await writer.close()


async def test_a_writer_that_closes_drops_what_was_not_prepared_and_only_that(case: Case) -> None:
    seen = case.seen
    committer = case.committer()
    writer = case.writer()
    await writer.open()
    writer.write_batch(case.records(1), None)
    prepared = await writer.prepare(1)
    writer.write_batch(case.records(2), None)
    await writer.flush()
    await writer.close()
    again = case.writer()
    go_on(again)
    await again.open()
    await committer.commit(prepared)
    assert await seen() == [1]
    assert case.leftovers() == []


async def test_subtasks_and_runs_do_not_overwrite_each_other(case: Case, ctx: SinkContext) -> None:
    seen = case.seen
    committer = case.committer()
    expected = []
    for run in range(2):
        for subtask in range(2):
            ctx.runtime = Runtime(subtask_index=subtask, parallelism=2)
            writer = case.writer()
            await writer.open()
            for i in range(2):
                value = 100 * run + 10 * subtask + i
                expected.append(value)
                writer.write_batch(case.records(value), None)
                await committer.commit(await writer.prepare(i + 1))
            await writer.close()
    assert await seen() == expected


async def test_a_writer_that_was_given_nothing_commits_nothing(case: Case) -> None:
    writer = case.writer()
    await writer.open()
    writer.write_batch(case.records(), None)
    await writer.flush()
    assert await writer.prepare(1) == []
    await writer.close()
    assert case.leftovers() == []


async def test_a_large_batch_asks_for_a_flush(case: Case) -> None:
    """Memory stays bounded: the chain gives no more until the flush is done."""
    seen = case.seen
    committer = case.committer()
    writer = case.writer()
    await writer.open()
    writer.write_batch(case.records(1), None)
    assert not writer.full
    writer.write_batch(case.records(*range(2, case.many)), None)
    assert writer.full
    await writer.flush()
    assert not writer.full
    await committer.commit(await writer.prepare(1))
    assert len(await seen()) == case.many - 1
    await writer.close()


async def test_leftovers_of_an_attempt_are_removed_by_the_next_and_prepared_data_is_not(
    case: Case, ctx: SinkContext
) -> None:
    """An attempt that is gone, at another parallelism: its second subtask has one heir."""
    committables = []
    for subtask in range(2):
        ctx.runtime = Runtime(subtask_index=subtask, parallelism=2)
        writer = case.writer()
        await writer.open()
        writer.write_batch(case.records(subtask), None)
        committables += await writer.prepare(1)
        writer.write_batch(case.records(10 + subtask), None)
        await writer.prepare(2)
        writer.write_batch(case.records(20 + subtask), None)
        await writer.flush()
    assert len(case.leftovers()) == (6 if case.stages_begun else 4) * case.stages
    ctx.runtime = Runtime(attempt=1)
    again = case.writer()
    go_on(again)
    await again.open()
    assert len(case.leftovers()) == 2 * case.stages
    await case.committer().commit(committables)
    assert await case.seen() == [0, 1]
    assert case.leftovers() == []


async def test_an_attempt_that_is_gone_removes_nothing_of_a_later_one(
    case: Case, ctx: SinkContext
) -> None:
    """R22.2: late calls change nothing."""
    zombie = case.writer()
    go_on(zombie)
    await zombie.open()
    zombie.write_batch(case.records(0), None)
    await zombie.flush()

    ctx.runtime = Runtime(attempt=1)
    later = case.writer()
    go_on(later)
    await later.open()
    later.write_batch(case.records(1), None)
    prepared = await later.prepare(2)
    zombie.write_batch(case.records(0), None)
    with suppress(StateError):  # Or the attempt learns that it is gone.
        await zombie.flush()
    await zombie.close()
    ctx.runtime = Runtime(attempt=0)
    if not isinstance(
        case.sink, (SqliteTable, PostgresTable, MysqlTable, RedisStreams)
    ):  # There the number is drawn when it opens.
        late = case.writer()
        go_on(late)
        with suppress(StateError):  # Or it learns that it is late.
            await late.open()
    await case.committer().commit(prepared)
    assert await case.seen() == [1]


class Gone(BaseException):
    """The death of the process: no Exception, so that no code tries again."""


class Steps:
    """Counts the steps of the two phases, and dies before or after the n-th."""

    def __init__(self, die_at: int | None, after: bool) -> None:
        self.count = 0
        self._die_at = die_at
        self._after = after

    async def step(self, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        self.count += 1
        if self.count != self._die_at:
            return await call(*args)
        if self._after:
            await call(*args)
        raise Gone


class Watched:
    """A sink whose steps are counted."""

    def __init__(self, case: Case, steps: Steps) -> None:
        self._case = case
        self._steps = steps

    def writer(self, ctx: Any) -> Any:
        return _Proxy(self._case.writer(), self._steps, ("open", "flush", "prepare"))

    def committer(self) -> Any:
        return _Proxy(self._case.committer(), self._steps, ("commit",))


class _Proxy:
    def __init__(self, inner: Any, steps: Steps, counted: tuple[str, ...]) -> None:
        self._inner = inner
        self._steps = steps
        self._counted = counted

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return (lambda *args: self._steps.step(found, *args)) if name in self._counted else found


async def run_job(
    case: Case, ctx: SinkContext, first: int, crashes: Sequence[tuple[int, bool]]
) -> int:
    """Six records from `first` on, in checkpoints of two, with crashes; gives the steps of the
    last attempt.
    """
    completed: tuple[int, int, OperatorSnapshot | None] = (0, 0, None)
    checkpoint_id = 0
    ctx.job_id = f"job{first}"
    for attempt, (die_at, after) in enumerate([*crashes, (0, False)]):
        steps = Steps(die_at or None, after)
        state = HeapOperatorStateBackend()
        if completed[2] is not None:
            state.restore(redistribute([completed[2]], 1)[0])
        ctx.operator_state, ctx.runtime = state, Runtime(attempt=attempt)
        ctx.failures.clear()
        operator = SinkOperator(Watched(case, steps), Retry(1))
        try:
            operator.setup(ctx)  # type: ignore[arg-type]
            operator.initialize_state()
            await operator.open()
            for position in range(completed[1], 6, 2):
                operator.process_batch(
                    RecordBatch(case.records(first + position, first + position + 1), None)
                )
                checkpoint_id += 1
                await operator.snapshot_state(checkpoint_id)
                if checkpoint_id == 2:
                    continue  # Its metadata could not be written: it is never completed.
                completed = (checkpoint_id, position + 2, state.snapshot())
                operator.notify_checkpoint_complete(checkpoint_id)
                await ctx.settled()
        except Gone:
            await case.die()
        assert max(await case.seen(), default=first - 1) < first + completed[1], (
            "something is seen that no checkpoint covers"
        )
    assert case.leftovers() == []
    return steps.count


async def test_dying_before_or_after_any_step_loses_and_repeats_nothing(
    case: Case, ctx: SinkContext, database: Any
) -> None:
    """R22: before prepare, after it, before and after the commit (the reply is lost); then once
    more.
    """
    steps = await run_job(case, ctx, 0, [])
    assert steps > 8
    crashes = [[(at, after)] for at in range(1, steps + 1) for after in (False, True)]
    crashes += [[(at, True), (1, True), (2, False)] for at in range(2, steps + 1, 3)]
    for i, some in enumerate(crashes, 1):
        await run_job(case, ctx, 6 * i, some)
        assert await case.seen() == list(range(6 * i + 6))


@pytest.mark.parametrize("name", ["stdout", "queue", "blackhole"])
async def test_a_sink_that_does_not_commit_shows_what_was_written_when_it_was_prepared(
    name: str, ctx: SinkContext, capsys: pytest.CaptureFixture[str]
) -> None:
    items: asyncio.Queue[int] = asyncio.Queue()
    sink: Any = {"stdout": stdout, "queue": lambda: queue(items), "blackhole": blackhole}[name]()
    assert isinstance(sink, Sink)
    assert sink.committer() is None
    writer = sink.writer(ctx)
    writer.write_batch([1, 2], None)
    assert await writer.prepare(1) == []
    writer.write_batch([3], None)
    await writer.flush()
    await writer.flush()
    shown = {
        "stdout": capsys.readouterr().out.split(),
        "queue": [str(items.get_nowait()) for _ in range(items.qsize())],
        "blackhole": ["1", "2", "3"],
    }[name]
    assert shown == ["1", "2", "3"]
