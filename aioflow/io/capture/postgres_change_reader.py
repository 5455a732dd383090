"""The reader of `postgres_changes`: the rows of the slot's snapshot, then the stream of the slot.

`change_reader` describes the position of a reader. The place of a transaction is the place of its
commit in the log (LSN).

Invariant: the reader confirms to the server only places in the log that a complete checkpoint
covers. The server may remove its log before a confirmed place.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import StateError
from aioflow.io.arguments import MALFORMED
from aioflow.io.brokers.readers import Message
from aioflow.io.capture.change_reader import (
    LOG,
    SNAPSHOT,
    ChangeLog,
    ChangeReader,
    Position,
    SnapshotRanges,
)
from aioflow.io.capture.pgoutput import (
    UNCHANGED,
    Begin,
    Cell,
    Commit,
    Relation,
    RowChange,
    Truncate,
    decode,
    lsn_number,
    lsn_text,
)
from aioflow.io.capture.postgres_catalog import (
    Table,
    free_slot,
    kept_slot,
    load_tables,
    load_types,
    refusal,
    replicate,
)
from aioflow.io.capture.postgres_replication import Keepalive, literal
from aioflow.io.capture.postgres_types import (
    COLLATED_TYPES,
    ORDERED_TYPES,
    PgType,
    decoder_of,
    known_type,
)
from aioflow.io.changes import Change
from aioflow.io.tables.postgres_tables import disconnect, is_away, open_connection
from aioflow.io.tables.table_sinks import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioflow.io.backoff import Backoff
    from aioflow.io.capture.pgoutput import Message as PgMessage
    from aioflow.io.capture.postgres_catalog import PostgresChangesConfig
    from aioflow.io.capture.postgres_replication import ReplicationConnection, XLogData
    from aioflow.operators.source import SourceContext, Split

__all__ = ["PostgresChangeReader"]

STATUS_EVERY_S = 5.0
"""Interval in seconds of the status messages, which keep the connection alive. By default the
server ends the connection after a minute without a message (`wal_sender_timeout`).
"""

UNTIL_EVERY_S = 0.2
"""Interval in seconds of the same messages for a source with `until`. Then they also ask how far
the server has read its log.
"""

SLOW_SLOT_S = 5.0
"""Time after which a slow creation of a slot is explained in a warning."""

logger = logging.getLogger(__name__)


class RowReader:
    """Makes `Change` objects from the cells of one table. It is replaced when the columns of the
    table change.
    """

    def __init__(
        self,
        table: str,
        columns: Sequence[tuple[str, int]],
        key: Sequence[str],
        types: dict[int, PgType],
        make: Callable[[dict[str, Any]], Any] | None,
    ) -> None:
        self.table = table
        self._make = make
        self._columns = [(name, decoder_of(oid, types)) for name, oid in columns]
        places = {name: place for place, (name, _) in enumerate(columns)}
        self._key = [
            (places[name], name, self._columns[places[name]][1]) for name in key if name in places
        ]

    def key_of(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Returns the key of a row: the values of the key columns by name."""
        return {
            name: None if (cell := cells[at]) is None else decoder(cell)  # type: ignore[arg-type]
            for at, name, decoder in self._key
        }

    def row(self, cells: Sequence[Cell]) -> Any:
        """Returns the row of `cells`, none of which may be `UNCHANGED`."""
        row = {
            name: None if cell is None else decoder(cell)  # type: ignore[arg-type]
            for (name, decoder), cell in zip(self._columns, cells, strict=True)
        }
        return row if self._make is None else self._make(row)

    def partial(self, cells: Sequence[Cell]) -> tuple[Any, tuple[str, ...]]:
        """Returns the row without the columns whose cells are `UNCHANGED`, and the names of these
        columns.
        """
        names = [name for name, _ in self._columns]
        left_out = tuple(
            [name for name, cell in zip(names, cells, strict=True) if cell is UNCHANGED]
        )
        row = {
            name: None if cell is None else decoder(cell)  # type: ignore[arg-type]
            for (name, decoder), cell in zip(self._columns, cells, strict=True)
            if cell is not UNCHANGED
        }
        if self._make is None:
            return row, left_out
        try:
            return self._make(row), left_out
        except MALFORMED as error:
            raise ValueError(
                f"{error}; the server does not log the large value of {left_out[0]!r} again, which "
                f"an UPDATE left as it was: ALTER TABLE {self.table} REPLICA IDENTITY FULL, or "
                "give the field a default"
            ) from error


