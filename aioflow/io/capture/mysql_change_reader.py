"""The reader of `mysql_changes`: the rows of a snapshot, then the events of the binary log.

Up to `HELD_BYTES` of a transaction's changes are held back until the transaction ends. A server
that crashes may leave a part of an uncommitted transaction in its log.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.core.errors import StateError
from aioflow.io.brokers.readers import Message
from aioflow.io.capture import mysql_binlog as binlog
from aioflow.io.capture.change_reader import LOG, SNAPSHOT, ChangeLog, ChangeReader, SnapshotRanges
from aioflow.io.capture.mysql_catalog import (
    FILE_SHIFT,
    MysqlChangesConfig,
    Table,
    begin_snapshot,
    check_server,
    kept_file,
    load_charsets,
    load_tables,
    log_end,
    lost,
    place_of,
    place_text,
    refusal,
)
from aioflow.io.capture.mysql_values import text_reader_of
from aioflow.io.changes import Change
from aioflow.io.tables.mysql_client import BinlogStream, MysqlConnection, error_number, is_away
from aioflow.io.tables.table_sinks import quoted

if TYPE_CHECKING:
    from aioflow.io.backoff import Backoff
    from aioflow.io.capture.change_reader import Position
    from aioflow.operators.source import SourceContext

__all__ = ["MysqlChangeReader"]

HELD_BYTES = 4 << 20
"""Maximum total size in bytes of a transaction's changes that are held back until the transaction
ends. The changes of a larger transaction are emitted before its end.
"""

BEGINS = (binlog.GTID, binlog.ANONYMOUS_GTID, binlog.GTID_TAGGED, binlog.MARIADB_GTID)
"""Kinds of the events that precede a transaction, or a statement that is a transaction by itself.
"""

SHAPES = 1_000
"""Maximum number of table maps that are cached."""

LOCK_WAITED = 1205
"""Error number for a lock that transactions of other programs held for too long."""

STANDALONE, PREPARED_XA = 1, 64
"""Flags of MariaDB's `MARIADB_GTID`."""

_DDL = re.compile(r"(?:DROP|RENAME|ALTER)\b", re.IGNORECASE)
_DML = re.compile(r"(?:INSERT|UPDATE|DELETE|REPLACE|LOAD|WITH)\b", re.IGNORECASE)


class RowReader:
    """Makes `Change` objects from the rows of one table. It is replaced when the columns of the
    table change.
    """

    def __init__(
        self,
        table: str,
        names: Sequence[str],
        key: Sequence[str],
        make: Callable[[dict[str, Any]], Any] | None,
        texts: Sequence[Callable[[bytes], Any]] = (),
    ) -> None:
        """`texts` has one function for each column. The function decodes the text of a cell in a
        snapshot. `make` converts a dict to a row; None keeps the dict.
        """
        self.table = table
        self._names = names
        self._make = make
        self._texts = texts
        self._key = [(names.index(name), name) for name in key]

    def key_of(self, row: Any) -> dict[str, Any]:
        """Returns the key of a row: the values of the key columns by name."""
        return {name: row[at] for at, name in self._key}

    def row(self, values: Sequence[Any]) -> Any:
        row = dict(zip(self._names, values, strict=True))
        return row if self._make is None else self._make(row)

    def values(self, cells: Sequence[bytes | None]) -> list[Any]:
        """Decodes the texts of a snapshot's row into values."""
        return [
            None if cell is None else read(cell)
            for read, cell in zip(self._texts, cells, strict=True)
        ]


