"""Converts entries of Redis streams to values, and back: all their fields, or the body in one
field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from aioflow.core.errors import describe_record, with_article
from aioflow.io.conversion import (
    body_decoder,
    body_encoder,
    field_names,
    fields_of_value,
    row_converter,
)

if TYPE_CHECKING:
    from aioflow.io.redis_streams import RedisStreams

__all__ = ["decoder_of", "encoder_of", "entry_decoder"]

Entry = dict[bytes, bytes]


def decoder_of(config: RedisStreams[Any]) -> Callable[[Entry], Any]:
    """Returns a function that decodes an entry. The function raises MsgspecError or
    UnicodeDecodeError.
    """
    if config.field is None:
        return entry_decoder(config.type)
    field, decode = config.field.encode(), body_decoder(config.format, config.type)

    def make(entry: Entry) -> Any:
        if field not in entry:
            has = ", ".join(repr(name.decode(errors="replace")) for name in entry)
            raise msgspec.ValidationError(
                f"there is no field {field.decode()!r}, the entry has {has}"
            )
        return decode(entry[field])

    return make


def entry_decoder(type: type[Any] | None) -> Callable[[Entry], Any]:
    """Returns a function that decodes an entry into a dict of texts, or into a `type`, whose fields
    are converted.

    Raises TypeError for a type without fields.
    """
    if type is None or type is dict:
        return lambda entry: {name.decode(): value.decode() for name, value in entry.items()}
    field_names(type)
    converters: dict[tuple[bytes, ...], Callable[[list[str]], Any]] = {}

    def make(entry: Entry) -> Any:
        names = tuple(entry)
        convert = converters.get(names)
        if convert is None:
            try:
                convert = row_converter(
                    type, [name.decode() for name in names], "field", "give it a default"
                )
            except TypeError as error:
                raise msgspec.ValidationError(str(error)) from None
            if len(converters) < 100:  # Bounded, because each entry may have other fields.
                converters[names] = convert
        return convert([value.decode() for value in entry.values()])

    return make


def encoder_of(config: RedisStreams[Any]) -> Callable[[Any], list[bytes]]:
    """Returns a function that encodes a value into the field names and field values of an entry,
    alternating.

    The function raises TypeError naming the value.
    """
    if config.field is not None:
        field, encode = config.field.encode(), body_encoder(config.format, repr(config))
        return lambda value: [field, encode(value)]
    place = repr(config)

    def fields(value: Any) -> list[bytes]:
        names = fields_of_value(value)
        if not names:
            raise TypeError(
                f"sink {place} got {describe_record(value)}, expected a dict or what has fields: "
                "map it first, or name by field= the one "
                "field that is to hold it"
            )
        cells = (
            value.values() if isinstance(value, dict) else [getattr(value, name) for name in names]
        )
        entry: list[bytes] = []
        for name, cell in zip(names, cells, strict=True):
            entry += (name.encode(), _text(cell, name, value, place))
        return entry

    return fields


def _text(cell: Any, name: str, value: Any, place: str) -> bytes:
    """Returns the value of one field as bytes, spelled as `row_converter` reads it."""
    if isinstance(cell, str):
        return cell.encode()
    if isinstance(cell, bytes):
        return cell
    if cell is None:
        return b""
    if isinstance(cell, bool):
        return b"true" if cell else b"false"
    if isinstance(cell, (int, float)):
        return repr(cell).encode()
    raise TypeError(
        f"sink {place} got {describe_record(value)}, whose field {name!r} is "
        f"{with_article(type(cell).__qualname__)}: fields of an "
        "entry are texts, bytes and numbers; map it first, or give field= to write the whole as "
        "JSON into one field"
    )