class PostgresChangeReader(ChangeReader):
    """Reads the one split of `postgres_changes`."""

    config: PostgresChangesConfig

    def __init__(self, ctx: SourceContext, config: PostgresChangesConfig) -> None:
        super().__init__(ctx, config)
        self._taken: dict[int, Position | None] = {}
        """Maps a checkpoint id to the position of the reader at the checkpoint's barrier."""
        self._durable = 0
        """The place in the log up to which complete checkpoints cover the changes."""
        self._written = 0
        """The place in the log up to which everything was received."""
        self._told = asyncio.Event()
        """Set when a new `_durable` must be reported to the server."""
        self._tables: dict[tuple[str, str], Table] = {}
        self._types: dict[int, PgType] = {}

    # Methods that the engine calls.

    async def open(self, splits: Sequence[Split]) -> None:
        await super().open(splits)
        if self.behind is not None:
            self._durable = self.behind[1]

    def checkpoint(self, checkpoint_id: int) -> None:
        for split_id in self.splits:
            self._taken[checkpoint_id] = self.position(split_id)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        for id_ in sorted(id_ for id_ in self._taken if id_ <= checkpoint_id):
            self._cover(self._taken.pop(id_))

    def _cover(self, position: Position | None) -> None:
        if position is not None and position[1] > self._durable:
            self._durable = position[1]
            self._told.set()

    def content_of(self, content: Any) -> bytes:
        cells = content[4] or content[2] or ()
        return b"\t".join(cell if isinstance(cell, bytes) else b"" for cell in cells)

    def change(self, content: Any) -> Change[Any]:
        rows, kind, old, whole, new, place, timestamp_ms, _ = content
        if rows is None:  # A truncate has only the name of its table.
            return Change(kind, old, {}, None, None, place, timestamp_ms)
        before = rows.row(old) if whole else None
        after, unchanged = None, ()
        if new is not None:
            if UNCHANGED not in new:
                after = rows.row(new)
            elif whole:
                after = rows.row(
                    [was if cell is UNCHANGED else cell for was, cell in zip(old, new, strict=True)]
                )
            else:
                after, unchanged = rows.partial(new)
        # `key` is the key of the row before the change.
        key = rows.key_of(new if old is None else old)
        return Change(kind, rows.table, key, before, after, place, timestamp_ms, unchanged)

    # Methods that the reading task calls.

    def is_away(self, error: Exception) -> bool:
        return is_away(error)

    def explained(self, error: Exception) -> BaseException | None:
        return refusal(self.config, error)

    async def read(self, backoff: Backoff) -> None:
        config = self.config
        replication = await replicate(config)
        try:
            connection = await open_connection(config.dsn, config)
            try:
                tables = await load_tables(connection, config)
                oids = [column.type_oid for table in tables for column in table.columns]
                await load_types(connection, oids, self._types)
            finally:
                await disconnect(connection)
            self._tables = {(table.schema, table.table): table for table in tables}
            if self.behind is None and not config.snapshot:
                await self._begin_without_rows(replication)
            elif self.behind is None or self.behind[0] == SNAPSHOT:
                await self._snapshot(replication, tables, backoff)
            await self._stream(replication, backoff)
        finally:
            replication.close()

    async def _begin_without_rows(self, replication: ReplicationConnection) -> None:
        found = await free_slot(replication, self.config)
        if found is None:
            begin = await self._create(replication, self.config.slot, "NOEXPORT_SNAPSHOT")
        else:
            begin = lsn_number(found["confirmed_flush_lsn"])
        self.behind = [LOG, begin, 0, 0, None]

    async def _create(self, replication: ReplicationConnection, slot: str, snapshot: str) -> int:
        """Creates a slot, and returns the place in the log where its changes begin."""
        slow = asyncio.get_running_loop().call_later(
            SLOW_SLOT_S,
            logger.warning,
            "%r: the server makes the slot when all transactions have ended that are open now, and "
            "one is still open: see pg_stat_activity",
            self.config,
        )
        kind = "" if slot == self.config.slot else "TEMPORARY "
        try:
            (row,) = await replication.query(
                f'CREATE_REPLICATION_SLOT "{slot}" {kind}LOGICAL pgoutput {snapshot}'
            )
        finally:
            slow.cancel()
        return lsn_number(row["consistent_point"])

    # The snapshot.

    async def _snapshot(
        self, replication: ReplicationConnection, tables: list[Table], backoff: Backoff
    ) -> None:
        """Reads the rows of all remaining tables, in one transaction."""
        slot, behind = self.config.slot, self.behind
        temporary = f"{slot[:55]}_resumed"
        if behind is None:
            if await free_slot(replication, self.config) is not None:
                await replication.query(f'DROP_REPLICATION_SLOT "{slot}"')
        else:
            await kept_slot(replication, self.config, behind[1])
        await replication.query("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ")
        made = slot if behind is None else temporary
        as_of = await self._create(replication, made, "USE_SNAPSHOT")
        start = as_of if behind is None else behind[1]
        backoff.reset()

        async def read(table: Table, begin: Position, last: list[str]) -> None:
            columns = [(column.name, column.type_oid) for column in table.columns]
            rows = self._row_reader(table, columns, table.primary)
            key = table.primary if _is_comparable(table) else []
            names = [name for name, _ in columns]
            pages = replication.pages(_select(table, key, last))
            await self.read_rows(
                pages, rows, [names.index(one) for one in key], "utf-8", begin, as_of,
                lsn_text(as_of),
            )  # fmt: skip

        await self.read_tables(tables, start, as_of, read)
        await replication.query("COMMIT")
        if behind is not None:
            await replication.query(f'DROP_REPLICATION_SLOT "{temporary}"')
        self._durable = max(self._durable, start)

    def _row_reader(
        self, table: Table, columns: Sequence[tuple[str, int]], key: Sequence[str]
    ) -> RowReader:
        return RowReader(table.name, columns, key, self._types, self.config.make)

    # The log.

    async def _stream(self, replication: ReplicationConnection, backoff: Backoff) -> None:
        assert self.behind is not None
        begin: int = self.behind[1]
        await kept_slot(replication, self.config, begin)
        (end,) = [split.payload for split in self.splits.values()]
        await replication.start(self.config.slot, lsn_text(begin), self.config.publication)
        self._written = max(self._written, begin)
        reporting = asyncio.get_running_loop().create_task(
            self._report(replication, ask=end is not None), name="postgres_changes status"
        )
        try:
            log = _Log(self, self.behind, end)
            while not log.at_end:
                received = await replication.messages()
                backoff.reset()
                await log.read(replication, received)
            await self.hand_over([], 0, log.behind, last=True)
        finally:
            await cancel_and_wait([reporting])
            self.send_status(replication)

    def received(self, lsn: int) -> None:
        """Notes that everything before the place `lsn` in the log was received."""
        self._written = max(self._written, lsn)

    def send_status(self, replication: ReplicationConnection, *, reply: bool = False) -> None:
        if not self.ctx.checkpointing:
            for split_id in self.splits:
                self._cover(self.position(split_id))
        self._told.clear()
        wall_ms = self.ctx.host.clock.wall_ms()
        replication.send_status(self._written, self._durable, wall_ms, reply=reply)

    async def _report(self, replication: ReplicationConnection, *, ask: bool) -> None:
        """Reports to the server, at an interval, how far this reader has come, even while the
        buffer is full. With `ask`, also asks how far the server has read its log.
        """
        every_s = UNTIL_EVERY_S if ask else STATUS_EVERY_S
        while True:
            self.send_status(replication, reply=ask)
            try:
                async with asyncio.timeout(every_s):
                    await self._told.wait()
            except TimeoutError:
                pass

    async def rows_of(self, relation: Relation) -> RowReader | None:
        """Returns the decoder for the rows of `relation`, or None if the source does not read its
        table.
        """
        # A table that was renamed stays the same table, as for the publication.
        same = (table for table in self._tables.values() if table.oid == relation.oid)
        table = next(same, None) or self._tables.get((relation.schema, relation.table))
        if table is None:
            return None
        columns = [(column.name, column.type_oid) for column in relation.columns]
        if not all(known_type(oid) or oid in self._types for _, oid in columns):
            connection = await open_connection(self.config.dsn, self.config)
            try:
                await load_types(connection, [oid for _, oid in columns], self._types)
            finally:
                await disconnect(connection)
        key = table.primary
        names = {name for name, _ in columns}
        # A column of the primary key may have a new name.
        if relation.identity == "i" or (relation.identity == "d" and not names.issuperset(key)):
            key = [column.name for column in relation.columns if column.in_identity]
        if table.primary and not (key and names.issuperset(key)):
            raise StateError(
                f"{self.config!r}: the primary key of table {table.name!r} was "
                f"{', '.join(table.primary)}, and is no longer: start with restore=None, "
                "fresh=True for a new snapshot"
            )
        return self._row_reader(table, columns, key)

    def ranges(self, told: Sequence[Sequence[Any]]) -> SnapshotRanges:
        """Returns the ranges `told`, taken from a position, with decoded keys."""
        found: list[list[Any]] = []
        by_name = {table.name: table for table in self._tables.values()}
        for name, texts, as_of in told:
            last: list[Any] | None = texts
            if texts and (table := by_name.get(name)) is not None:
                oids = {column.name: column.type_oid for column in table.columns}
                last = [
                    decoder_of(oids[column], self._types)(text.encode())
                    for column, text in zip(table.primary, texts, strict=True)
                ]
            found.append([name, last, as_of])
        return SnapshotRanges(found)


