"""Programs that change tables in transactions, and a flow that keeps a copy of a table by its
changes, for tests that kill what runs them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aioflow as af
from aioflow.operators.source import Split
from tests.integration.processes import eventually, open_workers
from tests.io.driver import read_all, take

__all__ = [
    "Writer",
    "applied",
    "change_through_kills",
    "check_files",
    "at_position",
    "copied",
    "lines",
    "opened",
    "plain",
    "random_transactions",
    "reads_as_changed",
]

STATEMENTS = 20
"""Changes of one transaction."""


class Writer:
    """Inserts, updates, deletes and changes of the key in table `t (id, n)`, by one seed."""

    def __init__(self, execute: Callable[[list[str]], Awaitable[list[int] | None]]) -> None:
        """`execute` runs statements in one transaction. After a failure it returns the ids that the
        table has then.
        """
        self._execute = execute
        self._random = Random(7)
        self._ids: list[int] = []
        self._next = 1_000_000
        self.changes = 0

    async def run(self, total: int, pause_s: float) -> None:
        while self.changes < total:
            ids = list(self._ids)
            statements = [self._statement(ids) for _ in range(STATEMENTS)]
            if self._random.random() < 0.05:
                statements.append("ROLLBACK")
            found = await self._execute(statements)
            if found is not None:
                self._ids = found
            elif statements[-1] != "ROLLBACK":
                self._ids = ids
                self.changes += STATEMENTS
            await asyncio.sleep(pause_s)

    def _statement(self, ids: list[int]) -> str:
        kind = self._random.random() if len(ids) > 50 else 0.0
        self._next += 1
        if kind < 0.2:
            ids.append(self._next)
            return f"INSERT INTO t VALUES ({self._next}, 0)"
        place = self._random.randrange(len(ids))
        one = ids[place]
        if kind < 0.7:
            return f"UPDATE t SET n = n + 1 WHERE id = {one}"
        if kind < 0.8:
            ids[place] = self._next
            return f"UPDATE t SET id = {self._next}, n = n + 1 WHERE id = {one}"
        ids[place] = ids[-1]
        ids.pop()
        return f"DELETE FROM t WHERE id = {one}"


class Exactly(af.KeyedProcessFunction[Any, af.Upsert[dict[str, int]], af.Upsert[dict[str, int]]]):
    """Passes rows on, and fails for one that does not follow the row before it."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor("last"))

    def process_element(
        self, value: af.Upsert[dict[str, int]], ctx: Any
    ) -> Iterable[af.Upsert[dict[str, int]]]:
        before = self.last.value()
        if value.row is None:
            assert before is not None, f"{value} removes a row that is not there"
            self.last.clear()
        else:
            n = value.row["n"]
            assert before is None or n == before + 1, f"{value} comes after {before}"
            self.last.update(n)
        yield value


def copied(changes: Any, target: Any, files: Path | None = None) -> af.Flow:
    """Writes the latest rows of table `t` into `target`, and each upsert into `files`."""
    flow = af.Flow("copied", parallelism=2)
    rows = flow.source(changes, uid="changes").upserts(uid="upserts")
    exact = rows.process(Exactly, uid="exactly")
    exact.sink(target, uid="copy")
    if files is not None:
        written = exact.map(lambda upsert: [upsert.key["id"], upsert.row and upsert.row["n"]])
        written.sink(af.io.jsonl(files), uid="files")
    return flow


def check_files(files: Path, rows: list[list[int]]) -> None:
    """Checks that each upsert is in `files` once, and that they lead to the rows `[id, n]`."""
    texts = [path.read_text() for path in files.glob("*.jsonl")]
    upserts = [json.loads(line) for text in texts for line in text.splitlines()]
    counts = Counter((id_, n) for id_, n in upserts)
    assert [one for one, count in counts.items() if count > 1] == []
    gone = {id_ for id_, n in upserts if n is None}
    latest: dict[int, int] = {}
    for id_, n in upserts:
        if id_ not in gone:
            latest[id_] = max(latest.get(id_, 0), n)
    assert sorted(latest.items()) == [(id_, n) for id_, n in sorted(rows)]


async def change_through_kills(
    flow: af.Flow,
    store: Path,
    writer: Writer,
    crash: Callable[[], None],
    same: Callable[[], Awaitable[bool]],
    *,
    kills: int = 5,
) -> None:
    """Runs `flow` with two workers while `writer` changes the table, and kills: the server every
    third time, a worker otherwise. Returns when the copies are the `same`.

    `CHANGES=100000 KILLS=13` takes longer. It prints the changes a second.
    """
    total = int(os.environ.get("CHANGES", "2000"))
    kills = int(os.environ.get("KILLS", kills))
    async with flow.run(
        workers=2, checkpoints=store, every="150ms", restart=af.fixed_delay(200, "100ms")
    ) as job:
        loop = asyncio.get_running_loop()
        began = loop.time()
        writing = asyncio.create_task(writer.run(total, 0.005 if total <= 2000 else 0))
        for kill in range(kills):
            while writer.changes < total * kill // (kills + 1) and not writing.done():
                await asyncio.sleep(0.05)
            if kill % 3 == 1:
                await asyncio.to_thread(crash)
            else:
                await eventually(lambda: len(open_workers(job)) > 0)
                workers = open_workers(job)
                os.kill(workers[kill % len(workers)].pid, signal.SIGKILL)
        await writing
        async with asyncio.timeout(120 + total / 1000):
            while not await same():
                await asyncio.sleep(0.2)
        print(f"{writer.changes / (loop.time() - began):,.0f} changes/s with {kills} kills")
        await job.stop(store.parent / "last")


