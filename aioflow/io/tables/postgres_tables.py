"""Reads and writes tables of PostgreSQL: `postgres(dsn, table)` reads a table to its end. As a sink
it appends rows, or replaces and deletes rows by key, exactly once with checkpoints.

Needs the extra `aioflow[postgres]` (asyncpg). asyncpg's documentation lists the Python type for
each column type; json and jsonb columns are decoded. Each writer, committer and reader has one
connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError, note_once
from aioflow.io.arguments import T, check_host_and_port
from aioflow.io.bodies import json_encoder
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
    from aioflow.io.tables.table_sinks import Batch, Mode, Piece, Prepared
    from aioflow.operators.operator import OperatorContext

__all__ = ["PostgresTable", "postgres"]

AWAY = frozenset({"57P01", "57P02", "57P03", "53300", "08000", "08001", "08003", "08006"})
"""SQLSTATE codes which mean that the server stops, starts, has too many connections, or has lost
the connection.
"""

CONNECT_TIMEOUT_S = 8.0
"""Maximum time for connecting, so that a wrong address soon becomes an error."""

CLOSE_TIMEOUT_S = 5.0
"""Maximum time for closing a connection."""

SCHEMA_LOCK = 0x61696F666C6F77
"""Advisory lock that is held while the sink's tables are created. `IF NOT EXISTS` does not protect
against another client that creates them at the same time.
"""


@explained
def postgres(
    dsn: str,
    table: str,
    type: type[T] | None = None,
    *,
    columns: Sequence[str] | None = None,
    key: str | Sequence[str] | None = None,
    query: str | None = None,
    mode: Mode = "append",
) -> PostgresTable[T]:
    """Returns a connector that reads the rows of `table` ("name" or "schema.name") in the order of
    `key`, or writes rows to it.

    `key` is a unique column, by default the primary key. Each row is a dict, or an object of
    `type`. The source reads the rows up to the largest key that exists when it begins. It reads
    `columns`, by default all of them. With `query`, a SELECT whose result includes the key, it
    reads the rows of the query instead.

    As a sink it accepts dicts, objects with fields (dataclasses, NamedTuples, Structs, Pydantic
    models), and lists and tuples by index. Their values are written to `columns`, by default the
    fields of the first record. The table must exist. Delivery is exactly once with checkpoints, at
    least once without. The sink keeps two small tables of its own in the database, `aioflow_staged`
    and `aioflow_sinks`.

    With `mode="upsert"` a record replaces the row with the same `key`, or is inserted. With
    `mode="delete"` it deletes the row with the same `key`. A function as `mode` returns "upsert" or
    "delete" for a record. `key` is then one column or several, with a unique constraint on them.
    The latest record of a key wins. Records of one key must come from one subtask, so key the
    stream by it.
    """
    place = f"postgres(..., {table!r})"  # Without the dsn: it may hold a password.
    check_postgres_dsn(dsn, place)
    make = checked_table(place, table, type, columns, key, query, mode)
    return PostgresTable(
        dsn, table, make, None if columns is None else list(columns), key, query, mode
    )


class PostgresTable(ServerTable[T]):
    """A `Source` and a `Sink` of the rows of one table. Made by `postgres`."""

    name = "postgres"

    async def connect(self) -> Any:
        return await connect(self)

    def is_away(self, error: Exception) -> bool:
        return is_away(error)

    async def disconnect(self, connection: Any) -> None:
        await disconnect(connection)

    async def fetch(
        self, connection: Any, texts: Sequence[str], values: Sequence[Any]
    ) -> list[dict[str, Any]]:
        sql = texts[0] + "".join(f"${i}{text}" for i, text in enumerate(texts[1:], 1))
        return [dict(row) for row in await connection.fetch(sql, *values)]

    async def primary_key(self, connection: Any) -> list[str]:
        await table_columns(connection, self)
        rows = await connection.fetch(
            "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND "
            "a.attnum = ANY(i.indkey) "
            "WHERE i.indisprimary AND i.indrelid = to_regclass($1)",
            self.quoted_table,
        )
        return [row[0] for row in rows]

    def writer(self, ctx: OperatorContext) -> TableWriter:
        return TableWriter(
            ctx,
            self.place,
            PostgresStore(self),
            self.columns,
            _as_it_is,
            self.mode,
            is_away,
        )

    def committer(self) -> TableCommitter:
        return TableCommitter(PostgresStore(self))


def _as_it_is(value: Any, column: str) -> Any:
    return value


def check_postgres_dsn(dsn: object, place: str) -> None:
    """Raises GraphError unless `dsn` is the URL of a database."""
    if not isinstance(dsn, str) or not dsn.startswith(("postgres://", "postgresql://")):
        raise GraphError(
            f"{place}: expected a URL as dsn, postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        )
    if "," not in dsn:  # A dsn with several hosts separates them by commas.
        check_host_and_port(dsn, place, needs_host=False)


async def connect(config: PostgresTable[Any]) -> Any:
    """Returns a connection to the database. Raises ModuleNotFoundError naming the extra."""
    connection = await open_connection(config.dsn, config)
    encode = json_encoder("postgres sink").encode
    try:
        await connection.set_type_codec(
            "json",
            schema="pg_catalog",
            format="binary",
            encoder=encode,
            decoder=msgspec.json.decode,
        )
        # The first byte is the version of the binary format.
        await connection.set_type_codec(
            "jsonb",
            schema="pg_catalog",
            format="binary",
            encoder=lambda value: b"\x01" + encode(value),
            decoder=lambda data: msgspec.json.decode(data[1:]),
        )
    except BaseException:
        await disconnect(connection)
        raise
    return connection


async def open_connection(dsn: str, owner: object, **settings: str) -> Any:
    """Returns an asyncpg connection without custom codecs. Errors name `owner`. `settings` are
    settings of the session.
    """
    try:
        import asyncpg
    except ImportError:
        raise ModuleNotFoundError(
            "af.io.postgres needs asyncpg: pip install 'aioflow[postgres]'"
        ) from None
    try:
        return await asyncpg.connect(
            dsn, timeout=CONNECT_TIMEOUT_S, server_settings=settings or None
        )
    except TimeoutError as error:
        raise TimeoutError(
            f"{owner!r}: the server {_place(dsn)} did not answer within "
            f"{CONNECT_TIMEOUT_S:g} s: check host and port of the dsn, and the network"
        ) from error
    except asyncpg.PostgresError as error:
        note_once(error, f"{owner!r}: the server {_place(dsn)} refused the connection")
        raise
    except OSError as error:
        told = f"{owner!r}: the server {_place(dsn)} cannot be reached: {error.strerror or error}"
        raise type(error)(error.errno, told) from error


def is_away(error: Exception) -> bool:
    """Returns whether the server cannot be reached or is not ready, so a retry may succeed."""
    import asyncpg

    if isinstance(error, asyncpg.PostgresError):
        return error.sqlstate in AWAY
    return isinstance(error, (OSError, TimeoutError))


def _place(dsn: str) -> str:
    """Returns the host and port of `dsn`, without the password."""
    return (
        dsn.partition("://")[2].partition("/")[0].partition("?")[0].rpartition("@")[2]
        or "of this machine"
    )


async def disconnect(connection: Any) -> None:
    """Closes the connection. Aborts it if closing takes too long."""
    try:
        await connection.close(timeout=CLOSE_TIMEOUT_S)
    except (OSError, TimeoutError):
        connection.terminate()


async def table_columns(connection: Any, config: PostgresTable[Any]) -> list[str]:
    """Returns the names of the table's columns that can be written. Raises GraphError if there is
    no such table.
    """
    rows = await connection.fetch(
        "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT "
        "attisdropped ORDER BY attnum",
        config.quoted_table,
    )
    if not rows:
        raise GraphError(
            f"the database has no table {config.table!r}: create it before the job starts"
        )
    return [row[0] for row in rows]


_UNIQUE = """
    SELECT bool_or(i.indisprimary), array_agg(a.attname::text ORDER BY k.place)
    FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k (attnum, place)
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
    WHERE i.indrelid = to_regclass($1) AND i.indisunique AND i.indisvalid AND i.indimmediate
    AND i.indpred IS NULL AND i.indexprs IS NULL AND k.place <= i.indnkeyatts
    GROUP BY i.indexrelid"""
"""Selects the sets of columns that ON CONFLICT can name, which are the columns of unique indexes
without a condition.
"""


class PostgresStore:
    """The `TableStore` for a PostgreSQL database."""

    def __init__(self, config: PostgresTable[Any]) -> None:
        self._config = config
        self._place = config.place
        self._connection: Any = None

    async def open(self) -> TableLayout:
        config, connection = self._config, await self._connected()
        columns = await table_columns(connection, config)
        primary: list[str] = []
        unique: list[list[str]] = []
        if config.mode != "append":
            for is_primary, names in await connection.fetch(_UNIQUE, config.quoted_table):
                unique.append(names)
                primary = names if is_primary else primary
        key = resolved_key(
            self._place, config.mode, key_names(config.key), columns, primary, unique
        )
        return TableLayout(columns, key)

    async def _connected(self) -> Any:
        """Returns the connection. If it was lost, opens a new one, which a retried commit needs."""
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(self._config)
        return self._connection

    async def register(self, sink: str, subtask: int, parallelism: int, restored: int) -> int:
        connection = await self._connected()
        async with connection.transaction():
            await _make_tables(connection)
            generation = await connection.fetchval(
                "INSERT INTO aioflow_sinks (sink, subtask, checkpoint, generation) VALUES ($1, "
                "-1, 0, 1) "
                "ON CONFLICT (sink, subtask) DO UPDATE SET generation = aioflow_sinks.generation "
                "+ 1 RETURNING generation",
                sink,
            )
            await connection.execute(
                "DELETE FROM aioflow_staged WHERE sink = $1 AND subtask % $2 = $3 AND since >= $4 "
                "AND generation < $5",
                sink,
                parallelism,
                subtask,
                restored,
                generation,
            )
        return int(generation)

    async def stage(self, batch: Batch, piece: Piece) -> None:
        import asyncpg

        content = piece.content(self._place)
        await despite_deadlocks(
            lambda: self._stage(batch, piece, content),
            lambda error: isinstance(error, asyncpg.DeadlockDetectedError),
        )

    async def _stage(self, batch: Batch, piece: Piece, content: bytes) -> None:
        connection = await self._connected()
        async with connection.transaction():
            tried = connection.transaction()  # A transaction within another one is a savepoint.
            await tried.start()
            await self._apply(connection, piece)
            await tried.rollback()
            await connection.execute(
                f"INSERT INTO aioflow_staged ({STAGED_COLUMNS}) VALUES "
                "($1, $2, $3, $4, $5, $6, $7)",
                *batch.staged(piece, content),
            )

    async def write(self, piece: Piece) -> None:
        connection = await self._connected()
        async with connection.transaction():
            await self._apply(connection, piece)

    async def _apply(self, connection: Any, piece: Piece) -> None:
        """Writes the rows of `piece` to the table, within a transaction."""
        schema, _, table = self._config.table.rpartition(".")
        try:
            if piece.key:
                await self._change(connection, piece)
            else:
                await connection.copy_records_to_table(
                    table, schema_name=schema or None, columns=piece.columns, records=piece.rows
                )
        except Exception as error:
            piece.explain(error, self._place)
            raise

    async def _change(self, connection: Any, piece: Piece) -> None:
        """Replaces or deletes the rows with the keys of `piece`.

        The changes are copied into a temporary table first. The database compares the keys, because
        its equality may differ from Python's.
        """
        table = self._config.quoted_table
        names = {name: quoted(name, "a column") for name in piece.columns}
        columns, key = ", ".join(names.values()), ", ".join(names[name] for name in piece.key)
        await connection.execute(
            f"CREATE TEMP TABLE aioflow_changes ON COMMIT DROP AS SELECT {columns}, "
            f"false AS aioflow_deletes, 0 AS aioflow_order FROM {table} WITH NO DATA"
        )
        await connection.copy_records_to_table(
            "aioflow_changes",
            schema_name="pg_temp",
            columns=[*piece.columns, "aioflow_deletes", "aioflow_order"],
            records=[(*row, number) for number, row in enumerate(piece.rows)],
        )
        latest = (
            f"(SELECT DISTINCT ON ({key}) * FROM pg_temp.aioflow_changes "
            f"ORDER BY {key}, aioflow_order DESC) AS change"
        )
        if any(row[-1] for row in piece.rows):
            same = " AND ".join(f"kept.{names[name]} = change.{names[name]}" for name in piece.key)
            await connection.execute(
                f"DELETE FROM {table} AS kept USING {latest} WHERE aioflow_deletes AND {same}"
            )
        if not all(row[-1] for row in piece.rows):
            others = [names[name] for name in piece.columns if name not in piece.key]
            update = ", ".join(f"{name} = EXCLUDED.{name}" for name in others)
            await connection.execute(
                # A key may be an identity column. COPY writes it, but INSERT needs this clause.
                f"INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM "
                f"{latest} WHERE NOT aioflow_deletes ON CONFLICT ({key}) DO "
                + (f"UPDATE SET {update}" if update else "NOTHING")
            )
        await connection.execute("DROP TABLE pg_temp.aioflow_changes")

    async def commit(self, prepared: Prepared) -> None:
        connection = await self._connected()
        async with connection.transaction():
            await _make_tables(connection)
            # Locks the row of the writer: a late duplicate of this commit waits for the lock, and
            # then finds nothing to do.
            await connection.execute(
                "INSERT INTO aioflow_sinks (sink, subtask, checkpoint, generation) VALUES ($1, "
                "$2, 0, 0) ON CONFLICT DO NOTHING",
                prepared.sink,
                prepared.subtask,
            )
            last = await connection.fetchval(
                "SELECT checkpoint FROM aioflow_sinks WHERE sink = $1 AND subtask = $2 FOR UPDATE",
                prepared.sink,
                prepared.subtask,
            )
            found = await connection.fetchval(
                "SELECT count(*) FROM aioflow_staged WHERE batch = $1", prepared.batch
            )
            if was_committed(prepared, found, last):
                return
            for number in range(prepared.pieces):
                content = await connection.fetchval(
                    "SELECT content FROM aioflow_staged WHERE batch = $1 AND piece = $2",
                    prepared.batch,
                    number,
                )
                await self._apply(connection, decode_piece(number, content))
            await connection.execute("DELETE FROM aioflow_staged WHERE batch = $1", prepared.batch)
            await connection.execute(
                "UPDATE aioflow_sinks SET checkpoint = GREATEST(checkpoint, $3) WHERE sink = $1 "
                "AND subtask = $2",
                prepared.sink,
                prepared.subtask,
                prepared.checkpoint,
            )

    async def discard(self, prepared: Prepared) -> None:
        await (await self._connected()).execute(
            "DELETE FROM aioflow_staged WHERE batch = $1", prepared.batch
        )

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await disconnect(connection)


async def _make_tables(connection: Any) -> None:
    if await connection.fetchval(
        "SELECT to_regclass('aioflow_sinks') IS NOT NULL AND to_regclass('aioflow_staged') IS NOT "
        "NULL"
    ):
        return
    await connection.execute("SELECT pg_advisory_xact_lock($1)", SCHEMA_LOCK)
    for statement in SCHEMA:
        await connection.execute(statement.format(binary="BYTEA"))
