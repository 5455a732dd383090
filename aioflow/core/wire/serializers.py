"""Encodes batches of values in the msgpack wire format. Decoding restores equal values of the same
types.

msgpack by itself flattens tuples to lists and subclasses to their bases. So each batch is examined
once, by the exact types of its values, and written in the cheapest of five shapes that keeps them:

    PLAIN    scalars, or lists or dicts of scalars: straight through msgspec
    TUPLES   tuples of scalars: the same, read by a decoder that makes tuples
    ROWS     one dataclass, NamedTuple or Struct class, or tuples of one length: rows of field
             values; only the columns with other values than scalars are tagged, and the class and
             its fields are named once
    COLUMNS  lists or tuples of one structure, of lists and tuples, as accumulators are: the
             structure is written once, and each place in it is a column of scalars
    TAGGED   anything: each value as a tagged tree (`core.wire.values`)

    byte 0 version | byte 1 shape | PLAIN, TUPLES: msgpack array
                                  | ROWS, TAGGED, COLUMNS: 4 bytes length of the header, msgpack
                                   header, msgpack array

A value that cannot be kept is rejected with TypeNotSupported before any byte is written. Malformed
bytes raise DecodeError, instead of the error of the decoder.

`lay_out` stores values of one structure as columns: one column for each place, and the structure
once. The values are nested lists and tuples of equal lengths, around immutable values. `[1,
("a",)]` and `[2, ("b",)]` are the columns `1 2` and `"a" "b"`, with the layout `[LIST, LEAF,
[TUPLE, LEAF]]`. This takes a loop in C for each place, while value by value it takes a call for
each container. A copy of the values takes a few objects instead of two for each value.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final

import msgspec

from aioflow.core.errors import RemoteProtocolError, TypeNotSupported, ValueNotSupported
from aioflow.core.user_code import check_after_conversion
from aioflow.core.wire.kinds import Kind
from aioflow.core.wire.types import DEFAULT_TYPES, Assembler, TypeRegistry
from aioflow.core.wire.values import SCALARS, Tagger, Untagger

__all__ = [
    "FORMAT_VERSION",
    "LEAF",
    "Codec",
    "DecodeError",
    "lay_out",
    "pick",
    "put_together",
]

LEAF, LIST, TUPLE = range(3)
"""Kinds of a place in a layout: a value that is not divided, or a list or tuple whose places
follow.
"""

LEVELS_MAX = 8
WIDTH_MAX = 32
"""Maximum depth of values, and their maximum width on each level. Wider values are not laid out as
columns.
"""

ROWS_MAX = 8_192
"""Maximum number of rows that one call of `zip` transposes, because it keeps an iterator for each
row.
"""


def lay_out(
    values: Sequence[Any],
    leaves: frozenset[type],
    columns: list[Sequence[Any]],
    levels: int = LEVELS_MAX,
) -> Any:
    """Returns the layout of `values`, which must not be empty, and appends their columns to
    `columns`.

    Returns None if the values have different layouts. `leaves` are the exact types of values that
    are not divided further.
    """
    types = list(map(type, values))
    kind = types[0]
    alike = types.count(kind) == len(types)
    if kind in leaves and (alike or leaves.issuperset(types)):
        columns.append(values)
        return LEAF
    if not alike or (kind is not list and kind is not tuple) or not levels:
        return None
    if len(values) > ROWS_MAX or not 0 < len(values[0]) <= WIDTH_MAX:
        return None
    try:
        places = list(zip(*values, strict=True))
    except ValueError:
        return None
    layout: list[Any] = [LIST if kind is list else TUPLE]
    for place in places:
        inner = lay_out(place, leaves, columns, levels - 1)
        if inner is None:
            return None
        layout.append(inner)
    return layout


def put_together(layout: Any, columns: Iterator[Sequence[Any]]) -> list[Any]:
    """Builds values as `layout` describes from the next columns of `columns`.

    Raises ValueError, TypeError or StopIteration if the layout and the columns do not match.
    """
    if layout == LEAF:
        return list(next(columns))
    kind, *places = layout
    rows = zip(*[put_together(place, columns) for place in places], strict=True)
    if kind == TUPLE:
        return list(rows)
    if kind == LIST:
        return list(map(list, rows))
    raise ValueError(f"values that are built as {kind!r}")


def pick(layout: Any, columns: Iterator[Sequence[Any]], row: int) -> Any:
    """Returns the single value at index `row` of the list that `put_together` would return."""
    if layout == LEAF:
        return next(columns)[row]
    places = [pick(place, columns, row) for place in layout[1:]]
    return places if layout[0] == LIST else tuple(places)


FORMAT_VERSION = 1
"""The first byte of every encoded batch."""

_BYTES_MAX = 1 << 28
"""Maximum size of one encoded batch, 256 MiB. Decoding takes memory in proportion to the bytes."""

_ZIP_ROWS_MIN = 16
_ZIP_ROWS_MAX = 8_192
"""Maximum number of rows that one call of `zip` transposes.

