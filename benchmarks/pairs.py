"""Kills workers and restarts the server while numbers go from one system to another, and checks the
output against the page of guarantees: exact, or at least once.

    python -m benchmarks.pairs SOURCE SINK [--records 500000] [--kills 10] [--restarts 3]

SOURCE is one of kafka, postgres-changes, mysql-changes, s3, nats, redis, mqtt, rabbitmq,
rabbitmq-stream. SINK is one of kafka, postgres, mysql, s3, iceberg, delta, jsonl, nats, redis,
rabbitmq. The program starts the servers. A flow with state counts the numbers by key on two
workers, while they are written to the source. Kills (with -9) and restarts of the source's server
are spread evenly over the output. Most servers are ended by SIGKILL. mosquitto is ended by SIGTERM,
because it keeps no sessions otherwise. The server of S3 keeps objects in memory, so it refuses
connections for 1.5 s instead. A sink that is at least once may write some
rows twice. A source that is at least once may give some numbers twice. Then no number may be
missing, and the counts of each key may have no gap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

import aioflow as af
from tests.integration.processes import open_workers
from tests.io.driver import SinkContext, read_all, system_context
from tests.io.kafka.brokers import kafka_brokers, produced
from tests.io.lake_tables import Lake, lake
from tests.io.mysql_server import LOGGED, mysql_server
from tests.io.postgres_server import postgres_server
from tests.io.servers import (
    BUCKET,
    Server,
    mosquitto_server,
    nats_server,
    published,
    rabbitmq_declared,
    rabbitmq_server,
    redis_server,
    s3_environment,
    s3_server,
)

KEYS = 100

PIECE = 1_000

GIVE_UP_S = 180.0
"""Time without a new row after which the flow counts as stuck."""


class Row(NamedTuple):
    n: int
    k: int
    c: int


class Count(af.KeyedProcessFunction[int, dict[str, int], Row]):
    """Counts the numbers of a key."""

    def open(self, ctx: Any) -> None:
        self.count = ctx.get_state(af.ValueStateDescriptor("count"))

    def process_element(self, value: dict[str, int], ctx: Any) -> Iterator[Row]:
        count = (self.count.value() or 0) + 1
        self.count.update(count)
        yield Row(value["n"], ctx.current_key, count)


@dataclass
class End:
    """A system at one end of the flow."""

    connector: Any
    """Reads, or writes."""
    written: Any = None
    """Writes the numbers into a source."""
    put: Callable[[range], None] | None = None
    """Does the same for some numbers at once, all of them or none."""
    restart: Callable[[], None] | None = None
    exact: bool = True
    given: Any = None
    """Reads what an exact source holds at the end. The writer is at least once: it may have written
    a number twice while the server was away.
    """
    rows: Callable[[SinkContext], Awaitable[list[Row]]] | None = None


async def source_of(kind: str, stack: ExitStack) -> End:
    """Starts the server of a source, and makes what has to be there."""
    if kind.startswith("rabbitmq"):
        server: Any = stack.enter_context(rabbitmq_server())
        stream = kind.endswith("stream")
        await rabbitmq_declared(server.url, "numbers", stream=stream)
        read: Any = af.io.rabbitmq(server.url, "numbers", stream=stream)
        given: Any = af.io.rabbitmq(server.url, "numbers", stream=True, until="latest")
        write: Any = af.io.rabbitmq(server.url, "numbers")
        restart = _restarts(server)
        return End(read, write, restart=restart, exact=stream, given=given if stream else None)
    if kind == "mqtt":
        server = stack.enter_context(mosquitto_server())
        url = f"mqtt://127.0.0.1:{server.port}"
        read = af.io.mqtt(url, "numbers", client_id="pairs")
        write = af.io.mqtt(url, "numbers")
        return End(read, write, restart=_restarts(server, signal.SIGTERM), exact=False)
    if kind == "postgres-changes":
        settings = {"wal_level": "logical"}
        server = stack.enter_context(postgres_server(**settings))
        dsn = server.create("numbers")
        server.query("numbers", "CREATE TABLE numbers (n BIGINT PRIMARY KEY)")

        def insert_all(piece: range) -> None:
            values = f"generate_series({piece.start}, {piece.stop - 1})"
            server.query("numbers", f"INSERT INTO numbers SELECT {values} ON CONFLICT DO NOTHING")

        def recover() -> None:
            server.crash()
            server.start()

        read = af.io.postgres_changes(dsn, "numbers", slot="pairs")
        return End(read, put=insert_all, restart=recover)
    if kind == "mysql-changes":
        server = stack.enter_context(mysql_server(*LOGGED))
        dsn = server.create("numbers")
        server.query("numbers", "CREATE TABLE numbers (n BIGINT PRIMARY KEY)")

        def insert_ignored(piece: range) -> None:
            values = f"seq_{piece.start}_to_{piece.stop - 1}"
            server.query("numbers", f"INSERT IGNORE INTO numbers SELECT seq FROM {values}")

        read = af.io.mysql_changes(dsn, "numbers")
        return End(read, put=insert_ignored, restart=_restarts(server))
    if kind == "s3":
        url = f"{_s3(stack)}/in"

        def put_object(piece: range) -> None:
            import obstore

            text = "".join(f'{{"n": {n}}}\n' for n in piece)
            obstore.put(obstore.store.from_url(url), f"{piece.start:09}.jsonl", text.encode())

        read = af.io.jsonl(url, discover_every="500ms")
        return End(read, put=put_object, restart=_s3_away)
    if kind == "kafka":
        brokers = await asyncio.to_thread(stack.enter_context, kafka_brokers())
        await produced(brokers, "numbers", [])
        read = af.io.kafka(brokers.bootstrap, "numbers")
        given = af.io.kafka(brokers.bootstrap, "numbers", until="latest")
        return End(read, read, restart=_restarts(brokers.servers[0]), given=given)
    if kind == "nats":
        server = stack.enter_context(nats_server())
        await published(server, "numbers")
        url = f"nats://127.0.0.1:{server.port}"
        read = af.io.nats(url, "numbers")
        given = af.io.nats(url, "numbers", until="latest")
    elif kind == "redis":
        server = stack.enter_context(redis_server())
        url = f"redis://127.0.0.1:{server.port}"
        read = af.io.redis(url, "numbers", field="v", must_exist=False)
        given = af.io.redis(url, "numbers", field="v", until="latest")
    else:
        raise SystemExit(f"there is no source {kind!r}")
    return End(read, read, restart=_restarts(server), given=given)


def _restarts(server: Server, number: int = signal.SIGKILL) -> Callable[[], None]:
    def restart() -> None:
        server.stop(number)
        server.start()

    return restart


_S3: list[Server] = []
"""The one server of S3 that both ends share: its address is in the environment."""


def _s3(stack: ExitStack) -> str:
    """Returns the URL of a bucket."""
    if not _S3:
        _S3.append(stack.enter_context(s3_server()))
        os.environ.update(s3_environment(_S3[0].port))
    return f"s3://{BUCKET}"


def _s3_away() -> None:
    _S3[0].send(signal.SIGUSR1)
    sleep(3)
    _S3[0].wait()


def _table(server: Any, sink: Any, separator: str | None) -> End:
    """Makes the table `found`. The server's client separates the columns of its lines."""
    server.query("pairs", "CREATE TABLE found (n BIGINT, k BIGINT, c BIGINT)")

    async def rows(ctx: SinkContext) -> list[Row]:
        found = await asyncio.to_thread(server.query, "pairs", "SELECT n, k, c FROM found")
        return [Row(*map(int, line.split(separator))) for line in found]

    return End(sink, rows=rows)


