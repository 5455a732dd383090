"""Computes the canonical bytes of a key, its key group, and the subtask that owns the group.

    key -> canonical bytes -> zlib.crc32 % max_parallelism = key group -> subtask

The invariant: keys that are equal in Python have equal canonical bytes, in every process and for
every PYTHONHASHSEED. Examples are `1 == 1.0 == True == Decimal(1)`, a NamedTuple and the plain
tuple, and one instant in two time zones. The key group of a key is a promise of the savepoint
format: the golden vectors in the tests never change.

The canonical form is a tag byte and a body; elements of composite keys are length-prefixed, so that
no two forms run into each other. None is not a valid key, but a tuple may contain it:

    i  integer: big-endian two's complement, shortest
    f  non-integral float, or infinity: IEEE 754, big endian
    q  non-integral Decimal that no float equals: shortest decimal text
    s  str: UTF-8, lone surrogates passed through
    b  bytes
    T  aware datetime: microseconds since 1970 UTC
    N  naive datetime: microseconds since 1970
    D  date: proleptic ordinal
    d  timedelta: microseconds
    u  UUID: 16 bytes
    E  Enum of no value type: class, name (Flag: value)
    t  tuple, NamedTuple
    n  None, only as a part of a tuple
    z  frozenset, sorted
    c  frozen dataclass: class and compared fields
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum, Flag
from itertools import repeat
from typing import Any
from uuid import UUID

from aioflow.core.errors import GraphError, ValueNotSupported

__all__ = [
    "MAX_PARALLELISM_LIMIT",
    "KeyGroupRange",
    "KeyNotSupported",
    "SubtaskCache",
    "canonical_key",
    "key_group",
    "key_groups",
    "range_for_subtask",
    "subtask_for_group",
]

MAX_PARALLELISM_LIMIT = 1 << 15
"""Highest allowed maximum parallelism, as in Flink. A key group is stored as a 16-bit number."""

_TEXT = frozenset((str,))
_TEXT_CHECKSUM = zlib.crc32(b"s")
_INTEGERS = frozenset((int,))
_INTEGER_CHECKSUM = zlib.crc32(b"i")
_DECIMAL_DIGITS_MAX = 10_000
"""Maximum number of digits of a Decimal key.

