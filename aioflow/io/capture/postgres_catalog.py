"""Loads and checks what `postgres_changes` needs from a server: tables, types, the publication and
the replication slot.

All checks are made before the first row is read. So a wrong setting is a helpful error at the start
of a job, not a stream that stays empty.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError, StateError
from aioflow.io.capture.pgoutput import lsn_number, lsn_text
from aioflow.io.capture.postgres_replication import SETTINGS, ReplicationConnection, literal
from aioflow.io.capture.postgres_types import PgType, known_type
from aioflow.io.changes import ChangesConfig
from aioflow.io.tables.postgres_tables import disconnect, open_connection
from aioflow.io.tables.table_sinks import quoted, quoted_table

__all__ = [
    "Column",
    "PostgresChangesConfig",
    "Table",
    "check_server",
    "drop_postgres_slot",
    "free_slot",
    "kept_slot",
    "load_tables",
    "load_types",
    "log_end",
    "refusal",
    "replicate",
]

IN_USE_WAIT_S = 8.0
"""Maximum time to wait for a slot that is in use: the server may not have noticed yet that its last
reader is gone.
"""

TABLE_KINDS = ("r", "p")
"""Kinds of relations whose changes are in the log: tables, and partitioned tables."""

KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence"}

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False, kw_only=True)
class PostgresChangesConfig(ChangesConfig):
    """The arguments of `postgres_changes`, for its source and its reader."""

    name = "postgres_changes"

    slot: str
    publication: str


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type_oid: int
    type_name: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table that is read."""

    name: str
    """The name that the user gave."""
    oid: int
    schema: str
    table: str
    columns: list[Column]
    """The published columns, in the order of the table."""
    primary: list[str]
    """The columns of the primary key, in the order of the key."""
    identity: str
    """The replica identity, a letter as in `pgoutput.Relation`."""
    where: str | None
    """The row filter of the publication, as SQL. None means all rows."""

    @property
    def quoted(self) -> str:
        return f"{quoted(self.schema, 'the schema')}.{quoted(self.table, 'the table')}"


async def check_server(connection: Any, config: PostgresChangesConfig) -> None:
    """Creates the publication if needed. Raises GraphError for a setting with which the server
    would not send the changes.
    """
    level = await connection.fetchval("SHOW wal_level")
    if level != "logical":
        raise GraphError(
            f"{config!r}: the server has wal_level = {level}, expected logical: set wal_level = "
            "logical in postgresql.conf (in a cloud, the parameter of logical replication), and "
            "restart the server"
        )
    for name in config.tables:
        kind = await connection.fetchval(
            "SELECT relkind::text FROM pg_class WHERE oid = to_regclass($1)", quoted_table(name)
        )
        if kind is None:
            raise GraphError(
                f"{config!r}: the database has no table {name!r}: create it before the job "
                'starts, or give its schema, as in "schema.table"'
            )
        if kind not in TABLE_KINDS:
            raise GraphError(
                f"{config!r}: {name!r} is {KINDS.get(kind, 'no table')}, whose changes the server "
                "does not log: name the tables that it reads"
            )
    await _make_publication(connection, config)
    for table in await load_tables(connection, config):
        if not await connection.fetchval(
            "SELECT has_table_privilege($1::oid, 'SELECT')", table.oid
        ):
            raise GraphError(
                f"{config!r}: the user may not read table {table.name!r}: GRANT SELECT ON "
                f"{table.quoted} TO {await _user(connection)}"
            )


async def _user(connection: Any) -> str:
    return quoted(await connection.fetchval("SELECT current_user"), "the user")


