"""Decodes the events of the binary log of MySQL and MariaDB: transactions, tables and rows. Does no
I/O.

An event has a header of 19 bytes and, if the log has checksums, 4 bytes at its end. In a
transaction, a `TableMap` precedes the rows of a table. It has the types of the columns. With
`binlog_row_metadata = FULL` it also has their names, signs, character sets, and the primary key. So
rows are decoded with the columns that the table had when they were written. See "Replication
Protocol" in MariaDB's documentation, and "Binlog Event" in the source of MySQL.

`mysql_values` decodes the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from struct import Struct, error
from typing import Any, NamedTuple

from aioflow.core.errors import MalformedInput
from aioflow.io.capture.mysql_values import (
    BIT,
    BLOB,
    DATETIME2,
    DOUBLE,
    ENUM,
    FLOAT,
    GEOMETRY,
    JSON,
    NEWDECIMAL,
    NUMERIC,
    SET,
    STRING,
    TEXTS,
    TIME2,
    TIMESTAMP2,
    VAR_STRING,
    VARCHAR,
    BinlogColumn,
    reader_of,
)

__all__ = [
    "ANONYMOUS_GTID",
    "ARTIFICIAL",
    "COMPRESSED",
    "FORMAT",
    "GTID",
    "GTID_TAGGED",
    "HEARTBEAT",
    "MARIADB_GTID",
    "PARTIAL_UPDATE",
    "PAYLOAD",
    "QUERY",
    "ROTATE",
    "ROWS",
    "STOP",
    "TABLE_MAP",
    "XA_PREPARE",
    "XID",
    "Event",
    "RowShape",
    "TableMap",
    "format_checksums",
    "head",
    "lenenc",
    "query_of",
    "removed_tables",
    "rotation_of",
    "rows_of",
    "statement",
    "table_id",
    "table_map_of",
    "table_name_of",
    "truncated_table",
]

QUERY, STOP, ROTATE, FORMAT, XID, TABLE_MAP, HEARTBEAT = 2, 3, 4, 15, 16, 19, 27
GTID, ANONYMOUS_GTID, GTID_TAGGED, MARIADB_GTID = 33, 34, 42, 162
XA_PREPARE, PARTIAL_UPDATE, PAYLOAD = 38, 39, 40
ROWS = {23: "insert", 24: "update", 25: "delete", 30: "insert", 31: "update", 32: "delete"}
COMPRESSED = range(165, 172)
"""Event kinds of MariaDB's compressed events."""

ARTIFICIAL = 0x20
"""Flag of an event that the server generated for the reader, and that is not in the log."""

_METADATA = {
    FLOAT: 1, DOUBLE: 1, VARCHAR: 2, BIT: 2, NEWDECIMAL: 2, BLOB: 1, GEOMETRY: 1, JSON: 1,
    STRING: 2, VAR_STRING: 2, TIMESTAMP2: 1, DATETIME2: 1, TIME2: 1, 140: 1, 141: 2, 242: 1,
}  # fmt: skip
"""Column type -> number of metadata bytes for a column of this type."""

_SIGNS, _DEFAULT_CHARSET, _CHARSETS, _NAMES, _SETS, _ENUMS = 1, 2, 3, 4, 5, 6
_KEY, _KEY_PREFIX, _DEFAULT_ENUM_CHARSET, _ENUM_CHARSETS = 8, 9, 10, 11

_HEAD = Struct("<IBIIIH").unpack_from


class Event(NamedTuple):
    """The header fields of an event, and its body without the checksum."""

    kind: int
    timestamp_s: int
    end: int
    """The offset in the file after the event, in 32 bits; 0 if the event has none."""
    flags: int
    body: bytes


class TableMap(NamedTuple):
    """The columns of a table, for the rows in the events that follow."""

    columns: list[BinlogColumn]
    """The columns. Their names are empty unless the log has full metadata."""
    key: list[str]
    """The columns of the primary key."""


