"""The reader of `postgres_changes`: the rows of the slot's snapshot, then the stream of the slot.

A position is None at the beginning, and otherwise a list:

    ["snapshot", start, ranges, table, key, as_of]   a row of the snapshot was read
        `start` is the place in the log where the slot begins, `as_of` that of this snapshot, and
        `key` has the texts of the row's key. `ranges` are those read before, see `snapshot_ranges`.
    ["log", end, commit, count, ranges]              all transactions before `end` were read, and of
        the one that commits at `commit` the first `count` changes

A checkpoint may fall within a transaction. After a restore the server sends this transaction again
from its beginning, with the same changes, and the reader leaves out the counted ones. The reader
stops reading the socket while its buffer is full, so memory is bounded for any transaction.

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
from aioflow.io.backoff import Backoff
from aioflow.io.changes import Change
from aioflow.io.pgoutput import (
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
from aioflow.io.postgres_catalog import (
    Table,
    error_code,
    free_slot,
    kept_slot,
    load_tables,
    load_types,
    refusal,
    replicate,
)
from aioflow.io.postgres_replication import Keepalive, literal
from aioflow.io.postgres_tables import disconnect, open_connection
from aioflow.io.postgres_types import COLLATED_TYPES, ORDERED_TYPES, PgType, decoder_of, known_type
from aioflow.io.readers import Message, StreamReader
from aioflow.io.snapshot_ranges import SnapshotRanges
from aioflow.io.tables import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioflow.io.pgoutput import Message as PgMessage
    from aioflow.io.postgres_catalog import ChangesConfig
    from aioflow.io.postgres_replication import ReplicationConnection, XLogData
    from aioflow.operators.source import SourceContext, Split

__all__ = ["ChangeReader"]

STATUS_EVERY_S = 5.0
"""Interval of the messages that keep the connection alive. The server ends it after a minute
without one, unless `wal_sender_timeout` says otherwise.
"""

UNTIL_EVERY_S = 0.2
"""The same for a source that ends: it asks how far the server has read its log."""

SLOW_SLOT_S = 5.0
"""Time after which a warning says what the creation of a slot waits for."""

BUFFERED_BYTES = 16 << 20
"""Number of bytes of rows that wait in memory, at most, and one block of messages."""

AWAY = frozenset({"57P01", "57P02", "57P03", "53300", "08000", "08001", "08003", "08006"})
"""Errors of a server that stops, starts, or has too many connections."""

SNAPSHOT, LOG = "snapshot", "log"

Position = list[Any]

logger = logging.getLogger(__name__)


class RowReader:
    """Makes changes of one table from cells, for one list of its columns."""

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
        """Returns the key of a row, by column."""
        return {
            name: None if (cell := cells[at]) is None else decoder(cell)  # type: ignore[arg-type]
            for at, name, decoder in self._key
        }

    def row(self, cells: Sequence[Cell]) -> Any:
        """Returns a row whose values were all sent."""
        row = {
            name: None if cell is None else decoder(cell)  # type: ignore[arg-type]
            for (name, decoder), cell in zip(self._columns, cells, strict=True)
        }
        return row if self._make is None else self._make(row)

    def partial(self, cells: Sequence[Cell]) -> tuple[Any, tuple[str, ...]]:
        """Returns a row without the values that were not sent, and their names."""
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


class ChangeReader(StreamReader):
    """Reads the one split of `postgres_changes`."""

    def __init__(self, ctx: SourceContext, config: ChangesConfig) -> None:
        super().__init__(ctx, self._change, config.on_error)
        self.config = config
        self._behind: Position | None = None
        """The position after everything that was put into the buffer."""
        self._bytes = 0
        self._taken: dict[int, Position | None] = {}
        """Checkpoint -> its position."""
        self._durable = 0
        """The place in the log that complete checkpoints cover."""
        self._written = 0
        """The place in the log up to which everything was received."""
        self._told = asyncio.Event()
        """Set when the server is to hear of a new `_durable`."""
        self._tables: dict[tuple[str, str], Table] = {}
        self._types: dict[int, PgType] = {}

    # What the engine calls.

    async def open(self, splits: Sequence[Split]) -> None:
        if splits:
            self._behind = splits[0].position
        await super().open(splits)

    def position(self, split_id: str) -> Position | None:
        if not self._chunks:
            # Kept, so that later positions are never before this one, which a checkpoint may have.
            self._positions[split_id] = self._behind
        position: Position | None = self._positions[split_id]
        return position

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

    def _change(self, content: Any) -> Change[Any]:
        rows, kind, old, whole, new, place, timestamp_ms, size = content
        self._bytes -= size
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
        # The key of a row is the one before the change.
        key = rows.key_of(new if old is None else old)
        return Change(kind, rows.table, key, before, after, place, timestamp_ms, unchanged)

    # What the task calls.

    async def hand_over(
        self, messages: list[Message], size: int, behind: Position, *, last: bool = False
    ) -> None:
        self._behind, self._bytes = behind, self._bytes + size
        (split_id,) = self.splits
        if messages or last:
            await self.put(split_id, messages, last=last)
        if self._bytes > BUFFERED_BYTES:
            await self._pump.added(lambda: self._bytes > BUFFERED_BYTES // 2 and bool(self._chunks))

    async def run(self) -> None:
        config = self.config
        backoff = Backoff(self.ctx.host.rng, config.backoff)
        if self._behind is not None:
            self._durable = self._behind[1]
        while True:
            try:
                await self._read(backoff)
                return
            # Checked here, because most errors justify no retry.
            except Exception as error:  # noqa: BLE001
                if not _is_away(error):
                    raise refusal(config, error) or error from None
                backoff.failed(config, error)
            await backoff.sleep()

    async def _read(self, backoff: Backoff) -> None:
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
            if self._behind is None and not config.snapshot:
                await self._begin_without_rows(replication)
            elif self._behind is None or self._behind[0] == SNAPSHOT:
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
        self._behind = [LOG, begin, 0, 0, None]

    async def _create(self, replication: ReplicationConnection, slot: str, snapshot: str) -> int:
        """Creates a slot, and returns the place in the log where it begins."""
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
        slot, behind = self.config.slot, self._behind
        temporary = f"{slot[:55]}_resumed"
        ranges: list[list[Any]] = []
        now_ms = self.ctx.host.clock.wall_ms()
        if behind is None:
            if await free_slot(replication, self.config) is not None:
                await replication.query(f'DROP_REPLICATION_SLOT "{slot}"')
        else:
            _, start, ranges, interrupted, key, read_as_of = behind
            await kept_slot(replication, self.config, start)
            # A table without a key that can be compared is read again, from its beginning.
            ranges = [*ranges, [interrupted, key, read_as_of if key else start]]
        await replication.query("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ")
        if behind is None:
            start = as_of = await self._create(replication, slot, "USE_SNAPSHOT")
        else:
            as_of = await self._create(replication, temporary, "USE_SNAPSHOT")
        backoff.reset()
        for table in tables:
            read = [one for one in ranges if one[0] == table.name]
            if not any(last is None for _, last, _ in read):
                await self._read_table(replication, table, [SNAPSHOT, start, ranges], as_of, now_ms)
                ranges = [*ranges, [table.name, None, as_of]]
        await replication.query("COMMIT")
        if behind is not None:
            await replication.query(f'DROP_REPLICATION_SLOT "{temporary}"')
        left = ranges if any(at > start for _, _, at in ranges) else None
        self._behind = [LOG, start, 0, 0, left]
        self._durable = max(self._durable, start)

    async def _read_table(
        self,
        replication: ReplicationConnection,
        table: Table,
        begin: Position,
        as_of: int,
        now_ms: int,
    ) -> None:
        """Reads the rows of `table` behind the ranges that `begin` tells."""
        columns = [column.name for column in table.columns]
        rows = self._row_reader(
            table, [(column.name, column.type_oid) for column in table.columns], table.primary
        )
        key = table.primary if _is_comparable(table) else []
        places = [columns.index(name) for name in key]
        read = [last for name, last, _ in begin[2] if name == table.name]
        where, place = f"row of {table.name!r}", lsn_text(as_of)
        async for _, page in replication.pages(_select(table, key, read[-1] if read else [])):
            messages, size = [], 0
            for cells in page:
                length = sum([len(cell) for cell in cells if cell is not None])
                size += length
                texts = [(cells[i] or b"").decode() for i in places]
                content = (rows, "read", None, False, cells, place, now_ms, length)
                position = [*begin, table.name, texts, as_of]
                messages.append(Message(content, position, now_ms, where))
            await self.hand_over(messages, size, messages[-1].position)

    def _row_reader(
        self, table: Table, columns: Sequence[tuple[str, int]], key: Sequence[str]
    ) -> RowReader:
        return RowReader(table.name, columns, key, self._types, self.config.make)

    # The log.

    async def _stream(self, replication: ReplicationConnection, backoff: Backoff) -> None:
        assert self._behind is not None
        begin: int = self._behind[1]
        await kept_slot(replication, self.config, begin)
        (end,) = [split.payload for split in self.splits.values()]
        await replication.start(self.config.slot, lsn_text(begin), self.config.publication)
        self._written = max(self._written, begin)
        reporting = asyncio.get_running_loop().create_task(
            self._report(replication, ask=end is not None), name="postgres_changes status"
        )
        try:
            log = _Log(self, self._behind, end)
            while not log.at_end:
                received = await replication.messages()
                backoff.reset()
                await log.read(replication, received)
            await self.hand_over([], 0, log.behind, last=True)
        finally:
            await cancel_and_wait([reporting])
            self.send_status(replication)

    def received(self, lsn: int) -> None:
        """Notes that everything before `lsn` was received."""
        self._written = max(self._written, lsn)

    def send_status(self, replication: ReplicationConnection, *, reply: bool = False) -> None:
        if not self.ctx.checkpointing:
            for split_id in self.splits:
                self._cover(self.position(split_id))
        self._told.clear()
        wall_ms = self.ctx.host.clock.wall_ms()
        replication.send_status(self._written, self._durable, wall_ms, reply=reply)

    async def _report(self, replication: ReplicationConnection, *, ask: bool) -> None:
        """Reports the position of this reader to the server, even while the buffer is full."""
        every_s = UNTIL_EVERY_S if ask else STATUS_EVERY_S
        while True:
            self.send_status(replication, reply=ask)
            try:
                async with asyncio.timeout(every_s):
                    await self._told.wait()
            except TimeoutError:
                pass

    async def rows_of(self, relation: Relation) -> RowReader | None:
        """Returns the reader for the rows of `relation`; None if its table was not asked for."""
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
        """Returns the ranges of a position, with the values of the keys."""
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
    """Returns whether Python orders the keys of `table` as the server does, and whether each change
    names the key.
    """
    types = {column.name: column.type_oid for column in table.columns}
    return (
        bool(table.primary)
        and table.identity in "df"
        and all(types.get(name) in ORDERED_TYPES for name in table.primary)
    )


def _select(table: Table, key: list[str], last: list[str] | None) -> str:
    """Returns the statement that reads the rows of `table` behind `last`, in the order of `key`."""
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


class _Log:
    """The place within the stream of the slot: transactions, and how much of one was read."""

    def __init__(self, reader: ChangeReader, begin: Position, end: int | None) -> None:
        _, self._done, self._cut, self._count, ranges = begin
        self._reader = reader
        self._end = end
        self._ranges = reader.ranges(ranges) if ranges else None
        self._told_ranges = ranges
        self._rows: dict[int, RowReader | None] = {}
        """Relation -> the reader of its rows; None if its table was not asked for."""
        self._commit = 0
        self._number = 0
        self._skip = 0
        self._inside = False
        self._place, self._timestamp_ms = "", 0
        self.behind = begin
        self.at_end = end is not None and self._done >= end

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
                self._number += 1
                if self._number > self._skip:
                    size += self._add(messages, told, len(one.message))
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
        if not self._inside:
            self._reached(keepalive.wal_end)
        if keepalive.reply_requested:
            reader.send_status(replication)

    def _reached(self, lsn: int) -> None:
        """Notes that all transactions before `lsn` were read."""
        if lsn <= self._done:
            return
        if self._ranges is not None and lsn >= self._ranges.end:
            self._ranges = self._told_ranges = None
        self._done = lsn
        # A transaction that was cut comes again, until it was read to its end.
        if self._cut < lsn:
            self._cut = self._count = 0
        self.behind = [LOG, lsn, self._cut, self._count, self._told_ranges]
        self.at_end = self._end is not None and lsn >= self._end

    def _other(self, messages: list[Message], told: PgMessage) -> None:
        if isinstance(told, Begin):
            if self._end is not None and told.final_lsn >= self._end:
                self.at_end = True
                return
            self._inside = True
            self._commit, self._number = told.final_lsn, 0
            self._skip = self._count if told.final_lsn == self._cut else 0
            self._place = lsn_text(told.final_lsn)
            self._timestamp_ms = told.committed_us // 1000
        elif isinstance(told, Commit):
            self._inside = False
            self._reader.received(told.end_lsn)
            self._reached(told.end_lsn)
        elif isinstance(told, Truncate):
            for oid in told.oids:
                self._number += 1
                rows = self._rows.get(oid)
                if rows is not None and self._number > self._skip:
                    self._truncate(messages, rows.table)

    def _truncate(self, messages: list[Message], table: str) -> None:
        if self._ranges is not None:
            changes = self._ranges.truncates(table, self._commit)
            if changes is None:
                raise StateError(
                    f"{self._reader.config!r}: table {table!r} was truncated while its rows were "
                    "read over a restart: start with restore=None, fresh=True for a new snapshot"
                )
            if not changes:
                return
        self._put(messages, (None, "truncate", table, False, None), 0)

    def _add(self, messages: list[Message], change: RowChange, size: int) -> int:
        """Adds a change to `messages`. Returns its size, or 0 if the snapshot contains it."""
        kind, oid, old, whole, new = change
        rows = self._rows.get(oid)
        if rows is None:
            return 0
        if self._ranges is not None:
            had = old if old is not None else new
            assert had is not None
            in_old = in_new = self._contains(rows, had)
            if kind == "update" and old is not None and new is not None:
                in_new = self._contains(rows, new)
            if in_old and in_new:
                return 0
            if in_old:
                kind, old, whole = "insert", None, False
            elif in_new:
                kind, new = "delete", None
        self._put(messages, (rows, kind, old, whole, new), size)
        return size

    def _contains(self, rows: RowReader, cells: Sequence[Cell]) -> bool:
        assert self._ranges is not None
        return self._ranges.contains(rows.table, tuple(rows.key_of(cells).values()), self._commit)

    def _put(self, messages: list[Message], content: tuple[Any, ...], size: int) -> None:
        self.behind = [LOG, self._done, self._commit, self._number, self._told_ranges]
        messages.append(
            Message(
                (*content, self._place, self._timestamp_ms, size),
                self.behind,
                self._timestamp_ms,
                f"change at {self._place}",
            )
        )


def _is_away(error: BaseException) -> bool:
    """Returns whether `error` says that the server cannot be reached now."""
    if isinstance(error, (OSError, TimeoutError)):
        return True
    return error_code(error) in AWAY