async def _make_publication(connection: Any, config: PostgresChangesConfig) -> None:
    import asyncpg

    publication = quoted(config.publication, "publication")
    oids = [
        await connection.fetchval("SELECT to_regclass($1)::oid", quoted_table(name))
        for name in config.tables
    ]
    for oid, name in zip(oids, config.tables, strict=True):
        # If a table without replica identity is published, UPDATEs of other programs fail.
        if not await connection.fetchval(
            "SELECT relreplident <> 'n' AND (relreplident <> 'd' OR EXISTS (SELECT FROM pg_index "
            "WHERE indrelid = pg_class.oid AND indisprimary)) FROM pg_class WHERE oid = $1",
            oid,
        ):
            raise GraphError(
                f"{config!r}: table {name!r} has no replica identity, by which its changes name a "
                f"row: add a primary key, or ALTER TABLE {quoted_table(name)} REPLICA IDENTITY FULL"
            )
    found = await connection.fetchrow(
        "SELECT puballtables FROM pg_publication WHERE pubname = $1", config.publication
    )
    tables = ", ".join(quoted_table(name) for name in config.tables)
    if found is None:
        create = (
            f"CREATE PUBLICATION {publication} FOR TABLE {tables} "
            "WITH (publish_via_partition_root = true)"
        )
        try:
            with suppress(asyncpg.DuplicateObjectError, asyncpg.UniqueViolationError):
                await connection.execute(create)
        except asyncpg.InsufficientPrivilegeError as error:
            raise GraphError(
                f"{config!r}: the user may not create the publication ({error}): let the owner of "
                f"the tables run: {create}"
            ) from None
    published = {
        row[0]
        for row in await connection.fetch(
            "SELECT to_regclass(format('%I.%I', schemaname, tablename))::oid "
            "FROM pg_publication_tables WHERE pubname = $1",
            config.publication,
        )
    }
    missing = [name for oid, name in zip(oids, config.tables, strict=True) if oid not in published]
    if missing:
        raise GraphError(
            f"{config!r}: publication {config.publication!r} lacks table "
            f"{', '.join(map(repr, missing))}: ALTER PUBLICATION {publication} ADD TABLE "
            f"{', '.join(map(quoted_table, missing))}, or name another one by publication="
        )


_TABLE = """
    SELECT c.oid, n.nspname, c.relname, c.relreplident::text
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = to_regclass($1)"""

_COLUMNS = """
    SELECT attname, atttypid, format_type(atttypid, atttypmod) FROM pg_attribute
    WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
    ORDER BY attnum"""

_PRIMARY = """
    SELECT a.attname
    FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k (attnum, place)
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
    WHERE i.indrelid = $1 AND i.indisprimary AND k.place <= i.indnkeyatts ORDER BY k.place"""


async def load_tables(connection: Any, config: PostgresChangesConfig) -> list[Table]:
    """Returns the tables of `config`. Raises StateError if a table no longer exists."""
    tables = []
    has_lists = connection.get_server_version() >= (15,)
    for name in config.tables:
        row = await connection.fetchrow(_TABLE, quoted_table(name))
        if row is None:
            raise StateError(
                f"{config!r}: table {name!r} was dropped or renamed: create it again, or start "
                "without it"
            )
        oid, schema, table, identity = row
        columns = [Column(*one) for one in await connection.fetch(_COLUMNS, oid)]
        where = None
        if has_lists:
            listed = await connection.fetchrow(
                "SELECT attnames::text[], rowfilter FROM pg_publication_tables "
                "WHERE pubname = $1 AND schemaname = $2 AND tablename = $3",
                config.publication,
                schema,
                table,
            )
            if listed is not None:
                columns = [one for one in columns if one.name in (listed[0] or ())]
                where = listed[1]
        primary = [one[0] for one in await connection.fetch(_PRIMARY, oid)]
        tables.append(Table(name, oid, schema, table, columns, primary, identity, where))
    return tables


async def load_types(connection: Any, oids: Sequence[int], types: dict[int, PgType]) -> None:
    """Loads the types `oids` into `types`, with the element types of arrays and the base types of
    domains.
    """
    missing = {oid for oid in oids if oid and oid not in types and not known_type(oid)}
    while missing:
        rows = await connection.fetch(
            "SELECT oid, typtype::text, CASE WHEN typcategory = 'A' THEN typelem ELSE 0 END, "
            "typbasetype, typdelim::text FROM pg_type WHERE oid = ANY($1::oid[])",
            sorted(missing),
        )
        types.update({oid: PgType(*found) for oid, *found in rows})
        below = [oid for row in rows for oid in row[2:4]]
        missing = {oid for oid in below if oid and oid not in types and not known_type(oid)}


async def log_end(connection: Any) -> int:
    """Returns the present end of the server's log."""
    return lsn_number(await connection.fetchval("SELECT pg_current_wal_flush_lsn()::text"))


# The slot.


async def _slot(replication: ReplicationConnection, slot: str) -> dict[str, str | None] | None:
    rows = await replication.query(
        "SELECT s.*, current_database() AS here FROM pg_replication_slots s "
        f"WHERE slot_name = {literal(slot)}"
    )
    return rows[0] if rows else None


