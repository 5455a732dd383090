"""Reads the changes of tables of PostgreSQL: `postgres_changes(dsn, tables)` emits the existing
rows, and then each change, by logical replication.

The server keeps a replication slot: the place in its log up to which a job has read. The existing
rows come from the slot's own snapshot. So no change between the rows and the first change is
missing or repeated. A checkpoint contains the place. When the checkpoint is complete, the slot
advances to this place, and the server removes older files of its log.

Needs the extra `aioflow[postgres]` (asyncpg), which opens the connections. `postgres_replication`
implements the replication protocol, `pgoutput` decodes its messages, `postgres_catalog` checks the
server, and `postgres_change_reader` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError
from aioflow.io.arguments import T, checked_text
from aioflow.io.backoff import reached
from aioflow.io.capture.postgres_catalog import (
    PostgresChangesConfig,
    check_server,
    free_slot,
    log_end,
    replicate,
)
from aioflow.io.changes import Change
from aioflow.io.tables.postgres_tables import (
    check_postgres_dsn,
    disconnect,
    is_away,
    open_connection,
)
from aioflow.io.tables.table_sinks import quoted
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["PostgresChanges", "postgres_changes"]

SLOT_SIGNS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")


@explained
def postgres_changes(
    dsn: str,
    tables: str | Sequence[str],
    type: type[T] | None = None,
    *,
    slot: str = "aioflow",
    publication: str | None = None,
    snapshot: bool = True,
    until: str | None = None,
    backoff: Duration = "100ms",
    on_error: OnError = "fail",
) -> PostgresChanges[T]:
    """Returns a source of the changes of `tables` ("name" or "schema.name"), each an `af.Change`.

    First come the rows that exist, as changes of the kind "read"; `snapshot=False` leaves them out.
    Then come inserts, updates, deletes and truncates, in the order of the transactions. A row is a
    dict, or an object of `type` (dataclass, NamedTuple, Struct, Pydantic model, attrs class). The
    server needs `wal_level = logical`, and the user the right REPLICATION.

    `slot` is the replication slot that makes the server keep its log for this flow: each flow needs
    its own. The source creates the slot, and `publication`, by default of the same name, if they do
    not exist. Both stay when the job ends, so a later run can continue from the slot. The server
    keeps its log until `af.io.drop_postgres_slot` drops the slot. A run that starts without a
    checkpoint creates the slot again; with `snapshot=False` it continues from an existing slot.

    Delivery is exactly once with checkpoints; the slot advances when a checkpoint is complete. With
    `until="latest"` the source ends at the place where the log ends when the job begins. `backoff`
    is the first delay between two tries to connect. `on_error` handles rows that are not of `type`.
    """
    place, names, make = PostgresChanges.checked(
        "postgres_changes", tables, type, until, backoff, on_error
    )
    check_postgres_dsn(dsn, place)
    checked_text(slot, "slot", place)
    if not set(slot) <= SLOT_SIGNS or len(slot) > 63:
        raise GraphError(
            f"{place}: slot is {slot!r}, expected at most 63 small letters, digits and _"
        )
    if publication is not None:
        checked_text(publication, "publication", place)
    try:
        for name in names:
            for part in name.split(".", 1):
                quoted(part, f"{place}: a name")
    except ValueError as error:
        raise GraphError(str(error)) from None
    return PostgresChanges(
        dsn=dsn,
        tables=names,
        make=make,
        slot=slot,
        publication=publication or slot,
        snapshot=bool(snapshot),
        until=until,
        backoff=backoff,
        on_error=on_error,
    )


class PostgresChanges(PostgresChangesConfig, BaseSource[Change[T]]):
    """A `Source` of the changes of some tables. Made by `postgres_changes`.

    It has one split, because all transactions are in one order.
    """

    parallelism_max = 1
    record_type = Change

    async def discover(self) -> list[Split]:
        """Checks that the changes can be read, and returns one split. Its payload is the place in
        the log at which to end, or None.
        """
        return [Split("0", None, await reached(self._end, self, is_away))]

    async def _end(self) -> int | None:
        connection = await open_connection(self.dsn, self)
        try:
            await check_server(connection, self)
            end = None if self.until is None else await log_end(connection)
        finally:
            await disconnect(connection)
        replication = await replicate(self)
        try:
            await free_slot(replication, self)
        finally:
            replication.close()
        return end

    def reader(self, ctx: SourceContext) -> SourceReader[Change[T]]:
        from aioflow.io.capture.postgres_change_reader import PostgresChangeReader

        return PostgresChangeReader(ctx, self)
