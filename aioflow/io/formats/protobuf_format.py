"""Protobuf: `protobuf(Message)`, with a schema registry or without one.

With a registry, a body begins with the id of its schema, and the index path of its message type in
the schema's file. The reader checks that this is the expected message type. If the registry returns
the text of a .proto file instead of a descriptor, the reader compares index paths instead.

Without a message class, bodies are decoded and encoded with the registry's descriptors: elements
are dicts, or objects of the connector's type. Needs the extra `aioflow[protobuf]`.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError, describe_record
from aioflow.io.arguments import T
from aioflow.io.formats.format import (
    Decoder,
    Encoder,
    Format,
    PlainValues,
    TypedFormat,
    maker_of,
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
from aioflow.io.formats.registry import PROTOBUF, Document, is_proto_file

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.io.formats.registry import Schema, SchemaRegistry

__all__ = ["ProtobufFormat", "message_indexes", "protobuf", "read_indexes"]

NESTED_MAX = 100
"""Maximum length of an index path. A longer path means damaged bytes."""

WELL_KNOWN = "google/protobuf/"
"""Folder of the schema files that every Protobuf library has, so registries may lack them."""


@overload
def protobuf(
    message: type[T],
    *,
    registry: SchemaRegistry | None = ...,
    subject: Subject = ...,
    auto_register: bool = ...,
) -> Format[T]: ...
@overload
def protobuf(
    message: None = ...,
    *,
    registry: SchemaRegistry | None = ...,
    subject: Subject = ...,
    auto_register: bool = ...,
) -> Format[Any]: ...
@explained
def protobuf(
    message: Any = None,
    *,
    registry: SchemaRegistry | None = None,
    subject: Subject = "topic",
    auto_register: bool = True,
) -> Format[Any]:
    """Returns the format of Protobuf bodies.

    `message` is a class that protoc has generated. The elements are its messages, or, if the
    connector has a `type`, objects of this type with the same fields. Without a class, the
    registry's descriptors are used. The elements are then dicts, or objects of the connector's
    type. A sink then writes the first message type in the latest schema of its subject. `registry`,
    `subject` and `auto_register` are as for `avro`. Files that the schema imports are registered
    under their own names.

    In dicts, an unset field is None if its presence is tracked. An enum value is its name, and a
    Timestamp or Duration is a datetime or timedelta.
    """
    base = _library()
    place = "protobuf(...)"
    registration = checked_registration(registry, subject, auto_register, place)
    is_message = isinstance(message, type) and issubclass(message, base)
    if not is_message and registration is None:
        raise GraphError(f"{place}: expected a message class that protoc has made, or registry=")
    if is_message:
        return ProtobufFormat(None, message, registration)
    return with_type(ProtobufFormat(None, None, registration), message, place)


def _library() -> Any:
    """Returns Protobuf's base class of messages. Raises ModuleNotFoundError naming the extra to
    install.
    """
    try:
        from google.protobuf.message import Message
    except ImportError:
        raise ModuleNotFoundError(
            "af.io.formats.protobuf needs protobuf: pip install 'aioflow[protobuf]'"
        ) from None
    return Message


@dataclass(frozen=True, eq=False)
class ProtobufFormat(TypedFormat[T]):
    """The format of Protobuf bodies. Made by `protobuf`."""

    message: Any
    """The message class of the user. None means that the class is made from the registry's
    descriptor.
    """
    registration: Registration | None

    def __repr__(self) -> str:
        return f"protobuf({getattr(self.message or self.type, '__name__', '')})"

    # Read.

    def decoder(self, host: Host) -> Decoder:
        if self.registration is not None:
            return SchemaReaders(host, self.registration, PROTOBUF, self._reader).decoder()
        read = self._message_reader(self.message)

        def decode(body: bytes) -> Any:
            try:
                return read(body)
            except Exception as error:  # DecodeError is no ValueError.
                raise ValueError(f"no {self.message.DESCRIPTOR.full_name}: {error}") from error

        return Decoder(decode)

    def _message_reader(self, message: Any) -> Callable[[bytes], Any]:
        """Returns a function that decodes the bytes of the message class `message` to an
        element.
        """
        parse = message.FromString
        if self.message is not None and self.type is None:
            return parse  # type: ignore[no-any-return]
        fields, make = _dict_maker(message.DESCRIPTOR), maker_of(self.type)
        if make is None:
            return lambda body: fields(parse(body))
        return lambda body: make(fields(parse(body)))

    def _reader(self, schema: Schema) -> Callable[[bytes], Any]:
        """Returns a function that decodes bodies that were written with `schema`."""
        file = None if self.message is not None and is_proto_file(schema.text) else _file_of(schema)
        readers: dict[tuple[int, ...], Callable[[bytes], Any]] = {}

        def reader_of(path: tuple[int, ...]) -> Callable[[bytes], Any]:
            if file is None:
                expected, found = str(list(_path_of(self.message.DESCRIPTOR))), str(list(path))
            else:
                descriptor = _message_at(file, path)
                if self.message is None:
                    return self._message_reader(_class_of(descriptor))
                expected, found = self.message.DESCRIPTOR.full_name, descriptor.full_name
            if found != expected:
                raise ValueError(f"the message is {found}, expected {expected}")
            return self._message_reader(self.message)

        def read(body: bytes) -> Any:
            path, begin = read_indexes(body, HEAD_BYTES)
            reader = readers.get(path)
            if reader is None:
                reader = readers[path] = reader_of(path)
            return reader(body[begin:])

        return read

    # Write.

    def encoder(self, place: str, host: Host, *, is_key: bool = False) -> Encoder:
        writer = _Writer(place, self.message)
        if self.registration is None:
            return Encoder(writer.encode)
        document = record = None
        if self.message is not None:
            descriptor = self.message.DESCRIPTOR
            document, record = _document_of(descriptor.file), descriptor.full_name

        def learn(found: Schema) -> None:
            writer.message = _class_of(_message_at(_file_of(found), (0,)))

        heads = SchemaHeads(
            host, self.registration, PROTOBUF, document, record, learn=learn, is_key=is_key
        )

        async def head(destination: str) -> bytes:
            begin = await heads.head(destination)
            return begin + message_indexes(_path_of(writer.message.DESCRIPTOR))

        return Encoder(writer.encode, head)


class _Writer:
    """Encodes the messages of one sink."""

    def __init__(self, place: str, message: Any) -> None:
        self._place = place
        self._plain = PlainValues()
        self.message = message
        """The message class. None until the registry has answered with the schema."""

    def encode(self, value: Any) -> bytes:
        message = self.message
        if message is None:
            raise GraphError(
                f"sink {self._place}: the format has no message class, and a function chooses the "
                "topic: give the format a class"
            )
        try:
            if not isinstance(value, message):
                value = self._message_of(message, value)
            return value.SerializeToString()  # type: ignore[no-any-return]
        except Exception as error:  # Constructors of messages raise several errors.
            raise TypeError(
                f"sink {self._place} got {describe_record(value)}, which is no "
                f"{message.DESCRIPTOR.full_name}: {error}"
            ) from error

    def _message_of(self, message: Any, value: Any) -> Any:
        """Returns a message of the class `message` with the fields of `value`."""
        if isinstance(value, _library()):
            raise TypeError(f"it is a {value.DESCRIPTOR.full_name}")
        fields = self._plain.of(value)
        if not isinstance(fields, dict):
            raise TypeError("expected a message, a dict or an object with fields")
        return message(**fields)


# Messages as dicts.


def _dict_maker(descriptor: Any) -> Callable[[Any], dict[str, Any]]:
    """Returns a function that makes a dict from a message."""
    makers: dict[str, Callable[[Any], dict[str, Any]]] = {}  # A message may contain its own kind.

    def make(descriptor: Any) -> Callable[[Any], dict[str, Any]]:
        if descriptor.full_name in makers:
            return lambda message: makers[descriptor.full_name](message)
        makers[descriptor.full_name] = lambda message: convert(message)
        parts = [
            (field.name, _has_presence(field), _part(field, make)) for field in descriptor.fields
        ]

        def convert(message: Any) -> dict[str, Any]:
            fields: dict[str, Any] = {}
            for name, may_be_unset, part in parts:
                if may_be_unset and not message.HasField(name):
                    fields[name] = None
                elif part is None:
                    fields[name] = getattr(message, name)
                else:
                    fields[name] = part(getattr(message, name))
            return fields

        return convert

    return make(descriptor)


def _has_presence(field: Any) -> bool:
    return bool(field.has_presence) and not _is_repeated(field)


def _is_repeated(field: Any) -> bool:
    found = getattr(field, "is_repeated", None)  # Earlier versions have a label instead.
    return bool(field.label == field.LABEL_REPEATED if found is None else found)


def _part(
    field: Any, make: Callable[[Any], Callable[[Any], dict[str, Any]]]
) -> Callable[[Any], Any] | None:
    """Returns the function that converts a value of `field`, or None if the value needs no
    conversion. `make(descriptor)` returns the function that converts a nested message to a dict.
    """
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        one = _single(field.message_type.fields_by_name["value"], make)
        if one is None:
            return dict
        return partial(_map_of, one)
    one = _single(field, make)
    if not _is_repeated(field):
        return one
    return list if one is None else partial(_list_of, one)


def _map_of(convert: Callable[[Any], Any], entries: Any) -> dict[Any, Any]:
    return {key: convert(entries[key]) for key in entries}


def _list_of(convert: Callable[[Any], Any], values: Any) -> list[Any]:
    return [convert(value) for value in values]


def _single(
    field: Any, make: Callable[[Any], Callable[[Any], dict[str, Any]]]
) -> Callable[[Any], Any] | None:
    if field.message_type is not None:
        name = field.message_type.full_name
        if name == "google.protobuf.Timestamp":
            return lambda message: message.ToDatetime(tzinfo=UTC)
        if name == "google.protobuf.Duration":
            return lambda message: message.ToTimedelta()
        is_wrapper = list(field.message_type.fields_by_name) == ["value"]
        if is_wrapper and name.startswith("google.protobuf."):
            return lambda message: message.value
        return make(field.message_type)
    if field.enum_type is not None:
        names = {number: one.name for number, one in field.enum_type.values_by_number.items()}
        return lambda number: names.get(number, number)
    return None


# Descriptors.


def _document_of(file: Any) -> Document:
    """Returns the schema of a file for the registry: its serialized descriptor, and the files that
    it imports.
    """
    references = {
        other.name: _document_of(other)
        for other in file.dependencies
        if not other.name.startswith(WELL_KNOWN)
    }
    return Document(PROTOBUF, base64.b64encode(file.serialized_pb).decode(), references)


def _file_of(schema: Schema) -> Any:
    """Returns the file descriptor for `schema`, in a new descriptor pool."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    known: set[str] = set()

    def add(name: str, text: str) -> Any:
        try:
            file = FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
        except Exception as error:
            raise ValueError(
                "the registry gives no serialized descriptor, as asked for with "
                f"?format=serialized: {text[:40]!r}"
            ) from error
        if name:
            file.name = name
        _add_well_known(pool, file.dependency, known)
        pool.Add(file)
        return pool.FindFileByName(file.name)

    for name, text in schema.references:
        add(name, text)
    return add("", schema.text)


