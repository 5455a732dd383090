"""Reads and writes tables of MySQL and MariaDB. `mysql(dsn, table)` reads a table to its end. As a
sink it appends rows, or replaces and deletes rows by key, exactly once with checkpoints.

Needs the extra `aioflow[mysql]` (asyncmy). Each writer, committer and reader has one connection. A
sink's table must support transactions (InnoDB), because without them a part of a batch could be
moved.
"""

from __future__ import annotations

import datetime
import enum
import uuid
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError
from aioflow.io.arguments import T
from aioflow.io.bodies import json_encoder
from aioflow.io.tables.mysql_client import MysqlConnection, check_mysql_dsn, error_number, is_away
from aioflow.io.tables.table_sinks import (
    SCHEMA,
    STAGED_COLUMNS,
    TableCommitter,
    TableLayout,
    TableWriter,
    decode_piece,
    despite_deadlocks,
    key_names,
    quoted,
    resolved_key,
    was_committed,
)
from aioflow.io.tables.table_sources import ServerTable, checked_table

if TYPE_CHECKING:
    from aioflow.io.tables.table_sinks import Batch, Mode, Piece, Prepared, Row
    from aioflow.operators.operator import OperatorContext

__all__ = ["MysqlTable", "mysql"]

DEADLOCKS = (1205, 1213)
"""Error numbers for a deadlock, and for a lock that another transaction held for too long."""

TEXT = "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
"""The type of texts in the sink's own tables. Keys need a maximum length and an exact
comparison.
"""


@explained
def mysql(
    dsn: str,
    table: str,
    type: type[T] | None = None,
    *,
    columns: Sequence[str] | None = None,
    key: str | Sequence[str] | None = None,
    query: str | None = None,
    mode: Mode = "append",
) -> MysqlTable[T]:
    """Returns a connector that reads the rows of `table` ("name" or "database.name") in the order
    of `key`, or writes rows to it. It works with MariaDB, too.

    `dsn` is "mysql://user:password@host:port/database"; `?unix_socket=` names a socket. `key` is a
    unique column, by default the primary key. Each row is a dict, or an object of `type`. The
    source reads the rows up to the largest key that exists when it begins. It reads `columns`, by
    default all of them. With `query`, a SELECT whose result includes the key, it reads the rows of
    the query instead.

    As a sink it accepts dicts, objects with fields (dataclasses, NamedTuples, Structs, Pydantic
    models), and lists and tuples by index. Their values are written to `columns`, by default the
    fields of the first record. The table must exist and use InnoDB. Delivery is exactly once with
    checkpoints, at least once without. Aware datetimes are stored in UTC, UUIDs as texts, dicts and
    lists as JSON. The sink keeps two small tables of its own in the database, `aioflow_staged` and
    `aioflow_sinks`.

    With `mode="upsert"` a record replaces the row with the same `key`, or is inserted. With
    `mode="delete"` it deletes the row with the same `key`. A function as `mode` returns "upsert" or
    "delete" for a record. `key` is then one column or several, with a unique constraint on them.
    The latest record of a key wins. Records of one key must come from one subtask, so key the
    stream by it.
    """
    place = f"mysql(..., {table!r})"  # Without the dsn: it may hold a password.
    check_mysql_dsn(dsn, place)
    make = checked_table(place, table, type, columns, key, query, mode)
    return MysqlTable(
        dsn, table, make, None if columns is None else list(columns), key, query, mode
    )