def head(payload: bytes, checksums: bool) -> Event:
    """Returns the event in a packet of the server. The first byte of the packet is a marker and is
    skipped.
    """
    try:
        timestamp_s, kind, _server, size, end, flags = _HEAD(payload, 1)
    except error:
        raise MalformedInput("an event of the binary log is cut off") from None
    if size != len(payload) - 1 or size < 19 + 4 * checksums:
        raise MalformedInput(f"an event of {size} bytes came as {len(payload) - 1} bytes")
    return Event(kind, timestamp_s, end, flags, payload[20 : len(payload) - 4 * checksums])


def format_checksums(event: Event) -> bool:
    """Returns whether the events that follow the format description `event` have checksums.

    `event.body` must still contain the checksum of `event` itself.
    """
    return len(event.body) > 5 and event.body[-5] == 1


def rotation_of(event: Event) -> tuple[str, int]:
    """Returns the name of the log's next file, and the offset where its events begin."""
    try:
        return event.body[8:].decode(), int.from_bytes(event.body[:8], "little")
    except ValueError as cause:
        raise _malformed("the name of a file") from cause


def query_of(event: Event) -> tuple[str, str]:
    """Returns the database and the text of a statement."""
    body = event.body
    if len(body) < 13:
        raise MalformedInput("a statement of the binary log is cut off")
    begin = 13 + int.from_bytes(body[11:13], "little")
    end = begin + body[8]
    return body[begin:end].decode(errors="replace"), body[end + 1 :].decode(errors="replace")


def lenenc(body: bytes, at: int) -> tuple[int, int]:
    """Returns the length-encoded integer at offset `at`, and the offset after it."""
    first = body[at]
    if first < 251:
        return first, at + 1
    size = {252: 2, 253: 3, 254: 8}[first]
    return int.from_bytes(body[at + 1 : at + 1 + size], "little"), at + 1 + size


def _malformed(what: str) -> MalformedInput:
    return MalformedInput(f"{what} in the binary log cannot be read")


def table_name_of(event: Event) -> tuple[str, str]:
    """Returns the database and the table name in a table map event."""
    body, at = event.body, 8
    names = []
    try:
        for _ in range(2):
            end = at + 1 + body[at]
            names.append(body[at + 1 : end].decode())
            at = end + 1
    except (IndexError, ValueError) as cause:
        raise _malformed("the name of a table") from cause
    return names[0], names[1]


def table_map_of(event: Event) -> TableMap:
    """Returns the `TableMap` in a table map event."""
    try:
        return _table_map(event.body)
    except (IndexError, KeyError, ValueError) as cause:
        raise _malformed("the description of a table") from cause


def _table_map(body: bytes) -> TableMap:
    at = 8
    for _ in range(2):  # The names.
        at += 2 + body[at]
    count, at = lenenc(body, at)
    if count > len(body) - at:
        raise IndexError(count)
    types, at = list(body[at : at + count]), at + count
    size, at = lenenc(body, at)
    described, at = body[at : at + size], at + size
    lengths, place = [0] * count, 0
    for i, type_ in enumerate(types):
        size = _METADATA.get(type_, 0)
        length = int.from_bytes(described[place : place + size], "little")
        place += size
        if type_ == STRING:
            # The first byte is the type. Two of its bits belong to the length.
            first, second = length & 0xFF, length >> 8
            if first & 0x30 != 0x30:
                length = second | ((first & 0x30) ^ 0x30) << 4
                first |= 0x30
            else:
                length = second
            types[i] = first
        lengths[i] = length
    at += (count + 7) // 8
    fields: dict[int, bytes] = {}
    while at < len(body):
        field = body[at]
        size, at = lenenc(body, at + 1)
        fields[field], at = body[at : at + size], at + size
    return _described(types, lengths, fields)


