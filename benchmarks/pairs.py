"""Kills workers and restarts the server while numbers go from one system to another, and checks the
output against the page of guarantees: exact, or at least once.

    python -m benchmarks.pairs SOURCE SINK [--records 500000] [--kills 10] [--restarts 3]

SOURCE is one of rabbitmq, rabbitmq-stream, mqtt, nats, redis. SINK is one of jsonl, postgres,
delta, rabbitmq, redis, nats. The program starts the servers. A flow with state counts the numbers
by key on two workers, while they are written to the source. Kills (with -9) and restarts of the
source's server are spread evenly over the output. mosquitto is ended by SIGTERM, because it keeps
no sessions otherwise, and all other servers by SIGKILL. A sink that is at least once may write some
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
from time import perf_counter
from typing import Any, NamedTuple

import aioflow as af
from tests.integration.processes import open_workers
from tests.io.driver import SinkContext, read_all, system_context
from tests.io.postgres_server import postgres_server
from tests.io.servers import (
    Server,
    mosquitto_server,
    nats_server,
    published,
    rabbitmq_declared,
    rabbitmq_server,
    redis_server,
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
    server: Server | None = None
    stop_by: int = signal.SIGKILL
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
        read = af.io.rabbitmq(server.url, "numbers", stream=stream)
        given: Any = af.io.rabbitmq(server.url, "numbers", stream=True, until="latest")
        write = af.io.rabbitmq(server.url, "numbers")
        return End(read, write, server, exact=stream, given=given if stream else None)
    if kind == "mqtt":
        server = stack.enter_context(mosquitto_server())
        url = f"mqtt://127.0.0.1:{server.port}"
        read = af.io.mqtt(url, "numbers", client_id="pairs")
        write = af.io.mqtt(url, "numbers")
        return End(read, write, server, stop_by=signal.SIGTERM, exact=False)
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
    return End(read, read, server, given=given)


async def sink_of(kind: str, stack: ExitStack, folder: Path) -> End:
    """Starts the server of a sink, and makes what has to be there."""
    if kind == "jsonl":
        return _files(folder / "out")
    if kind == "delta":
        return _delta(folder / "table")
    if kind == "postgres":
        server: Any = stack.enter_context(postgres_server())
        dsn = server.create("pairs")
        server.query("pairs", "CREATE TABLE rows (n BIGINT, k BIGINT, c BIGINT)")

        async def table_rows(ctx: SinkContext) -> list[Row]:
            found = await asyncio.to_thread(server.query, "pairs", "SELECT n, k, c FROM rows")
            return [Row(*map(int, line.split("|"))) for line in found]

        return End(af.io.postgres(dsn, "rows"), rows=table_rows)
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


def _delta(path: Path) -> End:
    import pyarrow as pa
    from deltalake import DeltaTable

    schema = pa.schema([(name, pa.int64()) for name in Row._fields])
    DeltaTable.create(str(path), schema)

    async def rows(ctx: SinkContext) -> list[Row]:
        def load() -> list[Row]:
            table = DeltaTable(str(path)).to_pyarrow_table()
            columns = [table.column(name).to_pylist() for name in Row._fields]
            return [Row(*cells) for cells in zip(*columns, strict=True)]

        return await asyncio.to_thread(load)

    return End(af.io.delta(str(path)), rows=rows)


async def fill(end: End, records: int, ctx: SinkContext) -> None:
    """Writes the numbers. The writer tries again while the server is away."""
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
        assert source.server is not None
        flow = af.Flow("pairs", parallelism=2)
        numbers = flow.source(source.connector, uid="numbers").rebalance()
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
        assert source.server is not None
        await asyncio.to_thread(source.server.stop, source.stop_by)
        await asyncio.to_thread(source.server.start)
        return
    while not (workers := open_workers(job)):  # noqa: ASYNC110  # There is no event of it.
        await asyncio.sleep(0.05)
    os.kill(chance.choice(workers).pid, signal.SIGKILL)


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
