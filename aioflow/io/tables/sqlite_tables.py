"""Reads and writes tables of SQLite: `sqlite(path, table)` reads a table to its end. As a sink it
appends rows, or replaces and deletes rows by key, exactly once with checkpoints.

All calls of one connection run in the executor, one after the other. Several subtasks that write to
one file take turns, because SQLite allows one writer at a time.
"""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import os
import sqlite3
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVarTuple
from urllib.parse import quote

from aioflow.advice.hints import explained
from aioflow.core.aio import wait_all
from aioflow.core.errors import Closed, GraphError, describe_record, note_once
from aioflow.io.arguments import T, checked_columns
from aioflow.io.conversion import value_maker
from aioflow.io.files.paths import checked_path, lent
from aioflow.io.tables.table_sinks import (
    SCHEMA,
    STAGED_COLUMNS,
    TableCommitter,
    TableLayout,
    TableWriter,
    check_upserts,
    checked_mode,
    decode_piece,
    key_names,
    quoted,
    resolved_key,
    was_committed,
)
from aioflow.io.tables.table_sources import KEY, PAGE_ROWS, PageReader, selected
from aioflow.operators.sink import BaseSink
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.io.tables.table_sinks import Batch, Mode, Piece, Prepared
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["SqliteTable", "sqlite"]

Args = TypeVarTuple("Args")

BUSY_TIMEOUT_S = 60.0
"""Maximum time that a transaction waits for other transactions on the file. Then the transaction
fails with "database is locked".
"""

INT_MIN, INT_MAX = -(2**63), 2**63 - 1


@explained
def sqlite(
    path: str | os.PathLike[str],
    table: str,
    type: type[T] | None = None,
    *,
    columns: Sequence[str] | None = None,
    key: str | Sequence[str] = "rowid",
    mode: Mode = "append",
) -> SqliteTable[T]:
    """Returns a connector that reads the rows of `table` in the SQLite file at `path`, in the order
    of `key`, or writes rows.

    For a source, `key` is a column that is unique and not null. Each row is a dict, or an object of
    `type`. The source reads the rows up to the largest key that exists when it begins. It reads
    `columns`, by default all of them.

    As a sink it accepts dicts, objects with fields (dataclasses, NamedTuples, Structs, Pydantic
    models), and lists and tuples by index. Their values are written to `columns`, by default the
    fields of the first record. The table must exist. Delivery is exactly once with checkpoints, at
    least once without. bool is stored as int; datetime, date, time, Decimal and UUID as text, NaN
    as NULL. The sink keeps two small tables of its own in the file, `aioflow_staged` and
    `aioflow_sinks`.

    With `mode="upsert"` a record replaces the row with the same `key`, or is inserted. With
    `mode="delete"` it deletes the row with the same `key`. A function as `mode` returns "upsert" or
    "delete" for a record. `key` is then one column or several, with a unique constraint on them, by
    default the primary key. The latest record of a key wins. Records of one key must come from one
    subtask, so key the stream by it.
    """
    place = f"sqlite({str(path)!r}, {table!r})"
    checked_columns(columns, place)
    try:
        for name in (table, *key_names(key), *(columns or ())):
            quoted(name, f"sqlite({str(path)!r}, {table!r}): a name")
        make = value_maker(type)
    except (ValueError, TypeError) as error:
        raise GraphError(str(error)) from None
    checked_mode(mode, columns, [] if key == "rowid" else key_names(key), place)
    return SqliteTable(
        str(checked_path(path, "sqlite")),
        table,
        make,
        None if columns is None else list(columns),
        key,
        mode,
    )


