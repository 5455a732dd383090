"""Encodes a batch of columns as bytes: msgpack of the shape of its columns, in which arrays of
numbers are their bytes.

    [kind, ...]   0 numbers: dtype, values, bytes of validity or nil
                  1 coded: codes as unsigned ints, 0 for None, and entries as a batch of the codec
                  2 objects: a batch of the codec
                  3 records: length, names, columns, kind of the records
                  4 ints: dtype, the least, the difference of each to it, validity
                  5 coded: number of a table of the channel, its number of entries, the new
                    entries, codes

Each byte costs a copy and a check at both ends. So ints that are close together are encoded by
their differences, in as few bytes as these need. Floats that lose no digits take four bytes. The
kind of records is False for dicts and tuples, True for window results, and otherwise the name of a
class that consists only of its fields; other records are encoded as objects. The decoder checks its
input like every frame: lengths must agree, codes must have entries, and only the known dtypes are
accepted.

With the dictionary encoding of a channel, each text is sent once; afterwards only its code is sent.
A channel has one producer and one consumer. Its data arrives once and in order, even over a later
connection. Each end keeps its own tables. A table is the list of entries that the columns share,
which must be a `GrowingList`, a list that only grows. The bytes of a batch contain the number of
the table, the number of entries sent before, and the new entries. So the bytes are valid only in
their channel. Data that leaves the order of the channel, such as in-flight data of a checkpoint, is
encoded again without tables.

Records can be stored as columns if their type consists only of its fields. The reader makes such
records from the values, in order, without running code of the application.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic

import msgspec

from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch, NumberColumn, ObjectColumn
from aioflow.core.functions import WindowResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from aioflow.core.wire.serializers import Codec

__all__ = [
    "EntryTables",
    "GrowingList",
    "decode_column",
    "encode_column",
    "encode_stretches",
    "is_made_by_position",
]

TABLES_MAX = 16
"""Maximum number of tables of a channel.

A table's number is never reused for another list, so that encoded batches waiting at either end
stay valid.
"""

ENTRIES_PER_RECORD = 4
"""Maximum ratio of the number of new entries of a batch to the number of its records.

