"""Message classes of Protobuf for tests, without protoc: made of descriptors."""

from __future__ import annotations

from typing import Any

from google.protobuf import timestamp_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

Field = FieldDescriptorProto
KINDS = {
    "int64": Field.TYPE_INT64,
    "double": Field.TYPE_DOUBLE,
    "string": Field.TYPE_STRING,
    "bytes": Field.TYPE_BYTES,
}


def _fill(message: DescriptorProto, fields: dict[str, str]) -> None:
    """Adds fields, such as {"n": "int64", "tags": "repeated string", "at": ".some.Message"}."""
    for number, (name, kind) in enumerate(fields.items(), 1):
        made = message.field.add(name=name, number=number, label=Field.LABEL_OPTIONAL)
        if kind.startswith("repeated "):
            made.label = Field.LABEL_REPEATED
        kind = kind.removeprefix("repeated ")
        if kind.startswith("enum "):
            made.type, made.type_name = Field.TYPE_ENUM, kind.removeprefix("enum ")
        elif kind.startswith("."):
            made.type, made.type_name = Field.TYPE_MESSAGE, kind
        else:
            made.type = KINDS[kind]


def shop(**more: str) -> dict[str, Any]:
    """The classes of a file shop.proto that imports items.proto: Refund, Order, Order.Line, Item.

    `more` are further fields of Order.
    """
    pool = DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    items = FileDescriptorProto(name="items.proto", package="shop", syntax="proto3")
    _fill(items.message_type.add(name="Item"), {"sku": "string"})
    pool.Add(items)
    file = FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.extend(["items.proto", "google/protobuf/timestamp.proto"])
    state = file.enum_type.add(name="State")
    state.value.add(name="NEW", number=0)
    state.value.add(name="PAID", number=1)
    _fill(file.message_type.add(name="Refund"), {"order": "int64"})
    order = file.message_type.add(name="Order")
    fields = {"id": "int64", "total": "double", "lines": "repeated .shop.Order.Line"}
    fields |= {"at": ".google.protobuf.Timestamp", "state": "enum .shop.State"}
    fields |= {"tags": "repeated string", "item": ".shop.Item"}
    _fill(order, fields | more)
    _fill(order.nested_type.add(name="Line"), {"n": "int64", "note": "string"})
    pool.Add(file)
    names = {"Refund": "shop.Refund", "Order": "shop.Order", "Line": "shop.Order.Line"}
    names["Item"] = "shop.Item"
    return {name: GetMessageClass(pool.FindMessageTypeByName(full)) for name, full in names.items()}
