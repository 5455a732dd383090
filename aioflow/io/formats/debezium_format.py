"""The JSON of Debezium: the changes of a database's rows, as its connectors write them to a broker.

A message is an object with the row `before` and `after` a change, and `op`, the kind of the change.
With the schemas of Kafka Connect (`schemas.enable=true`) this object is in `payload`, beside its
schema. The schema describes how decimals, bytes and times are encoded as numbers and texts.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError
from aioflow.io.arguments import one_or_more
from aioflow.io.bodies import body_decoder
from aioflow.io.changes import Change, ChangeKind
from aioflow.io.formats.format import Decoder, Encoder, Format, maker_of, with_type

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = ["DebeziumJson", "debezium_json"]

KINDS: dict[str, ChangeKind] = {
    "c": "insert",
    "d": "delete",
    "r": "read",
    "t": "truncate",
    "u": "update",
}
"""Maps the field `op` of a message to the kind of the change."""

_TEXT = "__debezium_unavailable_value"
_BYTES = base64.b64encode(_TEXT.encode()).decode()
_UUID = "b68a35a7-17ad-35b3-af2a-ae46edb4545a"  # Made from the MD5 of the text.
UNAVAILABLE: list[Any] = [
    _TEXT,
    _BYTES,
    {_TEXT: _TEXT},
    msgspec.json.encode({_TEXT: _TEXT}).decode(),
    [_TEXT],
    [_BYTES],
    [_UUID],
    list(_TEXT.encode()),
]
"""The values that Debezium writes in place of a large value that the database did not log. They
stand for a text, bytes, an hstore, and arrays of texts, bytes, UUIDs and integers.
"""
_MARKS = [one.encode() for one in (_TEXT, _BYTES, _UUID, ",".join(map(str, _TEXT.encode())))]
"""Fragments of JSON. A row with a value of `UNAVAILABLE` contains at least one of them."""

DAY_US = 86_400_000_000

Row = Callable[[Any], Any]
"""A function that makes a row from the row's JSON, or from a dict of values."""


@explained
def debezium_json(type: Any = None, *, key: str | Sequence[str]) -> Format[Change[Any]]:
    """Returns the format of Debezium's change events in JSON, with or without their schemas.

    Each element is an `af.Change`, as from `postgres_changes`. Rows are dicts, or objects of
    `type`. `key` names the columns that identify a row. In a message with its schema, decimals,
    bytes and times become Python objects; without a schema they stay JSON values. A tombstone, the
    record without a value after a deletion, is None. A sink cannot write this format.
    """
    place = "debezium_json(...)"
    names = one_or_more(key)
    if not names or not all(isinstance(one, str) and one for one in names):
        raise GraphError(
            f"{place}: key is {key!r}, expected the names of the columns that identify a row"
        )
    return with_type(DebeziumJson(tuple(names)), type, place)


NULL = msgspec.Raw(b"null")


class _Message(msgspec.Struct):
    """An event, or its envelope with a schema. Fields that may not be needed are kept undecoded."""

    schema: msgspec.Raw = NULL
    payload: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    op: str | None = None
    before: msgspec.Raw = NULL
    after: msgspec.Raw = NULL
    source: dict[str, Any] | None = None
    ts_ms: int | None = None


@dataclass(frozen=True, eq=False)
class DebeziumJson(Format[Change[Any]]):
    """The format of Debezium's JSON. Made by `debezium_json`."""

    key: tuple[str, ...]
    row: Row | None = None
    """Makes a row of the user's type from the row's JSON. None leaves rows as dicts."""

    def __repr__(self) -> str:
        return f"debezium_json(key={list(self.key)!r})"

    def of(self, type: Any) -> Format[Any]:
        if self.row is not None:
            raise TypeError(f"format is {self!r}, which has a type: leave out the other one")
        make = maker_of(type)
        return self if make is None else DebeziumJson(self.key, _Typed(type))

    def decoder(self, host: Host) -> Decoder:
        return Decoder(self.decode)

    def encoder(self, place: str, host: Host, *, is_key: bool = False) -> Encoder:
        raise GraphError(
            f"sink {place}: format is {self!r}, which only a source reads: write the rows as "
            "format='json', or upserts to a table"
        )

    def decode(self, body: bytes | str) -> Change[Any] | None:
        """Returns the change in an event, or None for an event that changes no row. Raises
        ValueError for a malformed event.
        """
        message = _MESSAGE.decode(body)
        convert = None
        if message.payload is not msgspec.UNSET and message.op is None:
            convert = _converter(bytes(message.schema))
            if bytes(message.payload) == b"null":
                return None
            message = _MESSAGE.decode(message.payload)
        if message.op == "m":  # A message that a program wrote to the log.
            return None
        kind = KINDS.get(message.op or "")
        if kind is None:
            raise ValueError(
                f"an event has op {message.op!r}, expected one of {', '.join(KINDS)}: if a "
                "transform such as ExtractNewRecordState has removed the envelope, read the rows "
                "by format='json'"
            )
        before, _ = self._row(message.before, convert)
        after, unchanged = self._row(message.after, convert)
        source = message.source or {}
        if kind == "truncate":
            before, after, key = None, None, {}
        elif kind == "delete":
            after, key = None, self._key(before, "before", kind)
        elif after is None:
            raise ValueError(f"an event with op {message.op!r} has no row after it")
        else:
            row, part = (after, "after") if before is None else (before, "before")
            key = self._key(row, part, kind)
        return Change(
            kind,
            _table(source),
            key,
            before,
            after,
            _position(source),
            source.get("ts_ms") or message.ts_ms or 0,
            unchanged,
        )

    def _row(self, raw: msgspec.Raw, convert: Row | None) -> tuple[Any, tuple[str, ...]]:
        """Returns the row in `raw`, and the names of the columns whose value the database did not
        log. `convert` decodes the row's values; None leaves them as JSON.
        """
        data = bytes(raw)
        if data == b"null":
            return None, ()
        make = self.row
        if make is None or convert is not None or any(one in data for one in _MARKS):
            row = msgspec.json.decode(data, type=dict[str, Any])
            unchanged = tuple(name for name, value in row.items() if value in UNAVAILABLE)
            row = {name: value for name, value in row.items() if name not in unchanged}
            row = row if convert is None else convert(row)
            return (row if make is None else make(row)), unchanged
        try:
            return make(data), ()
        except msgspec.ValidationError as error:
            if "decimal" not in str(error):
                raise
            raise msgspec.ValidationError(
                f"{error}: Debezium writes a decimal as bytes, which only its schema explains: set "
                "decimal.handling.mode=string, or value.converter.schemas.enable=true"
            ) from error

    def _key(self, row: Any, part: str, kind: str) -> dict[str, Any]:
        if not isinstance(row, dict):
            found = {name: getattr(row, name, None) for name in self.key}
        else:
            found = {name: row.get(name) for name in self.key}
        if None in found.values():
            raise ValueError(
                f"an event ({kind}) has no {', '.join(self.key)} in {part!r}, expected the key of "
                "its row: the table of the database needs these columns as PRIMARY KEY, or "
                "REPLICA IDENTITY FULL"
            )
        return found


