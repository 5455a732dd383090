"""Encodes elements as bytes for edges between processes: a batch with its times, keys and
watermarks, and each event in band.

`core.wire.serializers` encodes the values; this module encodes the batch around them. The
invariant: the decoded batch equals the encoded batch, type for type, in every column. Keys that
*are* the values (`key_by` of the element itself), or the same field of each value, are not written
twice. Keys that are only equal are written, since 1 and True are equal.

    batch   1 version | 1 flags | 8 watermark
            | for each present column: 4 length, msgpack or codec bytes | values
            (the column of keys may be the msgpack index or name of a field of the values)
            with flag 64 each of them is a column of `core.wire.columns`: times, watermarks, keys
            (or the name of a field), values;
            with flag 128 as well some of them refer to the tables of a channel
            (`core.wire.columns`);
            with flag 128 alone the values are extracted from the records for an aggregate
    event   msgpack array [kind, field, ...]

The `watermarks` of a batch never decrease and seldom differ, so they are written as runs if that is
shorter.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable
from operator import attrgetter, is_, itemgetter
from typing import Any, Final, Self

import msgspec

from aioflow.core.column_batch import Column, ColumnBatch, NumberColumn, ObjectColumn
from aioflow.core.elements import (
    CancelCheckpointMarker,
    CheckpointAnnouncement,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    Event,
    LatencyMarker,
    RecordBatch,
    Watermark,
    WatermarkStatus,
)
from aioflow.core.errors import ValueNotSupported
from aioflow.core.wire.columns import EntryTables, decode_column, encode_column
from aioflow.core.wire.serializers import Codec, DecodeError
from aioflow.core.wire.values import SCALARS

__all__ = [
    "BATCH_FORMAT_VERSION",
    "TabledBytes",
    "decode_batch",
    "decode_event",
    "encode_batch",
    "encode_event",
    "standing_alone",
]

BATCH_FORMAT_VERSION = 1
"""The first byte of every encoded batch.