def plain(change: af.Change[Any]) -> tuple[Any, ...]:
    return change.kind, change.table, change.key, change.before, change.after


async def at_position(
    source: Any, ctx: Any, position: Any = None, payload: Any = None
) -> tuple[Any, Any]:
    """A reader that was opened at `position`, and its split."""
    reader, split = source.reader(ctx), Split("0", position, payload)
    await reader.open([split])
    return reader, split


@asynccontextmanager
async def opened(source: Any, ctx: Any) -> AsyncIterator[Any]:
    """A reader from the beginning, closed at the end."""
    reader, _ = await at_position(source, ctx, (await source.discover())[0].position)
    try:
        yield reader
    finally:
        await reader.close()


TABLES = (
    "CREATE TABLE a (id INT PRIMARY KEY, n INT)",
    "CREATE TABLE b (k VARCHAR(20), i INT, v VARCHAR(20), PRIMARY KEY (k, i))",
    "CREATE TABLE other (id INT PRIMARY KEY)",
)
"""The tables of `random_transactions`."""


def random_transactions(random: Random, count: int) -> list[str]:
    """Transactions as SQL: rows of both tables that come, change, get another key and go."""
    fresh = 1_000

    def statement() -> str:
        nonlocal fresh
        fresh += 100
        one, letter = random.randrange(3), random.choice("abC")
        rows = random.choice([1, 1, 2, 40])
        return random.choice(
            [
                "INSERT INTO a VALUES "
                + ", ".join(f"({fresh + i}, {random.randrange(5)})" for i in range(rows)),
                "INSERT INTO b VALUES "
                + ", ".join(f"('{letter}{i}', {fresh}, NULL)" for i in range(rows)),
                f"UPDATE a SET n = n + 1 WHERE id % 3 = {one}",
                f"UPDATE a SET id = id + 1000000 WHERE n = {one} AND id < 1000000",
                f"UPDATE b SET v = '{letter}' WHERE i % 3 = {one}",
                "UPDATE b SET i = i + 1000000 WHERE v IS NULL AND i % 7 = 0 AND i < 1000000",
                f"DELETE FROM a WHERE id % 11 = {one}",
                f"DELETE FROM b WHERE i % 5 = {one}",
                f"INSERT INTO other VALUES ({fresh})",
            ]
        )

    found = []
    for _ in range(count):
        inside = [statement() for _ in range(random.choice([1, 1, 2, 5]))]
        if random.random() < 0.2:
            inside[1:1] = ["SAVEPOINT s", statement(), "ROLLBACK TO SAVEPOINT s"]
        end = "ROLLBACK" if random.random() < 0.2 else "COMMIT"
        found.append("; ".join(["BEGIN", *inside, end]))
    return found


def applied(changes: Iterable[af.Change[Any]]) -> dict[str, dict[Any, Any]]:
    """The rows of tables by their keys. Fails for a change that does not follow the one before."""
    tables: dict[str, dict[Any, Any]] = {}
    for change in changes:
        rows = tables.setdefault(change.table, {})
        key = tuple(change.key.values())
        if change.kind in ("insert", "read"):
            assert key not in rows, change
        else:
            assert rows.pop(key) == change.before, change
        if change.after is not None:
            new = tuple(change.after[name] for name in change.key)
            assert new not in rows, change
            rows[new] = change.after
    return tables


def lines(rows: dict[Any, Any], between: str, null: str) -> list[str]:
    """Rows as the client of a database prints them, in some order."""
    return sorted(
        between.join([null if cell is None else str(cell) for cell in row.values()])
        for row in rows.values()
    )


async def reads_as_changed(
    source: Any, ended: Any, ctx: Any, random: Random, change: Callable[[str], Awaitable[Any]]
) -> dict[str, dict[Any, Any]]:
    """Changes the tables of `source` while a reader is restarted at random places, each time at its
    last checkpoint. Returns the rows by the changes read.

    `ended` is the same source that ends at the end of the log.
    """
    transactions = random_transactions(random, 40)
    for one in transactions[:8]:
        await change(one)
    (split,) = await ended.discover()
    read: list[af.Change[Any]] = []
    position, safe = split.position, 0
    left = transactions[8:]
    while left:
        reader, _ = await at_position(source, ctx, position)
        try:
            for _ in range(random.randrange(1, 4)):
                writing = asyncio.create_task(change("; ".join(left[:4])))
                left = left[4:]
                for _ in range(random.randrange(3)):
                    if reader.pending_records:
                        read += await take(reader, 1, random.choice([1, 3, 8192]))
                    await asyncio.sleep(0.01)
                if random.random() < 0.5:
                    position, safe = reader.position("0"), len(read)
                await writing
        finally:
            await reader.close()
        del read[safe:]
    (split,) = await ended.discover()
    read += await read_all(ended, ctx, [Split("0", position, split.payload)])
    return applied(read)