async def free_slot(
    replication: ReplicationConnection, config: PostgresChangesConfig
) -> dict[str, str | None] | None:
    """Returns the row of the slot in pg_replication_slots, once no other connection uses it.

    Returns None if there is no such slot. Raises GraphError for a slot that cannot be used.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + IN_USE_WAIT_S
    while (found := await _slot(replication, config.slot)) is not None:
        if found["plugin"] != "pgoutput" or found["database"] != found["here"]:
            raise GraphError(
                f"{config!r}: the server has a slot {config.slot!r} with the plugin "
                f"{found['plugin']!r} and the database {found['database']!r}, expected 'pgoutput' "
                f"and {found['here']!r}: name another one by slot="
            )
        if found["active"] != "t":
            break
        if loop.time() >= until:
            raise GraphError(
                f"{config!r}: slot {config.slot!r} is in use by another connection (process "
                f"{found['active_pid']} of the server): end the job that reads it, or name "
                "another slot by slot="
            )
        await asyncio.sleep(0.1)
    return found


async def kept_slot(
    replication: ReplicationConnection, config: PostgresChangesConfig, lsn: int
) -> None:
    """Raises StateError unless the slot still has all changes after the place `lsn` in the log."""
    found = await free_slot(replication, config)
    remedy = "start with restore=None, fresh=True, which reads a new snapshot"
    if found is None:
        raise StateError(
            f"{config!r}: slot {config.slot!r} was dropped, so the changes after {lsn_text(lsn)} "
            f"are lost: {remedy}"
        )
    if found.get("wal_status") == "lost" or found.get("invalidation_reason"):
        raise StateError(
            f"{config!r}: the server has removed the log that slot {config.slot!r} needs after "
            f"{lsn_text(lsn)} (max_slot_wal_keep_size): {remedy}, and raise that setting"
        )
    if lsn_number(found["confirmed_flush_lsn"]) > lsn:
        raise StateError(
            f"{config!r}: slot {config.slot!r} is at {found['confirmed_flush_lsn']}, and the "
            f"checkpoint is at {lsn_text(lsn)}: another job has read the slot, or it was made "
            f"again, or the checkpoint is not the latest one; {remedy}"
        )


def _error_code(error: BaseException) -> str | None:
    """Returns the SQLSTATE of an error of the server; None for any other error."""
    import asyncpg

    return error.sqlstate if isinstance(error, asyncpg.PostgresError) else None


def refusal(config: PostgresChangesConfig, error: BaseException) -> BaseException | None:
    """Returns an error that tells the user how to fix the server's `error`, or None for an error
    without a known remedy.
    """
    code = _error_code(error)
    if "WAL sender" in str(error) or (code == "42501" and "replication" in str(error).lower()):
        return GraphError(
            f"{config!r}: the user may not replicate ({error}): ALTER ROLE name REPLICATION (on "
            "RDS: GRANT rds_replication TO name)"
        )
    if code == "53400":
        return GraphError(
            f"{config!r}: the server refused a slot ({error}): raise max_replication_slots, or "
            "drop a slot that is not used any more by af.io.drop_postgres_slot"
        )
    if code == "28000" and "replication" in str(error).lower():
        return GraphError(
            f"{config!r}: the server refused the connection ({error}): add a line with "
            "'replication' for this user and host to pg_hba.conf"
        )
    return None


async def replicate(config: PostgresChangesConfig) -> ReplicationConnection:
    """Returns a replication connection. Raises GraphError if the user may not replicate."""
    try:
        return ReplicationConnection(await open_connection(config.dsn, config, **SETTINGS))
    except Exception as error:
        if (explanation := refusal(config, error)) is not None:
            raise explanation from None
        raise


@explained
async def drop_postgres_slot(dsn: str, slot: str, *, publication: str | None = None) -> bool:
    """Drops a replication slot that `postgres_changes` has created, and its publication.

    Drop the slot when no job needs it: until then the server keeps its log. `publication` is by
    default the publication with the name of the slot. Returns whether there was such a slot. Raises
    asyncpg's ObjectInUseError if a job still reads the slot.
    """
    name = quoted(publication or slot, "publication")
    connection = await open_connection(dsn, f"drop_postgres_slot(..., {slot!r})")
    try:
        dropped = await connection.fetchval(
            "SELECT count(pg_drop_replication_slot(slot_name)) FROM pg_replication_slots "
            "WHERE slot_name = $1",
            slot,
        )
        await connection.execute(f"DROP PUBLICATION IF EXISTS {name}")
    finally:
        await disconnect(connection)
    return bool(dropped)
