"""Decodes the bodies of messages into values, and encodes values as bodies: JSON, text or bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from aioflow.core.errors import GraphError, describe_record, did_you_mean
from aioflow.io.shapes import is_namedtuple, namedtuple_from

__all__ = [
    "FORMATS",
    "body_decoder",
    "body_encoder",
    "checked_format",
    "one_or_more",
    "one_or_more_places",
]

_BETWEEN = re.compile(r"\s*,\s*(?=\w+://|[^@]*$)")

FORMATS = ("json", "text", "bytes")
"""Formats of a body."""


def one_or_more(given: Any) -> list[Any]:
    """Returns the items of the iterable `given` as a list. A text, or an object that is not
    iterable, is itself the only item. The caller checks the types.
    """
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def one_or_more_places(given: Any) -> list[Any]:
    """Returns `given` as a list of servers; a text may hold several servers, separated by commas.

    A comma before a later `@` is part of a password.
    """
    return [
        place
        for one in one_or_more(given)
        for place in (_BETWEEN.split(one) if isinstance(one, str) else [one])
    ]


def checked_format(format: str, type: type[Any] | None, place: str) -> str:
    """Returns `format` if it is valid.

    Raises GraphError naming `place`, also for a type that JSON cannot be decoded into.
    """
    if format not in FORMATS:
        raise GraphError(
            f"{place}: format is {format!r}, expected 'json', 'text' or "
            f"'bytes'{did_you_mean(format, FORMATS)}"
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
    return format


def body_decoder(format: str, type: type[Any] | None) -> Callable[[bytes], Any]:
    """Returns a function that decodes a body. The function raises MsgspecError or
    UnicodeDecodeError.
    """
    if format == "text":
        return bytes.decode
    if format == "bytes":
        return bytes
    if type is None:
        return msgspec.json.Decoder().decode
    if is_namedtuple(type):
        # msgspec decodes a NamedTuple from an array, but messages contain objects more often.
        read, make = msgspec.json.Decoder().decode, namedtuple_from(type)
        return lambda body: make(read(body))
    return msgspec.json.Decoder(type).decode


def body_encoder(format: str, place: str) -> Callable[[Any], bytes]:
    """Returns a function that encodes a value. The function raises TypeError naming `place` and the
    value.
    """
    if format == "json":
        return _JsonBodies(place).encode
    expected = str if format == "text" else bytes

    def encode(value: Any) -> bytes:
        if not isinstance(value, expected):
            raise TypeError(
                f"sink {place} got {describe_record(value)}, expected {expected.__name__}: map it "
                "first, or give format="
            )
        return value.encode() if isinstance(value, str) else bytes(value)

    return encode


class _JsonBodies:
    def __init__(self, place: str) -> None:
        self._place = place
        self._encode = msgspec.json.Encoder(enc_hook=self._other).encode

    def encode(self, value: Any) -> bytes:
        return self._encode(value._asdict() if hasattr(value, "_asdict") else value)

    def _other(self, value: Any) -> Any:
        """Converts a value that msgspec does not support: numpy's arrays and scalars become plain
        values.
        """
        tolist = getattr(value, "tolist", None)
        if tolist is not None:
            return tolist()
        raise TypeError(
            f"sink {self._place} got a {type(value).__qualname__}, expected what JSON can hold: "
            "map it to a dict or a dataclass first"
        )
