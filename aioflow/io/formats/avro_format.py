"""Avro: `avro(Type)` or `avro(schema)`, with a schema registry or without one.

A body is decoded with the schema that it was written with, which the registry returns. The value is
then converted to the type of the elements. So the type may have more or fewer fields than the
writer's schema: the type's defaults fill in missing fields. With a schema instead of a type, Avro's
rules of schema resolution apply. Needs the extra `aioflow[avro]` (fastavro).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, overload

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError, describe_record
from aioflow.io.arguments import T, checked_options, one_or_more
from aioflow.io.formats.avro_types import avro_schema_of, checked_written, differing_field, renamed
from aioflow.io.formats.format import (
    Decoder,
    Encoder,
    Format,
    PlainValues,
    TypedFormat,
    maker_of,
    reason_of,
    with_type,
)
from aioflow.io.formats.registered import (
    HEAD_BYTES,
    Registration,
    SchemaHeads,
    SchemaReaders,
    Subject,
    checked_registration,
)
from aioflow.io.formats.registry import AVRO, Document

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.io.formats.registry import Schema, SchemaRegistry

__all__ = ["AvroFormat", "avro"]


@overload
def avro(
    type: type[T],
    *,
    registry: SchemaRegistry | None = ...,
    subject: Subject = ...,
    auto_register: bool = ...,
    namespace: str | None = ...,
    aliases: Mapping[str, str | Sequence[str]] | None = ...,
) -> Format[T]: ...
@overload
def avro(
    type: Mapping[str, Any] | list[Any] | str | None = ...,
    *,
    registry: SchemaRegistry | None = ...,
    subject: Subject = ...,
    auto_register: bool = ...,
    namespace: str | None = ...,
    aliases: Mapping[str, str | Sequence[str]] | None = ...,
) -> Format[Any]: ...
@explained
def avro(
    type: Any = None,
    *,
    registry: SchemaRegistry | None = None,
    subject: Subject = "topic",
    auto_register: bool = True,
    namespace: str | None = None,
    aliases: Mapping[str, str | Sequence[str]] | None = None,
) -> Format[Any]:
    """Returns the format of Avro bodies.

    `type` is the type of the elements, from which a schema is made. It may also be a schema, as
    JSON. Then the elements are dicts, or objects of the connector's `type`. With a `registry`, each
    body is preceded by the id of its schema, and a source decodes the body with this schema. If
    `type` is None, a source emits dicts, and a sink writes with the latest schema of its subject.

    `subject` is the subject under which a sink registers its schema: "topic" means `TOPIC-value` or
    `TOPIC-key`, "record" the full name of the record, and "topic-record" `TOPIC-RECORD`. It may
    also be a function of the topic and the record's name. With `auto_register=False` the subject
    must already have the schema. `namespace` is the namespace of a schema that is made from a type.
    `aliases` has former names of fields, such as `{"total": "amount"}`, or `{"Line.total":
    ["amount"]}` for a record inside another.
    """
    _library()
    place = "avro(...)"
    former: dict[str, tuple[str, ...]] = {
        name: tuple(one_or_more(names))
        for name, names in checked_options(aliases, "aliases", place).items()
    }
    schema: Any = None
    if isinstance(type, (Mapping, list, str)):
        type, schema = None, _read(type, place)
        if former:
            raise GraphError(
                f"{place}: aliases= needs a type; write the aliases of a schema in the schema"
            )
    made = AvroFormat(
        None,
        schema,
        checked_registration(registry, subject, auto_register, place),
        namespace,
        former,
    )
    return with_type(made, type, place)


def _library() -> Any:
    """Returns the module fastavro. Raises ModuleNotFoundError naming the extra to install."""
    try:
        import fastavro
    except ImportError:
        raise ModuleNotFoundError(
            "af.io.formats.avro needs fastavro: pip install 'aioflow[avro]'"
        ) from None
    return fastavro


def _read(schema: Any, place: str) -> Any:
    """Returns `schema`, a JSON text or value, as a JSON value. Raises GraphError if `schema` is not
    an Avro schema.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            pass  # The name of a primitive type, or no schema.
    try:
        _parsed(schema, {})
    except Exception as error:  # noqa: BLE001  # fastavro's errors have no common base.
        raise GraphError(
            f"{place}: expected a type, or a schema of Avro: {str(error) or error!r}"
        ) from None
    return schema


def _parsed(schema: Any, named: dict[str, Any]) -> Any:
    return _library().parse_schema(schema, named)