async def sink_of(kind: str, stack: ExitStack, folder: Path) -> End:
    """Starts the server of a sink, and makes what has to be there."""
    server: Any
    if kind == "jsonl":
        return _files(folder / "out")
    if kind in ("delta", "iceberg"):
        return _lake(lake(kind, folder))
    if kind == "s3":
        return _objects(f"{_s3(stack)}/out")
    if kind == "mysql":
        server = stack.enter_context(mysql_server())
        dsn = server.create("pairs")
        return _table(server, af.io.mysql(dsn, "found"), None)
    if kind == "kafka":
        brokers = await asyncio.to_thread(stack.enter_context, kafka_brokers())
        await produced(brokers, "rows", [])
        sink = af.io.kafka(brokers.bootstrap, "rows", transactions=True)
        committed = af.io.kafka(brokers.bootstrap, "rows", until="latest")
        return End(sink, rows=lambda ctx: _read(committed, ctx))
    if kind == "postgres":
        server = stack.enter_context(postgres_server())
        dsn = server.create("pairs")
        return _table(server, af.io.postgres(dsn, "found"), "|")
    if kind == "rabbitmq":
        server = stack.enter_context(rabbitmq_server())
        await rabbitmq_declared(server.url, "rows", stream=True)
        out: Any = af.io.rabbitmq(server.url, "rows")
        back: Any = af.io.rabbitmq(server.url, "rows", stream=True, until="latest")
        return End(out, exact=False, rows=lambda ctx: _read(back, ctx))
    if kind == "nats":
        server = stack.enter_context(nats_server())
        await published(server, "rows")
        url = f"nats://127.0.0.1:{server.port}"
        back = af.io.nats(url, "rows", until="latest")
        return End(af.io.nats(url, "rows"), rows=lambda ctx: _read(back, ctx))
    if kind == "redis":
        server = stack.enter_context(redis_server())
        url = f"redis://127.0.0.1:{server.port}"
        out = af.io.redis(url, "rows", field="v")
        back = af.io.redis(url, "rows", field="v", until="latest", must_exist=False)
        return End(out, rows=lambda ctx: _read(back, ctx))
    raise SystemExit(f"there is no sink {kind!r}")


