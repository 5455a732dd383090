"""Decodes message bodies into values, and encodes values as message bodies: JSON, text or bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from aioflow.core.errors import describe_record
from aioflow.core.wire.kinds import Kind, fields_of, kind_of
from aioflow.io.conversion import (
    aliases_in,
    is_model,
    is_namedtuple,
    made_part,
    model_maker,
    namedtuple_reader,
    renaming_maker,
)

__all__ = [
    "FORMATS",
    "as_object",
    "body_decoder",
    "body_encoder",
    "holds_private",
    "json_encoder",
    "lines_of_objects",
]

FORMATS = ("json", "text", "bytes")
"""Formats of a body that need no schema."""


def body_decoder(format: str, type: type[Any] | None) -> Callable[[bytes], Any]:
    """Returns a function that decodes a body. The function raises MsgspecError or ValueError."""
    if format == "text":
        return bytes.decode
    if format == "bytes":
        return bytes
    if type is None:
        return msgspec.json.Decoder().decode
    if is_namedtuple(type):
        return namedtuple_reader(type)
    if is_model(type):
        return model_maker(type.model_validate_json)
    if (rename := renaming_maker(type)) is not None:
        parse = msgspec.json.Decoder().decode
        return lambda body: rename(parse(body))
    return msgspec.json.Decoder(type, dec_hook=made_part).decode


def body_encoder(format: str, place: str) -> Callable[[Any], bytes]:
    """Returns a function that encodes a value. The function raises TypeError naming `place` and the
    value.
    """
    if format == "json":
        encode_json = json_encoder(f"sink {place}").encode
        return lambda value: encode_json(as_object(value))
    expected = str if format == "text" else bytes

    def encode(value: Any) -> bytes:
        if not isinstance(value, expected):
            raise TypeError(
                f"sink {place} got {describe_record(value)}, expected {expected.__name__}: map it "
                "first, or give format="
            )
        return value.encode() if isinstance(value, str) else bytes(value)

    return encode


def json_encoder(place: str) -> msgspec.json.Encoder:
    """Returns an encoder for values that msgspec supports, Pydantic models, and numpy's arrays and
    scalars.

    For any other value, the encoder raises TypeError naming `place` and the type.
    """

    def plain(value: Any) -> Any:
        if is_model(type(value)):
            return value.model_dump(mode="json")
        tolist = getattr(value, "tolist", None)
        if tolist is not None:
            return tolist()
        raise TypeError(
            f"{place} got a {type(value).__qualname__}, expected what JSON can hold: "
            "map it to a dict or a dataclass first"
        )

    return msgspec.json.Encoder(enc_hook=plain)


def as_object(value: Any) -> Any:
    """Returns a dict for a NamedTuple, or for a value that contains attrs objects with private
    fields.

    So the JSON is an object. By itself, msgspec would write a NamedTuple as an array, and would
    omit private fields. Returns other values unchanged.
    """
    cls: Any = type(value)
    if hasattr(value, "_asdict"):
        made = value._asdict()
        return {name: _plain(one) for name, one in made.items()} if holds_private(cls) else made
    return _plain(value) if holds_private(cls) else value


@lru_cache(1_024)
def holds_private(cls: Any) -> bool:
    """Returns whether objects of `cls` may contain attrs objects with private fields."""
    return any(name.startswith("_") for name in aliases_in(cls))


def _plain(value: Any) -> Any:
    """Returns `value`, in which a dict replaces each object that contains private attrs fields."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, set, frozenset)) or type(value) is tuple:
        return [_plain(one) for one in value]
    cls: Any = type(value)
    kind = kind_of(cls) if holds_private(cls) else None
    if kind is Kind.NAMED_TUPLE:
        return [_plain(one) for one in value]
    if kind in (Kind.ATTRS, Kind.DATACLASS):
        return {name: _plain(getattr(value, name)) for name in fields_of(cls, kind)}
    if kind is Kind.STRUCT:
        names = zip(cls.__struct_encode_fields__, cls.__struct_fields__, strict=True)
        return {name: _plain(getattr(value, field)) for name, field in names}
    return value


def lines_of_objects(data: bytes) -> int | None:
    """Returns the number of lines in `data` if each line begins with `{` and ends with `}`,
    otherwise None.
    """
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    borders = data.count(b"}\n{") + (data.count(b"}\r\n{") if b"\r" in data else 0)
    if (
        borders + 1 != lines
        or not data.startswith(b"{")
        or not data.endswith((b"}", b"}\n", b"}\r\n"))
    ):
        return None
    return lines
