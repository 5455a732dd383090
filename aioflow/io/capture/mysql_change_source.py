"""Reads the changes of tables of MySQL and MariaDB: `mysql_changes(dsn, tables)` emits the existing
rows, and then each change from the binary log.

The snapshot is read in a transaction whose place in the log is known. So no change between the rows
and the first change is missing or repeated. A place is the number of the log's file, shifted by
`FILE_SHIFT`, plus the offset in the file. The place of a transaction is the place of its first
event. `change_reader` describes the position in a checkpoint. For this source, the last item of the
position is the time at which the server created the log file, in seconds, or 0.

The server does not track its readers. It removes old log files by its own rules, and a reader whose
file is gone must start with a new snapshot.

Needs the extra `aioflow[mysql]` (asyncmy), which opens the connections. `mysql_catalog` checks the
server, `mysql_change_reader` reads, `mysql_binlog` decodes the events, and `mysql_values` the
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError, did_you_mean
from aioflow.io.arguments import T
from aioflow.io.backoff import reached
from aioflow.io.capture.mysql_catalog import (
    FILE_SHIFT,
    MysqlChangesConfig,
    OnCascade,
    check_server,
    check_tables,
    load_tables,
    log_end,
    refusal,
)
from aioflow.io.changes import Change
from aioflow.io.tables.mysql_client import (
    BinlogStream,
    MysqlConnection,
    check_mysql_dsn,
    is_away,
)
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["MysqlChanges", "mysql_changes"]


@explained
def mysql_changes(
    dsn: str,
    tables: str | Sequence[str],
    type: type[T] | None = None,
    *,
    snapshot: bool = True,
    until: str | None = None,
    server_id: int | None = None,
    on_cascade: OnCascade = "fail",
    backoff: Duration = "100ms",
    on_error: OnError = "fail",
) -> MysqlChanges[T]:
    """Returns a source of the changes of `tables` ("name" or "database.name") of MySQL or MariaDB,
    each an `af.Change`.

    First come the rows that exist, as changes of the kind "read"; `snapshot=False` leaves them out.
    Then come inserts, updates, deletes and truncates, in the order of the transactions. A row is a
    dict, or an object of `type` (dataclass, NamedTuple, Struct, Pydantic model, attrs class). The
    server needs a binary log with `binlog_format = ROW`, `binlog_row_image = FULL` and
    `binlog_row_metadata = FULL`. The user needs the rights REPLICATION SLAVE, REPLICATION CLIENT
    and, on MySQL, LOCK TABLES.

    Delivery is exactly once with checkpoints. A run that starts without a checkpoint begins with
    the existing rows, or with `snapshot=False` at the end of the log. With `until="latest"` the
    source ends at the place where the log ends when the job begins.

    `server_id` is the number of this reader among the replicas of the server, by default a large
    number that is unlikely to be in use. Rows that a foreign key changes by CASCADE or SET NULL are
    not in the log of the server. With `on_cascade="fail"` tables with such a key are refused; with
    "ignore" they are read without these changes. `backoff` is the first delay between two tries to
    connect. `on_error` handles rows that are not of `type`.
    """
    place, names, make = MysqlChanges.checked(
        "mysql_changes", tables, type, until, backoff, on_error
    )
    check_mysql_dsn(dsn, place)
    if server_id is not None and not (isinstance(server_id, int) and 0 < server_id < 1 << 32):
        raise GraphError(
            f"{place}: server_id is {server_id!r}, expected a number from 1 to 2**32-1"
        )
    if on_cascade not in ("fail", "ignore"):
        hint = did_you_mean(on_cascade, ("fail", "ignore"))
        raise GraphError(
            f"{place}: on_cascade is {on_cascade!r}, expected 'fail' or 'ignore'{hint}"
        )
    return MysqlChanges(
        dsn=dsn,
        tables=names,
        make=make,
        snapshot=bool(snapshot),
        until=until,
        server_id=server_id,
        on_cascade=on_cascade,
        backoff=backoff,
        on_error=on_error,
    )


class MysqlChanges(MysqlChangesConfig, BaseSource[Change[T]]):
    """A `Source` of the changes of some tables. Made by `mysql_changes`.

    It has one split, because all transactions are in one order.
    """

    parallelism_max = 1
    record_type = Change

    async def discover(self) -> list[Split]:
        """Checks that the changes can be read, and returns one split. Its payload is the place in
        the log at which to end, or None.
        """
        end = await reached(self._end, self, is_away, explained=partial(refusal, self))
        return [Split("0", None, end)]

    async def _end(self) -> int | None:
        connection = await MysqlConnection.open(self.dsn, self)
        try:
            await check_server(connection, self)
            tables = await load_tables(connection, self)
            await check_tables(connection, self, tables)
            file, place = await log_end(connection, self)
            # Only the attempt to read shows whether the user may read the log.
            offset = place & ((1 << FILE_SHIFT) - 1)
            stream = await BinlogStream.open(connection, file, offset, self.server_id, waits=False)
            await stream.take()
        finally:
            connection.abort()
        return None if self.until is None else place

    def reader(self, ctx: SourceContext) -> SourceReader[Change[T]]:
        from aioflow.io.capture.mysql_change_reader import MysqlChangeReader

        return MysqlChangeReader(ctx, self)