class MysqlTable(ServerTable[T]):
    """A `Source` and a `Sink` of the rows of one table. Made by `mysql`."""

    name = "mysql"

    async def connect(self) -> MysqlConnection:
        return await MysqlConnection.open(self.dsn, self)

    def is_away(self, error: Exception) -> bool:
        return is_away(error)

    async def disconnect(self, connection: MysqlConnection) -> None:
        await connection.close()

    async def fetch(
        self, connection: MysqlConnection, texts: Sequence[str], values: Sequence[Any]
    ) -> list[dict[str, Any]]:
        return await connection.dicts("%s".join(text.replace("%", "%%") for text in texts), values)

    async def primary_key(self, connection: MysqlConnection) -> list[str]:
        await table_columns(connection, self)
        return (await unique_columns(connection, self)).get("PRIMARY", [])

    def writer(self, ctx: OperatorContext) -> TableWriter:
        return TableWriter(
            ctx, self.place, MysqlStore(self), self.columns, adapted, self.mode, is_away
        )

    def committer(self) -> TableCommitter:
        return TableCommitter(MysqlStore(self))


_ENCODE = json_encoder("mysql sink").encode


def adapted(value: Any, column: str) -> Any:
    """Converts `value` to a type that the client writes."""
    if isinstance(value, (dict, list)):
        return _ENCODE(value).decode()
    if isinstance(value, enum.Enum):
        return adapted(value.value, column)
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.UTC).replace(tzinfo=None)
    if isinstance(value, float) and not (value - value == 0):
        raise ValueError(f"column {column!r} got {value}, which MySQL cannot store: use None")
    return value


def _split_name(config: MysqlTable[Any]) -> tuple[str | None, str]:
    schema, _, table = config.table.rpartition(".")
    return schema or None, table


async def table_columns(connection: MysqlConnection, config: MysqlTable[Any]) -> list[str]:
    """Returns the names of the table's columns. Raises GraphError if there is no such table."""
    rows = await connection.rows(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = "
        "coalesce(%s, database()) AND table_name = %s ORDER BY ordinal_position",
        _split_name(config),
    )
    if not rows:
        raise GraphError(
            f"the database has no table {config.table!r}, or the user has no right to it: create "
            "it before the job starts, or grant the right"
        )
    return [row[0] for row in rows]


async def unique_columns(
    connection: MysqlConnection, config: MysqlTable[Any]
) -> dict[str, list[str]]:
    """Returns the columns of each unique index, by the name of the index. The primary key is named
    PRIMARY.
    """
    rows = await connection.rows(
        "SELECT index_name, column_name, sub_part FROM information_schema.statistics WHERE "
        "table_schema = coalesce(%s, database()) AND table_name = %s AND non_unique = 0 "
        "ORDER BY index_name, seq_in_index",
        _split_name(config),
    )
    return {name: [row[1] for row in columns] for name, columns in groupby(rows, lambda r: r[0])}