async def _read(source: Any, ctx: SinkContext) -> list[Row]:
    read = await read_all(source, ctx)
    return [Row(**row) if isinstance(row, dict) else Row(*row) for row in read]


def _files(folder: Path) -> End:
    seen: dict[str, list[Row]] = {}

    def load() -> list[Row]:
        for path in folder.glob("*"):
            if not path.name.startswith(".") and path.name not in seen:
                lines = path.read_text().splitlines()
                seen[path.name] = [Row(**json.loads(line)) for line in lines]
        return [row for part in seen.values() for row in part]

    async def rows(ctx: SinkContext) -> list[Row]:
        return await asyncio.to_thread(load)

    sink = af.io.jsonl(folder, roll=af.io.RollPolicy(age_ms=500))
    return End(sink, rows=rows)


def _objects(url: str) -> End:
    import obstore

    seen: dict[str, list[Row]] = {}

    def load() -> list[Row]:
        store = obstore.store.from_url(url)
        for meta in obstore.list(store).collect():
            name = meta["path"]
            if name.startswith("part-") and name not in seen:
                lines = bytes(obstore.get(store, name).bytes()).splitlines()
                seen[name] = [Row(**json.loads(line)) for line in lines]
        return [row for part in seen.values() for row in part]

    async def rows(ctx: SinkContext) -> list[Row]:
        while True:
            try:
                return await asyncio.to_thread(load)
            except OSError:  # The server is away.
                await asyncio.sleep(0.2)

    return End(af.io.jsonl(url, roll=af.io.RollPolicy(age_ms=500)), rows=rows)


def _lake(table: Lake) -> End:
    import pyarrow as pa

    table.create(pa.schema([(name, pa.int64()) for name in Row._fields]))

    async def rows(ctx: SinkContext) -> list[Row]:
        return [Row(**row) for row in await asyncio.to_thread(table.rows)]

    return End(table.connector(), rows=rows)


async def fill(end: End, records: int, ctx: SinkContext) -> None:
    """Writes the numbers. The writer tries again while the server is away."""
    if end.put is not None:
        for first in range(0, records, PIECE):
            piece = range(first, min(first + PIECE, records))
            while True:
                try:
                    await asyncio.to_thread(end.put, piece)
                    break
                except (AssertionError, OSError, TimeoutError):  # The server is away.
                    await asyncio.sleep(0.2)
        return
    writer = end.written.writer(ctx)
    await writer.open()
    for first in range(0, records, PIECE):
        writer.write_batch([{"n": n} for n in range(first, min(first + PIECE, records))], None)
        await writer.flush()
    await writer.close()


class Outcome(NamedTuple):
    rows: int
    twice: int
    """Rows beyond one for each message in the source."""
    mistakes: list[str]
    seconds: float


