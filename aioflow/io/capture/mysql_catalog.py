"""Loads and checks what `mysql_changes` needs from a server: settings, tables, the place in the
log, and a consistent snapshot.

All checks are made before the first row is read. So a wrong setting is a helpful error at the start
of a job, not a stream that stays empty.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aioflow.core.errors import GraphError, StateError
from aioflow.io.capture.mysql_values import text_reader_of
from aioflow.io.changes import ChangesConfig
from aioflow.io.tables.mysql_client import MysqlConnection, database_of, error_number
from aioflow.io.tables.table_sinks import quoted

__all__ = [
    "FILE_SHIFT",
    "MysqlChangesConfig",
    "Table",
    "begin_snapshot",
    "check_server",
    "kept_file",
    "load_charsets",
    "load_tables",
    "log_end",
    "lost",
    "place_of",
    "place_text",
    "refusal",
    "OnCascade",
    "check_tables",
]

FILE_SHIFT = 40
"""Number of the low bits of a place in the log that hold the offset in the file. The higher bits
hold the number of the file.
"""

LOCK_WAIT_S = 10
"""Maximum time that LOCK TABLES waits for open transactions."""

ORDERED_TYPES = frozenset(
    {
        "tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "date", "datetime",
        "timestamp", "binary", "varbinary", "char", "varchar",
    }
)  # fmt: skip
"""Types of key columns whose order in Python is that of the server, if the server orders by the SQL
that `_ordered` returns.
"""

NO_COLUMN = 1054
"""Number of the server's error for an unknown column. Earlier versions of MariaDB lack a column
that is read here.
"""

OnCascade = Literal["fail", "ignore"]


@dataclass(eq=False, repr=False, kw_only=True)
class MysqlChangesConfig(ChangesConfig):
    """The arguments of `mysql_changes`, for its source and its reader."""

    name = "mysql_changes"

    server_id: int | None
    on_cascade: OnCascade


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type_name: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table that is read."""

    name: str
    """The name that the user gave."""
    database: str
    table: str
    columns: list[Column]
    primary: list[str]
    """The columns of the primary key, in the order of the key."""
    json_columns: frozenset[str]
    """Columns of MariaDB's type JSON, which stores texts with a validity check."""

    @property
    def quoted(self) -> str:
        return f"{quoted(self.database, 'the database')}.{quoted(self.table, 'the table')}"

    @property
    def is_comparable(self) -> bool:
        """Whether Python orders the keys as the server does."""
        types = {column.name: column.type_name for column in self.columns}
        return bool(self.primary) and all(types.get(one) in ORDERED_TYPES for one in self.primary)


SETTINGS = {
    "log_bin": ("ON", "set log-bin and server-id = 1 below [mysqld], and restart the server"),
    "binlog_format": ("ROW", "SET GLOBAL binlog_format = 'ROW', and let programs connect again"),
    "binlog_row_image": (
        "FULL", "SET GLOBAL binlog_row_image = 'FULL', and let programs connect again",
    ),
    "binlog_row_metadata": (
        "FULL",
        "SET GLOBAL binlog_row_metadata = 'FULL' (MySQL 8.0, MariaDB 10.5 and later)",
    ),
    "log_bin_compress": ("OFF", "SET GLOBAL log_bin_compress = OFF"),
    "binlog_transaction_compression": ("OFF", "SET GLOBAL binlog_transaction_compression = OFF"),
}  # fmt: skip
"""Maps the name of a server setting to the expected value, and to the remedy if the server has
another value.
"""

MAY_LACK = ("log_bin_compress", "binlog_transaction_compression")


async def _settings(connection: MysqlConnection) -> dict[str, str]:
    names = [*SETTINGS, "server_id", "version", "binlog_checksum"]
    rows = await connection.rows(
        f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({', '.join(['%s'] * len(names))})", names
    )
    return {name.lower(): value for name, value in rows}


async def check_server(connection: MysqlConnection, config: MysqlChangesConfig) -> dict[str, str]:
    """Returns the server's settings by name. Raises GraphError for a setting with which the server
    would not send the changes.
    """
    found = await _settings(connection)
    for name, (wanted, remedy) in SETTINGS.items():
        value = found.get(name)
        if value != wanted and not (value is None and name in MAY_LACK):
            raise GraphError(
                f"{config!r}: the server has {name} = {value}, expected {wanted}: {remedy}"
            )
    if found.get("server_id") == "0":
        raise GraphError(
            f"{config!r}: the server has server_id = 0, with which it has no replicas: set "
            "server-id = 1 below [mysqld], and restart the server"
        )
    return found