@dataclass(frozen=True, eq=False)
class AvroFormat(TypedFormat[T]):
    """The format of Avro bodies. Made by `avro`."""

    schema: Any
    """The schema that the user gave, as JSON."""
    registration: Registration | None
    namespace: str | None
    aliases: dict[str, tuple[str, ...]]

    def __repr__(self) -> str:
        shown = getattr(self.type, "__name__", "" if self.schema is None else "schema")
        return f"avro({shown})"

    def _own_schema(self, place: str) -> Any:
        """Returns the schema of this format: the user's schema, or a schema made from the type.
        Returns None if the user gave neither.
        """
        if self.schema is not None or self.type in (None, dict, Any):
            return self.schema
        try:
            return avro_schema_of(self.type, self.namespace, self.aliases)
        except (GraphError, TypeError) as error:
            raise GraphError(f"{place}: {error}") from None

    # Read.

    def decoder(self, host: Host) -> Decoder:
        if self.registration is not None:
            return SchemaReaders(host, self.registration, AVRO, self._reader).decoder()
        schema = self._own_schema(repr(self))
        if schema is None:
            raise GraphError(f"{self!r}: without a registry it needs a type or a schema")
        read = _body_reader(_parsed(schema, {}), None, 0, maker_of(self.type))

        def decode(body: bytes) -> Any:
            try:
                return read(body)
            except Exception as error:  # fastavro raises many errors for bad bytes.
                raise ValueError(reason_of(error)) from error

        return Decoder(decode)

    def _reader(self, schema: Schema) -> Callable[[bytes], Any]:
        """Returns a function that decodes bodies that were written with `schema`."""
        named = _referred(schema)
        written = _json(schema.text)
        if self.aliases:
            written = renamed(written, self.aliases)
        wanted = None if self.schema is None else _parsed(self.schema, {})
        return _body_reader(_parsed(written, named), wanted, HEAD_BYTES, maker_of(self.type))

    # Write.

    def encoder(self, place: str, host: Host, *, is_key: bool = False) -> Encoder:
        schema = self._own_schema(place)
        if schema is None and self.registration is None:
            raise GraphError(f"{place}: {self!r} needs a type, a schema or a registry")
        exact = self.type if self.schema is None else None
        writer = _Writer(place, exact)
        document = record = None
        if schema is not None:
            document, record = Document(AVRO, json.dumps(schema)), writer.use(schema, {})
        if self.registration is None:
            return Encoder(writer.encode)

        def learn(found: Schema) -> None:
            writer.use(_json(found.text), _referred(found))

        heads = SchemaHeads(
            host, self.registration, AVRO, document, record, learn=learn, is_key=is_key
        )
        return Encoder(writer.encode, heads.head)


def _json(text: str) -> Any:
    """Returns the schema in a registry's answer as a JSON value. Some registries send a primitive
    schema without quotes.
    """
    try:
        return json.loads(text)
    except ValueError:
        return text


def _referred(schema: Schema) -> dict[str, Any]:
    """Returns the types, by name, that the schemas referenced by `schema` define."""
    named: dict[str, Any] = {}
    for _, text in schema.references:
        _parsed(_json(text), named)
    return named


def _body_reader(
    written: Any, wanted: Any, skipped: int, make: Callable[[Any], Any] | None
) -> Callable[[bytes], Any]:
    """Returns a function that decodes bodies of the schema `written`. It skips the first `skipped`
    bytes of a body.

    Values are resolved to the schema `wanted` unless it is None, and then converted by `make`
    unless it is None.
    """
    read = _library().schemaless_reader
    if checked_written(written):
        # The compiled reader ends the process when a damaged body nests too deep.
        from fastavro._read_py import schemaless_reader as read

    def read_body(body: bytes) -> Any:
        stream = BytesIO(body)
        stream.seek(skipped)
        try:
            value = read(stream, written, wanted)
        except Exception as error:
            if isinstance(error, EOFError) or "BytesIO" in str(error):
                raise ValueError("the bytes end within a value") from error
            if wanted is None or (field := differing_field(written, wanted)) is None:
                raise
            raise ValueError(f"field {field!r}: {error}") from error
        if stream.tell() != len(body):
            raise ValueError(f"{len(body) - stream.tell()} bytes remain after the value")
        return value if make is None else make(value)

    return read_body


class _Writer:
    """Encodes the values of one sink."""

    def __init__(self, place: str, exact: Any) -> None:
        self._place = place
        self._exact = exact
        """The type from which the schema was made, or None. Values of this type have no fields that
        the schema lacks.
        """
        self._plain = PlainValues()
        self._write = _library().schemaless_writer
        self._schema: Any = None
        self._shown = ""

    def use(self, schema: Any, named: dict[str, Any]) -> str | None:
        """Sets the schema to write with. `named` has the types, by name, to which the schema
        refers. Returns the full name of the schema, or None if it has no name.
        """
        self._schema = _parsed(schema, named)
        name = self._schema.get("name") if isinstance(self._schema, dict) else None
        self._shown = name or json.dumps(schema)[:80]
        return name

    def encode(self, value: Any) -> bytes:
        if self._schema is None:
            raise GraphError(
                f"sink {self._place}: the format has no schema, and a function chooses the topic: "
                "give the format a type or a schema"
            )
        stream = BytesIO()
        try:
            fields = self._plain.of(value)
            if type(value) is self._exact:
                self._write(stream, self._schema, fields, disable_tuple_notation=True)
            else:  # Unknown fields are refused: most are misspelled.
                self._write(
                    stream,
                    self._schema,
                    fields,
                    strict_allow_default=True,
                    disable_tuple_notation=True,
                )
        except Exception as error:  # fastavro raises many errors for values of another type.
            raise TypeError(
                f"sink {self._place} got {describe_record(value)}, which does not fit the Avro "
                f"schema {self._shown}: {reason_of(error)}"
            ) from error
        return stream.getvalue()