Above this ratio the batch contains the entries that it uses, which is cheaper.
"""

ENTRIES_MAX = 1 << 20
"""Maximum number of entries of a table. A larger number from the peer is rejected."""


class GrowingList(list[Any]):
    """A list that many batches share. It only grows at its end."""

    __slots__ = ()


class EntryTables:
    """The tables that one end of a channel keeps."""

    __slots__ = ("_lists", "_open", "_sent")

    def __init__(self) -> None:
        self._lists: list[GrowingList] = []
        self._sent: list[int] = []
        self._open: dict[int, int] = {}

    def place(self, entries: list[Any], records: int) -> tuple[int, int] | None:
        """Returns the number of the table for `entries`, and how many entries of the table were
        sent before.

        Returns None if the table cannot be used, so that the encoded batch has to contain its
        entries itself. `records` is the number of records of the batch. New entries count as sent
        after `commit`.
        """
        if type(entries) is not GrowingList:
            return None
        lists = self._lists
        number = next(
            (number for number, known in enumerate(lists) if known is entries), len(lists)
        )
        sent = self._open.get(number, self._sent[number] if number < len(self._sent) else 0)
        if len(entries) > ENTRIES_MAX or len(entries) - sent > ENTRIES_PER_RECORD * records:
            return None
        if number == len(lists):
            if number == TABLES_MAX:
                return None
            lists.append(entries)
            self._sent.append(0)
        self._open[number] = len(entries)
        return number, sent

    @property
    def are_used(self) -> bool:
        """Whether `place` has placed entries since the last `commit` or `forget`."""
        return bool(self._open)

    def commit(self) -> None:
        """Notes that the placed entries were sent."""
        for number, count in self._open.items():
            self._sent[number] = count
        self._open.clear()

    def forget(self) -> None:
        """Discards the placed entries, because another value of the batch could not be encoded."""
        self._open.clear()

    def filled(self, number: int, base: int, new: list[Any]) -> list[Any]:
        """Adds the entries `new` to table `number`, after its first `base` entries, and returns the
        table.

        Entries that the table already has are not added twice. Raises ValueError for arguments that
        no correct producer sends.
        """
        lists = self._lists
        if number == len(lists) < TABLES_MAX and base == 0:
            lists.append(GrowingList())
            self._sent.append(0)
        if (
            not 0 <= number < len(lists)
            or not 0 <= base <= len(lists[number])
            or base + len(new) > ENTRIES_MAX
        ):
            raise ValueError(f"table {number} of the channel does not have {base} entries")
        entries = lists[number]
        entries.extend(new[len(entries) - base :])
        return entries


_GENERATED = "<string>"
"""File name of code that `dataclasses` generates."""

_TYPES_MAX = 1_024
"""Maximum number of cached types, because a peer chooses the types that it names."""


@lru_cache(_TYPES_MAX)
def is_made_by_position(kind: Any, names: tuple[str, ...]) -> bool:
    """Returns whether `kind` has these fields, and `kind(*values)` only sets them.

    `kind` must be a dataclass, NamedTuple or Struct.
    """
    if not isinstance(kind, type) or hasattr(kind, "__post_init__"):
        return False
    if issubclass(kind, tuple):
        return (
            kind.__bases__ in ((tuple,), (tuple, Generic))
            and getattr(kind, "_fields", None) == names
        )
    if issubclass(kind, msgspec.Struct):
        if kind.__init__ is not msgspec.Struct.__init__:
            return False
    elif not _is_plain_dataclass(kind):
        return False
    parameters = inspect.signature(kind).parameters
    return tuple(parameters) == names and all(
        one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters.values()
    )


def _is_plain_dataclass(kind: Any) -> bool:
    """Returns whether `dataclass` generated the class's `__init__`, and setting a field runs no
    other code.

    A class may define `__init__` itself.
    """
    params = vars(kind).get("__dataclass_params__")
    if params is None or not params.init or kind.__new__ is not object.__new__:
        return False
    code = getattr(vars(kind)["__init__"], "__code__", None)
    return (
        code is not None
        and code.co_filename == _GENERATED
        and (params.frozen or kind.__setattr__ is object.__setattr__)
    )


_NUMBERS, _CODED, _OBJECTS, _RECORDS, _INTS, _TABLED = range(6)
_DTYPES = {"|b1": 1, "<i8": 8, "<f8": 8, "<f4": 4}
_READ_AS = {"<i8": "i8", "<f8": "f8", "<f4": "f8"}
_UNSIGNED = {"|u1": 1, "<u2": 2, "<u4": 4}
_DEPTH_MAX = 16
_LIMIT = 2**63
_LEAST_MAX = _LIMIT - (1 << 32)
_TRIED = 64
"""Number of floats that are tried first, to find out whether half the bytes suffice."""
_BARE_MAX = 1 << 20
"""Maximum number of records without columns. Such records take no bytes, so a peer could claim any
number.
"""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list).decode


def encode_column(
    column: Column, codec: Codec, owner: str, tables: EntryTables | None = None
) -> bytes:
    """Returns the bytes of `column`; `tables` are the tables of the channel.

    Raises TypeNotSupported naming `owner` for a value that cannot be encoded.
    """
    return _pack(_shape(column, codec, owner, tables))


def encode_stretches(
    column: Column, bounds: Sequence[int], codec: Codec, owner: str
) -> list[bytes]:
    """Returns the encoded bytes of each slice of `column` between two adjacent `bounds`.

    The bounds rise from 0 to the length of the column. The bytes of each slice decode like those of
    `encode_column`. For slices of a few hundred records this takes half the time, because numpy's
    work is done once for all slices. Ints may take more bytes, because all slices use the width of
    the widest slice.
    """
    return list(map(_pack, _shapes(column, bounds, codec, owner)))


def decode_column(
    content: bytes | memoryview, codec: Codec, tables: EntryTables | None = None
) -> Column:
    """Returns the column that `encode_column` encoded; `tables` are the tables of the channel.

    Raises ValueError or DecodeError if `content` is not an encoded column.
    """
    try:
        shape = _unpack(content)
    except RecursionError:
        raise ValueError("columns are nested too deeply") from None
    return _column(shape, codec, 0, tables)


def _shape(column: Column, codec: Codec, owner: str, tables: EntryTables | None) -> list[Any]:
    import numpy as np

    if isinstance(column, NumberColumn):
        values = column.values.astype(column.values.dtype.newbyteorder("<"), copy=False)
        valid = None if column.valid is None else column.valid.tobytes()
        if values.dtype.kind == "i" and len(values):
            least = int(values.min())
            dtype = _smallest(int(values.max()) - least)
            if dtype is not None and least < _LEAST_MAX:
                return [_INTS, dtype, least, (values - least).astype(dtype).tobytes(), valid]
        return [_NUMBERS, *_floats(values), valid]
    if isinstance(column, CodedColumn):
        codes, entries = column.codes, column.entries
        if tables is not None and (table := tables.place(entries, len(codes))) is not None:
            number, base = table
            new = codec.encode_batch(entries[base:], owner=owner) if len(entries) > base else b""
            dtype = _smallest(len(entries)) or "<u4"
            return [_TABLED, number, base, new, dtype, _packed(codes, dtype)]
        if len(entries) > len(codes) // 2:
            # Encodes only the used entries, because a part of a batch shares the entries of the
            # whole batch.
            used = np.zeros(len(entries) + 1, np.bool_)
            used[codes] = True
            used[-1] = False  # It was set by code -1.
            kept = np.flatnonzero(used)
            if len(kept) < len(entries):
                place = np.full(len(entries) + 1, -1, np.int32)
                place[kept] = np.arange(len(kept))
                codes, entries = place[codes], [entries[code] for code in kept.tolist()]
        dtype = _smallest(len(entries)) or "<u4"
        return [_CODED, dtype, _packed(codes, dtype), codec.encode_batch(entries[:], owner=owner)]
    if isinstance(column, ColumnBatch) and (kind := _kind(column, codec)) is not None:
        shapes = [_shape(one, codec, owner, tables) for one in column.columns.values()]
        return [_RECORDS, len(column), list(column.columns), shapes, kind]
    return [_OBJECTS, codec.encode_batch(column.to_list(), owner=owner)]


def _shapes(column: Column, bounds: Sequence[int], codec: Codec, owner: str) -> list[list[Any]]:
    """Returns the shape (see the module) of each slice of `column` between two adjacent
    `bounds`.
    """
    stretches = list(pairwise(bounds))
    if isinstance(column, NumberColumn):
        *head, values, valid = _shape(column, codec, owner, None)
        width = len(values) // max(len(column), 1)
        return [
            [
                *head,
                values[width * begin : width * stop],
                None if valid is None else valid[begin:stop],
            ]
            for begin, stop in stretches
        ]
    if isinstance(column, CodedColumn):
        return _coded_shapes(column, bounds, codec, owner)
    if isinstance(column, ColumnBatch) and (kind := _kind(column, codec)) is not None:
        names = list(column.columns)
        of_columns = [_shapes(one, bounds, codec, owner) for one in column.columns.values()]
        return [
            [_RECORDS, stop - begin, names, [shapes[number] for shapes in of_columns], kind]
            for number, (begin, stop) in enumerate(stretches)
        ]
    items = column.to_list()
    return [
        [_OBJECTS, codec.encode_batch(items[begin:stop], owner=owner)] for begin, stop in stretches
    ]


def _coded_shapes(
    column: CodedColumn, bounds: Sequence[int], codec: Codec, owner: str
) -> list[list[Any]]:
    """Returns the shape of each slice, with only those entries that the slice uses.

    The entries are found by one sort of all codes: by slice, then by code.
    """
    import numpy as np

    count, entries = len(column), column.entries
    size = len(entries) + 1  # Codes from 0, which is None.
    place_bits = count.bit_length()
    number = np.arange(len(bounds) - 1).repeat(np.diff(bounds))
    both = ((number * size + column.codes + 1) << place_bits) | np.arange(count)
    both.sort()
    places = both & ((1 << place_bits) - 1)
    both >>= place_bits
    is_first = np.ones(count, np.bool_)
    is_first[1:] = both[1:] != both[:-1]
    used = both[is_first]  # By stretch, each code once.
    starts = used.searchsorted(np.arange(len(bounds)) * size)
    used %= size
    # The first entry of a stretch gets code 1, unless it is None.
    base = starts[:-1] + (np.append(used, 0)[starts[:-1]] == 0) - 1
    packed = np.empty(count, np.int64)
    packed[places] = is_first.cumsum() - 1
    packed -= base[number]
    dtype = _smallest(int(packed.max(initial=0))) or "<u4"
    codes = packed.astype(dtype).tobytes()
    width, absent = np.dtype(dtype).itemsize, (base >= starts[:-1]).tolist()
    chosen, firsts = list(map([None, *entries].__getitem__, used.tolist())), starts.tolist()
    shapes: list[list[Any]] = []
    for at, (begin, stop) in enumerate(pairwise(bounds)):
        own = chosen[firsts[at] + absent[at] : firsts[at + 1]]
        shapes.append(
            [
                _CODED,
                dtype,
                codes[width * begin : width * stop],
                codec.encode_batch(own, owner=owner),
            ]
        )
    return shapes


def _floats(values: np.ndarray) -> tuple[str, bytes]:
    """Returns the dtype and the bytes of `values`.

    Floats that lose no digits in four bytes, such as whole numbers, halves and eighths, take half
    the bytes.
    """
    import numpy as np

    if values.dtype.kind == "f":
        with np.errstate(all="ignore"):
            for part in (values[:_TRIED], values):
                narrow = part.astype("<f4")
                if not (narrow == part).all():
                    break
            else:
                return "<f4", narrow.tobytes()
    return values.dtype.str, values.tobytes()


def _packed(codes: np.ndarray, dtype: str) -> bytes:
    import numpy as np

    return np.add(codes, 1, dtype=dtype, casting="unsafe").tobytes()  # type: ignore[no-any-return]


def _smallest(greatest: int) -> str | None:
    """Returns the smallest unsigned dtype that holds ints up to `greatest`, or None if eight bytes
    are needed.
    """
    if greatest < 1 << 16:
        return "|u1" if greatest < 1 << 8 else "<u2"
    return "<u4" if greatest < 1 << 32 else None


def _kind(batch: ColumnBatch, codec: Codec) -> bool | str | None:
    """Returns the kind of records (see the module); None if they have to be encoded as objects."""
    make = batch.make
    if make is None or make is WindowResult:
        return make is not None
    names = tuple(batch.columns)
    if (
        isinstance(make, type)
        and names
        and codec.fields_of(make) == names
        and is_made_by_position(make, names)
    ):
        return codec.name_of(make)
    return None


def _column(shape: Any, codec: Codec, depth: int, tables: EntryTables | None) -> Column:
    import numpy as np

    if depth > _DEPTH_MAX:
        raise ValueError("columns are nested too deeply")
    match shape:
        case [0, str(dtype), bytes(values), None | bytes() as valid] if dtype in _DTYPES:
            flags = _flags(valid, len(values), _DTYPES[dtype])
            if dtype == "|b1":
                return NumberColumn(np.frombuffer(values, np.uint8) != 0, flags)
            return NumberColumn(
                np.frombuffer(values, dtype).astype(_READ_AS[dtype], copy=False), flags
            )
        case [4, str(dtype), int(least), bytes(values), None | bytes() as valid] if (
            dtype in _UNSIGNED
        ):
            flags = _flags(valid, len(values), _UNSIGNED[dtype])
            if not -_LIMIT <= least < _LEAST_MAX:
                raise ValueError("ints of a column are beyond 64 bits")
            ints = np.frombuffer(values, dtype).astype(np.int64)
            ints += least
            return NumberColumn(ints, flags)
        case [1, str(dtype), bytes(content), bytes(packed)] if dtype in _UNSIGNED:
            return _coded(content, dtype, codec.decode_batch(packed))
        case [5, int(number), int(base), bytes(packed), str(dtype), bytes(content)] if (
            dtype in _UNSIGNED and tables is not None
        ):
            return _coded(
                content,
                dtype,
                tables.filled(number, base, codec.decode_batch(packed) if packed else []),
            )
        case [2, bytes(packed)]:
            return ObjectColumn(list(codec.decode_batch(packed)))
        case [3, int(length), list(names), list(shapes), bool() | str() as kind] if (
            length >= 0 and len(names) == len(shapes)
        ):
            if not all(type(name) is str or type(name) is int for name in names) or len(
                set(names)
            ) < len(names):
                raise ValueError("the columns of a batch have no names of their own")
            columns = {
                name: _column(one, codec, depth + 1, tables)
                for name, one in zip(names, shapes, strict=True)
            }
            if not columns and length > _BARE_MAX:
                raise ValueError(f"{length} records without a column")
            if any(len(column) != length for column in columns.values()):
                raise ValueError("the columns of a batch differ in length")
            if kind is True and len(columns) != len(WindowResult._fields):
                raise ValueError("window results have other columns")
            if isinstance(kind, str):
                return _records(kind, columns, length, codec)
            return ColumnBatch(columns, length, WindowResult if kind else None)
    raise ValueError("a column of this kind is not part of the format")


def _coded(content: bytes, dtype: str, entries: list[Any]) -> CodedColumn:
    import numpy as np

    if len(content) % _UNSIGNED[dtype]:
        raise ValueError("the codes of a column are cut off")
    codes = np.frombuffer(content, dtype)
    if len(codes) and int(codes.max()) > len(entries):
        raise ValueError("a column has codes without an entry")
    return CodedColumn(np.subtract(codes, 1, dtype=np.int32, casting="unsafe"), entries)


def _flags(valid: bytes | None, size: int, of_each: int) -> Any:
    """Returns an array of flags that are true for values that are not None. Returns None if all
    flags are true.

    Raises ValueError if an array of `size` bytes does not have one flag for each item of `of_each`
    bytes.
    """
    import numpy as np

    count, rest = divmod(size, of_each)
    if rest or (valid is not None and len(valid) != count):
        raise ValueError("an array of a column is cut off")
    return None if valid is None else np.frombuffer(valid, np.uint8) != 0


def _records(kind: str, columns: dict[Any, Column], length: int, codec: Codec) -> Column:
    """Returns records of the class `kind`, as columns if the class has not changed.

    If the class has changed since the records were written, they are made one by one.
    """
    names = tuple(columns)
    try:
        assembler = codec.assembler(kind, names)
    except LookupError as error:
        raise ValueError(str(error)) from error
    cls: Any = assembler.cls
    if codec.fields_of(cls) == names and is_made_by_position(cls, names):
        return ColumnBatch(columns, length, cls)
    if assembler.decode is not None or not names:
        raise ValueError(f"{kind} was written field by field, and is registered otherwise here")
    return ObjectColumn(assembler.assemble(list(zip(*columns.values(), strict=True))))