class _Typed:
    """Makes an object of a type from a row's JSON, or from a dict."""

    def __init__(self, type: Any) -> None:
        self._type = type
        self._read = body_decoder("json", type)
        self._make = maker_of(type)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Typed, (self._type,)

    def __call__(self, row: Any) -> Any:
        make = self._read if isinstance(row, bytes) else self._make
        assert make is not None, "the type of a row has fields"
        return make(row)


_MESSAGE = msgspec.json.Decoder(_Message)


def _table(source: dict[str, Any]) -> str:
    return ".".join(str(source[one]) for one in ("schema", "table") if source.get(one)) or ""


def _position(source: dict[str, Any]) -> str:
    if source.get("file"):
        return f"{source['file']}:{source.get('pos')}"
    return str(source.get("lsn") or source.get("scn") or "")


# Values by the schemas of Kafka Connect.


def _decimal(text: str, scale: int) -> Decimal:
    number = int.from_bytes(base64.b64decode(text), "big", signed=True)
    return Decimal(f"{number}e{-scale}")


def _moment(microseconds: int) -> datetime:
    return datetime(1970, 1, 1) + timedelta(microseconds=microseconds)


def _time(microseconds: int) -> time:
    if not 0 <= microseconds < DAY_US:
        raise ValueError("expected a time of a day: a TIME of MySQL can be longer, or negative")
    return _moment(microseconds).time()


_NAMED: dict[str, Callable[[Any], Any]] = {
    "io.debezium.data.VariableScaleDecimal": lambda x: _decimal(x["value"], x["scale"]),
    "io.debezium.time.Date": lambda x: date(1970, 1, 1) + timedelta(days=x),
    "io.debezium.time.MicroTime": _time,
    "io.debezium.time.MicroTimestamp": _moment,
    "io.debezium.time.NanoTime": lambda x: _time(x // 1000),
    "io.debezium.time.NanoTimestamp": lambda x: _moment(x // 1000),
    "io.debezium.time.Time": lambda x: _time(x * 1000),
    "io.debezium.time.Timestamp": lambda x: _moment(x * 1000),
    "io.debezium.time.ZonedTimestamp": datetime.fromisoformat,
    "org.apache.kafka.connect.data.Date": lambda x: date(1970, 1, 1) + timedelta(days=x),
    "org.apache.kafka.connect.data.Time": lambda x: _time(x * 1000),
    "org.apache.kafka.connect.data.Timestamp": lambda x: _moment(x * 1000),
}
"""Maps the name of a schema's type to a function that decodes a value. Decoded times are naive if
the database type has no time zone.
"""


@lru_cache(64)
def _converter(schema: bytes) -> Row | None:
    """Returns a function that converts the rows of events with `schema`, or None if the rows need
    no conversion.
    """
    try:
        parts = (msgspec.json.decode(schema) or {}).get("fields", ())
        row = next((one for one in parts if one.get("field") in ("after", "before")), None)
        return None if row is None else _reader(row)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"the schema of an event is {schema!r:.80}, expected one of Kafka Connect: {error!r}"
        ) from error


def _reader(schema: dict[str, Any]) -> Row | None:
    """Returns a function that converts non-null values of `schema`, or None if they need no
    conversion.
    """
    name, kind = schema.get("name"), schema.get("type")
    if name == "org.apache.kafka.connect.data.Decimal":
        scale = int(schema["parameters"]["scale"])
        return lambda text: _decimal(text, scale)
    if name in _NAMED:
        return _NAMED[name]
    if kind == "bytes":
        return base64.b64decode
    if kind == "array":
        of = _reader(schema["items"])
        return of and (lambda items: [None if one is None else of(one) for one in items])
    if kind != "struct":
        return None
    readers = {one["field"]: found for one in schema["fields"] if (found := _reader(one))}

    def read(row: dict[str, Any]) -> dict[str, Any]:
        made = {**row}
        for field, reader in readers.items():
            value = row.get(field)
            if value is None:
                continue
            try:
                made[field] = reader(value)
            except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                raise ValueError(f"the column {field} is {value!r:.60}: {error}") from error
        return made

    return read if readers else None