async def log_end(connection: MysqlConnection, config: MysqlChangesConfig) -> tuple[str, int]:
    """Returns the name of the log's last file, and the place at its end."""
    (version,) = await connection.dicts("SELECT version() AS version")
    parts = re.findall(r"\d+", version["version"])
    is_new = "mariadb" not in version["version"].lower() and [int(one) for one in parts[:2]] >= [
        8, 2,
    ]  # fmt: skip
    rows = await connection.rows("SHOW BINARY LOG STATUS" if is_new else "SHOW MASTER STATUS")
    if not rows:
        raise GraphError(f"{config!r}: the server has no binary log: {SETTINGS['log_bin'][1]}")
    file, place = str(rows[0][0]), int(rows[0][1])
    kept, ignored = rows[0][2:4]
    for table in config.tables:
        database, _ = split_name(config, table)
        if (kept and database not in kept.split(",")) or database in ignored.split(","):
            raise GraphError(
                f"{config!r}: the log of the server leaves out database {database!r}: change "
                "binlog_do_db or binlog_ignore_db"
            )
    return file, place_of(file, place)


def place_of(file: str, place: int) -> int:
    return int(file.rpartition(".")[2]) << FILE_SHIFT | place


def place_text(file: str, place: int) -> str:
    """Returns `place` as the server writes it, "FILE:OFFSET". `file` is the name of any file of the
    log.
    """
    base, _, digits = file.rpartition(".")
    return f"{base}.{place >> FILE_SHIFT:0{len(digits)}}:{place & ((1 << FILE_SHIFT) - 1)}"


def split_name(config: MysqlChangesConfig, table: str) -> tuple[str, str]:
    database, _, name = table.rpartition(".")
    return database or database_of(config.dsn), name


async def load_tables(connection: MysqlConnection, config: MysqlChangesConfig) -> list[Table]:
    """Returns the tables of `config`. Raises GraphError if a table does not exist or cannot be
    read.
    """
    found = []
    is_mariadb = "mariadb" in (await _settings(connection))["version"].lower()
    for name in config.tables:
        named = split_name(config, name)
        columns = await connection.rows(
            "SELECT column_name, data_type FROM information_schema.columns WHERE "
            "table_schema = %s AND table_name = %s ORDER BY ordinal_position",
            named,
        )
        if not columns:
            raise GraphError(
                f"{config!r}: the server has no table {name!r}, or the user has no right to it: "
                "create it before the job starts, or grant the right; another database is named "
                'as in "database.table"'
            )
        primary = await connection.rows(
            "SELECT column_name FROM information_schema.statistics WHERE table_schema = %s AND "
            "table_name = %s AND index_name = 'PRIMARY' ORDER BY seq_in_index",
            named,
        )
        checks: list[tuple[Any, ...]] = []
        if is_mariadb:
            checks = await connection.rows(
                "SELECT check_clause FROM information_schema.check_constraints WHERE "
                "constraint_schema = %s AND table_name = %s",
                named,
            )
        as_json = [re.fullmatch(r'json_valid\("(.+)"\)', one[0].strip()) for one in checks]
        json_columns = frozenset(one[1].replace('""', '"') for one in as_json if one is not None)
        found.append(
            Table(
                name,
                *named,
                [
                    Column(column, "json" if column in json_columns else type_.lower())
                    for column, type_ in columns
                ],
                [one[0] for one in primary],
                json_columns,
            )
        )
    return found


async def check_tables(
    connection: MysqlConnection, config: MysqlChangesConfig, tables: Sequence[Table]
) -> None:
    """Raises GraphError if the log would lack some changes of one of `tables`."""
    for table in tables:
        named = table.database, table.table
        ((kind, engine),) = await connection.rows(
            "SELECT table_type, engine FROM information_schema.tables WHERE table_schema = %s AND "
            "table_name = %s",
            named,
        )
        if kind != "BASE TABLE" or engine != "InnoDB":
            raise GraphError(
                f"{config!r}: {table.name!r} is of the kind {kind!r} with the engine {engine}, "
                "expected a table of InnoDB, whose transactions are in the log"
            )
        for column in table.columns:
            if text_reader_of(column.type_name) is None:
                raise GraphError(
                    f"{config!r}: column {column.name!r} of table {table.name!r} has the type "
                    f"{column.type_name}, which is not read from the log: give it another type, "
                    "such as BINARY or VARCHAR"
                )
        cascades = await connection.rows(
            "SELECT constraint_name, update_rule, delete_rule FROM "
            "information_schema.referential_constraints WHERE constraint_schema = %s AND "
            "table_name = %s",
            named,
        )
        for constraint, *rules in cascades:
            if config.on_cascade == "fail" and not {*rules} <= {"RESTRICT", "NO ACTION"}:
                raise GraphError(
                    f"{config!r}: the foreign key {constraint!r} of table {table.name!r} changes "
                    "its rows by CASCADE or SET NULL, and the server does not log these changes: "
                    "change its rules to RESTRICT, or give on_cascade='ignore' to read the table "
                    "without them"
                )
        await connection.rows(f"SELECT 1 FROM {table.quoted} LIMIT 0")


