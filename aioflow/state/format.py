"""The file format of keyed state, for savepoints and for checkpoints of the heap backend.

    "aioflow.keyed" | version (1 byte) | frame*
    frame = length (4 bytes, big endian) | msgpack array, its first element the kind

    HEADER   first and once: max_parallelism, first and last key group, the tables (name, kind,
             timed), event time of the timer services
    DROPS    a table, namespaces: their contents in earlier files are void. Before the entries,
             which may fill the namespaces again
    PUTS     a table, first and last key group of the entries, namespaces, keys, values: three
             columns of equal length
    REMOVES  the same without values: removed keys of earlier files
    END      last and once: the number of frames before it

Columns are batches of the codec; namespaces that are all None are left out. Entries are in order of
their key groups, in frames of bounded size. So writing takes little memory, and a reader skips
frames of key groups that it does not need, without decoding them. Only plain files of the heap
(`heap_churn`) are not in this order: each of their frames may contain all key groups.

The values of a table are the stored values of its states: a value, list, map, reduced value or
accumulator, with their times if the table is timed. Timers are tables of kind `timers`:
namespace = timestamp, key = (key, namespace of the timer), value = order among equal timestamps.

Any other content is rejected with RestoreError, which names the file and the operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from aioflow.core.errors import ProtocolError, RestoreError, TypeNotSupported, ValueNotSupported
from aioflow.core.keygroups import KeyGroupRange, key_groups
from aioflow.core.wire.serializers import Codec
from aioflow.state.snapshot import TableMeta, Uncopied

__all__ = [
    "TIMERS",
    "Drops",
    "Entries",
    "FileHeader",
    "encode_drops",
    "encode_end",
    "encode_entries",
    "encode_header",
    "encode_timers",
    "encode_value",
    "groups_of",
    "groups_of_read",
    "read_frames",
]

MAGIC = b"aioflow.keyed"
VERSION = 1

TIMERS = "timers"
"""Kind of a table that holds the timers of one service in one time domain."""

FRAME_BYTES_MAX = 1 << 30

KEY_CHARS_MAX = 80
"""Maximum length of a key in an error message."""

_HEADER, _DROPS, _PUTS, _REMOVES, _END = range(5)


class FileHeader(msgspec.Struct, frozen=True):
    """The decoded header of a state file."""

    max_parallelism: int
    groups: KeyGroupRange
    """Key groups of the subtask that wrote the file."""
    tables: dict[str, TableMeta]
    """All tables by name, including those without rows in the file.

    Frames identify a table by its position in this dict.
    """
    watermarks: dict[str, int]
    """Event time of each timer service, by name."""


class Drops(msgspec.Struct, frozen=True):
    """A frame that lists namespaces of a table that were dropped."""

    table: str
    namespaces: list[Any]


class Entries(msgspec.Struct, frozen=True):
    """A frame that contains rows of one table. `values` is None if the keys were removed."""

    table: str
    groups: KeyGroupRange
    """A range of key groups that contains the key group of each key."""
    namespaces: list[Any]
    keys: list[Any]
    values: list[Any] | None


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: int
    max_parallelism: int
    first: int
    last: int
    tables: list[tuple[str, str, bool]]
    watermarks: dict[str, int]


class _Drops(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: int
    table: int
    namespaces: bytes


class _Entries(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: int
    table: int
    first: int
    last: int
    namespaces: bytes | None
    keys: bytes
    values: bytes | None


class _End(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: int
    frames: int


def groups_of(kind: str, keys: Sequence[Any], max_parallelism: int) -> list[int]:
    """Returns the key group of each of `keys` of a table of `kind`.

    Raises KeyNotSupported if `canonical_key` refuses a key.
    """
    return key_groups([key for key, _ in keys] if kind == TIMERS else keys, max_parallelism)


def groups_of_read(kind: str, keys: Sequence[Any], max_parallelism: int, where: str) -> list[int]:
    """Returns the same as `groups_of`, for keys that were read from the file or state `where`.

    Raises RestoreError, which names `where`, if a value cannot be a key.
    """
    try:
        return groups_of(kind, keys, max_parallelism)
    except (TypeNotSupported, TypeError, LookupError) as error:
        raise RestoreError(
            f"cannot restore {where}: it holds a key that is none: {error}"
        ) from error


# Writing.


def encode_header(header: FileHeader) -> bytes:
    """Returns the bytes at the beginning of a file."""
    tables = [(name, meta.kind, meta.timed) for name, meta in header.tables.items()]
    groups = header.groups
    return (
        MAGIC
        + bytes((VERSION,))
        + _frame(
            _Header(
                _HEADER, header.max_parallelism, groups.start, groups.end, tables, header.watermarks
            )
        )
    )


def encode_drops(table: int, namespaces: list[Any], codec: Codec, owner: str) -> bytes:
    return _frame(_Drops(_DROPS, table, _column(codec, namespaces, f"{owner}, namespaces")))


def encode_entries(
    table: int,
    groups: KeyGroupRange,
    namespaces: list[Any],
    keys: list[Any],
    values: list[Any] | None,
    codec: Codec,
    owner: str,
) -> bytes:
    """Encodes rows of the key groups `groups` as one frame. If `values` is None, the frame removes
    the keys.

    Raises TypeNotSupported, which names `owner` and the remedy, if a key, namespace or value cannot
    be encoded.
    """
    return _frame(
        _Entries(
            _REMOVES if values is None else _PUTS,
            table,
            groups.start,
            groups.end,
            None
            if namespaces.count(None) == len(namespaces)
            else _column(codec, namespaces, f"{owner}, namespaces"),
            _column(codec, keys, f"{owner}, keys"),
            None if values is None else _values(codec, keys, values, owner),
        )
    )


def encode_timers(
    table: int,
    groups: KeyGroupRange,
    columns: tuple[list[int], list[Any], list[Any], list[int]],
    codec: Codec,
    owner: str,
) -> bytes:
    """Does the same as `encode_entries` for timers, given as columns: timestamps, keys, namespaces
    and orders.
    """
    timestamps, keys, namespaces, orders = columns
    try:
        timers = codec.encode_pairs(keys, namespaces, owner=f"{owner}, keys")
    except TypeNotSupported:
        timers = _column(codec, list(zip(keys, namespaces, strict=True)), f"{owner}, keys")
    return _frame(
        _Entries(
            _PUTS,
            table,
            groups.start,
            groups.end,
            codec.encode_batch(timestamps, owner=owner),
            timers,
            codec.encode_batch(orders, owner=owner),
        )
    )


def encode_end(frames: int) -> bytes:
    """Returns the END frame of a file. `frames` is the number of frames before it, including the
    header.
    """
    return _frame(_End(_END, frames))


def _column(codec: Codec, values: list[Any], owner: str) -> bytes:
    try:
        return codec.encode_batch(values, owner=owner)
    except TypeNotSupported:
        # A single value gives a better error message, and a batch may only be too large.
        for value in values:
            codec.check(value, owner=owner)
        raise


def _values(codec: Codec, keys: list[Any], values: list[Any], owner: str) -> bytes:
    try:
        return codec.encode_batch(values, owner=owner)
    except Exception:
        for key, value in zip(keys, values, strict=True):
            encode_value(codec, key, value, owner)
        raise


def encode_value(codec: Codec, key: Any, value: Any, owner: str) -> bytes:
    """Returns `value` as bytes.

    Raises TypeNotSupported, which names `owner`, the key, the type and the remedy, if the value
    cannot be encoded. This also replaces an error that code of the value raises, because a retry
    would fail again.
    """
    if type(value) is Uncopied:
        raise ValueNotSupported(
            f"{owner}, key {_shown(key)}: a value cannot be copied ({value.reason}), and would go "
            "on changing while the checkpoint is "
            "written; keep values that do not contain themselves, and whose classes can be copied"
        )
    try:
        return codec.encode(value, owner=owner)
    except TypeNotSupported as error:
        raise ValueNotSupported(
            str(error).replace(owner, f"{owner}, key {_shown(key)}", 1)
        ) from None
    except Exception as error:
        what = f"a {type(value).__name__} cannot be encoded: {type(error).__name__}: {error}"
        raise ValueNotSupported(f"{owner}, key {_shown(key)}: {what}") from error


def _shown(key: Any) -> str:
    text = repr(key)
    return text if len(text) <= KEY_CHARS_MAX else f"{text[:KEY_CHARS_MAX]}..."


def _frame(content: msgspec.Struct) -> bytes:
    packed = _pack(content)
    if len(packed) > FRAME_BYTES_MAX:
        raise ValueNotSupported(
            f"a frame of state takes {len(packed)} bytes, expected up to {FRAME_BYTES_MAX}; keep "
            "smaller values"
        )
    return len(packed).to_bytes(4, "big") + packed


# Reading.


def read_frames(
    content: bytes, groups: KeyGroupRange, codec: Codec, where: str
) -> Iterator[FileHeader | Drops | Entries]:
    """Yields the header, then the frames of the key groups `groups`.

    Raises RestoreError, which names `where`, if the file has another format or is incomplete.
    """
    reader = _Reader(content, codec, where)
    header = reader.header()
    yield header
    names, kinds = list(header.tables), [meta.kind for meta in header.tables.values()]
    while (frame := reader.next()) is not None:
        if not 0 <= frame.table < len(names):
            raise reader.refused(f"a frame of table {frame.table}, there are {len(names)}")
        table, kind = names[frame.table], kinds[frame.table]
        if isinstance(frame, _Drops):
            namespaces = reader.column(table, frame.namespaces)
            reader.check_keys(table, namespaces)
            yield Drops(table, namespaces)
            continue
        if not header.groups.start <= frame.first <= frame.last <= header.groups.end:
            raise reader.refused(
                f"entries of key groups {frame.first}-{frame.last} in a file of {header.groups}"
            )
        shared = groups.intersection(KeyGroupRange(frame.first, frame.last))
        if shared is not None:
            entries = _entries(reader, table, kind, frame)
            yield (
                entries
                if len(shared) > frame.last - frame.first
                else _only(entries, kind, groups, header.max_parallelism, reader)
            )


class _Reader:
    """An iterator over the frames of one state file."""

    __slots__ = ("_at", "_codec", "_content", "_frames", "_where")

    def __init__(self, content: bytes, codec: Codec, where: str) -> None:
        self._content = memoryview(content)
        self._codec = codec
        self._where = where
        self._frames = 0
        self._at = len(MAGIC) + 1

    def header(self) -> FileHeader:
        start = self._content[: self._at]
        if start[: len(MAGIC)] != MAGIC:
            raise self.refused("it is no file of keyed state")
        if len(start) != self._at or start[-1] != VERSION:
            version = "nothing" if len(start) < self._at else str(start[-1])
            raise self.refused(
                f"its format is of version {version}, this program reads {VERSION}; restore with "
                "the one that wrote it"
            )
        kind, frame = self._take()
        if kind != _HEADER:
            raise self.refused("it does not begin with a header")
        found = self._decode(_unpack_header, frame)
        tables = {name: TableMeta(kind, timed) for name, kind, timed in found.tables}
        if not 0 <= found.first <= found.last < found.max_parallelism or len(tables) != len(
            found.tables
        ):
            raise self.refused("its header contradicts itself")
        return FileHeader(
            found.max_parallelism, KeyGroupRange(found.first, found.last), tables, found.watermarks
        )

    def next(self) -> _Drops | _Entries | None:
        """Returns the next frame, or None after the last."""
        frames = self._frames
        kind, frame = self._take()
        if kind == _DROPS:
            drops: _Drops = self._decode(_unpack_drops, frame)
            return drops
        if kind in (_PUTS, _REMOVES):
            entries: _Entries = self._decode(_unpack_entries, frame)
            if (entries.values is None) is not (kind == _REMOVES):
                raise self.refused("a frame without the values that it announces")
            return entries
        if kind != _END:
            raise self.refused(f"a frame of kind {kind}")
        if self._decode(_unpack_end, frame).frames != frames or self._at != len(self._content):
            raise self.refused("it does not end where it says")
        return None

    def column(self, table: str, content: bytes) -> list[Any]:
        try:
            return self._codec.decode_batch(content)
        except ProtocolError as error:
            raise self.refused(f"state {table!r}: {error}") from error

    def check_keys(self, table: str, keys: list[Any]) -> None:
        """Raises RestoreError if one of `keys` cannot be the key of a dict."""
        try:
            dict.fromkeys(keys)
        except TypeError as error:
            raise self.refused(f"table {table!r} holds a key that is none: {error}") from error

    def in_table(self, table: str) -> str:
        """Returns a text that names this file and `table`, for error messages."""
        return f"{self._where}, table {table!r}"

    def refused(self, why: str) -> RestoreError:
        return RestoreError(f"cannot restore {self._where}: {why}")

    def _take(self) -> tuple[int, memoryview]:
        begin = self._at + 4
        end = begin + int.from_bytes(self._content[self._at : begin], "big")
        # A frame is an array of less than 16 elements, and its kind is small, so each takes one
        # byte.
        if len(self._content) < end or end < begin + 2:
            raise self.refused(f"it has {len(self._content)} bytes and breaks off at {self._at}")
        self._at = end
        self._frames += 1
        return self._content[begin + 1], self._content[begin:end]

    def _decode(self, unpack: Any, frame: memoryview) -> Any:
        try:
            return unpack(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self.refused(
                f"the frame that ends at byte {self._at} is malformed: {error}"
            ) from error


def _entries(reader: _Reader, table: str, kind: str, frame: _Entries) -> Entries:
    keys = reader.column(table, frame.keys)
    namespaces = (
        [None] * len(keys) if frame.namespaces is None else reader.column(table, frame.namespaces)
    )
    values = None if frame.values is None else reader.column(table, frame.values)
    if len(namespaces) != len(keys) or (values is not None and len(values) != len(keys)):
        raise reader.refused(f"columns of different lengths in table {table!r}")
    reader.check_keys(table, keys)
    reader.check_keys(table, namespaces)
    if kind == TIMERS and not (
        all(type(timestamp) is int for timestamp in namespaces)
        and all(type(timer) is tuple and len(timer) == 2 for timer in keys)
        and all(type(place) is int and place > 0 for place in values or ())
    ):
        raise reader.refused(f"table {table!r} has an entry that is no timer")
    return Entries(table, KeyGroupRange(frame.first, frame.last), namespaces, keys, values)


def _only(
    entries: Entries, kind: str, groups: KeyGroupRange, max_parallelism: int, reader: _Reader
) -> Entries:
    """Returns the rows of `entries` whose key group is in `groups`."""
    found = groups_of_read(kind, entries.keys, max_parallelism, reader.in_table(entries.table))
    rows = [row for row, group in enumerate(found) if groups.start <= group <= groups.end]
    return Entries(
        entries.table,
        entries.groups,
        [entries.namespaces[row] for row in rows],
        [entries.keys[row] for row in rows],
        None if entries.values is None else [entries.values[row] for row in rows],
    )


_pack = msgspec.msgpack.Encoder().encode
_unpack_header = msgspec.msgpack.Decoder(_Header).decode
_unpack_drops = msgspec.msgpack.Decoder(_Drops).decode
_unpack_entries = msgspec.msgpack.Decoder(_Entries).decode
_unpack_end = msgspec.msgpack.Decoder(_End).decode
