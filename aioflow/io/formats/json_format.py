"""JSON with a schema registry: `json_schema(Type)` writes JSON, and registers the JSON Schema of
the type.

A source does not ask the registry: JSON is decoded without a schema, and checked against the type
of the elements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import msgspec

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError
from aioflow.io.arguments import T
from aioflow.io.bodies import body_decoder, body_encoder
from aioflow.io.conversion import is_model, is_namedtuple
from aioflow.io.formats.format import Decoder, Encoder, Format, TypedFormat, with_type
from aioflow.io.formats.registered import (
    HEAD_BYTES,
    Registration,
    SchemaHeads,
    Subject,
    checked_registration,
)
from aioflow.io.formats.registry import JSON, Document

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.io.formats.registry import Schema, SchemaRegistry

__all__ = ["JsonSchemaFormat", "json_schema"]


@overload
def json_schema(
    type: type[T],
    *,
    registry: SchemaRegistry,
    subject: Subject = ...,
    auto_register: bool = ...,
) -> Format[T]: ...
@overload
def json_schema(
    type: Mapping[str, Any] | None = ...,
    *,
    registry: SchemaRegistry,
    subject: Subject = ...,
    auto_register: bool = ...,
) -> Format[Any]: ...
@explained
def json_schema(
    type: Any = None,
    *,
    registry: SchemaRegistry,
    subject: Subject = "topic",
    auto_register: bool = True,
) -> Format[Any]:
    """Returns the format of JSON bodies with the id of a JSON Schema before them.

    `type` is the type of the elements, whose JSON Schema a sink registers. It may also be a JSON
    Schema. Then the elements are plain JSON values, or objects of the connector's `type`. If `type`
    is None, a sink writes with the id of the latest schema of its subject. A source needs no
    schema; it checks elements against their type. `registry`, `subject` and `auto_register` are as
    for `avro`.
    """
    place = "json_schema(...)"
    registration = checked_registration(registry, subject, auto_register, place)
    if registration is None:
        raise GraphError(f"{place}: expected registry=; without a registry, give format='json'")
    if isinstance(type, Mapping):
        return JsonSchemaFormat(None, dict(type), registration)
    return with_type(JsonSchemaFormat(None, None, registration), type, place)


@dataclass(frozen=True, eq=False)
class JsonSchemaFormat(TypedFormat[T]):
    """The format of JSON bodies whose schema is in a registry. Made by `json_schema`."""

    schema: dict[str, Any] | None
    registration: Registration

    def __repr__(self) -> str:
        shown = getattr(self.type, "__name__", "" if self.schema is None else "schema")
        return f"json_schema({shown})"

    def decoder(self, host: Host) -> Decoder:
        read = body_decoder("json", self.type)

        def decode(body: bytes) -> Any:
            if len(body) < HEAD_BYTES or body[0] != 0:
                raise ValueError(
                    f"the body begins with {body[:HEAD_BYTES]!r}, expected a zero byte and the id "
                    "of a schema"
                )
            return read(body[HEAD_BYTES:])

        return Decoder(decode)

    def encoder(self, place: str, host: Host, *, is_key: bool = False) -> Encoder:
        schema = self.schema
        if schema is None and self.type not in (None, dict, Any):
            schema = _schema_of(self.type, place)
        document = None if schema is None else Document(JSON, json.dumps(schema))
        record = None if schema is None else schema.get("title")

        def learn(found: Schema) -> None:
            """Does nothing: JSON is written without its schema."""

        heads = SchemaHeads(
            host, self.registration, JSON, document, record, learn=learn, is_key=is_key
        )
        return Encoder(body_encoder("json", place), heads.head)


def _schema_of(type: Any, place: str) -> dict[str, Any]:
    """Returns the JSON Schema of a type, with the type's name as its title."""
    if is_model(type):
        made: dict[str, Any] = type.model_json_schema()
    elif is_namedtuple(type):
        raise GraphError(
            f"{place}: a NamedTuple has no JSON Schema of an object: give the format a schema"
        )
    else:
        try:
            (top,), parts = msgspec.json.schema_components([type], ref_template="#/$defs/{name}")
        except TypeError as error:
            raise GraphError(f"{place}: {error}: give the format a schema") from None
        name = str(top.get("$ref", "")).rpartition("/")[2]
        if name and json.dumps(parts).count(json.dumps(top)[1:-1]) == 0:
            # Nothing else refers to the schema, so it need not be a definition.
            top = parts.pop(name)
        made = {**top, **({"$defs": parts} if parts else {})}
    made.setdefault("title", getattr(type, "__name__", "value"))
    return {"$schema": "http://json-schema.org/draft-07/schema#", **made}
