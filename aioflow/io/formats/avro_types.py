"""Makes Avro schemas for Python types: a record for each class with fields, and Avro's types for
the types of the fields.

The fields of dataclasses, Structs, TypedDicts, attrs classes and Pydantic models have the names in
their input. A field with a default has this default in the schema, so that readers can fill it in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as kinds

from aioflow.core.errors import GraphError
from aioflow.io.conversion import is_model, model_fields

__all__ = ["avro_schema_of", "checked_written", "differing_field", "renamed"]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

INT_MIN, INT_MAX = -(2**31), 2**31 - 1

_SIMPLE: dict[type[kinds.Type], Any] = {
    kinds.NoneType: "null",
    kinds.BoolType: "boolean",
    kinds.FloatType: "double",
    kinds.StrType: "string",
    kinds.BytesType: "bytes",
    kinds.ByteArrayType: "bytes",
    kinds.DateType: {"type": "int", "logicalType": "date"},
    kinds.TimeType: {"type": "long", "logicalType": "time-micros"},
    kinds.UUIDType: {"type": "string", "logicalType": "uuid"},
}


class _Field(NamedTuple):
    name: str
    kind: kinds.Type
    default: Any
    """The default value as JSON, or NODEFAULT if there is none."""


def avro_schema_of(
    type: Any, namespace: str | None = None, aliases: Mapping[str, Sequence[str]] | None = None
) -> Any:
    """Returns the Avro schema of a type, as JSON.

    `aliases` maps the name of a field, as "field" or "Record.field", to its former names. Raises
    GraphError naming a field or item whose type has no Avro type.
    """
    return _Maker(namespace, aliases or {}).of(kinds.type_info(type), "")


class _Maker:
    def __init__(self, namespace: str | None, aliases: Mapping[str, Sequence[str]]) -> None:
        self._namespace = namespace
        self._aliases = aliases
        self._named: dict[str, type] = {}
        """Maps the Avro names that the schema has defined so far to their Python types. A name is
        defined only once.
        """

    def of(self, info: kinds.Type, place: str) -> Any:
        simple = _SIMPLE.get(type(info))
        if simple is not None:
            return simple
        match info:
            case kinds.IntType():
                return "int" if _is_small(info) else "long"
            case kinds.DateTimeType():
                local = "local-" if info.tz is False else ""
                return {"type": "long", "logicalType": f"{local}timestamp-micros"}
            case kinds.LiteralType() if all(isinstance(one, str) for one in info.values):
                return "string"
            case kinds.LiteralType() if all(isinstance(one, int) for one in info.values):
                return "long"
            case kinds.EnumType():
                return self._enum(info.cls)
            case kinds.ListType() | kinds.SetType() | kinds.FrozenSetType() | kinds.VarTupleType():
                return {"type": "array", "items": self.of(info.item_type, f"{place}[]")}
            case kinds.DictType() if isinstance(info.key_type, kinds.StrType):
                return {"type": "map", "values": self.of(info.value_type, f"{place}[]")}
            case kinds.UnionType() if sum(map(_is_record, info.types)) < 2:
                return self._union([self.of(one, place) for one in info.types])
            case kinds.StructType(array_like=True):
                pass
            case kinds.DataclassType() | kinds.StructType() | kinds.TypedDictType():
                return self._record(info.cls, [_field(one) for one in info.fields])
            case kinds.NamedTupleType() if not place:
                return self._record(info.cls, [_field(one) for one in info.fields])
            case kinds.CustomType() if is_model(info.cls):
                return self._record(info.cls, _fields_of_model(info.cls))
            case kinds.Metadata():
                return self.of(info.type, place)
        where = f"{place}: " if place else ""
        kind: Any = type(info).__name__.removesuffix("Type")
        if isinstance(info, kinds.CustomType):
            kind = info.cls
        raise GraphError(
            f"{where}{kind} has no Avro type: give the format a schema, avro({{...}}), and the "
            "type to the connector"
        )

    def _defined(self, cls: type) -> str | None:
        """Returns the Avro name of `cls`, and notes that the schema defines it. Raises GraphError
        if another type has this name.
        """
        name = re.sub(r"\W+", "_", cls.__name__).strip("_")
        known = self._named.setdefault(name, cls)
        if known is not cls:
            raise GraphError(
                f"two types are named {name!r}, {known!r} and {cls!r}: give the format a schema"
            )
        return name

    def _record(self, cls: type, fields: list[_Field]) -> Any:
        known = len(self._named)
        name = self._defined(cls)
        if len(self._named) == known:
            return f"{self._namespace}.{name}" if self._namespace else name
        made: dict[str, Any] = {"type": "record", "name": name}
        if self._namespace and known == 0:
            made["namespace"] = self._namespace
        made["fields"] = [self._with_default(name, field) for field in fields]
        return made

    def _with_default(self, record: str | None, field: _Field) -> dict[str, Any]:
        if NAME.fullmatch(field.name) is None:
            raise GraphError(
                f"{record}.{field.name} cannot be the name of an Avro field, expected letters, "
                "digits and _"
            )
        schema = self.of(field.kind, f"{record}.{field.name}")
        made = {"name": field.name, "type": schema}
        default = field.default
        if default is not msgspec.NODEFAULT:
            if isinstance(schema, list) and default is not None and schema[0] == "null":
                made["type"] = [*schema[1:], "null"]  # A default must match the first type.
            if default is not None or (isinstance(schema, list) and "null" in schema):
                made["default"] = default
        aliases = self._aliases.get(f"{record}.{field.name}") or self._aliases.get(field.name)
        if aliases:
            made["aliases"] = list(aliases)
        return made

    def _union(self, members: list[Any]) -> Any:
        flat: list[Any] = []
        for one in members:
            flat += one if isinstance(one, list) else [one]
        distinct = [one for number, one in enumerate(flat) if one not in flat[:number]]
        if "null" in distinct:
            distinct.remove("null")
            distinct.insert(0, "null")
        return distinct[0] if len(distinct) == 1 else distinct

    def _enum(self, cls: Any) -> Any:
        values = [one.value for one in cls]
        if all(isinstance(one, int) for one in values):
            return "long"
        if not all(isinstance(one, str) and NAME.fullmatch(one) for one in values):
            return "string"
        known = len(self._named)
        name = self._defined(cls)
        if len(self._named) == known:
            return f"{self._namespace}.{name}" if self._namespace else name
        return {"type": "enum", "name": name, "symbols": values}


def _is_record(info: kinds.Type) -> bool:
    """Returns whether a type has fields. A union of several such types needs a tag to distinguish
    them.
    """
    return isinstance(info, (kinds.DataclassType, kinds.StructType, kinds.TypedDictType))


def _is_small(info: kinds.IntType) -> bool:
    """Returns whether the constraints of an int keep it within 32 bits."""
    least = info.ge if info.ge is not None else info.gt
    most = info.le if info.le is not None else info.lt
    return least is not None and most is not None and least >= INT_MIN and most <= INT_MAX


def _field(field: kinds.Field) -> _Field:
    default: Any = msgspec.NODEFAULT
    if field.default is not msgspec.NODEFAULT:
        default = _as_json(field.default)
    elif field.default_factory in (list, set, frozenset, tuple):
        default = []
    elif field.default_factory is dict:
        default = {}
    return _Field(field.encode_name, field.type, default)


def _fields_of_model(model: Any) -> list[_Field]:
    fields = []
    for name, field in model_fields(model).items():
        default: Any = msgspec.NODEFAULT
        if not field.is_required() and field.default_factory is None:
            default = _as_json(field.default)
        elif field.default_factory in (list, set, dict):
            default = {} if field.default_factory is dict else []
        fields.append(_Field(name, kinds.type_info(field.annotation), default))
    return fields


def _as_json(default: Any) -> Any:
    """Returns a default value as JSON, or NODEFAULT if JSON cannot express the value exactly."""
    if default is None or isinstance(default, (bool, int, float, str)):
        return msgspec.to_builtins(default)
    if isinstance(default, (list, tuple, dict)) and not default:
        return {} if isinstance(default, dict) else []
    if hasattr(type(default), "__members__"):
        return default.value
    return msgspec.NODEFAULT


def renamed(schema: Any, aliases: Mapping[str, Sequence[str]]) -> Any:
    """Returns a writer's schema in which fields with former names have their present names.

    `aliases` maps the present name of a field to its former names. A field is not renamed if the
    record already has a field with the present name.
    """
    if isinstance(schema, list):
        return [renamed(one, aliases) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: renamed(one, aliases) if key in ("items", "values", "type") else one
        for key, one in schema.items()
    }
    if isinstance(schema.get("fields"), list):
        record = str(schema.get("name", "")).rpartition(".")[2]
        present = {one["name"] for one in schema["fields"]}
        former = {
            old: new.rpartition(".")[2]
            for new, olds in aliases.items()
            if new.rpartition(".")[0] in ("", record) and new.rpartition(".")[2] not in present
            for old in olds
        }
        made["fields"] = [
            {
                **one,
                "name": former.get(one["name"], one["name"]),
                "type": renamed(one["type"], aliases),
            }
            for one in schema["fields"]
        ]
    return made


PROMOTIONS = {
    "int": {"long", "float", "double"},
    "long": {"float", "double"},
    "float": {"double"},
    "string": {"bytes"},
    "bytes": {"string"},
}
"""Maps an Avro type to the other types as which Avro can read its values."""


def differing_field(written: Any, wanted: Any) -> str | None:
    """Returns the path of the first field of `written` whose type cannot be read as the type in
    `wanted`.

    Returns None if no such field is found; unions are not searched.
    """
    if not (isinstance(written, dict) and isinstance(wanted, dict)):
        return None
    present = {one["name"]: one["type"] for one in written.get("fields", ())}
    for field in wanted.get("fields", ()):
        name = next(
            (one for one in (field["name"], *field.get("aliases", ())) if one in present), None
        )
        if name is None:
            continue
        found, expected = _kind(present[name]), _kind(field["type"])
        if "union" in (found, expected):
            continue
        if found != expected and expected not in PROMOTIONS.get(found, ()):
            return str(field["name"])
        inner = differing_field(present[name], field["type"])
        if inner is not None:
            return f"{field['name']}.{inner}"
    return None


def _kind(schema: Any) -> str:
    if isinstance(schema, list):
        return "union"
    return str(schema["type"] if isinstance(schema, dict) else schema)


def checked_written(schema: Any) -> bool:
    """Returns whether a parsed schema contains itself, so that its values may nest without limit.

    Raises ValueError for an array whose items take no bytes, because a few damaged bytes could
    claim any number of items.
    """
    return _nests(schema, frozenset())


def _nests(schema: Any, outer: frozenset[str]) -> bool:
    if isinstance(schema, str):
        return schema in outer
    if isinstance(schema, list):
        nest = [_nests(one, outer) for one in schema]  # All of them, to find each array.
        return any(nest)
    kind = schema["type"]
    if kind == "array":
        if _takes_no_bytes(schema["items"]):
            raise ValueError("an array has items that take no bytes")
        return _nests(schema["items"], outer)
    if kind == "map":
        return _nests(schema["values"], outer)
    if kind in ("record", "error"):
        inner = outer | {schema["name"]}
        nest = [_nests(field["type"], inner) for field in schema["fields"]]
        return any(nest)
    return isinstance(kind, (dict, list)) and _nests(kind, outer)


def _takes_no_bytes(schema: Any) -> bool:
    if isinstance(schema, dict):
        if schema["type"] == "fixed":
            return bool(schema["size"] == 0)
        if schema["type"] == "record":
            return all(_takes_no_bytes(field["type"]) for field in schema["fields"])
        return _takes_no_bytes(schema["type"])
    return bool(schema == "null")
