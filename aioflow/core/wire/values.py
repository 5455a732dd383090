"""Converts values whose types msgpack cannot distinguish to tagged trees that it can encode, and
back.

In a tagged tree every array is `[tag, ...]`, so that a list, a tuple, a set and a date keep their
types. None, bool, float, bytes, ints of 64 bits and valid UTF-8 strings are written as they are. A
map is a dict whose keys are all of these types. Classes of the user are written once, in a table
`[[name, [field, ...]], ...]`, and are named by their index in it.

The invariant: `Untagger(t.table).untag(Tagger().tag(v))` equals v, type for type, or `tag` raises
TypeNotSupported.

An array or scalar of numpy is written as three plain values. numpy is optional, and is imported
only for the first such value. The three values are the dtype as numpy writes it (`"<f8"`, byte
order included), the shape (None for a scalar) and the items in C order. The text of a `numpy.str_`
and the bytes of a `numpy.bytes_` have no such dtype, because a dtype of fixed width drops trailing
zeros: they are `"U"` and `"S"`.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from itertools import chain, islice
from operator import itemgetter
from types import ModuleType
from typing import Any, Final
from uuid import UUID

from aioflow.core.errors import ValueNotSupported
from aioflow.core.user_code import conversion_error
from aioflow.core.wire.kinds import Kind, type_name
from aioflow.core.wire.types import Assembler, TypePlan, TypeRegistry

__all__ = [
    "DEPTH_MAX",
    "SCALARS",
    "Tagger",
    "Untagger",
    "from_parts",
    "is_of_numpy",
    "parts",
]

_KINDS = "biufcmMSU"
"""Kinds of numpy dtype that are encoded by the bytes of their items: numbers, times and text, but
not objects or records.
"""


def is_of_numpy(kind: type[Any]) -> bool:
    """Returns whether `kind` is the array type of numpy or one of its scalar types."""
    numpy = sys.modules.get("numpy")
    # While another thread imports numpy, the module lacks names, and no value is of its types.
    names = {} if numpy is None else vars(numpy)
    scalar = names.get("generic")
    return kind is names.get("ndarray") or (scalar is not None and issubclass(kind, scalar))


def parts(value: Any) -> tuple[str, list[int] | None, bytes]:
    """Returns dtype, shape and bytes of a numpy array or scalar.

    Raises TypeNotSupported for a dtype other than of numbers, times and text.
    """
    numpy = _numpy()
    kind, dtype = type(value), value.dtype
    if kind is numpy.ndarray:
        if dtype.kind not in _KINDS:
            raise ValueNotSupported(
                f"a numpy array of dtype {dtype} cannot travel: use a dtype of numbers, times or "
                "text, or array.tolist()"
            )
        return dtype.str, list(value.shape), value.tobytes()
    if kind is numpy.str_:
        return "U", None, str.encode(value, "utf-8", "surrogatepass")
    if kind is numpy.bytes_:
        return "S", None, bytes(value)
    if dtype.kind not in _KINDS or numpy.dtype(dtype.str).type is not kind:
        raise ValueNotSupported(
            f"a numpy scalar of dtype {dtype!r} cannot travel: call .item() on it"
        )
    return dtype.str, None, value.tobytes()


def from_parts(dtype_text: str, shape: list[int] | None, content: bytes) -> Any:
    """Returns the array (writable) or the scalar that `parts` took apart.

    Raises ValueError or TypeError if the parts are invalid, and ImportError without numpy.
    """
    numpy = _numpy()
    if shape is None and dtype_text == "U":
        return numpy.str_(content.decode("utf-8", "surrogatepass"))
    if shape is None and dtype_text == "S":
        return numpy.bytes_(content)
    dtype = numpy.dtype(dtype_text)
    if dtype.kind not in _KINDS or dtype.str != dtype_text:
        raise ValueError(f"dtype {dtype_text!r} is not part of the format")
    if shape is None:
        (scalar,) = numpy.frombuffer(content, dtype)
        return scalar
    if dtype.itemsize == 0 or 0 in shape:  # No bytes to read, no memory to take.
        return numpy.empty(shape, dtype)
    return numpy.frombuffer(content, dtype).reshape(shape).copy()


def _numpy() -> ModuleType:
    # This is the only module that is imported because of a value. Its name is written here, not in
    # the value.
    import numpy

    return numpy


DEPTH_MAX = 100
"""Maximum depth of nested containers.