class MysqlChangeReader(ChangeReader):
    """Reads the one split of `mysql_changes`."""

    config: MysqlChangesConfig

    def __init__(self, ctx: SourceContext, config: MysqlChangesConfig) -> None:
        super().__init__(ctx, config)
        self.tables: dict[tuple[str, str], Table] = {}
        self.charsets: dict[int, str] = {}
        """Maps the number of a collation to the name of its character set."""

    def content_of(self, content: Any) -> bytes:
        cells = content[4] or content[2] or ()
        return b"\t".join(
            [cell if isinstance(cell, bytes) else str(cell).encode() for cell in cells]
        )

    def change(self, content: Any) -> Change[Any]:
        rows, kind, old, _, new, place, timestamp_ms, _ = content
        if rows is None:  # A truncate has only the name of its table.
            return Change(kind, old, {}, None, None, place, timestamp_ms)
        if kind == "read":
            new = rows.values(new)
        # `key` is the key of the row before the change.
        key = rows.key_of(new if old is None else old)
        before = None if old is None else rows.row(old)
        after = None if new is None else rows.row(new)
        return Change(kind, rows.table, key, before, after, place, timestamp_ms)

    def is_away(self, error: Exception) -> bool:
        return is_away(error) or error_number(error) == LOCK_WAITED

    def explained(self, error: Exception) -> BaseException | None:
        return refusal(self.config, error)

    async def read(self, backoff: Backoff) -> None:
        config = self.config
        connection = await MysqlConnection.open(config.dsn, config)
        try:
            settings = await check_server(connection, config)
            tables = await load_tables(connection, config)
            self.charsets = await load_charsets(connection)
            self.tables = {(table.database, table.table): table for table in tables}
            file, end = await log_end(connection, config)
            if self.behind is None and not config.snapshot:
                self.behind = [LOG, end, 0, 0, None]
            elif self.behind is None or self.behind[0] == SNAPSHOT:
                await self._snapshot(tables, backoff)
            assert self.behind is not None
            if len(self.behind) == 5:
                self.behind = [*self.behind, 0]
            file = await kept_file(connection, config, self.behind[1])
            offset = self.behind[1] & ((1 << FILE_SHIFT) - 1)
            if offset >> 32:
                raise lost(
                    config, f"{place_text(file, self.behind[1])} is behind 4 GiB of its file"
                )
            stream = await BinlogStream.open(connection, file, offset, config.server_id)
            (until,) = [split.payload for split in self.splits.values()]
            log = _Log(self, file, self.behind, until, settings["binlog_checksum"] != "NONE")
            while not log.at_end:
                received = await stream.take()
                backoff.reset()
                await log.read(received)
            await self.hand_over([], 0, log.behind, last=True)
        finally:
            connection.abort()

    async def _snapshot(self, tables: list[Table], backoff: Backoff) -> None:
        """Reads the rows of all remaining tables, in one transaction."""
        config = self.config
        connection = await MysqlConnection.open(config.dsn, config)
        try:
            if self.behind is not None:
                await kept_file(connection, config, self.behind[1])
            file, as_of = await begin_snapshot(connection, config, tables)
            start = as_of if self.behind is None else self.behind[1]
            backoff.reset()
            stream = BinlogStream(connection)

            async def read(table: Table, begin: Position, last: list[str]) -> None:
                names = [column.name for column in table.columns]
                texts = [text_reader_of(column.type_name) for column in table.columns]
                rows = RowReader(
                    table.name, names, table.primary, config.make,
                    [one for one in texts if one is not None],
                )  # fmt: skip
                key = table.primary if table.is_comparable else []
                await self.read_rows(
                    stream.pages(_select(table, key, last)),
                    rows,
                    [names.index(one) for one in key],
                    "latin-1",
                    begin,
                    as_of,
                    place_text(file, as_of),
                )

            await self.read_tables(tables, start, as_of, read)
        finally:
            connection.abort()

    def ranges(self, told: Sequence[Sequence[Any]]) -> SnapshotRanges:
        """Returns the ranges `told`, taken from a position, with decoded keys."""
        found: list[list[Any]] = []
        by_name = {table.name: table for table in self.tables.values()}
        for name, texts, as_of in told:
            last: list[Any] | None = texts
            if texts and (table := by_name.get(name)) is not None:
                types = {column.name: column.type_name for column in table.columns}
                last = []
                for column, text in zip(table.primary, texts, strict=True):
                    read = text_reader_of(types[column])
                    assert read is not None
                    last.append(_ordered_value(read(text.encode("latin-1"))))
            found.append([name, last, as_of])
        return SnapshotRanges(found)

    async def check_exists(self, table: Table) -> None:
        """Raises StateError if the table is gone."""
        connection = await MysqlConnection.open(self.config.dsn, self.config)
        try:
            found = await connection.rows(
                "SELECT 1 FROM information_schema.tables WHERE table_schema = %s AND "
                "table_name = %s",
                (table.database, table.table),
            )
        finally:
            await connection.close()
        if not found:
            raise StateError(
                f"{self.config!r}: table {table.name!r} was dropped or renamed: create it again, "
                "or start without it"
            )