@dataclass(eq=False, repr=False)
class SqliteTable(BaseSource[T], BaseSink[Any]):
    """A `Source` and a `Sink` of the rows of one table. Made by `sqlite`.

    The source has one split, whose position is the key of the last row read.
    """

    name = "sqlite"
    bounded = True
    parallelism_max = 1

    path: str
    table: str
    make: Callable[[dict[str, Any]], T] | None
    columns: list[str] | None
    key: str | Sequence[str]
    mode: Mode

    def __repr__(self) -> str:
        return f"sqlite({self.path!r}, {self.table!r})"

    async def discover(self, host: Host | None = None) -> list[Split]:
        """Returns one split, which ends at the largest key that exists now."""
        if not isinstance(self.key, str):
            raise GraphError(
                f"{self!r} stands as a source, and key= is {self.key!r}, expected one unique column"
            )
        async with lent(host) as machine:
            connection = _Connection(machine, self.path)
            try:
                await connection.open(must_exist=True)
                last = await connection.run(_last_key, self.table, self.key)
            finally:
                await connection.close()
        return [Split("0", None, last)]

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return _TableReader(ctx, self)

    def check_upserts(self, key: Sequence[str]) -> None:
        check_upserts(self, self.mode, [] if self.key == "rowid" else key_names(self.key), key)

    def writer(self, ctx: OperatorContext) -> TableWriter:
        return TableWriter(
            ctx,
            f"table {self.table!r} of {self.path}",
            SqliteStore(ctx.host, self),
            self.columns,
            adapted,
            self.mode,
        )

    def committer(self, ctx: OperatorContext | None = None) -> TableCommitter:
        if ctx is None:
            raise TypeError(f"{self!r} commits through the host of its operator: committer(ctx)")
        return TableCommitter(SqliteStore(ctx.host, self))


def adapted(value: Any, column: str) -> Any:
    """Converts `value` to a type that SQLite stores. Raises TypeError or ValueError naming the
    column.
    """
    if value is None or type(value) in (str, bytes, float):
        return value
    if isinstance(value, enum.Enum):
        return adapted(value.value, column)
    if isinstance(value, int):
        if not INT_MIN <= value <= INT_MAX:
            raise ValueError(
                f"column {column!r} got {value}, expected an integer of 64 bits: convert it to "
                "text before the sink"
            )
        return int(value)
    if isinstance(value, (datetime.date, datetime.time)):  # This includes datetime.
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, uuid.UUID)):
        return str(value)
    if isinstance(value, (str, bytes, float)):
        return value
    raise TypeError(
        f"column {column!r} got {describe_record(value)} of type {type(value).__name__}, expected "
        "None, a number, text, bytes, a date or "
        "time, Decimal or UUID: convert it in a map before the sink"
    )


