"""Decodes values of MySQL and MariaDB: bytes in the binary log, and texts in the result of a
SELECT.

Both decode to the same values. `af.io.mysql` reads the same values, with three exceptions. Here a
TIMESTAMP is an aware datetime in UTC, a BIT is an integer, and JSON is decoded. A date that Python
cannot represent, such as a zero date, stays a text.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from struct import Struct, error
from typing import Any, NamedTuple

import msgspec

__all__ = [
    "BinlogColumn",
    "codec_of",
    "decode_json",
    "reader_of",
    "text_reader_of",
]

TINY, SHORT, LONG, FLOAT, DOUBLE, LONGLONG, INT24 = 1, 2, 3, 4, 5, 8, 9
DATE, TIME, YEAR, VARCHAR, BIT, TIMESTAMP2, DATETIME2, TIME2 = 10, 11, 13, 15, 16, 17, 18, 19
JSON, NEWDECIMAL, ENUM, SET, BLOB, VAR_STRING, STRING, GEOMETRY = (
    245, 246, 247, 248, 252, 253, 254, 255,
)  # fmt: skip
NUMERIC = {TINY, SHORT, INT24, LONG, LONGLONG, NEWDECIMAL, FLOAT, DOUBLE, YEAR}
TEXTS = {VARCHAR, VAR_STRING, STRING, BLOB}
BINARY = 63
"""The collation of binary strings."""

Read = Callable[[bytes, int], tuple[Any, int]]
"""Decodes the value at an offset in bytes. Returns the value, and the offset after it."""


class BinlogColumn(NamedTuple):
    name: str
    type: int
    length: int
    """The parameters of the type, such as a length or a number of digits."""
    unsigned: bool
    collation: int
    members: Sequence[bytes]
    """The texts of an ENUM or SET, in their character set."""


# Character sets.

_CODECS = {
    "utf8": "utf-8", "utf8mb3": "utf-8", "utf8mb4": "utf-8", "ascii": "ascii", "latin1": "cp1252",
    "latin2": "iso8859-2", "latin5": "iso8859-9", "latin7": "iso8859-13", "greek": "iso8859-7",
    "hebrew": "iso8859-8", "cp1250": "cp1250", "cp1251": "cp1251", "cp1256": "cp1256",
    "cp1257": "cp1257", "cp850": "cp850", "cp852": "cp852", "cp866": "cp866", "koi8r": "koi8-r",
    "koi8u": "koi8-u", "sjis": "shift-jis", "cp932": "cp932", "ujis": "euc-jp",
    "eucjpms": "euc-jp", "euckr": "euc-kr", "gb2312": "gb2312", "gbk": "gbk",
    "gb18030": "gb18030", "big5": "big5", "tis620": "tis-620", "ucs2": "utf-16-be",
    "utf16": "utf-16-be", "utf16le": "utf-16-le", "utf32": "utf-32-be", "macroman": "mac-roman",
}  # fmt: skip
"""Maps a character set of the server to a Python codec."""


def codec_of(collation: int, charsets: Mapping[int, str]) -> str | None:
    """Returns the Python codec for texts of a collation, or None for binary strings. `charsets`
    maps the numbers of collations to names of character sets.

    Raises ValueError for a character set that Python lacks.
    """
    if collation == BINARY:
        return None
    name = charsets.get(collation, "utf8mb4")
    try:
        return _CODECS[name]
    except KeyError:
        raise ValueError(f"its character set is {name}, which Python does not have") from None


# Values.


def _number(code: str) -> Read:
    struct = Struct(code)
    unpack, size = struct.unpack_from, struct.size

    def read(body: bytes, at: int) -> tuple[Any, int]:
        return unpack(body, at)[0], at + size

    return read


def _integer(size: int, *, signed: bool = False, big: bool = False) -> Read:
    order: Any = "big" if big else "little"

    def read(body: bytes, at: int) -> tuple[Any, int]:
        end = at + size
        return int.from_bytes(body[at:end], order, signed=signed), end

    return read


_INTEGERS = {
    (TINY, False): _number("<b"), (TINY, True): _number("<B"),
    (SHORT, False): _number("<h"), (SHORT, True): _number("<H"),
    (LONG, False): _number("<i"), (LONG, True): _number("<I"),
    (LONGLONG, False): _number("<q"), (LONGLONG, True): _number("<Q"),
    (INT24, False): _integer(3, signed=True), (INT24, True): _integer(3),
}  # fmt: skip


def _year(body: bytes, at: int) -> tuple[int, int]:
    return (1900 + body[at] if body[at] else 0), at + 1


def text_of_date(year: int, month: int, day: int) -> str:
    return f"{year:04}-{month:02}-{day:02}"


def _date(body: bytes, at: int) -> tuple[Any, int]:
    value = int.from_bytes(body[at : at + 3], "little")
    parts = value >> 9, (value >> 5) & 15, value & 31
    try:
        return datetime.date(*parts), at + 3
    except ValueError:
        return text_of_date(*parts), at + 3


def _fraction(digits: int) -> tuple[int, int]:
    """Returns the size in bytes of a stored fraction of a second with `digits` digits, and the unit
    of the stored number in microseconds.
    """
    if digits > 6:
        raise ValueError(f"its fraction has {digits} digits, expected at most 6")
    size = (digits + 1) // 2
    return size, 10 ** (6 - 2 * size)


def _datetime(digits: int) -> Read:
    size, unit = _fraction(digits)
    bits = 8 * size

    def read(body: bytes, at: int) -> tuple[Any, int]:
        end = at + 5 + size
        value = int.from_bytes(body[at:end], "big")
        micros = (value & ((1 << bits) - 1)) * unit
        value = (value >> bits) - (1 << 39)
        year, month = divmod(value >> 22, 13)
        day, hour, minute, second = (
            (value >> 17) & 31, (value >> 12) & 31, (value >> 6) & 63, value & 63,
        )  # fmt: skip
        try:
            return datetime.datetime(year, month, day, hour, minute, second, micros), end
        except ValueError:
            text = f"{text_of_date(year, month, day)} {hour:02}:{minute:02}:{second:02}"
            return text + (f".{micros:06}"[: digits + 1] if digits else ""), end

    return read


def _timestamp(digits: int) -> Read:
    size, unit = _fraction(digits)

    def read(body: bytes, at: int) -> tuple[Any, int]:
        seconds = int.from_bytes(body[at : at + 4], "big")
        end = at + 4 + size
        if not seconds:
            text = f"{text_of_date(0, 0, 0)} 00:00:00"
            return text + ("." + "0" * digits if digits else ""), end
        micros = int.from_bytes(body[at + 4 : end], "big") * unit
        found = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        return found.replace(microsecond=micros), end

    return read


def _time(digits: int) -> Read:
    size, unit = _fraction(digits)
    bits = 8 * size

    def read(body: bytes, at: int) -> tuple[Any, int]:
        end = at + 3 + size
        value = int.from_bytes(body[at:end], "big") - (1 << (23 + bits))
        micros = (abs(value) & ((1 << bits) - 1)) * unit
        whole = abs(value) >> bits
        found = datetime.timedelta(
            hours=(whole >> 12) & 1023,
            minutes=(whole >> 6) & 63,
            seconds=whole & 63,
            microseconds=micros,
        )
        return -found if value < 0 else found, end

    return read


_DIGIT_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
"""Maps a number of digits to the number of bytes in which a DECIMAL stores them."""


def _decimal(digits: int, scale: int) -> Read:
    if scale > digits:
        raise ValueError(f"{scale} of its {digits} digits are a fraction")
    groups = []
    whole = digits - scale
    for part, is_left in ((whole, True), (scale, False)):
        full, rest = divmod(part, 9)
        sizes = [(9, 4)] * full
        left_over = [(rest, _DIGIT_BYTES[rest])] if rest else []
        groups += left_over + sizes if is_left else sizes + left_over
    size = sum(length for _, length in groups)

    def read(body: bytes, at: int) -> tuple[Any, int]:
        end = at + size
        negative = not body[at] & 0x80
        content = bytes([body[at] ^ 0x80]) + body[at + 1 : end]
        if negative:
            content = bytes([byte ^ 0xFF for byte in content])
        text, place = "-" if negative else "", 0
        texts = []
        for count, length in groups:
            value = int.from_bytes(content[place : place + length], "big")
            texts.append(f"{value:0{count}}")
            place += length
        joined = "".join(texts)
        text += joined[:whole] or "0"
        return Decimal(f"{text}.{joined[whole:]}" if scale else text), end

    return read


def _sized(size: int, convert: Callable[[bytes], Any] | None) -> Read:
    """Returns a function that decodes a value that is stored after its length. The length takes
    `size` bytes. `convert` makes the value from its bytes; None returns the bytes.
    """
    if size == 1 and convert is None:

        def read_short(body: bytes, at: int) -> tuple[Any, int]:
            end = at + 1 + body[at]
            return body[at + 1 : end], end

        return read_short

    def read(body: bytes, at: int) -> tuple[Any, int]:
        begin = at + size
        end = begin + int.from_bytes(body[at:begin], "little")
        content = body[begin:end]
        return content if convert is None else convert(content), end

    return read


def text_decoder(codec: str) -> Callable[[bytes], str]:
    """Returns a function that decodes bytes with `codec`. The five bytes that cp1252 does not
    define become control characters.
    """
    if codec != "cp1252":
        return lambda content: content.decode(codec)

    def decode(content: bytes) -> str:
        try:
            return content.decode("cp1252")
        except UnicodeDecodeError:
            return "".join(
                [
                    bytes([byte]).decode("latin-1" if byte in _UNDEFINED else "cp1252")
                    for byte in content
                ]
            )

    return decode


_UNDEFINED = frozenset({0x81, 0x8D, 0x8F, 0x90, 0x9D})


def _texts(column: BinlogColumn, size: int, codec: str | None, as_json: bool) -> Read:
    if as_json and codec is not None:
        return _sized(size, decode_json_text)
    if codec is not None:
        return _sized(size, text_decoder(codec))
    if column.type == STRING:  # The log leaves out the zeros at the end of a BINARY.
        return _sized(size, lambda content: content.ljust(column.length, b"\0"))
    return _sized(size, None)


decode_json_text = msgspec.json.decode


def _enum(size: int, members: Sequence[str]) -> Read:
    # An index of 0 is the empty text of a wrong value.
    texts = ["", *members]

    def read(body: bytes, at: int) -> tuple[Any, int]:
        return texts[int.from_bytes(body[at : at + size], "little")], at + size

    return read


def _set(size: int, members: Sequence[str]) -> Read:
    def read(body: bytes, at: int) -> tuple[Any, int]:
        mask = int.from_bytes(body[at : at + size], "little")
        return ",".join([one for i, one in enumerate(members) if mask >> i & 1]), at + size

    return read


SIZED_READERS: dict[int, Callable[[int], Read]] = {
    YEAR: lambda length: _year,
    DATE: lambda length: _date,
    DATETIME2: _datetime,
    TIMESTAMP2: _timestamp,
    TIME2: _time,
    NEWDECIMAL: lambda length: _decimal(length & 0xFF, length >> 8),
    GEOMETRY: lambda length: _sized(length, None),
    JSON: lambda length: _sized(length, decode_json),
    BIT: lambda length: _integer((length >> 8) + ((length & 0xFF) > 0), big=True),
}
"""Maps a column type to a function that gets the `length` of a column and returns the decoder of
its values.
"""


def reader_of(column: BinlogColumn, charsets: Mapping[int, str], as_json: bool) -> Read:
    """Returns a function that decodes values of a column. `as_json` says whether its texts are
    JSON, to be decoded too. Raises ValueError for an unknown type.
    """
    type_, length = column.type, column.length
    if (found := _INTEGERS.get((type_, column.unsigned))) is not None:
        return found
    if type_ == FLOAT:
        return _number("<f")
    if type_ == DOUBLE:
        return _number("<d")
    if type_ in SIZED_READERS:
        return SIZED_READERS[type_](length)
    codec = codec_of(column.collation, charsets)
    if type_ in (VARCHAR, VAR_STRING, STRING):
        return _texts(column, 2 if length > 255 else 1, codec, as_json)
    if type_ == BLOB:
        return _texts(column, length, codec, as_json)
    members = [one.decode(codec or "utf-8") for one in column.members]
    if type_ == ENUM:
        return _enum(length, members)
    if type_ == SET:
        return _set(length, members)
    raise ValueError(
        f"the log has it with the type {type_}, which is not known: ALTER TABLE ... FORCE rewrites "
        "columns of an old format, and compressed columns are not read"
    )


# JSON of MySQL, in its binary form. MariaDB's is a text.

_JSON_NUMBERS = {
    5: Struct("<h"), 6: Struct("<H"), 7: Struct("<i"), 8: Struct("<I"), 9: Struct("<q"),
    10: Struct("<Q"), 11: Struct("<d"),
}  # fmt: skip
_INLINED = {False: (4, 5, 6), True: (4, 5, 6, 7, 8)}
"""Types whose values are stored in place of an offset, in small (False) and large (True)
documents.
"""


def decode_json(content: bytes) -> Any:
    """Decodes a binary JSON document. Raises ValueError if it is malformed."""
    try:
        return _json(content[0], content, 1) if content else None
    except (IndexError, KeyError, OverflowError, RecursionError, error) as cause:
        raise ValueError("a JSON document in the binary log is malformed") from cause


def _json(kind: int, content: bytes, at: int) -> Any:
    if kind < 4:
        return _json_items(content, at, is_large=bool(kind & 1), is_object=kind < 2)
    if kind == 4:
        return {0: None, 1: True, 2: False}[content[at]]
    if kind in _JSON_NUMBERS:
        return _JSON_NUMBERS[kind].unpack_from(content, at)[0]
    if kind == 12:
        length, at = _varying(content, at)
        return content[at : at + length].decode()
    if kind == 15:
        length, begin = _varying(content, at + 1)
        return _opaque(content[at], content[begin : begin + length])
    raise ValueError(f"a JSON document in the binary log has the type {kind}, which is not known")


def _varying(content: bytes, at: int) -> tuple[int, int]:
    length = shift = 0
    while True:
        byte = content[at]
        at += 1
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return length, at


def _json_items(content: bytes, begin: int, *, is_large: bool, is_object: bool) -> Any:
    size = 4 if is_large else 2

    def number(at: int, width: int = size) -> int:
        if at + width > len(content):
            raise IndexError(at)
        return int.from_bytes(content[at : at + width], "little")

    count = number(begin)
    keys_at = begin + 2 * size
    values_at = keys_at + (count * (size + 2) if is_object else 0)
    keys, values = [], []
    for i in range(count):
        if is_object:
            entry = keys_at + i * (size + 2)
            key = begin + number(entry)
            keys.append(content[key : key + number(entry + size, 2)].decode())
        entry = values_at + i * (size + 1)
        kind = content[entry]
        inlined = kind in _INLINED[is_large]
        place = entry + 1 if inlined else begin + number(entry + 1)
        if not inlined and place <= entry:
            raise IndexError(place)
        values.append(_json(kind, content, place))
    return dict(zip(keys, values, strict=True)) if is_object else values


def _opaque(kind: int, content: bytes) -> Any:
    """Decodes a value of a type that JSON lacks, such as a date, to the value that the server
    writes into JSON texts.
    """
    if kind == NEWDECIMAL:
        return float(_decimal(content[0], content[1])(content, 2)[0])
    if kind in (7, DATE, TIME, 12, TIMESTAMP2, DATETIME2, TIME2):
        value = int.from_bytes(content[:8], "little", signed=True)
        sign, micros, value = "-" * (value < 0), abs(value) & 0xFFFFFF, abs(value) >> 24
        time = f"{(value >> 6) & 63:02}:{value & 63:02}.{micros:06}"
        if kind in (TIME, TIME2):
            return f"{sign}{(value >> 12) & 1023:02}:{time}"
        year, month = divmod(value >> 22, 13)
        date = text_of_date(year, month, (value >> 17) & 31)
        return date if kind == DATE else f"{date} {(value >> 12) & 31:02}:{time}"
    raise ValueError(f"a JSON document in the binary log has an opaque value of type {kind}")


# Texts of a SELECT, whose session has the time zone UTC.


def _date_of(text: bytes) -> Any:
    found = text.decode()
    try:
        return datetime.date.fromisoformat(found)
    except ValueError:
        return found


def _datetime_of(text: bytes) -> Any:
    found = text.decode()
    try:
        return datetime.datetime.fromisoformat(found)
    except ValueError:
        return found


def _timestamp_of(text: bytes) -> Any:
    found = _datetime_of(text)
    return found if isinstance(found, str) else found.replace(tzinfo=datetime.UTC)


def _time_of(text: bytes) -> datetime.timedelta:
    hours, minutes, seconds = text.decode().removeprefix("-").split(":")
    whole, _, fraction = seconds.partition(".")
    found = datetime.timedelta(
        hours=int(hours),
        minutes=int(minutes),
        seconds=int(whole),
        microseconds=int(fraction.ljust(6, "0")),
    )
    return -found if text[:1] == b"-" else found


def _decimal_of(text: bytes) -> Decimal:
    return Decimal(text.decode())


def _bytes_of(text: bytes) -> bytes:
    return text


_TEXT_READERS: dict[str, Callable[[bytes], Any]] = {
    "decimal": _decimal_of, "float": float, "double": float, "date": _date_of,
    "datetime": _datetime_of, "timestamp": _timestamp_of, "time": _time_of,
    "bit": lambda text: int.from_bytes(text, "big"), "json": decode_json_text,
    **dict.fromkeys(("tinyint", "smallint", "mediumint", "int", "bigint", "year"), int),
    **dict.fromkeys(
        ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set"),
        bytes.decode,
    ),
    **dict.fromkeys(
        (
            "binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob", "geometry",
            "point", "linestring", "polygon", "multipoint", "multilinestring", "multipolygon",
            "geometrycollection", "geomcollection",
        ),
        _bytes_of,
    ),
}  # fmt: skip


def text_reader_of(type_name: str) -> Callable[[bytes], Any] | None:
    """Returns a function that decodes a text of the column type `type_name`, or None for an unknown
    type.
    """
    return _TEXT_READERS.get(type_name)