The recursion of the encoder and the decoder then fits the interpreter's stack from any caller.
"""

_COLUMN_MIN = 4
_COLUMN_ITEMS_MAX = 1 << 16
"""Maximum number of items of the containers of one type that are processed together.

A list that contains itself would grow with each level. Processing the values one by one soon
reaches the maximum depth.
"""

_PART_VALUES = 1 << 12
"""Number of containers that are processed together if all at once would have too many items."""

_COLUMNS_MAX = 32
"""Maximum number of columns; wider values are no rows.

Vectors of 768 numbers would take three times as long with one call for each column.
"""

SCALARS: Final[frozenset[type]] = frozenset({type(None), bool, int, float, str, bytes})
"""Types whose values are written as they are, if ints fit 64 bits and strings have no lone
surrogates.
"""

_SAFE_SCALARS: Final[frozenset[type]] = frozenset({type(None), bool, float, bytes})

(
    _LIST,
    _TUPLE,
    _DICT,
    _SET,
    _FROZENSET,
    _INT,
    _STR,
    _DATETIME,
    _DATE,
    _TIME,
    _TIMEDELTA,
    _DECIMAL,
    _UUID,
) = range(13)
_ENUM, _RECORD, _CUSTOM, _NUMPY = range(13, 17)

_EPOCH = datetime(1970, 1, 1)

_FIXED_OFFSETS = frozenset(
    [
        ("pydantic_core._pydantic_core", "TzInfo"),
        ("dateutil.tz.tz", "tzutc"),
        ("dateutil.tz.tz", "tzoffset"),
    ]
)
"""Time zone classes with a fixed offset, which are decoded as the equal `datetime.timezone`.