def judged(
    rows: list[Row], records: int, given: Counter[int], source: End, sink: End, seconds: float
) -> Outcome:
    """Compares the rows with what the two ends promise. `given` are the numbers in the source."""
    numbers = Counter(row.n for row in rows)
    mistakes = []
    if missing := records - len(numbers):
        mistakes.append(f"{missing} numbers are missing")
    twice = (numbers - given).total()
    if twice and source.exact and sink.exact:
        mistakes.append(f"{twice} rows are there twice")
    if lost := (given - numbers).total():
        mistakes.append(f"{lost} rows are missing")
    counts: dict[int, Counter[int]] = {}
    for row in rows:
        counts.setdefault(row.k, Counter())[row.c] += 1
    for k, found in counts.items():
        if set(found) != set(range(1, max(found) + 1)):
            mistakes.append(f"the counts of key {k} have gaps")
        if sink.exact and max(found.values()) > 1:
            mistakes.append(f"a count of key {k} is there twice")
    return Outcome(len(rows), twice, mistakes[:5], seconds)


async def run_pair(
    source_kind: str, sink_kind: str, *, records: int, kills: int, restarts: int, every: str = "1s"
) -> Outcome:
    """Runs one pair, and compares its output."""
    chance = random.Random(1)
    events = [*["kill"] * kills, *["restart"] * restarts]
    chance.shuffle(events)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aioflow-pairs-")))
        source = await source_of(source_kind, stack)
        sink = await sink_of(sink_kind, stack, folder)
        assert sink.rows is not None
        flow = af.Flow("pairs", parallelism=2)
        numbers = flow.source(source.connector, uid="numbers").rebalance().map(_number)
        counts = numbers.key_by(_key).process(Count, uid="count")
        counts.map(Row._asdict).sink(sink.connector, uid="rows")
        async with system_context() as machine:
            ctx = SinkContext(machine.host, checkpointing=False)
            began = perf_counter()
            filling: asyncio.Task[None] | None = None
            job_of = flow.run(
                workers=2,
                checkpoints=f"file://{folder}/checkpoints",
                every=every,
                restart=af.fixed_delay(1_000, "100ms"),
            )
            async with job_of as job:
                filling = asyncio.create_task(fill(source, records, ctx))
                done, last, moved = 0, 0, perf_counter()
                while True:
                    asked = perf_counter()
                    rows = await sink.rows(ctx)
                    if len(rows) > last:
                        last, moved = len(rows), perf_counter()
                    elif perf_counter() - moved > GIVE_UP_S:
                        break
                    if done < len(events):
                        if last >= records * (done + 1) // (len(events) + 2):
                            await _strike(events[done], job, source, chance)
                            done += 1
                    elif filling.done() and len({row.n for row in rows}) == records:
                        break
                    await asyncio.sleep(max(0.2, 3 * (perf_counter() - asked)))
                seconds = perf_counter() - began
                await job.cancel()
            await filling
            given = Counter(range(records))
            if source.given is not None:
                given = Counter(one["n"] for one in await read_all(source.given, ctx))
            return judged(await sink.rows(ctx), records, given, source, sink, seconds)


async def _strike(event: str, job: Any, source: End, chance: random.Random) -> None:
    if event == "restart":
        assert source.restart is not None
        await asyncio.to_thread(source.restart)
        return
    while not (workers := open_workers(job)):  # noqa: ASYNC110  # There is no event of it.
        await asyncio.sleep(0.05)
    os.kill(chance.choice(workers).pid, signal.SIGKILL)


def _number(value: Any) -> dict[str, int]:
    """Returns the row of a change, and any other value as it is."""
    row: Any = value.after if isinstance(value, af.Change) else value
    return dict(row)


def _key(value: dict[str, int]) -> int:
    return value["n"] % KEYS


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source")
    parser.add_argument("sink")
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--restarts", type=int, default=3)
    given = parser.parse_args()
    outcome = await run_pair(
        given.source,
        given.sink,
        records=given.records,
        kills=given.kills,
        restarts=given.restarts,
    )
    print(json.dumps({**vars(given), **outcome._asdict()}))
    if outcome.mistakes:
        raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main())
