"""Decodes the messages of PostgreSQL's output plugin `pgoutput`, protocol version 1.

`decode(message)` returns the content of one message, and keeps no state. The columns of a relation
come in a separate message before the first change of its rows. Malformed bytes raise
MalformedInput. See "Logical Replication Message Formats" in PostgreSQL's documentation.

Values are in text format. A cell is bytes, None for NULL, or `UNCHANGED`. The latter stands for a
large value that the statement did not change, so the server did not log it again.
"""

from __future__ import annotations

from struct import Struct, error
from typing import Any, Final, NamedTuple

from aioflow.core.errors import MalformedInput

__all__ = [
    "UNCHANGED",
    "Begin",
    "Cell",
    "Commit",
    "Message",
    "Relation",
    "RelationColumn",
    "RowChange",
    "Truncate",
    "decode",
    "lsn_number",
    "lsn_text",
]

EPOCH_US = 946_684_800_000_000
"""Microseconds from 1970 to 2000, the epoch of the server's timestamps."""


class _Unchanged:
    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged()

Cell = bytes | _Unchanged | None


class Begin(NamedTuple):
    """The message that begins a transaction. Transactions arrive one after the other, in the order
    of their commits.
    """

    final_lsn: int
    """Place of the commit in the log."""
    committed_us: int
    """Time of the commit, in microseconds since 1970."""


class Commit(NamedTuple):
    """The message that ends a transaction."""

    end_lsn: int
    """Place in the log after the transaction. The next transaction ends at a later place."""


class RelationColumn(NamedTuple):
    name: str
    type_oid: int
    in_identity: bool
    """Whether the column is part of the replica identity."""


class Relation(NamedTuple):
    """The message with the columns of a table. It comes before the first change of the table's
    rows, and again when the columns change.
    """

    oid: int
    schema: str
    table: str
    identity: str
    """The replica identity: d (the primary key), i (an index), f (the whole row), n (nothing)."""
    columns: list[RelationColumn]


class RowChange(NamedTuple):
    """The change of one row."""

    kind: str
    """"insert", "update" or "delete"."""
    oid: int
    old: list[Cell] | None
    """The row before the change. None if neither it nor its key was logged."""
    old_is_whole: bool
    """Whether `old` is the whole row. Otherwise only the columns of the replica identity have
    values.
    """
    new: list[Cell] | None


class Truncate(NamedTuple):
    """The removal of all rows of some tables."""

    oids: list[int]


Message = Begin | Commit | Relation | RowChange | Truncate

_LSN_TIME = Struct(">qq").unpack_from
_LSN = Struct(">q").unpack_from
_INT = Struct(">i").unpack_from
_UINT = Struct(">I").unpack_from
_SHORT = Struct(">h").unpack_from
_COLUMN = Struct(">Ii").unpack_from

_INSERT, _UPDATE, _DELETE = b"I"[0], b"U"[0], b"D"[0]
_KEY, _OLD, _NEW = b"K"[0], b"O"[0], b"N"[0]
_NULL, _TEXT, _SAME = b"n"[0], b"t"[0], b"u"[0]


def decode(message: bytes) -> Message | None:
    """Returns the content of `message`. Returns None for a message that does not concern rows."""
    try:
        found, end = _decode(message)
    except (IndexError, error, UnicodeDecodeError) as fault:
        raise MalformedInput(f"message {message[:40]!r} of pgoutput is cut off") from fault
    if found is not None and end != len(message):
        raise MalformedInput(f"message {message[:40]!r} of pgoutput has {len(message) - end} more")
    return found


def _decode(message: bytes) -> tuple[Message | None, int]:
    kind = message[0]
    if kind == _INSERT:
        (oid,) = _UINT(message, 1)
        _expect(message, 5, _NEW)
        new, at = _row(message, 6)
        return RowChange("insert", oid, None, False, new), at
    if kind == _UPDATE:
        (oid,) = _UINT(message, 1)
        at, old, whole = 5, None, False
        if message[5] != _NEW:
            whole = _is_whole(message)
            old, at = _row(message, 6)
        _expect(message, at, _NEW)
        new, at = _row(message, at + 1)
        return RowChange("update", oid, old, whole, new), at
    if kind == _DELETE:
        (oid,) = _UINT(message, 1)
        old, at = _row(message, 6)
        return RowChange("delete", oid, old, _is_whole(message), None), at
    if kind == b"B"[0]:
        final_lsn, time_us = _LSN_TIME(message, 1)
        return Begin(final_lsn, time_us + EPOCH_US), 21
    if kind == b"C"[0]:
        return Commit(_LSN(message, 10)[0]), 26
    if kind == b"R"[0]:
        return _relation(message)
    if kind == b"T"[0]:
        (count,) = _INT(message, 1)
        if not 0 <= count <= len(message):
            raise IndexError
        return Truncate([_UINT(message, 6 + 4 * i)[0] for i in range(count)]), 6 + 4 * count
    if kind in b"OYM":  # Origin, type and message of an application.
        return None, len(message)
    raise MalformedInput(f"message {message[:40]!r} of pgoutput has no known kind")


def _expect(message: bytes, at: int, kind: int) -> None:
    if message[at] != kind:
        raise MalformedInput(f"message {message[:40]!r} of pgoutput lacks its row")


def _is_whole(message: bytes) -> bool:
    if message[5] not in (_KEY, _OLD):
        raise MalformedInput(f"message {message[:40]!r} of pgoutput lacks its row")
    return message[5] == _OLD


def _row(message: bytes, at: int) -> tuple[list[Cell], int]:
    (count,) = _SHORT(message, at)
    at += 2
    cells: list[Cell] = []
    for _ in range(count):
        kind = message[at]
        at += 1
        if kind == _TEXT:
            (length,) = _INT(message, at)
            at += 4
            end = at + length
            if length < 0 or end > len(message):
                raise IndexError
            cells.append(message[at:end])
            at = end
        elif kind == _NULL:
            cells.append(None)
        elif kind == _SAME:
            cells.append(UNCHANGED)
        else:
            raise MalformedInput(f"a cell of {message[:40]!r} of pgoutput has no known kind")
    return cells, at


def _relation(message: bytes) -> tuple[Relation, int]:
    (oid,) = _UINT(message, 1)
    schema, at = _string(message, 5)
    table, at = _string(message, at)
    identity = chr(message[at])
    (count,) = _SHORT(message, at + 1)
    at += 3
    columns = []
    for _ in range(count):
        flags = message[at]
        name, at = _string(message, at + 1)
        type_oid, _modifier = _COLUMN(message, at)
        at += 8
        columns.append(RelationColumn(name, type_oid, bool(flags & 1)))
    # The schema pg_catalog is written as an empty text.
    return Relation(oid, schema or "pg_catalog", table, identity, columns), at


def _string(message: bytes, at: int) -> tuple[str, int]:
    end = message.find(b"\0", at)
    if end < 0:
        raise IndexError
    return message[at:end].decode(), end + 1


def lsn_text(lsn: int) -> str:
    """Returns `lsn` as the server writes it, such as "0/16B3748"."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lsn_number(text: Any) -> int:
    """Returns the place in the log for a text such as "0/16B3748"."""
    high, _, low = str(text).partition("/")
    return (int(high, 16) << 32) + int(low, 16)
