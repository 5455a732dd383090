"""Converts the texts in which PostgreSQL sends values to Python objects, for rows of a snapshot and
for changes.

In a reader's session the server writes dates in ISO 8601 and UTC, and bytes as hexadecimal digits.

    int2 int4 int8 oid            int
    float4 float8                 float
    numeric                       Decimal
    bool                          bool
    date time timestamp           datetime's types; timestamptz is aware, in UTC
    json jsonb                    the values themselves
    uuid                          UUID
    bytea                         bytes
    arrays of these               list, nested if it has several dimensions
    domains                       as the type below
    enums and all others          str, as PostgreSQL writes them

A date or time beyond the range of Python's types, such as "infinity", is a str as well.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

__all__ = ["COLLATED_TYPES", "ORDERED_TYPES", "Decoder", "PgType", "decoder_of", "known_type"]

Decoder = Callable[[bytes], Any]


class PgType(NamedTuple):
    """A row of pg_type."""

    kind: str
    """b (base), d (domain), e (enum) and others."""
    element: int
    """The oid of the element type of an array, otherwise 0."""
    base: int
    """The oid of the base type of a domain, otherwise 0."""
    delimiter: str
    """The delimiter between the elements of an array."""


def _text(cell: bytes) -> str:
    return cell.decode()


def _bool(cell: bytes) -> bool:
    return cell == b"t"


def _numeric(cell: bytes) -> Decimal:
    return Decimal(cell.decode())


def _float(cell: bytes) -> float:
    return float(cell)


def _bytea(cell: bytes) -> bytes:
    return bytes.fromhex(cell[2:].decode())  # It begins with \x.


def _uuid(cell: bytes) -> UUID:
    return UUID(cell.decode())


def _moment(parse: Callable[[str], Any]) -> Decoder:
    def decode(cell: bytes) -> Any:
        text = cell.decode()
        try:
            return parse(text)
        except ValueError:  # "infinity", a year before Christ, or after 9999.
            return text

    return decode


_DECODERS: dict[int, Decoder] = {
    16: _bool,
    17: _bytea,
    20: int,
    21: int,
    23: int,
    26: int,
    25: _text,
    114: msgspec.json.decode,
    700: _float,
    701: _float,
    1042: _text,
    1043: _text,
    1082: _moment(date.fromisoformat),
    1083: _moment(time.fromisoformat),
    1114: _moment(datetime.fromisoformat),
    1184: _moment(datetime.fromisoformat),
    1266: _moment(time.fromisoformat),
    1700: _numeric,
    2950: _uuid,
    3802: msgspec.json.decode,
}

_ARRAYS: dict[int, int] = {
    1000: 16,
    1001: 17,
    1005: 21,
    1007: 23,
    1016: 20,
    1028: 26,
    1009: 25,
    199: 114,
    1021: 700,
    1022: 701,
    1014: 1042,
    1015: 1043,
    1182: 1082,
    1183: 1083,
    1115: 1114,
    1185: 1184,
    1270: 1266,
    1231: 1700,
    2951: 2950,
    3807: 3802,
}

ORDERED_TYPES = frozenset({16, 17, 20, 21, 23, 25, 26, 1043, 1082, 1114, 1184, 1700, 2950})
"""Oids of types whose values Python orders as PostgreSQL does, with the collation "C" for texts."""

COLLATED_TYPES = frozenset({25, 1043})
"""Oids of the types in `ORDERED_TYPES` that have a collation."""


def known_type(oid: int) -> bool:
    """Returns whether `decoder_of` can decode the type without its row of pg_type."""
    return oid in _DECODERS or oid in _ARRAYS


def decoder_of(oid: int, types: dict[int, PgType]) -> Decoder:
    """Returns the function that converts the text of a value of the type `oid`. `types` maps oids
    to rows of pg_type.
    """
    if (known := _DECODERS.get(oid)) is not None:
        return known
    if (element := _ARRAYS.get(oid)) is not None:
        return _array(_DECODERS[element], ",")
    found = types.get(oid)
    if found is not None and found.kind == "d":
        return decoder_of(found.base, types)
    if found is not None and found.element:
        return _array(decoder_of(found.element, types), found.delimiter)
    return _text


def _array(element: Decoder, delimiter: str) -> Decoder:
    def decode(cell: bytes) -> list[Any]:
        text = cell.decode()
        start = text.index("{")  # Other lower bounds than 1 stand before it.
        values, end = _elements(text, start + 1, element, delimiter)
        if end != len(text):
            raise ValueError(f"array {text[:80]!r} goes on behind its end")
        return values

    return decode


def _elements(text: str, at: int, element: Decoder, delimiter: str) -> tuple[list[Any], int]:
    """Returns the elements of an array, and the offset after the array. Its opening brace is just
    before offset `at`. `element` decodes one element.
    """
    values: list[Any] = []
    while True:
        sign = text[at : at + 1]
        if sign == "}":
            return values, at + 1
        if sign == "{":
            value, at = _elements(text, at + 1, element, delimiter)
            values.append(value)
        elif sign == '"':
            content, at = _quoted(text, at + 1)
            values.append(element(content.encode()))
        else:
            end = at
            while end < len(text) and text[end] not in (delimiter, "}"):
                end += 1
            content = text[at:end]
            values.append(None if content == "NULL" else element(content.encode()))
            at = end
        sign = text[at : at + 1]
        if sign == delimiter:
            at += 1
        elif sign != "}":
            raise ValueError(f"array {text[:80]!r} has no end")


def _quoted(text: str, at: int) -> tuple[str, int]:
    """Returns the text from offset `at` up to the closing quote, and the offset after the quote."""
    parts: list[str] = []
    while True:
        end = at
        while text[end : end + 1] not in ('"', "\\", ""):
            end += 1
        parts.append(text[at:end])
        sign = text[end : end + 1]
        if sign == '"':
            return "".join(parts), end + 1
        if not text[end + 1 : end + 2]:
            raise ValueError(f"array {text[:80]!r} has no end")
        parts.append(text[end + 1])
        at = end + 2