def _is_comparable(table: Table) -> bool:
    """Returns whether Python orders the keys of `table` as the server does, and each logged change
    contains the key.
    """
    types = {column.name: column.type_oid for column in table.columns}
    return (
        bool(table.primary)
        and table.identity in "df"
        and all(types.get(name) in ORDERED_TYPES for name in table.primary)
    )


def _select(table: Table, key: list[str], last: list[str] | None) -> str:
    """Returns the statement that reads the rows of `table` after the key `last`, in the order of
    the columns `key`.
    """
    types = {column.name: column for column in table.columns}
    conditions = [] if table.where is None else [f"({table.where})"]
    ordered = [
        quoted(name, "a column") + ' COLLATE "C"' * (types[name].type_oid in COLLATED_TYPES)
        for name in key
    ]
    if key and last:
        values = ", ".join(
            f"CAST({literal(text)} AS {types[name].type_name})"
            for name, text in zip(key, last, strict=True)
        )
        conditions.append(f"({', '.join(ordered)}) > ({values})")
    columns = ", ".join(quoted(name, "a column") for name in types)
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    order = f" ORDER BY {', '.join(ordered)}" if ordered else ""
    return f"SELECT {columns} FROM {table.quoted}{where}{order}"


class _Log(ChangeLog):
    """Tracks the position within the stream of the slot."""

    def __init__(self, reader: PostgresChangeReader, begin: Position, end: int | None) -> None:
        ranges = begin[4]
        super().__init__(reader.config, begin, end, reader.ranges(ranges) if ranges else None)
        self._reader = reader
        self._rows: dict[int, RowReader | None] = {}
        """Maps the oid of a relation to the decoder of its rows. None means that the source does
        not read the table.
        """

    async def read(
        self, replication: ReplicationConnection, received: list[XLogData | Keepalive]
    ) -> None:
        messages: list[Message] = []
        size = 0
        for one in received:
            if isinstance(one, Keepalive):
                self._keepalive(replication, one)
                continue
            told = decode(one.message)
            if isinstance(told, RowChange):
                if self.is_new():
                    kind, oid, old, whole, new = told
                    if (rows := self._rows.get(oid)) is not None:
                        size += self.add(messages, rows, kind, old, whole, new, len(one.message))
            elif isinstance(told, Relation):
                self._rows[told.oid] = await self._reader.rows_of(told)
            elif told is not None:
                self._other(messages, told)
            if self.at_end:
                break
        await self._reader.hand_over(messages, size, self.behind)

    def _keepalive(self, replication: ReplicationConnection, keepalive: Keepalive) -> None:
        reader = self._reader
        reader.received(keepalive.wal_end)
        if not self.inside:
            self.reached(keepalive.wal_end)
        if keepalive.reply_requested:
            reader.send_status(replication)

    def _other(self, messages: list[Message], told: PgMessage) -> None:
        if isinstance(told, Begin):
            self.begin(told.final_lsn, lsn_text(told.final_lsn), told.committed_us // 1000)
        elif isinstance(told, Commit):
            self._reader.received(told.end_lsn)
            self.commit(told.end_lsn)
        elif isinstance(told, Truncate):
            for oid in told.oids:
                rows = self._rows.get(oid)
                if self.is_new() and rows is not None:
                    self.truncate(messages, rows.table)