Pydantic's JSON parser makes the first, dateutil's parser the others.
"""


class Tagger:
    """An encoder of the values of one batch as tagged trees.

    `careful` also checks each int and str, which may exceed msgpack's range.
    """

    __slots__ = ("_index", "_plans", "_scalars", "_types", "table")

    def __init__(self, types: TypeRegistry, *, careful: bool = False) -> None:
        self.table: list[tuple[str, tuple[str, ...]]] = []
        self._index: dict[type[Any], int] = {}
        self._plans: list[TypePlan] = []
        self._types = types
        self._scalars = _SAFE_SCALARS if careful else SCALARS

    def tag(self, value: Any, depth: int = 0) -> Any:
        """Returns the tagged tree of `value`. The tree shares the scalars of `value`. Raises
        TypeNotSupported.
        """
        kind = type(value)
        if kind in self._scalars:
            return value
        if depth >= DEPTH_MAX:
            raise ValueNotSupported(
                f"a value is nested deeper than {DEPTH_MAX} levels, or contains itself; flatten it"
            )
        encode = _TAG_BY_TYPE.get(kind)
        return (
            encode(self, value, depth + 1)
            if encode is not None
            else self._tag_class(value, kind, depth + 1)
        )

    def handles(self, kind: type[Any]) -> bool:
        """Returns whether values of type `kind` are written with a tag of their own, and not as
        instances of a user's class.
        """
        return kind in _TAG_BY_TYPE or is_of_numpy(kind)

    def tag_all(self, values: Collection[Any], depth: int) -> Collection[Any]:
        """Returns the trees of `values`, or `values` itself if all are scalars."""
        if self.stand_for_themselves(values):
            return values
        kind = _common_container(values)
        if kind is not None and depth < DEPTH_MAX:
            if sum(map(len, values)) <= _COLUMN_ITEMS_MAX:
                return (
                    self._tag_dicts(values, depth + 1)
                    if kind is dict
                    else self._tag_sequences(kind, values, depth + 1)
                )
            if len(values) > _PART_VALUES:
                left = iter(values)
                parts = iter(lambda: list(islice(left, _PART_VALUES)), [])
                return [tree for part in parts for tree in self.tag_all(part, depth)]
        tag = self.tag
        return [tag(value, depth) for value in values]

    def stand_for_themselves(self, values: Collection[Any]) -> bool:
        """Returns whether all of `values` are scalars."""
        types = list(map(type, values))
        # Nearly always there is one type, and counting it costs half as much as a lookup of each in
        # a
        # set.
        return not types or (
            types[0] in self._scalars
            and (types.count(types[0]) == len(types) or self._scalars.issuperset(types))
        )

    def class_index(self, cls: type[Any]) -> int:
        """Returns the index of `cls` in the table, to which it is added at its first use.

        Raises TypeNotSupported if instances of `cls` cannot be encoded.
        """
        index = self._index.get(cls)
        if index is None:
            plan = self._types.plan(cls)
            index = self._index[cls] = len(self.table)
            self.table.append((plan.name, plan.fields))
            self._plans.append(plan)
        return index

    @property
    def converts(self) -> bool:
        """Whether a function of the user encodes some values."""
        return any(plan.encode is not None for plan in self._plans)

    def plan(self, cls: type[Any]) -> TypePlan:
        """Returns the plan of `cls`. Raises TypeNotSupported if it cannot be encoded."""
        return self._plans[self.class_index(cls)]

    def _tag_sequences(self, kind: type[Any], values: Collection[Any], depth: int) -> list[Any]:
        """Returns the trees of lists, or of tuples, at a fraction of the cost of tagging them one
        by one.
        """
        number = _LIST if kind is list else _TUPLE
        columns = _columns_of(values)
        if columns is not None:
            return [
                [number, *row]
                for row in zip(*[self.tag_all(column, depth) for column in columns], strict=True)
            ]
        trees = iter(self.tag_all(list(chain.from_iterable(values)), depth))
        return [[number, *islice(trees, len(value))] for value in values]

    def _tag_dicts(self, values: Collection[dict[Any, Any]], depth: int) -> list[Any]:
        names = _common_keys(values)
        if names is None or not self.stand_for_themselves(names):
            return [_tag_dict(self, value, depth) for value in values]
        columns = [
            self.tag_all(column, depth) for column in zip(*map(dict.values, values), strict=True)
        ]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def _tag_class(self, value: Any, kind: type[Any], depth: int) -> Any:
        if is_of_numpy(kind):
            return [_NUMPY, *parts(value)]
        index = self.class_index(kind)
        plan = self._plans[index]
        if plan.kind is Kind.ENUM:
            if isinstance(value, enum.Flag):  # Combinations of flags have no name that is kept.
                return [_ENUM, index, self.tag(value._value_, depth)]
            return [_ENUM, index, self.tag(value._name_, depth)]
        if plan.encode is not None:
            try:
                made = plan.encode(value)
            except Exception:
                raise
            except BaseException as error:
                raise conversion_error(plan.encode, error) from error
            return [_CUSTOM, index, self.tag(made, depth)]
        return [_RECORD, index, *self.tag_all(plan.rows((value,))[0], depth)]


class Untagger:
    """The decoder of tagged trees.

    A malformed tree yields an arbitrary value or error: the caller converts errors to one kind.
    """

    __slots__ = ("_assemblers",)

    def __init__(self, types: TypeRegistry, table: Iterable[Any]) -> None:
        """Makes a decoder. Raises LookupError for a class of `table` that is not loaded here."""
        self._assemblers: list[Assembler] = [
            types.assembler(name, fields) for name, fields in table
        ]

    @property
    def converts(self) -> bool:
        """Whether a function of the user decodes some values."""
        return any(assembler.decode is not None for assembler in self._assemblers)

    def untag(self, tree: Any, depth: int = 0) -> Any:
        """Returns the value that `tree` encodes."""
        kind = type(tree)
        if kind is list:
            if depth >= DEPTH_MAX:
                raise ValueError(f"nested deeper than {DEPTH_MAX} levels")
            return _UNTAG[tree[0]](self, tree, depth + 1)
        if kind is dict:
            if SCALARS.issuperset(map(type, tree.values())):
                return tree
            if depth >= DEPTH_MAX:
                raise ValueError(f"nested deeper than {DEPTH_MAX} levels")
            return {key: self.untag(value, depth + 1) for key, value in tree.items()}
        if kind not in SCALARS:
            raise ValueError(f"a {kind.__name__} is not part of the format")
        return tree

    def untag_all(self, trees: Sequence[Any], depth: int = 0) -> list[Any]:
        """Returns a new list of the values that `trees` encode."""
        if SCALARS.issuperset(map(type, trees)):
            return list(trees)
        kind = _common_container(trees)
        if depth < DEPTH_MAX:
            if kind is dict:
                return self._untag_dicts(trees, depth + 1)
            if kind is list and (number := _common_tag(trees)) is not None:
                return self._untag_sequences(number, trees, depth + 1)
        untag = self.untag
        return [untag(tree, depth) for tree in trees]

    def _untag_sequences(self, number: int, trees: Sequence[list[Any]], depth: int) -> list[Any]:
        """Returns the values of `trees`, all of which are lists or all of which are tuples, as
        `number` says.
        """
        columns = _columns_of(trees)
        if columns is not None and len(columns) > 1:
            rows = zip(*[self.untag_all(column, depth) for column in columns[1:]], strict=True)
            return list(rows) if number == _TUPLE else list(map(list, rows))
        items = iter(self.untag_all(list(chain.from_iterable(tree[1:] for tree in trees)), depth))
        make = tuple if number == _TUPLE else list
        return [make(islice(items, len(tree) - 1)) for tree in trees]

    def _untag_dicts(self, trees: Sequence[dict[Any, Any]], depth: int) -> list[Any]:
        if SCALARS.issuperset(map(type, chain.from_iterable(map(dict.values, trees)))):
            return list(trees)
        names = _common_keys(trees)
        if names is None:
            return [
                {key: self.untag(value, depth) for key, value in tree.items()} for tree in trees
            ]
        columns = [
            self.untag_all(column, depth) for column in zip(*map(dict.values, trees), strict=True)
        ]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def assembler(self, index: int) -> Assembler:
        """Returns the assembler of the class at `index` of the table."""
        if index < 0:
            raise ValueError(f"class index is {index}")
        return self._assemblers[index]


def _common_container(values: Collection[Any]) -> type[Any] | None:
    """Returns the common type of `values` if it is list, tuple or dict and `values` are not few."""
    if len(values) < _COLUMN_MIN:
        return None
    kinds = list(map(type, values))
    kind = kinds[0]
    return kind if kind in (list, tuple, dict) and kinds.count(kind) == len(kinds) else None


def _common_tag(trees: Sequence[list[Any]]) -> int | None:
    """Returns the common tag of `trees` if it is the tag of lists or of tuples, otherwise None."""
    numbers = list(map(itemgetter(0), trees))
    number = numbers[0]
    return (
        number
        if type(number) is int
        and number in (_LIST, _TUPLE)
        and numbers.count(number) == len(numbers)
        else None
    )


def _columns_of(values: Collection[Sequence[Any]]) -> list[tuple[Any, ...]] | None:
    """Returns the columns of `values` if they are rows of one length, otherwise None."""
    lengths = list(map(len, values))
    if not 0 < lengths[0] <= _COLUMNS_MAX or lengths.count(lengths[0]) != len(lengths):
        return None
    return list(zip(*values, strict=True))


def _common_keys(values: Collection[dict[Any, Any]]) -> tuple[Any, ...] | None:
    """Returns the keys of all `values`, if they are rows with the same texts in the same order.

    Keys that are not texts do not qualify, because 1 and True are equal but not the same.
    """
    keys = list(map(tuple, values))
    first = keys[0]
    if (
        not 0 < len(first) <= _COLUMNS_MAX
        or keys.count(first) != len(keys)
        or set(map(type, chain.from_iterable(keys))) != {str}
    ):
        return None
    return first


def _tag_list(tagger: Tagger, value: list[Any], depth: int) -> Any:
    return [_LIST, *tagger.tag_all(value, depth)]


def _tag_tuple(tagger: Tagger, value: tuple[Any, ...], depth: int) -> Any:
    return [_TUPLE, *tagger.tag_all(value, depth)]


def _tag_dict(tagger: Tagger, value: dict[Any, Any], depth: int) -> Any:
    values = tagger.tag_all(value.values(), depth)
    if tagger.stand_for_themselves(value):
        return dict(zip(value, values, strict=True))
    return [_DICT, list(tagger.tag_all(value, depth)), list(values)]


def _tag_set(tagger: Tagger, value: set[Any], depth: int) -> Any:
    return [_SET, *_tag_members(tagger, value, depth)]


def _tag_frozenset(tagger: Tagger, value: frozenset[Any], depth: int) -> Any:
    return [_FROZENSET, *_tag_members(tagger, value, depth)]


def _tag_members(tagger: Tagger, members: Collection[Any], depth: int) -> Collection[Any]:
    try:
        # Sorted if possible, so that equal sets have the same bytes in every process.
        members = sorted(members)
    except TypeError:
        pass
    return tagger.tag_all(members, depth)


def _tag_int(tagger: Tagger, value: int, depth: int) -> Any:
    if -(2**63) <= value < 2**64:
        return value
    return [_INT, value.to_bytes((value.bit_length() + 8) >> 3, "big", signed=True)]


def _tag_str(tagger: Tagger, value: str, depth: int) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return [_STR, value.encode("utf-8", "surrogatepass")]
    return value


def _tag_datetime(tagger: Tagger, value: datetime, depth: int) -> Any:
    zone = value.tzinfo
    delta = (value if zone is None else value.replace(tzinfo=None)) - _EPOCH
    micros = (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
    return [_DATETIME, micros, value.fold, None if zone is None else _tag_zone(tagger, zone, depth)]


def _tag_time(tagger: Tagger, value: time, depth: int) -> Any:
    micros = ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond
    return [_TIME, micros, value.fold, _tag_zone(tagger, value.tzinfo, depth)]


def _tag_zone(tagger: Tagger, zone: tzinfo | None, depth: int) -> Any:
    kind = type(zone)
    if zone is None or zone is UTC:
        return None if zone is None else 0
    from zoneinfo import ZoneInfo  # Imported late: most programs have no such zone.

    # mypy cannot narrow by `kind`.
    if kind is ZoneInfo and zone.key is not None:  # type: ignore[attr-defined]
        return zone.key  # type: ignore[attr-defined]
    if (kind.__module__, kind.__qualname__) in _FIXED_OFFSETS:
        offset = zone.utcoffset(None)
        assert offset is not None
        zone = timezone(offset)
        kind = timezone
        if zone is UTC:
            return 0
    if kind is timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return tagger.tag([offset, *name], depth)
    raise ValueNotSupported(
        f"a datetime with a time zone of type {type_name(kind)} cannot travel: use "
        "zoneinfo.ZoneInfo(key) or datetime.timezone"
    )


def _tag_date(tagger: Tagger, value: date, depth: int) -> Any:
    return [_DATE, value.toordinal()]


def _tag_timedelta(tagger: Tagger, value: timedelta, depth: int) -> Any:
    return [_TIMEDELTA, value.days, value.seconds, value.microseconds]


def _tag_decimal(tagger: Tagger, value: Decimal, depth: int) -> Any:
    return [_DECIMAL, str(value)]


def _tag_uuid(tagger: Tagger, value: UUID, depth: int) -> Any:
    return [_UUID, value.bytes]


_TAG_BY_TYPE: Final[dict[type, Callable[[Tagger, Any, int], Any]]] = {
    list: _tag_list,
    tuple: _tag_tuple,
    dict: _tag_dict,
    set: _tag_set,
    frozenset: _tag_frozenset,
    int: _tag_int,
    str: _tag_str,
    datetime: _tag_datetime,
    date: _tag_date,
    time: _tag_time,
    timedelta: _tag_timedelta,
    Decimal: _tag_decimal,
    UUID: _tag_uuid,
}


def _untag_list(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    return untagger.untag_all(tree[1:], depth)


def _untag_tuple(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    return tuple(untagger.untag_all(tree[1:], depth))


def _untag_dict(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    _, keys, values = tree
    return dict(
        zip(untagger.untag_all(keys, depth), untagger.untag_all(values, depth), strict=True)
    )


def _untag_set(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    return set(untagger.untag_all(tree[1:], depth))


def _untag_frozenset(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    return frozenset(untagger.untag_all(tree[1:], depth))


def _untag_int(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    return int.from_bytes(_bytes(tree), "big", signed=True)


def _untag_str(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    return _bytes(tree).decode("utf-8", "surrogatepass")


def _untag_datetime(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    _, micros, fold, zone = tree
    naive = _EPOCH + timedelta(0, 0, micros)
    if zone is None and fold == 0:
        return naive
    return naive.replace(tzinfo=_untag_zone(untagger, zone, depth), fold=fold)


def _untag_time(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    _, micros, fold, zone = tree
    moment = (_EPOCH + timedelta(microseconds=micros)).time()
    return moment.replace(tzinfo=_untag_zone(untagger, zone, depth), fold=fold)


def _untag_zone(untagger: Untagger, tree: Any, depth: int) -> tzinfo | None:
    if tree is None:
        return None
    if tree == 0:
        return UTC
    if type(tree) is str:
        from zoneinfo import ZoneInfo

        return ZoneInfo(tree)
    return timezone(*untagger.untag(tree, depth))


def _untag_date(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    return date.fromordinal(tree[1])


def _untag_timedelta(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    _, days, seconds, microseconds = tree
    return timedelta(days, seconds, microseconds)


def _untag_decimal(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    return Decimal(tree[1])


def _untag_uuid(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    return UUID(bytes=_bytes(tree))


def _untag_enum(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    _, index, member = tree
    cls = untagger.assembler(index).cls
    member = untagger.untag(member, depth)
    if issubclass(cls, enum.Flag):
        return cls(member)
    found = cls.__members__.get(member)
    if found is None:
        raise LookupError(
            f"{type_name(cls)} has no member {member!r}; keep members that were written, as aliases"
        )
    return found


def _untag_record(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    assembler = untagger.assembler(tree[1])
    if assembler.decode is not None or assembler.kind is Kind.ENUM:
        raise ValueError(
            f"{type_name(assembler.cls)} was written field by field, and is registered otherwise "
            "here"
        )
    return assembler.assemble((untagger.untag_all(tree[2:], depth),))[0]


def _untag_custom(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    _, index, payload = tree
    assembler = untagger.assembler(index)
    if assembler.decode is None:
        raise LookupError(
            f"{type_name(assembler.cls)} was written by its encode=, and has no decode= here; "
            "register it"
        )
    written = untagger.untag(payload, depth)
    try:
        value = assembler.decode(written)
    except Exception:
        raise
    except BaseException as error:
        raise conversion_error(assembler.decode, error) from error
    if type(value) is not assembler.cls:
        raise TypeError(
            f"decode= of {type_name(assembler.cls)} returned a {type_name(type(value))}"
        )
    return value


def _untag_numpy(untagger: Untagger, tree: list[Any], depth: int) -> Any:
    _, dtype, shape, content = tree
    return from_parts(dtype, shape, content)


def _bytes(tree: list[Any]) -> bytes:
    content = tree[1]
    if type(content) is not bytes:
        raise ValueError("expected bytes")
    return content


_UNTAG: Final[dict[int, Callable[[Untagger, list[Any], int], Any]]] = {
    _LIST: _untag_list,
    _TUPLE: _untag_tuple,
    _DICT: _untag_dict,
    _SET: _untag_set,
    _FROZENSET: _untag_frozenset,
    _INT: _untag_int,
    _STR: _untag_str,
    _DATETIME: _untag_datetime,
    _DATE: _untag_date,
    _TIME: _untag_time,
    _TIMEDELTA: _untag_timedelta,
    _DECIMAL: _untag_decimal,
    _UUID: _untag_uuid,
    _ENUM: _untag_enum,
    _RECORD: _untag_record,
    _CUSTOM: _untag_custom,
    _NUMPY: _untag_numpy,
}