async def load_charsets(connection: MysqlConnection) -> dict[int, str]:
    """Returns the name of the character set for the number of each collation."""
    found: dict[int, str] = {}
    for view in ("collation_character_set_applicability", "collations"):
        try:
            rows = await connection.rows(
                f"SELECT id, character_set_name FROM information_schema.{view} WHERE id > 0"
            )
        except Exception as error:
            if error_number(error) != NO_COLUMN:
                raise
        else:
            found.update({int(number): name for number, name in rows if name})
    return found


def refusal(config: MysqlChangesConfig, error: BaseException) -> BaseException | None:
    """Returns an error that tells the user how to fix the server's `error`, or None for an error
    without a known remedy.
    """
    number, text = error_number(error), str(error)
    if number == 1227:
        return GraphError(
            f"{config!r}: the user may not read the binary log ({text}): GRANT REPLICATION SLAVE, "
            "REPLICATION CLIENT ON *.* TO the user"
        )
    if number in (1044, 1142):
        return GraphError(
            f"{config!r}: the user may not read a table ({text}): GRANT SELECT, LOCK TABLES ON the "
            "database TO the user"
        )
    if number == 1236 and "same server" in text:
        return GraphError(
            f"{config!r}: another replica of the server has the same server_id ({text}): give "
            "each one a number of its own by server_id="
        )
    if number == 1236:
        return lost(config, f"the server cannot go on in its log ({text})")
    return None


def lost(config: MysqlChangesConfig, what: str) -> StateError:
    return StateError(
        f"{config!r}: {what}: start with restore=None, fresh=True for a new snapshot, and let the "
        "server keep its log for longer (binlog_expire_logs_seconds)"
    )


async def kept_file(connection: MysqlConnection, config: MysqlChangesConfig, place: int) -> str:
    """Returns the log file of `place`. Raises StateError if the server no longer has it."""
    files = {row[0]: int(row[1]) for row in await connection.rows("SHOW BINARY LOGS")}
    for file, size in files.items():
        if place_of(file, 0) >> FILE_SHIFT == place >> FILE_SHIFT:
            if size < place & ((1 << FILE_SHIFT) - 1):
                raise lost(
                    config,
                    f"the checkpoint is at {place_text(file, place)}, and this file has {size} "
                    "bytes: the log was reset, or it is the log of another server",
                )
            return str(file)
    first = next(iter(files), "its first file")
    raise lost(
        config,
        f"the server has removed the log after {place_text(first, place)}, which now begins with "
        f"{first}",
    )


async def begin_snapshot(
    connection: MysqlConnection, config: MysqlChangesConfig, tables: Sequence[Table]
) -> tuple[str, int]:
    """Begins a transaction that reads a consistent snapshot. Returns the name of a log file, and
    the place of the snapshot in the log.
    """
    for statement in (
        "SET SESSION net_write_timeout = 31536000, wait_timeout = 2147483",
        "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    ):
        await connection.execute(statement)
    begin = "START TRANSACTION WITH CONSISTENT SNAPSHOT"
    if await connection.rows("SHOW STATUS LIKE 'binlog_snapshot_file'"):
        await connection.execute(begin)
        rows = await connection.rows("SHOW STATUS LIKE 'binlog_snapshot_%%'", ())
        told = {name.lower(): value for name, value in rows}
        file = told["binlog_snapshot_file"]
        return file, place_of(file, int(told["binlog_snapshot_position"]))
    # MySQL does not report the place of a snapshot. While the tables are locked, all transactions
    # that changed them are both in the log and in the snapshot.
    other = await MysqlConnection.open(config.dsn, config)
    try:
        await other.execute(f"SET SESSION lock_wait_timeout = {LOCK_WAIT_S}")
        await other.execute(f"LOCK TABLES {', '.join(f'{one.quoted} READ' for one in tables)}")
        await connection.execute(begin)
        return await log_end(other, config)
    finally:
        await other.close()