Another version is rejected, because both ends of an edge run the same release.
"""

(
    _TIMESTAMPS,
    _KEYS,
    _KEYS_ARE_VALUES,
    _WATERMARKS,
    _WATERMARK_RUNS,
    _KEYS_ARE_FIELD,
    _COLUMNS,
    _TABLES,
) = 1, 2, 4, 8, 16, 32, 64, 128
_TAKEN: Final = _TABLES
"""The flag of `RecordBatch.taken`. The same bit means tables in a batch of columns; rows have no
tables.
"""
_ALL_FLAGS: Final = 255
_KEY_FLAGS: Final = (0, _KEYS, _KEYS_ARE_VALUES, _KEYS_ARE_FIELD)
_HEAD: Final = struct.Struct(">BBq")
_LENGTH: Final = struct.Struct(">I")

_EVENT_BYTES_MAX = 4096
"""Maximum size of an event: the largest is a latency marker with the name of its source."""


def encode_batch(
    batch: RecordBatch, codec: Codec, owner: str, tables: EntryTables | None = None
) -> bytes:
    """Returns the bytes of `batch`, which is neither changed nor kept.

    With the `tables` of a channel the bytes are valid only in that channel. Raises TypeNotSupported
    naming `owner`, the operator that emits the batch, for a value or key that cannot be encoded.
    """
    values, timestamps, keys, watermarks = (
        batch.values,
        batch.timestamps,
        batch.keys,
        batch.watermarks,
    )
    if (
        type(values) is not list
        or (timestamps is not None and type(timestamps) is not list)
        or (keys is not None and type(keys) is not list)
        or (watermarks is not None and type(watermarks) is not list)
    ):
        return _encode_columns(batch, codec, owner, tables)
    flags = _TAKEN if batch.taken else 0
    parts = [b""]
    try:
        if timestamps is not None:
            flags |= _TIMESTAMPS
            _add_column(parts, _pack(timestamps))
        if keys is not None:
            if keys is values or (
                values
                and keys[0] is values[0]
                and len(keys) == len(values)
                and all(map(is_, keys, values))
            ):
                flags |= _KEYS_ARE_VALUES
            elif (field := _key_field(keys, values, codec)) is not None:
                flags |= _KEYS_ARE_FIELD
                _add_column(parts, _pack(field))
            else:
                flags |= _KEYS
                _add_column(parts, codec.encode_batch(keys, owner=owner))
        if watermarks is not None:
            runs = _runs(watermarks)
            flags |= _WATERMARKS if runs is None else _WATERMARKS | _WATERMARK_RUNS
            _add_column(parts, _pack(watermarks if runs is None else runs))
        parts[0] = _HEAD.pack(BATCH_FORMAT_VERSION, flags, batch.watermark)
    except (OverflowError, struct.error) as error:
        raise ValueNotSupported(
            f"{owner}: a timestamp or watermark is beyond 64 bits; expected int milliseconds"
        ) from error
    parts.append(codec.encode_batch(values, owner=owner))
    return b"".join(parts)


class TabledBytes(bytes):
    """The bytes of an encoded batch that refers to the tables of its channel."""

    def __new__(cls, content: bytes, codec: Codec, owner: str, tables: EntryTables) -> Self:
        made = super().__new__(cls, content)
        made._meant = codec, owner, tables
        return made

    _meant: tuple[Codec, str, EntryTables]

    def standing_alone(self) -> bytes:
        """Returns the bytes of the same batch without references to tables."""
        return standing_alone(self, *self._meant)


def standing_alone(content: bytes, codec: Codec, where: str, tables: EntryTables) -> bytes:
    """Returns the bytes of the same batch without references to tables.

    `tables` are the tables of the channel, of its sender or its receiver.
    """
    if content[1] & (_COLUMNS | _TABLES) != _COLUMNS | _TABLES:
        return content
    return encode_batch(decode_batch(content, codec, where, tables), codec, where)


def decode_batch(
    content: bytes | bytearray | memoryview,
    codec: Codec,
    where: str,
    tables: EntryTables | None = None,
) -> RecordBatch:
    """Returns the batch that `encode_batch` encoded; `content` is not kept.

    Raises DecodeError if the bytes are not a batch. The error names `where`, the channel that
    delivered the bytes.
    """
    try:
        return _decode_batch(memoryview(content), codec, tables)
    except DecodeError as error:
        raise DecodeError(f"{where}: {error}") from error
    except (ValueError, struct.error, msgspec.MsgspecError) as error:
        raise DecodeError(
            f"{where}: cannot decode a batch of {len(content)} bytes: {error}"
        ) from error


def _decode_batch(view: memoryview, codec: Codec, tables: EntryTables | None) -> RecordBatch:
    version, flags, watermark = _HEAD.unpack_from(view)
    if version != BATCH_FORMAT_VERSION:
        raise ValueError(
            f"its format version is {version}, expected {BATCH_FORMAT_VERSION}; run the same "
            "release on both sides"
        )
    if flags > _ALL_FLAGS or flags & (_KEYS | _KEYS_ARE_VALUES | _KEYS_ARE_FIELD) not in _KEY_FLAGS:
        raise ValueError(f"flags {flags:#x} are not part of the format")
    at = _HEAD.size
    if flags & _COLUMNS:
        return _decode_columns(view, flags, watermark, codec, tables if flags & _TABLES else None)
    timestamps = keys = watermarks = field = None
    if flags & _TIMESTAMPS:
        section, at = _column(view, at)
        timestamps = _unpack_ints(section)
    if flags & _KEYS:
        section, at = _column(view, at)
        keys = codec.decode_batch(section)
    if flags & _KEYS_ARE_FIELD:
        section, at = _column(view, at)
        field = _unpack_field(section)
    if flags & _WATERMARKS:
        section, at = _column(view, at)
        watermarks = _unpack_ints(section)
    values = codec.decode_batch(view[at:])
    count = len(values)
    if flags & _KEYS_ARE_VALUES:
        keys = list(values)
    if field is not None:
        keys = _keys_of_field(values, field, codec)
    if watermarks is not None and flags & _WATERMARK_RUNS:
        watermarks = _spread(watermarks, count)
    for name, column in (("timestamps", timestamps), ("keys", keys), ("watermarks", watermarks)):
        if column is not None and len(column) != count:
            raise ValueError(f"it has {count} values and {len(column)} {name}")
    return RecordBatch(values, timestamps, keys, watermarks, watermark, bool(flags & _TAKEN))


def _encode_columns(
    batch: RecordBatch, codec: Codec, owner: str, tables: EntryTables | None
) -> bytes:
    """Encodes a batch of columns. Times, watermarks, keys and values are each a column, in this
    order.

    If the keys are a field of the values, the name of the field is encoded in their place.
    """
    if tables is not None:
        tables.forget()  # Discards entries of an earlier batch that was not sent.
    values: Any = batch.values
    flags = _COLUMNS
    parts = [b""]
    columns: list[tuple[int, Any]] = [
        (_TIMESTAMPS, batch.timestamps),
        (_WATERMARKS, batch.watermarks),
        (_KEYS, batch.keys),
    ]
    fields = values.columns.items() if isinstance(values, ColumnBatch) else ()
    for flag, column in columns:
        if column is None:
            continue
        if flag == _KEYS and (names := [name for name, field in fields if field is column]):
            flags |= _KEYS_ARE_FIELD
            _add_column(parts, _pack(names[0]))
            continue
        flags |= flag
        _add_column(parts, encode_column(_as_column(column), codec, owner, tables))
    parts.append(encode_column(_as_column(values), codec, owner, tables))
    tabled = tables is not None and tables.are_used
    parts[0] = _HEAD.pack(
        BATCH_FORMAT_VERSION, flags | _TABLES if tabled else flags, batch.watermark
    )
    content = b"".join(parts)
    if tables is None or not tabled:
        return content
    tables.commit()
    return TabledBytes(content, codec, owner, tables)


def _as_column(items: Any) -> Column:
    return items if isinstance(items, Column) else ObjectColumn(items)


def _as_items(column: Column) -> Any:
    # A list stays a list, so that readers of rows need not know columns.
    return column.to_list() if isinstance(column, ObjectColumn) else column


def _decode_columns(
    view: memoryview, flags: int, watermark: int, codec: Codec, tables: EntryTables | None
) -> RecordBatch:
    if flags & (_KEYS_ARE_VALUES | _WATERMARK_RUNS):
        raise ValueError(f"flags {flags:#x} are not part of the format")
    at = _HEAD.size
    found: dict[int, Any] = {}
    for flag in (_TIMESTAMPS, _WATERMARKS, _KEYS):
        if flags & flag:
            section, at = _column(view, at)
            column = decode_column(section, codec, tables)
            if flag != _KEYS and not _are_ints(column):
                raise ValueError("its timestamps or watermarks are no ints")
            found[flag] = _as_items(column)
    if flags & _KEYS_ARE_FIELD:
        section, at = _column(view, at)
        field = _unpack_field(section)
    values = decode_column(view[at:], codec, tables)
    if flags & _KEYS_ARE_FIELD:
        if isinstance(values, ObjectColumn):
            # The records' class has changed since.
            found[_KEYS] = _keys_of_field(values.to_list(), field, codec)
        elif not isinstance(values, ColumnBatch) or field not in values.columns:
            raise ValueError(f"its keys are field {field!r}, which the values do not have")
        else:
            found[_KEYS] = values.columns[field]
    if any(len(column) != len(values) for column in found.values()):
        raise ValueError("its columns differ in length")
    return RecordBatch(
        _as_items(values),
        found.get(_TIMESTAMPS),
        found.get(_KEYS),
        found.get(_WATERMARKS),
        watermark,
    )


def _are_ints(column: Column) -> bool:
    if isinstance(column, NumberColumn):
        return column.valid is None and column.values.dtype.kind == "i"
    return isinstance(column, ObjectColumn) and all(type(item) is int for item in column)


def _key_field(keys: list[Any], values: list[Any], codec: Codec) -> int | str | None:
    """Returns the index or name of the field in which each of `values` holds its key.

    The key must be the same object. Returns None if there is no such field.
    """
    if not values or len(keys) != len(values):
        return None
    first, key = values[0], keys[0]
    kind = type(first)
    named: Iterable[tuple[Any, Any]]
    if kind is tuple:
        named = enumerate(first)
    elif kind is dict:  # A lone surrogate is not printable, and cannot be written.
        named = [
            (name, item) for name, item in first.items() if type(name) is str and name.isprintable()
        ]
    elif kind in SCALARS:
        return None
    else:
        named = [(name, getattr(first, name, None)) for name in codec.fields_of(kind)]
    for field, held in named:
        if held is key and list(map(type, values)).count(kind) == len(values):
            try:
                if all(map(is_, keys, map(_getter(kind, field), values))):
                    return field
            except (LookupError, AttributeError):
                pass  # One of the values lacks the field.
    return None


def _keys_of_field(values: list[Any], field: int | str, codec: Codec) -> list[Any]:
    kind = type(values[0]) if values else tuple
    if kind is not tuple and kind is not dict and field not in codec.fields_of(kind):
        raise ValueError(
            f"its keys are field {field!r} of {kind.__qualname__}, which has none of that name"
        )
    try:
        return list(map(_getter(kind, field), values))
    except Exception as error:  # The other values may be of any types.
        raise ValueError(
            f"its keys are field {field!r} of the values, and not all have it"
        ) from error


def _getter(kind: type[Any], field: int | str) -> Callable[[Any], Any]:
    return itemgetter(field) if kind is tuple or kind is dict else attrgetter(str(field))


def _add_column(parts: list[bytes], content: bytes) -> None:
    parts.append(_LENGTH.pack(len(content)))
    parts.append(content)


def _column(view: memoryview, at: int) -> tuple[memoryview, int]:
    """Returns the bytes of the column that begins at offset `at`, and the offset of the next
    column.
    """
    start = at + _LENGTH.size
    stop = start + _LENGTH.unpack_from(view, at)[0]
    if stop > len(view):
        raise ValueError("a column is cut off")
    return view[start:stop], stop


def _runs(watermarks: list[int]) -> list[int] | None:
    """Returns [watermark, count, ...], or None if this is not shorter than the list itself. Reads
    only the ends of runs.
    """
    runs: list[int] = []
    at, count = 0, len(watermarks)
    runs_max = count >> 2
    while at < count:
        if len(runs) >= runs_max:
            return None
        stop = bisect_right(watermarks, watermarks[at], at)
        runs += (watermarks[at], stop - at)
        at = stop
    return runs


def _spread(runs: list[int], count: int) -> list[int]:
    # The sum is checked first, because a few bytes must not become a list of any length.
    lengths = runs[1::2]
    if len(runs) % 2 or min(lengths, default=1) < 1 or sum(lengths) != count:
        raise ValueError(f"its runs of watermarks do not make {count}")
    watermarks: list[int] = []
    for watermark, length in zip(runs[::2], lengths, strict=True):
        watermarks += [watermark] * length
    return watermarks


def encode_event(event: Event) -> bytes:
    """Returns the bytes of an event of `core.elements`."""
    kind, names = _KIND_OF[type(event)]
    return _pack([kind, *[getattr(event, name) for name in names]])


def decode_event(content: bytes | bytearray | memoryview, where: str) -> Event:
    """Returns the event that `encode_event` encoded.

    Raises DecodeError, which names `where`, if the bytes are not an event, or if this release does
    not know the kind of the event.
    """
    if len(content) > _EVENT_BYTES_MAX:
        raise DecodeError(
            f"{where}: an event takes {len(content)} bytes, expected up to {_EVENT_BYTES_MAX}"
        )
    try:
        kind, *given = _unpack_list(content)
        if type(kind) is not int or not 0 <= kind < len(_EVENTS):
            raise DecodeError(
                f"{where}: an event of kind {kind!r} is not known here; run the same release on "
                "both sides"
            )
        cls, schema = _EVENTS[kind]
        return cls(*msgspec.convert(given, schema))
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise DecodeError(
            f"{where}: cannot decode an event of {len(content)} bytes: {error}"
        ) from error


def _refuse_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension type {code} is not part of the format")


_pack: Final[Callable[[Any], bytes]] = msgspec.msgpack.Encoder().encode
_unpack_list: Final[Callable[[Any], list[Any]]] = msgspec.msgpack.Decoder(
    list, ext_hook=_refuse_extension
).decode
_unpack_ints: Final[Callable[[Any], list[int]]] = msgspec.msgpack.Decoder(
    list[int], ext_hook=_refuse_extension
).decode
_unpack_field: Final[Callable[[Any], int | str]] = msgspec.msgpack.Decoder(
    int | str, ext_hook=_refuse_extension
).decode

_EVENTS: Final[tuple[tuple[Callable[..., Event], Any], ...]] = (
    (Watermark, tuple[int]),
    (WatermarkStatus, tuple[bool]),
    (CheckpointBarrier, tuple[int, int, bool, bool, int | None, bool, str, bool, bool]),
    (CancelCheckpointMarker, tuple[int]),
    (EndOfData, tuple[bool]),
    (EndOfPartition, tuple[()]),
    (LatencyMarker, tuple[int, str, int]),
    (CheckpointAnnouncement, tuple[int]),
)
"""The class and field types of each kind, in order.

The index is part of the wire format, so a new kind is appended.
"""

_KIND_OF: Final[dict[type, tuple[int, tuple[str, ...]]]] = {
    cls: (kind, cls.__struct_fields__)
    for kind, (cls, _) in enumerate(_EVENTS)
    if isinstance(cls, type) and issubclass(cls, msgspec.Struct)
}