class _Connection:
    """A connection to a SQLite file. A cancelled call continues in its thread, and `close` waits
    for it.
    """

    def __init__(self, host: Host, path: str) -> None:
        self._host = host
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._running: asyncio.Future[Any] | None = None

    async def open(self, *, must_exist: bool) -> None:
        if self._connection is None:
            self._running = self._host.blocking(self._connect, must_exist)
            await asyncio.shield(self._running)

    def _connect(self, must_exist: bool) -> None:
        mode = "rw" if must_exist else "rwc"
        try:
            self._connection = sqlite3.connect(
                f"file:{quote(self._path)}?mode={mode}",
                uri=True,
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            self._connection.execute("SELECT 1 FROM sqlite_master").close()
        except sqlite3.Error as error:
            note_once(error, f"SQLite file {self._path!r}")
            raise

    async def run(self, function: Callable[[sqlite3.Connection, *Args], T], *args: *Args) -> T:
        """Returns the result of `function(connection, *args)`, run in the executor."""
        connection = self._connection
        if connection is None:
            raise Closed(f"the connection to SQLite file {self._path!r} is closed")
        future: asyncio.Future[T] = self._host.blocking(function, connection, *args)
        self._running = future
        return await asyncio.shield(future)

    async def close(self) -> None:
        if self._running is not None:
            await wait_all([self._running])
            if not self._running.cancelled():
                self._running.exception()  # Otherwise asyncio logs the error as never retrieved.
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._host.blocking(connection.close)


class SqliteStore:
    """The `TableStore` for a SQLite file."""

    def __init__(self, host: Host, config: SqliteTable[Any]) -> None:
        self._connection = _Connection(host, config.path)
        self._path = config.path
        self._table = config.table
        self._mode = config.mode
        self._key = [] if config.key == "rowid" else key_names(config.key)
        self._place = f"table {config.table!r} of {config.path}"

    async def open(self) -> TableLayout:
        await self._connection.open(must_exist=False)
        columns = await self._connection.run(_columns, self._table)
        if not columns:
            raise GraphError(
                f"SQLite file {self._path} has no table {self._table!r}: create it before the job "
                "starts"
            )
        primary, unique = await self._connection.run(_unique_columns, self._table)
        key = resolved_key(self._place, self._mode, self._key, columns, primary, unique)
        return TableLayout(columns, key)

    async def register(self, sink: str, subtask: int, parallelism: int, restored: int) -> int:
        return await self._connection.run(_register, sink, subtask, parallelism, restored)

    async def stage(self, batch: Batch, piece: Piece) -> None:
        content = piece.content(self._place)
        await self._connection.run(self._stage, batch, piece, content)

    def _stage(
        self, connection: sqlite3.Connection, batch: Batch, piece: Piece, content: bytes
    ) -> None:
        with _Transaction(connection):
            connection.execute("SAVEPOINT tried")
            self._apply(connection, piece)
            connection.execute("ROLLBACK TO tried")
            connection.execute(
                f"INSERT INTO aioflow_staged ({STAGED_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                batch.staged(piece, content),
            )

    async def write(self, piece: Piece) -> None:
        await self._connection.run(self._write, piece)

    def _write(self, connection: sqlite3.Connection, piece: Piece) -> None:
        with _Transaction(connection):
            self._apply(connection, piece)

    def _apply(self, connection: sqlite3.Connection, piece: Piece) -> None:
        names = {name: quoted(name, "a column") for name in piece.columns}
        table = quoted(self._table, "the table")
        write = (
            f"INSERT INTO {table} ({', '.join(names.values())}) "
            f"VALUES ({', '.join('?' for _ in names)})"
        )
        if piece.key:
            update = ", ".join(
                f"{quoted_name} = excluded.{quoted_name}"
                for name, quoted_name in names.items()
                if name not in piece.key
            )
            write += f" ON CONFLICT ({', '.join(names[name] for name in piece.key)}) DO " + (
                f"UPDATE SET {update}" if update else "NOTHING"
            )
        same = " AND ".join(f"{names[name]} = ?" for name in piece.key)
        delete = f"DELETE FROM {table} WHERE {same}"
        places = [piece.columns.index(name) for name in piece.key]
        written = -1
        try:
            # Written one by one, so that the error below can name the row. This costs 0.3 us
            # more a row than executemany, and keeps the order of the changes of one key.
            for written, row in enumerate(piece.rows):  # noqa: B007
                if not piece.key:
                    connection.execute(write, row)
                elif row[-1]:
                    connection.execute(delete, [row[place] for place in places])
                else:
                    connection.execute(write, row[:-1])
        except sqlite3.Error as error:
            note_once(error, f"in {self._place}, at row {piece.described(written)}")
            raise

    async def commit(self, prepared: Prepared) -> None:
        await self._connection.run(self._commit, prepared)

    def _commit(self, connection: sqlite3.Connection, prepared: Prepared) -> None:
        for statement in SCHEMA:
            connection.execute(statement.format(binary="BLOB"))
        with _Transaction(connection):
            (found,) = connection.execute(
                "SELECT count(*) FROM aioflow_staged WHERE batch = ?", (prepared.batch,)
            ).fetchone()
            last = connection.execute(
                "SELECT checkpoint FROM aioflow_sinks WHERE sink = ? AND subtask = ?",
                (prepared.sink, prepared.subtask),
            ).fetchone()
            if was_committed(prepared, found, None if last is None else last[0]):
                return
            for number in range(prepared.pieces):
                (content,) = connection.execute(
                    "SELECT content FROM aioflow_staged WHERE batch = ? AND piece = ?",
                    (prepared.batch, number),
                ).fetchone()
                self._apply(connection, decode_piece(number, content))
            connection.execute("DELETE FROM aioflow_staged WHERE batch = ?", (prepared.batch,))
            connection.execute(
                "INSERT INTO aioflow_sinks (sink, subtask, checkpoint, generation) VALUES (?, ?, "
                "?, 0) "
                "ON CONFLICT (sink, subtask) DO UPDATE SET checkpoint = max(checkpoint, "
                "excluded.checkpoint)",
                (prepared.sink, prepared.subtask, prepared.checkpoint),
            )

    async def discard(self, prepared: Prepared) -> None:
        await self._connection.run(_discard, prepared.batch)

    async def close(self) -> None:
        await self._connection.close()


class _Transaction:
    """A context manager for a transaction that takes the write lock at its beginning.

    Otherwise another connection might write between a read and a later write of the transaction.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._connection.execute("COMMIT")
        elif self._connection.in_transaction:  # SQLite itself rolls back when the disk is full.
            self._connection.execute("ROLLBACK")


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[0] for row in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))]


def _unique_columns(
    connection: sqlite3.Connection, table: str
) -> tuple[list[str], list[list[str]]]:
    """Returns the columns of the primary key, and each set of columns with a unique constraint."""
    primary = [
        row[0]
        for row in connection.execute(
            "SELECT name FROM pragma_table_info(?) WHERE pk > 0 ORDER BY pk", (table,)
        )
    ]
    unique = [primary] if primary else []
    for (index,) in connection.execute(
        'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial', (table,)
    ).fetchall():
        columns = [
            row[0] for row in connection.execute("SELECT name FROM pragma_index_info(?)", (index,))
        ]
        if None not in columns:  # The name of an expression is NULL.
            unique.append(columns)
    return primary, unique


def _register(
    connection: sqlite3.Connection, sink: str, subtask: int, parallelism: int, restored: int
) -> int:
    for statement in SCHEMA:
        connection.execute(statement.format(binary="BLOB"))
    with _Transaction(connection):
        (generation,) = connection.execute(
            "INSERT INTO aioflow_sinks (sink, subtask, checkpoint, generation) VALUES (?, -1, 0, "
            "1) "
            "ON CONFLICT (sink, subtask) DO UPDATE SET generation = aioflow_sinks.generation + 1 "
            "RETURNING generation",
            (sink,),
        ).fetchone()
        connection.execute(
            "DELETE FROM aioflow_staged WHERE sink = ? AND subtask % ? = ? AND since >= ? AND "
            "generation < ?",
            (sink, parallelism, subtask, restored, generation),
        )
    return int(generation)


def _discard(connection: sqlite3.Connection, batch: str) -> None:
    connection.execute("DELETE FROM aioflow_staged WHERE batch = ?", (batch,))


def _last_key(connection: sqlite3.Connection, table: str, key: str) -> Any:
    columns = _columns(connection, table)
    if not columns:
        (_, _, path), *_ = connection.execute("PRAGMA database_list")
        raise GraphError(
            f"SQLite file {path} has no table {table!r}: create it before the job starts"
        )
    name = quoted(key, "the key")
    if key == "rowid":
        try:
            # No quotes here, because SQLite reads a quoted name that is no column as a text.
            connection.execute(f"SELECT rowid FROM {quoted(table, 'the table')} LIMIT 0")
        except sqlite3.OperationalError:
            raise GraphError(
                f"table {table!r} has no rowid: name a unique column by key=, expected one of "
                f"{', '.join(columns)}"
            ) from None
    elif key not in columns:
        raise GraphError(
            f"table {table!r} has no column {key!r} for key=, expected one of {', '.join(columns)}"
        )
    (nulls, last) = connection.execute(
        f"SELECT count(*) - count({name}), max({name}) FROM {quoted(table, 'the table')}"
    ).fetchone()
    if nulls:
        raise GraphError(
            f"key {key!r} of table {table!r} is NULL in {nulls} rows, expected a unique column "
            "that is never NULL"
        )
    return last


class _TableReader(PageReader):
    """A reader of a `SqliteTable`."""

    def __init__(self, ctx: SourceContext, config: SqliteTable[Any]) -> None:
        super().__init__(ctx)
        self._config = config
        self._connection = _Connection(ctx.host, config.path)

    async def run(self, split: Split) -> None:
        end, make = split.payload, self._config.make
        if end is None:
            return  # There was no row.
        await self._connection.open(must_exist=True)
        key = str(self._config.key)
        await self.put_pages(
            self._config,
            key,
            make,
            split.position,
            lambda last: self._connection.run(_page, self._config, last, end),
        )

    async def close(self) -> None:
        await super().close()
        await self._connection.close()


def _page(
    connection: sqlite3.Connection, config: SqliteTable[Any], last: Any, end: Any
) -> list[dict[str, Any]]:
    """Returns the rows of the next page, and the first row of the page after it."""
    key, table = quoted(str(config.key), "the key"), quoted(config.table, "the table")
    after = "" if last is None else f"{key} > ? AND "
    cursor = connection.execute(
        f"SELECT {key} AS {KEY}, {selected(config.columns, '*')} FROM {table} WHERE {after}{key} "
        f"<= ? ORDER BY {key} LIMIT {PAGE_ROWS + 1}",
        (end,) if last is None else (last, end),
    )
    names = [description[0] for description in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]
