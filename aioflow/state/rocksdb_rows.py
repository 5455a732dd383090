"""Converts entries of keyed state to rows of RocksDB, and back.

    row      = key group (2 bytes) | space (6 bytes) | canonical key
               all big endian, so that rows are in order of key groups
    content  = flags (1 byte)
               | the key as it was first spelled, with its length, if its canonical bytes do not
                 determine the spelling
               | value

A *space* is one namespace of one table, identified by a number that is never reused. So a dropped
space is unreachable at once, and its rows can be removed later. Separate rows, which sort after all
key groups, map each number to its space. A timer is an entry as well; its canonical key is
(timestamp, key, namespace).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from aioflow.core.errors import ProtocolError, StateError
from aioflow.core.keygroups import KeyNotSupported, canonical_key
from aioflow.core.wire.serializers import Codec
from aioflow.state.format import encode_value

__all__ = [
    "END",
    "SPACES",
    "RowCodec",
    "Spaced",
    "StoredSpace",
    "group_in",
    "plain_key",
    "prefix",
    "space_of",
]

PREFIX_BYTES = 8
SPACE_BITS = 48
SPACES = 0xFFFF
"""The "key group" of the rows that describe the spaces. It is above all real key groups."""

TIME_BYTES = 16
TIME_BIAS = 1 << 127
"""Offset added to timestamps, so that their bytes sort like the timestamps."""

END = b"\xff" * (PREFIX_BYTES + 1)
"""A bound above all rows."""

SPELLED, CODED = 1, 2
"""Flags of a row's content. SPELLED: the content contains the key. CODED: the value is a batch of
the codec, not a bare scalar.
"""

_PLAIN_KEYS = frozenset((str, int, bytes))
_PLAIN_VALUES = frozenset((str, int, float, bool, bytes))

_DAMAGE = (ProtocolError, msgspec.MsgspecError, ValueError, LookupError, TypeError)
"""Errors that a damaged row may raise when it is decoded."""


class Spaced(Protocol):
    """The interface of a space, with the properties that its rows need."""

    @property
    def number(self) -> int: ...

    @property
    def is_timers(self) -> bool: ...

    @property
    def table(self) -> str: ...

    @property
    def namespace(self) -> Any: ...

    @property
    def owner(self) -> str:
        """Operator and state of the space, for error messages."""


@dataclass(frozen=True, slots=True)
class StoredSpace:
    """The description of a space, as the database stores it."""

    number: int
    table: str
    namespace: Any
    is_timers: bool
    owner: str


class RowCodec:
    """The encoder and decoder of the rows of one operator's subtask."""

    __slots__ = ("_codec", "_max_parallelism")

    def __init__(self, codec: Codec, max_parallelism: int) -> None:
        self._codec = codec
        self._max_parallelism = max_parallelism

    def row(self, space: Spaced, key: Any) -> bytes:
        """Returns the row of `key`. Raises KeyNotSupported if `canonical_key` refuses the key."""
        if space.is_timers:
            timestamp, inner, namespace = key
            canonical = canonical_key(inner)
            group = zlib.crc32(canonical) % self._max_parallelism
            time = (timestamp + TIME_BIAS).to_bytes(TIME_BYTES, "big")
            canonical = b"".join(
                (
                    time,
                    len(canonical).to_bytes(4, "big"),
                    canonical,
                    self._namespace(namespace, space.owner),
                )
            )
        else:
            canonical = canonical_key(key)
            group = zlib.crc32(canonical) % self._max_parallelism
        return prefix(group, space.number) + canonical

    def content(self, space: Spaced, key: Any, value: Any) -> bytes:
        """Returns the content of the row of `key`.

        Raises TypeNotSupported naming operator, state, type and remedy.
        """
        flags, spelled = 0, b""
        if space.is_timers:
            key = key[1:]
        if type(key) not in _PLAIN_KEYS:
            encoded = self._codec.encode(key, owner=f"{space.owner}, keys")
            flags, spelled = SPELLED, len(encoded).to_bytes(4, "big") + encoded
        if type(value) in _PLAIN_VALUES:
            try:
                return b"".join((bytes((flags,)), spelled, _pack(value)))
            except (OverflowError, UnicodeEncodeError):
                pass  # An int above 64 bits or a lone surrogate: the codec has a form for them.
        return b"".join(
            (bytes((flags | CODED,)), spelled, encode_value(self._codec, key, value, space.owner))
        )

    def entry(self, space: Spaced, row: bytes, content: bytes) -> tuple[Any, Any]:
        """Decodes the key and value of a row. Raises StateError if the row is damaged."""
        try:
            key, at = self._key(row, content)
            if space.is_timers:
                key = (
                    int.from_bytes(row[PREFIX_BYTES : PREFIX_BYTES + TIME_BYTES], "big")
                    - TIME_BIAS,
                    *key,
                )
            value = (
                self._codec.decode(content[at:]) if content[0] & CODED else _unpack(content[at:])
            )
        except _DAMAGE as error:
            raise _unreadable(space, error) from error
        return key, value

    def key(self, space: Spaced, row: bytes, content: bytes) -> Any:
        """Decodes the key of a row that holds no timer. Raises StateError if the row is damaged."""
        try:
            return self._key(row, content)[0]
        except _DAMAGE as error:
            raise _unreadable(space, error) from error

    def _key(self, row: bytes, content: bytes) -> tuple[Any, int]:
        """Returns the key of a row (without the time of a timer) and the offset of the value."""
        if content[0] & SPELLED:
            at = 5 + int.from_bytes(content[1:5], "big")
            return self._codec.decode(content[5:at]), at
        return plain_key(row[PREFIX_BYTES:]), 1

    def space_row(self, number: int) -> bytes:
        """Returns the row that describes space `number`."""
        return prefix(SPACES, number)

    def space_content(self, table: str, namespace: Any, owner: str) -> bytes:
        return self._codec.encode((table, namespace), owner=f"{owner}, namespaces")

    def spaces(
        self, rows: Iterable[tuple[bytes, bytes]], operator: str, timers: frozenset[str]
    ) -> dict[int, StoredSpace]:
        """Decodes the spaces that `rows`, made by `space_row`, describe; `timers` are the tables of
        timers.

        Raises StateError if a row is damaged.
        """
        found: dict[int, StoredSpace] = {}
        for row, content in rows:
            try:
                table, namespace = self._codec.decode(content)
            except (ProtocolError, ValueError, TypeError) as error:
                raise StateError(
                    f"operator {operator!r}: a row of its RocksDB cannot be read: {error}"
                ) from error
            number = space_of(row)
            found[number] = StoredSpace(
                number, table, namespace, table in timers, f"operator {operator!r}, state {table!r}"
            )
        return found

    def _namespace(self, namespace: Any, owner: str) -> bytes:
        if namespace is None:
            return b""
        try:
            return b"c" + canonical_key(namespace)
        except KeyNotSupported:
            return b"e" + self._codec.encode(namespace, owner=f"{owner}, namespaces")


def _unreadable(space: Spaced, error: Exception) -> StateError:
    return StateError(
        f"{space.owner}: a row of its RocksDB cannot be read: {error}; restore from a checkpoint"
    )


def prefix(group: int, space: int = 0) -> bytes:
    """Returns the common prefix of all rows of `space` in `group`.

    No space has number 0; its prefix is below all rows of the group.
    """
    return (group << SPACE_BITS | space).to_bytes(PREFIX_BYTES, "big")


def group_in(row: bytes) -> int:
    return int.from_bytes(row[:2], "big")


def space_of(row: bytes) -> int:
    return int.from_bytes(row[2:PREFIX_BYTES], "big")


def plain_key(canonical: bytes) -> str | int | bytes:
    kind, body = canonical[:1], canonical[1:]
    if kind == b"s":
        return body.decode("utf-8", "surrogatepass")
    if kind == b"i":
        return int.from_bytes(body, "big", signed=True)
    if kind == b"b":
        return body
    raise ValueError("the key is not in it")


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