Fewer rows would not be worth the call's fixed cost; more would keep too many iterators, one for
each row.
"""


class DecodeError(RemoteProtocolError):
    """The bytes are not an encoded batch, or contain types that this process does not have."""


class _Shape(enum.IntEnum):
    PLAIN = 0
    TUPLES = 1
    ROWS = 2
    TAGGED = 3
    COLUMNS = 4


_PLAIN: Final = bytes((FORMAT_VERSION, _Shape.PLAIN))
_TUPLES: Final = bytes((FORMAT_VERSION, _Shape.TUPLES))


class Codec:
    """The encoder and decoder of batches, with the types of one registry.

    A codec has no state between calls.
    """

    __slots__ = ("_bytes_max", "_types")

    def __init__(self, types: TypeRegistry = DEFAULT_TYPES, *, bytes_max: int = _BYTES_MAX) -> None:
        """Makes a codec. `bytes_max` limits the size of one encoded batch, written or read."""
        self._types = types
        self._bytes_max = bytes_max

    def encode_batch(self, values: list[Any], *, owner: str) -> bytes:
        """Returns the bytes of `values`, which are not changed or kept.

        Raises TypeNotSupported naming `owner` (the operator or state of the values), the type and
        the remedy. Also raises TypeNotSupported for more than `bytes_max` bytes. Exceptions of a
        registered `encode=` are raised unchanged; RuntimeError replaces a CancelledError or
        SystemExit of that function.
        """
        try:
            try:
                content = self._encode(values, careful=False)
            except (
                OverflowError,
                UnicodeEncodeError,
            ):
                # An int above 64 bits, or a lone surrogate, which is rare.
                content = self._encode(values, careful=True)
        except TypeNotSupported as error:
            raise ValueNotSupported(f"{owner}: {error}") from None
        except RecursionError:
            raise ValueNotSupported(
                f"{owner}: a value is nested too deeply, or contains itself; flatten it"
            ) from None
        if len(content) > self._bytes_max:
            raise ValueNotSupported(
                f"{owner}: {len(values)} values take {len(content)} bytes, expected up to "
                f"{self._bytes_max}; "
                "emit smaller values, or smaller batches"
            )
        return content

    def encode_pairs(self, firsts: list[Any], seconds: list[Any], *, owner: str) -> bytes:
        """Returns the bytes of the pairs of `firsts` and `seconds`, at most 8,192 pairs.
        `decode_batch` returns the pairs as tuples.

        The bytes may differ from those of `encode_batch`. No tuples are made in between if both
        lists contain scalars, or tuples of scalars.
        """
        columns: list[Sequence[Any]] = []
        layouts = [firsts and lay_out(column, SCALARS, columns) for column in (firsts, seconds)]
        if firsts and None not in layouts:
            try:
                content = _framed(_Shape.COLUMNS, [[TUPLE, *layouts]], columns)
            except (OverflowError, UnicodeEncodeError):
                pass
            else:
                if len(content) <= self._bytes_max:
                    return content
        return self.encode_batch(list(zip(firsts, seconds, strict=True)), owner=owner)

    def decode_batch(self, content: bytes | bytearray | memoryview) -> list[Any]:
        """Returns the values of an encoded batch. `content` is not kept.

        Raises DecodeError if `content` is not a batch, or has types that this process lacks.
        """
        try:
            return self._decode(content)
        except MemoryError:
            raise
        except Exception as error:
            # A plain LookupError is ours and says it all: a type or field that is not here. The
            # others are decoders'.
            reason = (
                str(error) if type(error) is LookupError else f"{type(error).__name__}: {error}"
            )
            raise DecodeError(f"cannot decode a batch of {len(content)} bytes: {reason}") from error

    def encode(self, value: Any, *, owner: str) -> bytes:
        """Returns the bytes of one value. Raises the errors of `encode_batch`."""
        return self.encode_batch([value], owner=owner)

    def decode(self, content: bytes | bytearray | memoryview) -> Any:
        """Returns the value from the bytes that `encode` returned.

        Raises DecodeError if `decode_batch` does, or if `content` does not hold exactly one value.
        """
        values = self.decode_batch(content)
        if len(values) != 1:
            raise DecodeError(
                f"cannot decode {len(content)} bytes: they hold {len(values)} values, expected one"
            )
        return values[0]

    def check(self, value: Any, *, owner: str) -> None:
        """Raises TypeNotSupported if `value` could not be encoded."""
        self.encode_batch([value], owner=owner)

    def fields_of(self, kind: type[Any]) -> tuple[str, ...]:
        """Returns the names of the fields by which instances of `kind` are encoded and decoded.

        Returns an empty tuple for a type without fields.
        """
        try:
            return self._types.plan(kind).fields
        except TypeNotSupported:
            return ()

    def name_of(self, kind: type[Any]) -> str:
        """Returns the name under which instances of `kind` are encoded.

        Raises TypeNotSupported if they cannot be encoded.
        """
        return self._types.plan(kind).name

    def assembler(self, name: str, fields: tuple[str, ...]) -> Assembler:
        """Returns the function that makes instances of class `name` that were written with these
        fields.

        Raises LookupError if the class is not loaded here.
        """
        return self._types.assembler(name, fields)

    def _encode(self, values: list[Any], *, careful: bool) -> bytes:
        kind = _common_type(values)
        if not careful:
            if kind in SCALARS or (kind is None and SCALARS.issuperset(map(type, values))):
                return _PLAIN + _pack(values)
            plain = _encode_containers(kind, values)
            if plain is not None:
                return plain
            if (kind is list or kind is tuple) and len(values) >= _ZIP_ROWS_MIN:
                columns: list[Sequence[Any]] = []
                if (layout := lay_out(values, SCALARS, columns)) is not None:
                    return _framed(_Shape.COLUMNS, [layout], columns)
        tagger = Tagger(self._types, careful=careful)
        if kind is not None and len(values) > 1:
            content = _encode_rows(tagger, kind, values)
            if content is not None:
                if tagger.converts:
                    check_after_conversion()
                return content
        trees = list(tagger.tag_all(values, 0))
        if tagger.converts:
            check_after_conversion()
        return _framed(_Shape.TAGGED, tagger.table, trees)

    def _decode(self, content: bytes | bytearray | memoryview) -> list[Any]:
        view = memoryview(content).cast("B")
        if len(view) > self._bytes_max:
            raise ValueError(f"expected up to {self._bytes_max} bytes")
        if len(view) < 2 or view[0] != FORMAT_VERSION:
            raise ValueError(f"expected format version {FORMAT_VERSION} in the first byte")
        shape = view[1]
        if shape == _Shape.PLAIN:
            return _unpack_list(view[2:])
        if shape == _Shape.TUPLES:
            return _unpack_tuples(view[2:])
        body = 6 + int.from_bytes(view[2:6], "big")
        if body > len(view):
            raise ValueError("the header is cut off")
        if shape == _Shape.TAGGED:
            untagger = Untagger(self._types, _unpack_list(view[6:body]))
            values = untagger.untag_all(_unpack_list(view[body:]))
            if untagger.converts:
                check_after_conversion()
            return values
        if shape == _Shape.ROWS:
            table, row_class, tagged = _unpack_list(view[6:body])
            untagger = Untagger(self._types, table)
            values = _decode_rows(untagger, row_class, tagged, _unpack_tuples(view[body:]))
            if untagger.converts:
                check_after_conversion()
            return values
        if shape == _Shape.COLUMNS:
            (layout,) = _unpack_list(view[6:body])
            columns = _unpack_list(view[body:])
            if not all(SCALARS.issuperset(map(type, column)) for column in columns):
                raise ValueError("a column of something else than scalars")
            left = iter(columns)
            values = put_together(layout, left)
            if next(left, None) is not None:
                raise ValueError("a column that stands nowhere")
            return values
        raise ValueError(f"shape {shape} is not part of the format")


def _common_type(values: list[Any]) -> type[Any] | None:
    """Returns the exact type that all `values` have, or None.

    This takes 10 ns a value; a set of the types takes 18.
    """
    if not values:
        return None
    kind = type(values[0])
    return kind if list(map(type, values)).count(kind) == len(values) else None


def _encode_containers(kind: type[Any] | None, values: list[Any]) -> bytes | None:
    """Returns the encoded batch of values of one builtin container type, or None unless they
    contain only scalars.
    """
    if kind is tuple:
        if _are_rows_of_scalars(values) or SCALARS.issuperset(
            map(type, chain.from_iterable(values))
        ):
            return _TUPLES + _pack(values)
    elif kind is dict:
        leaves = list(map(dict.values, values))
        if SCALARS.issuperset(map(type, chain.from_iterable(values))) and (
            _are_rows_of_scalars(leaves)
            or SCALARS.issuperset(map(type, chain.from_iterable(leaves)))
        ):
            return _PLAIN + _pack(values)
    elif kind is list and SCALARS.issuperset(map(type, chain.from_iterable(values))):
        return _PLAIN + _pack(values)
    return None


def _are_rows_of_scalars(values: Sequence[Iterable[Any]]) -> bool:
    """Returns whether rows have one length and columns of one scalar type each.

    May return False for such rows, too. A usual batch is examined column by column, which takes 61
    ns for a tuple of three, instead of 87 ns row by row.
    """
    if not _ZIP_ROWS_MIN <= len(values) <= _ZIP_ROWS_MAX:
        return False
    try:
        columns = list(zip(*values, strict=True))
    except ValueError:
        return False
    count = len(values)
    return all(
        type(column[0]) in SCALARS and list(map(type, column)).count(type(column[0])) == count
        for column in columns
    )


def _encode_rows(tagger: Tagger, kind: type[Any], values: list[Any]) -> bytes | None:
    """Returns the batch of values of one class or of tuples of one length, or None if they are
    neither.
    """
    row_class: int | None = None
    rows: Sequence[tuple[Any, ...]] = values
    if kind is tuple:
        if len(set(map(len, values))) != 1:
            return None
    elif tagger.handles(kind) or tagger.plan(kind).kind in (Kind.ENUM, Kind.CUSTOM):
        return None
    else:
        row_class = tagger.class_index(kind)
        rows = tagger.plan(kind).rows(values)
    tagged: list[int] = []
    columns = _transpose(rows)
    for index, column in enumerate(columns):
        if not tagger.stand_for_themselves(column):
            columns[index] = list(tagger.tag_all(column, 1))
            tagged.append(index)
    if tagged:
        rows = list(zip(*columns, strict=True))
    return _framed(_Shape.ROWS, [tagger.table, row_class, tagged], rows)


def _decode_rows(
    untagger: Untagger, row_class: int | None, tagged: list[int], rows: list[Any]
) -> list[Any]:
    if tagged and rows:
        if len(set(map(len, rows))) != 1:
            raise ValueError("rows differ in length")
        columns = _transpose(rows)
        for index in tagged:
            columns[index] = untagger.untag_all(columns[index], 1)
        rows = list(zip(*columns, strict=True))
    if row_class is None:
        return rows
    assembler = untagger.assembler(row_class)
    if assembler.decode is not None or assembler.kind is Kind.ENUM:
        raise ValueError(
            f"{assembler.cls.__qualname__} was written field by field, and is registered "
            "otherwise here"
        )
    return assembler.assemble(rows)


def _transpose(rows: Sequence[tuple[Any, ...]]) -> list[Sequence[Any]]:
    """Returns the columns of rows that all have one length."""
    if len(rows) <= _ZIP_ROWS_MAX:
        return list(zip(*rows, strict=True))
    return [list(map(itemgetter(index), rows)) for index in range(len(rows[0]))]


def _framed(shape: _Shape, header: list[Any], body: Sequence[Any]) -> bytes:
    packed = _pack(header)
    return b"".join(
        (bytes((FORMAT_VERSION, shape)), len(packed).to_bytes(4, "big"), packed, _pack(body))
    )


def _refuse_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension type {code} is not part of the format")


_pack: Final[Callable[[Any], bytes]] = msgspec.msgpack.Encoder().encode
_unpack_list: Final[Callable[[Any], list[Any]]] = msgspec.msgpack.Decoder(
    list, ext_hook=_refuse_extension
).decode
_unpack_tuples: Final[Callable[[Any], list[tuple[Any, ...]]]] = msgspec.msgpack.Decoder(
    list[tuple[Any, ...]], ext_hook=_refuse_extension
).decode
