"""Formats of message bodies. A format encodes values as bodies, and decodes bodies to values.

A broker connector accepts `format="json"`, "text" or "bytes", or a `Format` of `af.io.formats`. A
format is pure data. Its `decoder` and `encoder` process one body at a time, and never wait. Schemas
are fetched earlier: `Decoder.prepare` is awaited when messages arrive, and `Encoder.head` before
the first record goes to a destination.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import msgspec

from aioflow.core.errors import GraphError, did_you_mean
from aioflow.io.arguments import T
from aioflow.io.bodies import FORMATS, as_object, body_decoder, body_encoder, holds_private
from aioflow.io.conversion import (
    is_model,
    is_namedtuple,
    made_part,
    model_maker,
    namedtuple_from,
    renaming_maker,
)

if TYPE_CHECKING:
    from aioflow.core.host import Host

__all__ = [
    "Decoder",
    "Encoder",
    "Format",
    "PlainValues",
    "TypedFormat",
    "checked_format",
    "maker_of",
    "reason_of",
    "with_type",
]


class Decoder(NamedTuple):
    """The functions that decode message bodies."""

    decode: Callable[[bytes], Any]
    """Returns the value of a body. Raises an error of `arguments.MALFORMED` for a
    malformed body.
    """
    prepare: Callable[[Iterable[bytes]], Awaitable[None]] | None = None
    """Fetches the schemas of the given bodies. None for formats without schemas."""


class Encoder(NamedTuple):
    """The functions that encode message bodies."""

    encode: Callable[[Any], bytes]
    """Returns the body for a value, without its head. Raises TypeError naming the sink and the
    value.
    """
    head: Callable[[str], Awaitable[bytes]] | None = None
    """Returns the head: the bytes before each body that goes to a destination (a topic, subject or
    stream).
    """


class Format(ABC, Generic[T]):
    """A format of message bodies. The functions of `af.io.formats` return formats."""

    def of(self, type: Any) -> Format[Any]:
        """Returns this format with elements of `type`. Raises TypeError if the format has another
        type.
        """
        raise TypeError(f"{self!r} takes no type")

    @abstractmethod
    def decoder(self, host: Host) -> Decoder:
        """Returns the functions that decode bodies."""

    @abstractmethod
    def encoder(self, place: str, host: Host, *, is_key: bool = False) -> Encoder:
        """Returns the functions that encode bodies; `place` names the sink in errors."""


@dataclass(frozen=True, eq=False)
class TypedFormat(Format[T]):
    """A format whose elements can become objects of a type."""

    type: Any
    """The type of the elements. None leaves the elements as they are decoded."""

    def of(self, type: Any) -> Format[Any]:
        if self.type is not None:
            raise TypeError(f"format is {self!r}, which has a type: leave out the other one")
        maker_of(type)
        return replace(self, type=type)


@dataclass(frozen=True)
class PlainFormat(Format[T]):
    """A format without a schema: "json", "text" or "bytes"."""

    name: str
    type: Any = None

    def decoder(self, host: Host) -> Decoder:
        return Decoder(body_decoder(self.name, self.type))

    def encoder(self, place: str, host: Host, *, is_key: bool = False) -> Encoder:
        return Encoder(body_encoder(self.name, place))


def checked_format(format: str | Format[Any], type: Any, place: str) -> Format[Any]:
    """Returns the format for the argument `format=` of a connector, with elements of `type`.

    Raises GraphError naming `place` for an invalid format, or a type that the format cannot be
    decoded into.
    """
    if isinstance(format, Format):
        return with_type(format, type, place)
    if not isinstance(format, str) or format not in FORMATS:
        hint = did_you_mean(format, FORMATS) if isinstance(format, str) else ""
        raise GraphError(
            f"{place}: format is {format!r}, expected 'json', 'text' or 'bytes', or a format of "
            f"af.io.formats, such as avro(...){hint}"
        )
    if type is not None and format != "json":
        raise GraphError(
            f"{place}: type is given and format is {format!r}; a type is made of JSON alone: "
            "leave out one of them"
        )
    try:
        body_decoder(format, type)
    except TypeError as error:
        raise GraphError(
            f"{place}: type is {type!r}, which JSON cannot be decoded into: {error}"
        ) from None
    return PlainFormat(format, type)


def with_type(format: Format[Any], type: Any, place: str) -> Format[Any]:
    """Returns `format` with elements of `type`, or unchanged if `type` is None.

    Raises GraphError naming `place` if the format does not support the type.
    """
    try:
        return format if type is None else format.of(type)
    except TypeError as error:
        raise GraphError(f"{place}: {error}") from None


def reason_of(error: Exception) -> str:
    """Returns the message of an error, or the name of its class if it has no message."""
    return str(error) or type(error).__name__


def maker_of(type: Any) -> Callable[[Any], Any] | None:
    """Returns a function that makes a value of `type` from dicts, lists and scalars.

    Returns None if dicts stay dicts. Raises TypeError for a type without known fields.
    """
    if type is None or type is dict or type is Any:
        return None
    if is_namedtuple(type):
        return namedtuple_from(type)
    if is_model(type):
        return model_maker(type.model_validate)
    msgspec.json.Decoder(type)  # Checks that the type is supported.
    return renaming_maker(type) or partial(msgspec.convert, type=type, dec_hook=made_part)


KEPT = (
    bytes,
    bytearray,
    memoryview,
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    uuid.UUID,
)
"""Types that Avro or Protobuf can encode directly."""


class PlainValues:
    """Converts the values of one sink into dicts, lists, scalars and objects of `KEPT`."""

    def __init__(self) -> None:
        self._converters: dict[type, Callable[[Any], Any]] = {}

    def of(self, value: Any) -> Any:
        """Returns `value` converted to dicts, lists, scalars and objects of `KEPT`. Raises
        TypeError for an object without fields.
        """
        convert = self._converters.get(type(value))
        if convert is None:
            convert = self._converters[type(value)] = _converter_of(type(value))
        return convert(value)


def _converter_of(type_: type) -> Callable[[Any], Any]:
    convert = partial(msgspec.to_builtins, builtin_types=KEPT, enc_hook=_plain_part)
    if is_model(type_):
        return lambda value: convert(value.model_dump(by_alias=True))
    if is_namedtuple(type_) or holds_private(type_):
        return lambda value: convert(as_object(value))
    return convert


def _plain_part(value: Any) -> Any:
    if is_model(type(value)):
        return value.model_dump(by_alias=True)
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    raise TypeError(f"a {type(value).__qualname__} has no fields")