def _add_well_known(pool: Any, imports: Iterable[str], known: set[str]) -> None:
    """Adds to `pool` the schema files among `imports` that come with Protobuf, such as
    timestamp.proto. `known` has the names of the files that were already added.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    for name in imports:
        if name.startswith(WELL_KNOWN) and name not in known:
            known.add(name)
            module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
            file = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
            _add_well_known(pool, file.dependency, known)
            pool.Add(file)


def _class_of(descriptor: Any) -> Any:
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(descriptor)


def _message_at(file: Any, path: tuple[int, ...]) -> Any:
    """Returns the descriptor of the message type at an index path in `file`."""
    several = list(file.message_types_by_name.values())
    found = None
    for index in path:
        if not 0 <= index < len(several):
            raise ValueError(f"the schema has no message {list(path)}")
        found = several[index]
        several = list(found.nested_types)
    return found


def _path_of(descriptor: Any) -> tuple[int, ...]:
    """Returns the index path of a message type in its file: the index of each enclosing type, then
    its own.
    """
    outer = descriptor.containing_type
    if outer is None:
        several = list(descriptor.file.message_types_by_name.values())
        return (several.index(descriptor),)
    return (*_path_of(outer), list(outer.nested_types).index(descriptor))


# The indexes in the wire format: their number and each of them, as zigzag varints.


def message_indexes(path: tuple[int, ...]) -> bytes:
    """Returns the bytes for an index path in the wire format. The path of the first message is a
    single zero byte.
    """
    if path == (0,):
        return b"\0"
    return b"".join(map(_varint, (len(path), *path)))


def read_indexes(body: bytes, begin: int) -> tuple[tuple[int, ...], int]:
    """Returns the index path at offset `begin` of `body`, and the offset after it. Raises
    ValueError for damaged bytes.
    """
    if body[begin : begin + 1] == b"\0":
        return (0,), begin + 1
    count, begin = _read_varint(body, begin)
    if not 0 < count <= NESTED_MAX:
        raise ValueError(f"the body has {count} indexes of messages")
    path = []
    for _ in range(count):
        index, begin = _read_varint(body, begin)
        path.append(index)
    return tuple(path), begin


def _varint(number: int) -> bytes:
    left, made = number << 1, bytearray()
    while left > 0x7F:
        made.append(left & 0x7F | 0x80)
        left >>= 7
    made.append(left)
    return bytes(made)


def _read_varint(body: bytes, begin: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if begin >= len(body) or shift > 63:
            raise ValueError("the indexes of the message are damaged")
        byte = body[begin]
        begin += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), begin
        shift += 7