def _described(
    types: list[int],
    lengths: list[int],
    fields: Mapping[int, bytes],
) -> TableMap:
    """Returns the `TableMap` for the types, lengths and optional metadata of columns."""
    count = len(types)
    names = [text.decode() for text in _strings(fields.get(_NAMES, b""))] or [""] * count
    signs = iter(_bits(fields.get(_SIGNS, b"")))
    unsigned = [type_ in NUMERIC and next(signs, False) for type_ in types]
    collations = [0] * count
    for kinds, default, listed in (
        (TEXTS, _DEFAULT_CHARSET, _CHARSETS),
        ({ENUM, SET}, _DEFAULT_ENUM_CHARSET, _ENUM_CHARSETS),
    ):
        places = [i for i, type_ in enumerate(types) if type_ in kinds]
        if listed in fields:
            for i, one in zip(places, _numbers(fields[listed]), strict=False):
                collations[i] = one
        elif default in fields:
            first, *pairs = _numbers(fields[default])
            others = dict(zip(pairs[::2], pairs[1::2], strict=True))
            for number_, i in enumerate(places):
                collations[i] = others.get(number_, first)
    members: list[Sequence[bytes]] = [()] * count
    for kind, field in ((SET, _SETS), (ENUM, _ENUMS)):
        lists = _lists(fields.get(field, b""))
        for i in (i for i, type_ in enumerate(types) if type_ == kind):
            members[i] = next(lists, [])
    if _KEY in fields:
        key = _numbers(fields[_KEY])
    else:
        key = _numbers(fields.get(_KEY_PREFIX, b""))[::2]
    columns = [
        BinlogColumn(*one)
        for one in zip(names, types, lengths, unsigned, collations, members, strict=True)
    ]
    return TableMap(columns, [names[i] for i in key])


def _bits(content: bytes) -> list[bool]:
    return [bool(byte & (0x80 >> bit)) for byte in content for bit in range(8)]


def _numbers(content: bytes) -> list[int]:
    found, at = [], 0
    while at < len(content):
        number, at = lenenc(content, at)
        found.append(number)
    return found