A Decimal such as 1E+999999999 equals an int of a gigabyte, so it is rejected, not expanded.
"""

_NAN = (
    "it is NaN, which does not equal itself and would never find its state again; filter it out "
    "or replace it"
)
_EPOCH = datetime(1970, 1, 1)
_ALLOWED = (
    "str, bytes, bool, int, float, Decimal, date, datetime, timedelta, UUID, Enum, "
    "and tuples, NamedTuples, frozensets and frozen dataclasses of these"
)


class KeyNotSupported(ValueNotSupported):
    """A value cannot be a key, because it does not equal itself, or because its type defines its
    own equality.
    """


def key_group(key: Hashable, max_parallelism: int) -> int:
    """Returns the key group of `key`, in `range(max_parallelism)`.

    Raises KeyNotSupported if `canonical_key` refuses the key.
    """
    return zlib.crc32(canonical_key(key)) % max_parallelism


def key_groups(keys: Sequence[Any], max_parallelism: int) -> list[int]:
    """Returns the key group of each of `keys`.

    Raises KeyNotSupported if `canonical_key` refuses a key.

    For texts and for integers from 0, this takes a third of the time of calls of `key_group`.
    """
    if _TEXT.issuperset(map(type, keys)):
        try:
            # The checksum of b"s" + text, without concatenating them.
            return [
                checksum % max_parallelism
                for checksum in map(zlib.crc32, map(str.encode, keys), repeat(_TEXT_CHECKSUM))
            ]
        except UnicodeEncodeError:
            pass  # One text has a lone surrogate, so they are encoded one by one.
    elif _INTEGERS.issuperset(map(type, keys)):
        lengths = [(bits + 8) >> 3 for bits in map(int.bit_length, keys)]
        try:
            # The order of bytes is a literal.
            bodies = map(int.to_bytes, keys, lengths, repeat("big"))  # type: ignore[arg-type]
            return [
                checksum % max_parallelism
                for checksum in map(zlib.crc32, bodies, repeat(_INTEGER_CHECKSUM))
            ]
        except OverflowError:
            pass  # One integer is negative, so they are encoded one by one.
    return [zlib.crc32(canonical_key(key)) % max_parallelism for key in keys]


def canonical_key(key: Any) -> bytes:
    """Returns the canonical bytes of `key`. Equal keys have equal canonical bytes.

    Raises KeyNotSupported, which names the remedy, for a value that cannot be a key, for example
    None or NaN.
    """
    kind = type(key)
    if kind is str:
        try:
            return b"s" + str.encode(key)
        except UnicodeEncodeError:
            return _encode_str(key)
    try:
        exact = _BY_TYPE.get(kind)
        return exact(key) if exact is not None else _encode_other(key)
    except RecursionError:
        raise KeyNotSupported(
            "a key is nested too deeply; key by a flat tuple of its parts"
        ) from None


def subtask_for_group(group: int, parallelism: int, max_parallelism: int) -> int:
    """Returns the index of the subtask that owns key group `group`.

    The arguments are not checked, because the function is called for each distinct key.
    """
    return group * parallelism // max_parallelism


def range_for_subtask(index: int, parallelism: int, max_parallelism: int) -> KeyGroupRange:
    """Returns the key groups of subtask `index`; the ranges of all subtasks cover every group once.

    Raises GraphError when parallelism is above max_parallelism or either is out of bounds,
    ValueError for a wrong index.
    """
    if not 1 <= max_parallelism <= MAX_PARALLELISM_LIMIT:
        raise GraphError(
            f"max_parallelism is {max_parallelism}, expected 1 to {MAX_PARALLELISM_LIMIT}"
        )
    if not 1 <= parallelism <= max_parallelism:
        raise GraphError(
            f"parallelism is {parallelism}, expected 1 to max_parallelism={max_parallelism}; "
            "max_parallelism is fixed "
            "for the life of the state: lower the parallelism, or start with a higher "
            "max_parallelism and empty state"
        )
    if not 0 <= index < parallelism:
        raise ValueError(f"subtask index is {index}, expected 0 to {parallelism - 1}")
    start = (index * max_parallelism + parallelism - 1) // parallelism
    return KeyGroupRange(start, ((index + 1) * max_parallelism - 1) // parallelism)


@dataclass(frozen=True, slots=True, order=True)
class KeyGroupRange:
    """The key groups from `start` to `end`, both included. A range is never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(
                f"key group range is {self.start} to {self.end}, expected 0 <= start <= end"
            )

    def __contains__(self, group: object) -> bool:
        return isinstance(group, int) and self.start <= group <= self.end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end + 1))

    def __len__(self) -> int:
        return self.end - self.start + 1

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"

    def intersection(self, other: KeyGroupRange) -> KeyGroupRange | None:
        """Returns the key groups that both ranges contain, or None."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return KeyGroupRange(start, end) if start <= end else None


CACHED_MIN = 1 << 15
"""Minimum capacity of a cache, in keys. A full cache of this capacity takes some four MB."""

SAMPLED = 64


class SubtaskCache:
    """A cache from a key to the index of the subtask that owns it.

    The hot loop reads `known`, and calls `find` for missing keys. `known` is a plain dict, because
    the interpreter has a special instruction for plain dicts. One lookup costs a third less than in
    a subclass with `__missing__`. A rejected key raises KeyNotSupported and is not kept. An
    unhashable key raises TypeError from `dict` itself: the caller then calls `canonical_key`, which
    raises with the better message.

    A full cache is emptied. Its capacity is `CACHED_MIN` keys at first. The capacity doubles, up to
    `limit`, if keys that were dropped are looked up again; a sample of one key in `SAMPLED` shows
    this. So keys that occur only once take little memory, however many there are.
    """

    __slots__ = (
        "_again",
        "_limit",
        "_max_parallelism",
        "_missed",
        "_parallelism",
        "_room",
        "_sample",
        "known",
    )

    def __init__(self, parallelism: int, max_parallelism: int, *, limit: int = 1_000_000) -> None:
        self.known: dict[Any, int] = {}
        """The subtask of each cached key, for reading. It is always the same dict object."""
        self._parallelism = parallelism
        self._max_parallelism = max_parallelism
        self._limit = limit
        self._room = min(CACHED_MIN, limit)
        """Current capacity in keys."""
        self._sample: set[Any] = set()
        """The last `limit / SAMPLED` keys of the sample."""
        self._missed = self._again = 0
        """Number of sampled keys that were looked up since the cache was last emptied, and how many
        of them had been looked up before.
        """

    def __getitem__(self, key: Any) -> int:
        subtask = self.known.get(key)
        return self.find(key) if subtask is None else subtask

    def find(self, key: Any) -> int:
        """Returns the subtask of a key that is not in `known`, and adds the key."""
        known, max_parallelism = self.known, self._max_parallelism
        checksum = zlib.crc32(canonical_key(key))
        if checksum >> 16 & SAMPLED - 1 == 0:  # Not the bits that decide about the group.
            self._note(key)
        if len(known) >= self._room:
            self._start_over()
        known[key] = subtask = checksum % max_parallelism * self._parallelism // max_parallelism
        return subtask

    def _note(self, key: Any) -> None:
        self._missed += 1
        if key in self._sample:
            self._again += 1
            return
        if len(self._sample) * SAMPLED >= self._limit:
            self._sample.clear()
        self._sample.add(key)

    def _start_over(self) -> None:
        self.known.clear()
        room = self._room * 2 if self._again * 2 > self._missed else self._room // 2
        self._room = max(min(CACHED_MIN, self._limit), min(room, self._limit))
        self._missed = self._again = 0


def _encode_other(key: Any) -> bytes:
    """Encodes a key whose exact type is not in the table, by the type that defines its `__eq__`.

    An IntEnum compares as an int and a NamedTuple as a tuple, so they are encoded as int and tuple.
    A subclass with an `__eq__` of its own could equal anything and is rejected.
    """
    kind = type(key)
    equality: object = kind.__eq__
    if kind.__hash__ is None:
        raise _refused(
            key, "it is not hashable; key by an immutable value such as a tuple or a frozenset"
        )
    encode = _BY_EQUALITY.get(equality)
    if encode is not None:
        return encode(key)
    if isinstance(key, Enum) and equality is object.__eq__:
        return _encode_enum(key)
    if dataclasses.is_dataclass(kind):
        return _encode_dataclass(key)
    if kind.__module__.partition(".")[0] == "numpy":
        raise _refused(key, "call .item() on it")
    raise _refused(key, f"allowed are {_ALLOWED}; key by one of its fields")


def _encode_none(key: None) -> bytes:
    raise _refused(
        key,
        "filter such records out, or give them a key of their own such as ''; a part of a tuple "
        "may be None",
    )


def _encode_int(key: int) -> bytes:
    return b"i" + int.to_bytes(key, (int.bit_length(key) + 8) >> 3, "big", signed=True)


def _encode_float(key: float) -> bytes:
    value = float.__float__(key)
    if value.is_integer():
        return _encode_int(int(value))
    if value != value:
        raise _refused(key, _NAN)
    return b"f" + struct.pack(">d", value)


def _encode_decimal(key: Decimal) -> bytes:
    if key.is_nan():
        raise _refused(key, _NAN)
    if key.is_infinite():
        return _encode_float(float(key))
    sign, digits, exponent = key.as_tuple()
    assert isinstance(exponent, int)  # The special values are handled above.
    text = "".join(map(str, digits))
    shortest = text.rstrip("0")
    if not shortest:
        return _encode_int(0)
    exponent += len(text) - len(shortest)
    if exponent >= 0:
        if len(shortest) + exponent > _DECIMAL_DIGITS_MAX:
            raise _refused(
                key, f"a Decimal key may have up to {_DECIMAL_DIGITS_MAX} digits; key by its text"
            )
        return _encode_int(int(Decimal((sign, tuple(map(int, shortest)), exponent))))
    nearest = float(key)
    if Decimal(nearest) == key:
        # The conversion is exact, so this Decimal equals a float and must be the same key.
        return b"f" + struct.pack(">d", nearest)
    return f"q{'-' if sign else ''}{shortest}e{exponent}".encode()


def _encode_str(key: Any) -> bytes:
    return b"s" + str.encode(key, "utf-8", "surrogatepass")


def _encode_bytes(key: bytes) -> bytes:
    return b"b" + bytes.__getitem__(key, slice(None))


def _encode_datetime(key: datetime) -> bytes:
    # Within one zone Python compares wall-clock fields and ignores `fold`; its hash takes fold=0,
    # and so do we.
    if key.fold:
        key = key.replace(fold=0)
    offset = key.utcoffset()
    if offset is None:
        return b"N" + _micros(key.replace(tzinfo=None) - _EPOCH)
    return b"T" + _micros(key.replace(tzinfo=None) - _EPOCH - offset)


def _encode_date(key: date) -> bytes:
    return b"D" + _encode_int(key.toordinal())


def _encode_timedelta(key: timedelta) -> bytes:
    return b"d" + _micros(key)


def _encode_uuid(key: UUID) -> bytes:
    return b"u" + key.bytes


def _encode_tuple(key: tuple[object, ...]) -> bytes:
    return b"t" + _join([b"n" if part is None else _encode(part) for part in tuple.__iter__(key)])


def _encode_frozenset(key: frozenset[object]) -> bytes:
    return b"z" + _join(iter(sorted(map(_encode, frozenset.__iter__(key)))))


def _encode_enum(key: Enum) -> bytes:
    if isinstance(key, Flag):  # Combinations of flags have no name that is kept.
        return b"E" + _join(iter((_class_name(key), _encode(key._value_))))
    return b"E" + _join(iter((_class_name(key), key._name_.encode())))


def _encode_dataclass(key: Any) -> bytes:
    kind = type(key)
    equality: object = kind.__eq__
    if equality is object.__eq__:
        raise _refused(key, "it compares by identity; declare it with @dataclass(frozen=True)")
    if not kind.__dataclass_params__.frozen:
        raise _refused(key, "it is mutable; declare it with @dataclass(frozen=True)")
    code = getattr(equality, "__code__", None)
    if code is None or not code.co_qualname.startswith("__create_fn__."):
        # Where `dataclasses` generates its methods.
        raise _refused(
            key,
            "it has an __eq__ of its own, which no other process can know; key by a tuple of its "
            "fields",
        )
    compared = (
        _encode(getattr(key, field.name)) for field in dataclasses.fields(kind) if field.compare
    )
    return b"c" + _join(iter((_class_name(key), _join(compared))))


def _encode(key: Any) -> bytes:
    exact = _BY_TYPE.get(type(key))
    return exact(key) if exact is not None else _encode_other(key)


def _join(parts: Iterable[bytes]) -> bytes:
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])


def _micros(delta: timedelta) -> bytes:
    return _encode_int((delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds)


def _class_name(key: object) -> bytes:
    return f"{type(key).__module__}:{type(key).__qualname__}".encode()


def _refused(key: object, remedy: str) -> KeyNotSupported:
    kind = type(key)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    what = "None" if key is None else f"a value of type {name}"
    return KeyNotSupported(f"{what} cannot be a key: {remedy}")


_BY_TYPE: dict[type, Callable[[Any], bytes]] = {
    str: _encode_str,
    int: _encode_int,
    bool: _encode_int,
    float: _encode_float,
    bytes: _encode_bytes,
    tuple: _encode_tuple,
    datetime: _encode_datetime,
    date: _encode_date,
    timedelta: _encode_timedelta,
    Decimal: _encode_decimal,
    UUID: _encode_uuid,
    frozenset: _encode_frozenset,
    type(None): _encode_none,
}

_BY_EQUALITY: dict[object, Callable[[Any], bytes]] = {
    kind.__eq__: encode
    for kind, encode in _BY_TYPE.items()
    if kind is not type(None) and kind is not bool
}