class MysqlStore:
    """The `TableStore` for a database of MySQL."""

    def __init__(self, config: MysqlTable[Any]) -> None:
        self._config = config
        self._place = config.place
        self._connection: MysqlConnection | None = None
        self._one_key = False
        """Whether the table has no unique constraint besides the key of the upserts."""

    async def open(self) -> TableLayout:
        config, connection = self._config, await self._connected()
        columns = await table_columns(connection, config)
        ((engine,),) = await connection.rows(
            "SELECT engine FROM information_schema.tables WHERE table_schema = "
            "coalesce(%s, database()) AND table_name = %s",
            _split_name(config),
        )
        if engine is not None and engine.upper() in ("MYISAM", "ARIA", "MEMORY", "CSV", "ARCHIVE"):
            raise GraphError(
                f"{self._place} has the engine {engine}, which has no transactions, expected "
                f"InnoDB: ALTER TABLE {config.quoted_table} ENGINE = InnoDB"
            )
        unique: dict[str, list[str]] = {}
        if config.mode != "append":
            unique = await unique_columns(connection, config)
        key = resolved_key(
            self._place,
            config.mode,
            key_names(config.key),
            columns,
            unique.get("PRIMARY", []),
            list(unique.values()),
        )
        self._one_key = all(set(names) == set(key) for names in unique.values())
        return TableLayout(columns, key)

    async def _connected(self) -> MysqlConnection:
        """Returns the connection. If it was lost, opens a new one, which a retried commit needs."""
        if self._connection is not None and self._connection.broken:
            broken, self._connection = self._connection, None
            await broken.close()
        if self._connection is None:
            self._connection = await self._config.connect()
        return self._connection

    async def register(self, sink: str, subtask: int, parallelism: int, restored: int) -> int:
        await _make_tables(await self._connected())
        async with _Transaction(await self._connected()) as connection:
            await connection.execute(
                "INSERT INTO aioflow_sinks (sink, subtask, checkpoint, generation) VALUES "
                "(%s, -1, 0, 1) ON DUPLICATE KEY UPDATE generation = generation + 1",
                (sink,),
            )
            ((generation,),) = await connection.rows(
                "SELECT generation FROM aioflow_sinks WHERE sink = %s AND subtask = -1 FOR UPDATE",
                (sink,),
            )
            await connection.execute(
                "DELETE FROM aioflow_staged WHERE sink = %s AND mod(subtask, %s) = %s AND "
                "since >= %s AND generation < %s",
                (sink, parallelism, subtask, restored, generation),
            )
        return int(generation)

    async def stage(self, batch: Batch, piece: Piece) -> None:
        content = piece.content(self._place)
        await despite_deadlocks(
            lambda: self._stage(batch, piece, content),
            lambda error: error_number(error) in DEADLOCKS,
        )

    async def _stage(self, batch: Batch, piece: Piece, content: bytes) -> None:
        async with _Transaction(await self._connected()) as connection:
            await connection.execute("SAVEPOINT tried")
            await self._apply(connection, piece)
            await connection.execute("ROLLBACK TO SAVEPOINT tried")
            await connection.execute(
                f"INSERT INTO aioflow_staged ({STAGED_COLUMNS}) VALUES "
                "(%s, %s, %s, %s, %s, %s, %s)",
                batch.staged(piece, content),
            )

    async def write(self, piece: Piece) -> None:
        async with _Transaction(await self._connected()) as connection:
            await self._apply(connection, piece)

    async def _apply(self, connection: MysqlConnection, piece: Piece) -> None:
        """Writes the rows of `piece` to the table, within a transaction."""
        try:
            if not piece.key:
                await self._insert(connection, piece, piece.rows, "")
                return
            # The database compares the keys, because its equality may differ from Python's. So
            # rows keep their order, and only neighbours of one kind are written together.
            for deletes, rows in groupby(piece.rows, lambda row: bool(row[-1])):
                if deletes:
                    await self._delete(connection, piece, list(rows))
                else:
                    await self._upsert(connection, piece, [row[:-1] for row in rows])
        except Exception as error:
            piece.explain(error, self._place)
            raise

    async def _insert(
        self, connection: MysqlConnection, piece: Piece, rows: Sequence[Row], end: str
    ) -> None:
        columns = ", ".join(quoted(name, "a column") for name in piece.columns)
        row = f"({', '.join(['%s'] * len(piece.columns))})"
        sql = f"INSERT INTO {self._config.quoted_table} ({columns}) VALUES ".replace("%", "%%")
        await connection.execute(
            f"{sql}{', '.join([row] * len(rows))}{end.replace('%', '%%')}",
            [cell for one in rows for cell in one],
        )

    async def _upsert(self, connection: MysqlConnection, piece: Piece, rows: list[Row]) -> None:
        names = {name: quoted(name, "a column") for name in piece.columns}
        others = [name for name in piece.columns if name not in piece.key]
        # A table without other columns than its key has nothing to update, so the key is set to
        # itself.
        changed = others or piece.key
        if self._one_key:
            update = ", ".join(f"{names[name]} = VALUES({names[name]})" for name in changed)
            await self._insert(connection, piece, rows, f" ON DUPLICATE KEY UPDATE {update}")
            return
        # ON DUPLICATE KEY would replace the row of any unique constraint.
        update = ", ".join(f"{names[name].replace('%', '%%')} = %s" for name in changed)
        same = " AND ".join(f"{names[name].replace('%', '%%')} = %s" for name in piece.key)
        table = self._config.quoted_table.replace("%", "%%")
        for row in rows:
            cells = dict(zip(piece.columns, row, strict=True))
            values = [cells[name] for name in (*changed, *piece.key)]
            if not await connection.execute(f"UPDATE {table} SET {update} WHERE {same}", values):
                await self._insert(connection, piece, [row], "")

    async def _delete(self, connection: MysqlConnection, piece: Piece, rows: list[Row]) -> None:
        places = [piece.columns.index(name) for name in piece.key]
        key = ", ".join(quoted(name, "a column") for name in piece.key).replace("%", "%%")
        row = f"({', '.join(['%s'] * len(places))})"
        table = self._config.quoted_table.replace("%", "%%")
        await connection.execute(
            f"DELETE FROM {table} WHERE ({key}) IN ({', '.join([row] * len(rows))})",
            [one[place] for one in rows for place in places],
        )

    async def commit(self, prepared: Prepared) -> None:
        await _make_tables(await self._connected())
        async with _Transaction(await self._connected()) as connection:
            # Locks the row of the writer: a late duplicate of this commit waits for the lock, and
            # then finds nothing to do.
            writer = (prepared.sink, prepared.subtask)
            await connection.execute(
                "INSERT INTO aioflow_sinks (sink, subtask, checkpoint, generation) VALUES "
                "(%s, %s, 0, 0) ON DUPLICATE KEY UPDATE sink = VALUES(sink)",
                writer,
            )
            ((last,),) = await connection.rows(
                "SELECT checkpoint FROM aioflow_sinks WHERE sink = %s AND subtask = %s FOR UPDATE",
                writer,
            )
            # FOR UPDATE reads what is committed now, and not the state at the start of the
            # transaction.
            found = await connection.rows(
                "SELECT piece FROM aioflow_staged WHERE batch = %s FOR UPDATE", (prepared.batch,)
            )
            if was_committed(prepared, len(found), last):
                return
            for number in range(prepared.pieces):
                ((content,),) = await connection.rows(
                    "SELECT content FROM aioflow_staged WHERE batch = %s AND piece = %s",
                    (prepared.batch, number),
                )
                await self._apply(connection, decode_piece(number, content))
            await connection.execute(
                "DELETE FROM aioflow_staged WHERE batch = %s", (prepared.batch,)
            )
            await connection.execute(
                "UPDATE aioflow_sinks SET checkpoint = GREATEST(checkpoint, %s) WHERE sink = %s "
                "AND subtask = %s",
                (prepared.checkpoint, *writer),
            )

    async def discard(self, prepared: Prepared) -> None:
        connection = await self._connected()
        await connection.execute("DELETE FROM aioflow_staged WHERE batch = %s", (prepared.batch,))

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _Transaction:
    """A context manager for a transaction: commits at the end of the block, rolls back if the block
    raises.
    """

    def __init__(self, connection: MysqlConnection) -> None:
        self._connection = connection

    async def __aenter__(self) -> MysqlConnection:
        await self._connection.execute("START TRANSACTION")
        return self._connection

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            await self._connection.execute("COMMIT")
        elif not self._connection.broken:
            await self._connection.execute("ROLLBACK")


async def _make_tables(connection: MysqlConnection) -> None:
    ((found,),) = await connection.rows(
        "SELECT count(*) FROM information_schema.tables WHERE table_schema = database() AND "
        "table_name IN ('aioflow_sinks', 'aioflow_staged')"
    )
    if found == 2:
        return
    for statement in SCHEMA:
        made = statement.format(binary="LONGBLOB").replace(" TEXT ", f" {TEXT} ")
        await connection.execute(f"{made} ENGINE = InnoDB")