def _strings(content: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(content):
        length, at = lenenc(content, at)
        found.append(content[at : at + length])
        at += length
    return found


def _lists(content: bytes) -> Iterator[list[bytes]]:
    """Yields the lists of texts in an optional metadata field, one for each ENUM or SET column."""
    at = 0
    while at < len(content):
        count, at = lenenc(content, at)
        found = []
        for _ in range(count):
            length, at = lenenc(content, at)
            found.append(content[at : at + length])
            at += length
        yield found


class RowShape:
    """Decodes the rows of a table that have the columns of one `TableMap`."""

    def __init__(
        self, table: TableMap, charsets: Mapping[int, str], json_columns: frozenset[str]
    ) -> None:
        """`charsets` maps collations to character sets. `json_columns` names text columns that
        contain JSON. Raises ValueError naming a column that cannot be decoded.
        """
        self.names = [column.name for column in table.columns]
        self._readers: list[Any] = []
        for column in table.columns:
            try:
                self._readers.append(reader_of(column, charsets, column.name in json_columns))
            except ValueError as cause:
                raise ValueError(f"column {column.name!r} cannot be read: {cause}") from None
        self._count = len(self.names)
        self._null_bytes = (self._count + 7) // 8

    def row(self, body: bytes, at: int) -> tuple[tuple[Any, ...], int]:
        end = at + self._null_bytes
        nulls = int.from_bytes(body[at:end], "little")
        at = end
        values: list[Any] = []
        append = values.append
        if nulls:
            for read in self._readers:
                if nulls & 1:
                    append(None)
                else:
                    value, at = read(body, at)
                    append(value)
                nulls >>= 1
        else:
            for read in self._readers:
                value, at = read(body, at)
                append(value)
        if at > len(body):
            raise IndexError(at)
        return tuple(values), at


def table_id(event: Event) -> int:
    """Returns the number of the table in a table map event or rows event."""
    return int.from_bytes(event.body[:6], "little")


def rows_of(event: Event, shape: RowShape) -> list[tuple[Any, ...]] | None:
    """Returns the rows of an event. Returns None if the event lacks some of the columns."""
    try:
        return _rows(event, shape)
    except (IndexError, KeyError, ValueError, error) as cause:
        raise _malformed("a row") from cause


def _rows(event: Event, shape: RowShape) -> list[tuple[Any, ...]] | None:
    body, at = event.body, 8
    if event.kind >= 30:
        at += int.from_bytes(body[8:10], "little")
    count, at = lenenc(body, at)
    if count != len(shape.names) or not count:
        raise ValueError(count)
    size = (count + 7) // 8
    every = (1 << count) - 1
    for _ in range(2 if ROWS[event.kind] == "update" else 1):
        if int.from_bytes(body[at : at + size], "little") & every != every:
            return None
        at += size
    rows, end = [], len(body)
    read = shape.row
    while at < end:
        row, at = read(body, at)
        rows.append(row)
    return rows


_COMMENT = re.compile(r"/\*.*?\*/|--[^\n]*\n|#[^\n]*\n", re.DOTALL)
_WORD = r"(?:`((?:[^`]|``)+)`|\"((?:[^\"]|\"\")+)\"|([\w$]+))"
_TABLE = re.compile(rf"\s*{_WORD}(?:\s*\.\s*{_WORD})?")
_TRUNCATE = re.compile(r"TRUNCATE\s+(?:TABLE\s+)?", re.IGNORECASE)
_DROP = re.compile(
    r"DROP\s+(TABLE|DATABASE|SCHEMA)\s+(?:IF\s+EXISTS\s+)?|(CREATE)\s+OR\s+REPLACE\s+TABLE\s+"
    r"|(ALTER)\s+(?:ONLINE\s+|IGNORE\s+)*TABLE\s+(?:IF\s+EXISTS\s+)?",
    re.IGNORECASE,
)
_PARTITION = re.compile(r"\b(?:DROP|TRUNCATE|EXCHANGE)\s+PARTITION\b", re.IGNORECASE)


def statement(text: str) -> str:
    """Returns the SQL statement `text` without comments."""
    return _COMMENT.sub(" ", text).strip()


def _table_at(text: str, at: int, database: str) -> tuple[tuple[str, str], int] | None:
    """Returns the database and the table that `text` names at offset `at`, and the offset after the
    name. The default is `database`.
    """
    found = _TABLE.match(text, at)
    if found is None:
        return None
    names = [
        name.replace(2 * sign, sign)
        for first in (1, 4)
        for sign, name in zip('`" ', found.group(first, first + 1, first + 2), strict=True)
        if name is not None
    ]
    return ((names[0], names[1]) if len(names) == 2 else (database, names[0])), found.end()


def truncated_table(text: str, database: str) -> tuple[str, str] | None:
    """Returns the database and the table that a TRUNCATE statement empties. Returns None for any
    other statement.
    """
    begin = _TRUNCATE.match(text)
    found = None if begin is None else _table_at(text, begin.end(), database)
    return None if found is None else found[0]


def removed_tables(text: str, database: str) -> list[tuple[str, str]]:
    """Returns the database and name of each table that a statement drops or replaces, or from which
    it removes a partition.

    An empty name stands for all tables of the database.
    """
    begin = _DROP.match(text)
    if begin is None or (begin[3] and _PARTITION.search(text) is None):
        return []
    names = []
    at = begin.end()
    while (found := _table_at(text, at, database)) is not None:
        name, at = found
        names.append(name)
        if begin[2] or begin[3] or text[at : at + 1].strip() not in (",", ""):
            break
        comma = text.find(",", at)
        if comma < 0 or text[at:comma].strip():
            break
        at = comma + 1
    if begin[1] and begin[1].upper() != "TABLE":
        return [(name, "") for _, name in names]
    return names