def _ordered(name: str, type_name: str) -> str:
    """Returns the SQL expression that orders a key column as Python does: texts by code points."""
    column = quoted(name, "a column")
    if type_name in ("char", "varchar"):
        return f"CAST(CONVERT({column} USING utf8mb4) AS BINARY)"
    return column


def _ordered_value(value: Any) -> Any:
    """Returns a key value in the form in which keys are compared. Dates become texts, because zero
    dates are texts too.
    """
    return str(value) if isinstance(value, datetime.date) else value


def _select(table: Table, key: list[str], last: list[str]) -> str:
    """Returns the statement that reads the rows of `table` after the key `last`, in the order of
    the columns `key`.
    """
    types = {column.name: column.type_name for column in table.columns}
    columns = []
    for name, type_name in types.items():
        column = quoted(name, "a column")
        # As a text, a FLOAT has six digits, and a DOUBLE has all digits.
        columns.append(f"{column} + 0e0" if type_name == "float" else column)
    ordered = [_ordered(name, types[name]) for name in key]
    where = ""
    if key and last:
        values = []
        for name, text in zip(key, last, strict=True):
            digits = types[name] == "decimal" or types[name].endswith("int")
            if not digits and ("char" in types[name] or "binary" in types[name]):
                values.append(f"x'{text.encode('latin-1').hex()}'")
            else:
                values.append(text if digits else f"'{text}'")
        where = f" WHERE ({', '.join(ordered)}) > ({', '.join(values)})"
    order = f" ORDER BY {', '.join(ordered)}" if ordered else ""
    return f"SELECT {', '.join(columns)} FROM {table.quoted}{where}{order}"


class _Rows(RowReader):
    """Decodes the rows of a table in the log, with the columns of a `TableMap`."""

    def __init__(
        self,
        table: Table,
        columns: binlog.TableMap,
        charsets: dict[int, str],
        make: Callable[[dict[str, Any]], Any] | None,
    ) -> None:
        names = [column.name for column in columns.columns]
        super().__init__(table.name, names, columns.key, make)
        self.shape = binlog.RowShape(columns, charsets, table.json_columns)


class _Log(ChangeLog):
    """Tracks the position within the log: the file, and the current transaction."""

    def __init__(
        self,
        reader: MysqlChangeReader,
        file: str,
        begin: Position,
        end: int | None,
        checksums: bool,
    ) -> None:
        ranges = begin[4]
        super().__init__(reader.config, begin, end, reader.ranges(ranges) if ranges else None)
        self._reader = reader
        self._file = file
        self._at = begin[1]
        """The place in the log after the last event."""
        self._checksums = checksums
        self._tables: dict[int, _Rows | None] = {}
        """Maps the number of a table in the log to the decoder of its rows. None means that the
        source does not read the table.
        """
        self._shapes: dict[bytes, _Rows | None] = {}
        """Maps the bytes of a table map in the log to the decoder of the table's rows. None means
        that the source does not read the table.
        """
        self._held: list[Message] = []
        """Changes of the current transaction that are held back."""
        self._held_size = 0
        self._before = begin
        """The position before the held changes."""
        self._handed_over = False
        """Whether changes of the current transaction were emitted before its end."""
        self._is_xa = False
        self._is_alone = True
        """Whether the current transaction is a single statement, without BEGIN and COMMIT."""

    async def read(self, received: list[bytes]) -> None:
        messages: list[Message] = []
        size = 0
        for payload in received:
            if payload[:1] != b"\0":
                raise ConnectionResetError("the server has ended the stream")
            event = self._event(payload)
            kind = event.kind
            if kind in binlog.ROWS:
                rows = self._tables.get(binlog.table_id(event))
                if rows is not None:
                    self._add_rows(rows, event)
            elif kind == binlog.TABLE_MAP:
                await self._describe(event)
            elif kind == binlog.XID:
                self._end_transaction()
            elif kind in BEGINS:
                self._begin_transaction(event)
            elif kind == binlog.QUERY:
                await self._query(event)
            else:
                self._other(event)
            if not self.inside and self._held:
                messages += self._held
                size += self._held_size
                self._held, self._held_size = [], 0
            if self.at_end:
                break
        if self._held_size > HELD_BYTES:
            messages += self._held
            size += self._held_size
            self._held, self._held_size, self._handed_over = [], 0, True
            self._before = self.behind
        behind = self._before if self.inside else self.behind
        await self._reader.hand_over(messages, size, behind)

    def _event(self, payload: bytes) -> binlog.Event:
        kind = payload[5] if len(payload) > 19 else 0
        event = binlog.head(payload, self._checksums and kind != binlog.FORMAT)
        if event.flags & binlog.ARTIFICIAL or kind == binlog.HEARTBEAT:
            return event
        offset = self._at & ((1 << FILE_SHIFT) - 1)
        file = self._at - offset
        if kind == binlog.FORMAT and offset > 4:
            return event  # Sent first, wherever reading begins.
        if event.end:
            after = offset & ~0xFFFFFFFF | event.end
            # `event.end` has 32 bits, but a file with a large transaction may be longer.
            offset = after if after >= offset else after + (1 << 32)
        else:
            offset += len(payload) - 1
        self._at = file | offset
        return event

    def _begin_transaction(self, event: binlog.Event) -> None:
        if self.inside:
            self._abandon()
        self._before = self.behind
        self.begin(self.done, place_text(self._file, self.done), event.timestamp_s * 1000)
        flags = event.body[12] if event.kind == binlog.MARIADB_GTID else STANDALONE
        self._is_alone, self._is_xa = bool(flags & STANDALONE), bool(flags & PREPARED_XA)
        self._handed_over = False

    def _end_transaction(self) -> None:
        self.commit(self._at)
        self._tables.clear()

    def _abandon(self) -> None:
        """Drops the current transaction, which the server did not complete because it crashed.
        Raises an error if some of its changes were already emitted.
        """
        if self._handed_over:
            raise lost(
                self._reader.config,
                f"the server has crashed in the midst of the large transaction at {self._place}, "
                "of which changes were already read",
            )
        self.inside = False
        self._held, self._held_size, self.behind = [], 0, self._before

    def _other(self, event: binlog.Event) -> None:
        kind = event.kind
        if kind in (binlog.FORMAT, binlog.STOP, binlog.ROTATE) and self.inside:
            self._abandon()
        if kind == binlog.ROTATE:
            self._file, place = binlog.rotation_of(event)
            self._tables.clear()
            if place_of(self._file, place) > self._at:
                self._at = place_of(self._file, place)
                self.more = [0]
        elif kind == binlog.FORMAT:
            self._checksums = binlog.format_checksums(event)
            made = event.timestamp_s
            if self.more[0] not in (0, made):
                raise lost(
                    self._reader.config,
                    f"the server's log was reset: {self._file} is not the file of the checkpoint",
                )
            self.more = [made]
        elif kind in (binlog.PARTIAL_UPDATE, binlog.PAYLOAD) or kind in binlog.COMPRESSED:
            raise StateError(
                f"{self._reader.config!r}: the log has an event of the kind {kind}, which is not "
                "read: set binlog_row_value_options = '', binlog_transaction_compression = OFF, "
                "log_bin_compress = OFF, and start with restore=None, fresh=True"
            )
        elif kind == binlog.XA_PREPARE and self.inside:
            self._end_transaction()
        if not self.inside:
            self.reached(self._at)

    async def _query(self, event: binlog.Event) -> None:
        database, text = binlog.query_of(event)
        text = binlog.statement(text)
        words = text[:16].upper()
        if words.startswith("BEGIN"):
            if not self.inside:
                self._begin_transaction(event)
            self._is_alone = False
        elif words.startswith("XA START"):
            self._is_xa, self._is_alone = True, False
        elif words.startswith("ROLLBACK TO") and (self._held or self._handed_over):
            raise StateError(
                f"{self._reader.config!r}: a transaction was rolled back to a savepoint after it "
                "changed a table without transactions, and the log does not say which changes "
                "remain: start with restore=None, fresh=True for a new snapshot"
            )
        elif words == "ROLLBACK" and self.inside:
            self._abandon()
        else:
            for table in self._reader.tables.values():
                await self._statement(table, database, text)
            if self._is_alone and text[-17:].upper() != "START TRANSACTION":
                self.inside = False
            if words == "COMMIT" or not self.inside:
                self._end_transaction()
        if not self.inside:
            self.reached(self._at)

    async def _statement(self, table: Table, database: str, text: str) -> None:
        """Handles the SQL statement `text` of the log, as far as it affects `table`. Emits a
        truncate. Raises an error for a statement whose changes are not in the log.
        """
        emptied = binlog.truncated_table(text, database)
        if emptied is not None:
            if emptied == (table.database, table.table) and self.is_new():
                self.truncate(self._held, table.name)
            return
        removed = binlog.removed_tables(text, database)
        if (table.database, table.table) in removed or (table.database, "") in removed:
            raise StateError(
                f"{self._reader.config!r}: table {table.name!r}, or a partition of it, was dropped "
                f"or replaced by {text[:60]!r}, and the log does not have the removed rows: "
                "start with restore=None, fresh=True for a new snapshot"
            )
        if not re.search(rf"(?<!\w){re.escape(table.table)}(?!\w)", text):
            return
        if _DDL.match(text):
            await self._reader.check_exists(table)
        elif _DML.match(text):
            raise StateError(
                f"{self._reader.config!r}: a statement may have changed table {table.name!r}, and "
                f"the log has only its text ({text[:60]!r}): let no session set binlog_format, "
                "and start with restore=None, fresh=True for a new snapshot"
            )

    async def _describe(self, event: binlog.Event) -> None:
        # A server describes a table in each transaction, mostly with the same bytes.
        content = event.body[8:]
        if content not in self._shapes:
            if len(self._shapes) >= SHAPES:
                self._shapes.clear()
            table = self._reader.tables.get(binlog.table_name_of(event))
            self._shapes[content] = (
                None if table is None else self._rows_of(table, binlog.table_map_of(event))
            )
        self._tables[binlog.table_id(event)] = self._shapes[content]

    def _rows_of(self, table: Table, columns: binlog.TableMap) -> _Rows:
        config = self._reader.config
        if not all(column.name for column in columns.columns):
            raise StateError(
                f"{config!r}: the log does not name the columns of table {table.name!r} at "
                f"{place_text(self._file, self._at)}: SET GLOBAL binlog_row_metadata = 'FULL', "
                "and start with restore=None, fresh=True for a new snapshot"
            )
        if table.primary and not columns.key:
            raise StateError(
                f"{config!r}: the primary key of table {table.name!r} was "
                f"{', '.join(table.primary)}, and is no longer: start with restore=None, "
                "fresh=True for a new snapshot"
            )
        try:
            return _Rows(table, columns, self._reader.charsets, config.make)
        except ValueError as error:
            raise StateError(f"{config!r}: table {table.name!r}: {error}") from None

    def _add_rows(self, rows: _Rows, event: binlog.Event) -> None:
        if self._is_xa:
            raise StateError(
                f"{self._reader.config!r}: an XA transaction changed table {rows.table!r}, and the "
                "log has its rows before its commit: use transactions of one server, and start "
                "with restore=None, fresh=True"
            )
        found = binlog.rows_of(event, rows.shape)
        if found is None:
            raise StateError(
                f"{self._reader.config!r}: the log has only a part of the columns of table "
                f"{rows.table!r}: let no session set binlog_row_image, and start with "
                "restore=None, fresh=True for a new snapshot"
            )
        kind = binlog.ROWS[event.kind]
        none: list[Any] = [None] * len(found)
        old, new = {
            "insert": (none, found), "update": (found[::2], found[1::2]), "delete": (found, none),
        }[kind]  # fmt: skip
        share = len(event.body) // max(len(found), 1)
        for before, after in zip(old, new, strict=True):
            if self.is_new():
                whole = before is not None
                self._held_size += self.add(self._held, rows, kind, before, whole, after, share)
