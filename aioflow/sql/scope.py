"""Names and types: the fields of a relation, how a query finds them, and the schemas of streams.

A name must match exactly, or match only one field if case is ignored. A relation without known
fields is open: each name is a field of type ANY.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

from sqlglot import exp
from sqlglot.errors import ParseError

from aioflow.core.errors import GraphError, did_you_mean
from aioflow.expressions.nodes import Column, Expr
from aioflow.sql.dialect import StreamingSql
from aioflow.sql.errors import SqlError
from aioflow.sql.types import (
    ANY,
    BOOLEAN,
    BYTES,
    DATE,
    DECIMAL,
    FLOAT,
    INTEGER,
    INTERVAL,
    STRING,
    TIMESTAMP,
    SqlType,
    array_of,
    map_of,
    row_of,
    type_of_declaration,
)

__all__ = ["Field", "Merged", "Named", "Schema", "Scope", "schema_of", "type_of_hint"]


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a relation."""

    name: str
    """Name of the column in the query."""
    type: SqlType
    nullable: bool
    key: str
    """Key of the column in the dict of a row."""
    read: Expr[Any] | None = None
    """Expression that reads the field from a record. None if the field is read by its key."""

    @property
    def expression(self) -> Expr[Any]:
        return Column(self.key) if self.read is None else self.read


@dataclass(frozen=True, slots=True)
class Named:
    """A relation of FROM under its alias."""

    alias: str
    fields: tuple[Field, ...]
    is_open: bool = False
    """Whether the relation may have more fields than are known."""

    def find(self, name: str, quoted: bool = False) -> list[Field]:
        """Returns the fields that `name` may mean: one, none, or several that differ in case.

        A quoted name must match exactly.
        """
        found = _alike(name, self.fields, lambda field: field.name)
        return [field for field in found if field.name == name] if quoted else found


@dataclass(frozen=True, slots=True)
class Merged:
    """The column into which USING merges columns of both sides."""

    fields: tuple[Field, ...]
    """All columns that were merged."""
    values: tuple[Field, ...]
    """The columns from which the value is read: the first of their values that is not NULL."""


class Scope:
    """The relations that the names of one SELECT refer to, and the columns that USING merged."""

    def __init__(self, relations: Sequence[Named], merged: Sequence[Merged] = ()) -> None:
        self.relations = tuple(relations)
        self.merged = tuple(merged)

    def resolve(self, column: exp.Column) -> Field:
        """Returns the field that `column` names. Raises SqlError at the column."""
        return self.values(column)[0]

    def values(self, column: exp.Column) -> tuple[Field, ...]:
        """Returns the fields from which the value of `column` is read.

        It is one field, except for a column that a FULL JOIN merged. Then the value is the first
        field that is not NULL. Raises SqlError at the column.
        """
        relations: Iterable[Named] = self.relations
        if column.table:
            relations = [self.relation(column)]
        quoted = bool(column.this.args.get("quoted"))
        found = [field for relation in relations for field in relation.find(column.name, quoted)]
        exact = [field for field in found if field.name == column.name]
        for merged in () if column.table or not found else self.merged:
            if all(field in merged.fields for field in exact or found):
                return merged.values
        if len(exact or found) > 1:
            where = " and ".join(dict.fromkeys(self._owner(field) for field in exact or found))
            raise SqlError(
                f"{column.name!r} is ambiguous: {where} have it; write alias.column", column
            )
        if found:
            return ((exact or found)[0],)
        is_open = [relation for relation in relations if relation.is_open]
        if len(is_open) == 1:
            return (Field(column.name, ANY, True, column.name),)
        if is_open:
            raise SqlError(
                f"{column.name!r} may be a column of "
                f"{' or '.join(relation.alias for relation in is_open)}, whose columns are not "
                "declared; write alias.column, or declare them with schemas=",
                column,
            )
        names = [field.name for relation in relations for field in relation.fields]
        of = " or ".join(relation.alias for relation in relations) or "a query without FROM"
        raise SqlError(
            f"no column {column.name!r} in {of}; there are "
            f"{', '.join(dict.fromkeys(names)) or 'none'}{did_you_mean(column.name, names, '{}')}",
            column,
        )

    def relation(self, column: exp.Column) -> Named:
        """Returns the relation that qualifies `column`. Raises SqlError at the column."""
        found = _alike(column.table, self.relations, lambda relation: relation.alias)
        if len(found) == 1:
            (named,) = found
            assert isinstance(named, Named)
            return named
        aliases = [relation.alias for relation in self.relations]
        raise SqlError(
            f"no table {column.table!r} in FROM; there are {', '.join(aliases) or 'none'}"
            f"{did_you_mean(column.table, aliases, '{}')}",
            column,
        )

    def _owner(self, field: Field) -> str:
        return next(
            relation.alias
            for relation in self.relations
            if any(f is field for f in relation.fields)
        )


def _alike(name: str, things: Iterable[Any], name_of: Any) -> list[Any]:
    """Returns the items of `things` for which `name_of(item)` is `name`. If there are none, ignores
    case.
    """
    things = list(things)
    folded = name.casefold()
    return [thing for thing in things if name_of(thing) == name] or [
        thing for thing in things if name_of(thing).casefold() == folded
    ]


# Schemas.

_PLAIN: dict[Any, SqlType] = {
    bool: BOOLEAN,
    int: INTEGER,
    float: FLOAT,
    Decimal: DECIMAL,
    str: STRING,
    bytes: BYTES,
    datetime: TIMESTAMP,
    date: DATE,
    timedelta: INTERVAL,
}
_ARROW = (
    ("is_boolean", BOOLEAN),
    ("is_integer", INTEGER),
    ("is_floating", FLOAT),
    ("is_decimal", DECIMAL),
    ("is_string", STRING),
    ("is_large_string", STRING),
    ("is_binary", BYTES),
    ("is_timestamp", TIMESTAMP),
    ("is_date", DATE),
    ("is_duration", INTERVAL),
)


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of the records of a stream."""

    fields: tuple[Field, ...]
    datetimes: frozenset[str] = frozenset()
    """Names of the fields that hold a datetime or a date. Queries read them as int milliseconds."""


def schema_of(declared: Any) -> Schema | None:
    """Returns the schema that `declared` describes, or None if it describes none.

    `declared` is a dataclass, a TypedDict, a NamedTuple, a `msgspec.Struct`, a Pydantic model, an
    Arrow schema, or a dict. Values of the dict are Python types, or SQL types such as "BIGINT".
    """
    if isinstance(declared, Mapping):
        pairs = {name: _declared(name, kind) for name, kind in declared.items()}
        plain = {name for name, kind in declared.items() if isinstance(kind, str | SqlType)}
    elif type(declared).__module__.startswith("pyarrow"):
        columns = [declared.field(name) for name in declared.names]
        pairs = {column.name: (_of_arrow(column.type), column.nullable) for column in columns}
        plain = set()
    elif isinstance(declared, type) and _has_fields(declared):
        pairs = {name: type_of_hint(hint) for name, hint in _hints(declared).items()}
        plain = set()
    else:
        return None
    return Schema(
        tuple(Field(name, kind, null, name) for name, (kind, null) in pairs.items()),
        frozenset(n for n, (kind, _) in pairs.items() if kind in (TIMESTAMP, DATE)) - plain,
    )


def type_of_hint(hint: Any) -> tuple[SqlType, bool]:
    """Returns the SQL type for a Python annotation, and whether the annotation allows None."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        return type_of_hint(arguments[0])
    if origin in (typing.Union, types.UnionType):
        others = [one for one in arguments if one is not type(None)]
        kinds = {type_of_hint(one)[0] for one in others}
        return kinds.pop() if len(kinds) == 1 else ANY, True
    if hint in _PLAIN:
        return _PLAIN[hint], False
    plain = origin or hint
    if plain in (list, tuple):
        return array_of(type_of_hint(arguments[0])[0] if arguments else ANY), False
    if plain is dict:
        return map_of(type_of_hint(arguments[1])[0] if arguments else ANY), False
    if isinstance(plain, type) and _has_fields(plain):
        return row_of(**{name: type_of_hint(own)[0] for name, own in _hints(plain).items()}), False
    return ANY, True


def _has_fields(kind: type) -> bool:
    return (
        dataclasses.is_dataclass(kind)
        or typing.is_typeddict(kind)
        or any(hasattr(kind, name) for name in ("_fields", "__struct_fields__", "model_fields"))
    )


def _hints(kind: type) -> dict[str, Any]:
    """Returns the annotation of each field of a class, in their order."""
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError):  # An annotation uses a name that is local to a function.
        hints = {}
    if dataclasses.is_dataclass(kind):
        names: Iterable[str] = [field.name for field in dataclasses.fields(kind)]
    else:
        own = (getattr(kind, n, None) for n in ("_fields", "__struct_fields__", "model_fields"))
        names = next((found for found in own if found), ()) or kind.__annotations__
    return {name: hints.get(name, Any) for name in names}


def _declared(column: str, kind: Any) -> tuple[SqlType, bool]:
    if isinstance(kind, SqlType):
        return kind, True
    if not isinstance(kind, str):
        return type_of_hint(kind)
    try:
        return type_of_declaration(exp.DataType.build(kind, dialect=StreamingSql)), True
    except (ParseError, SqlError) as error:
        raise GraphError(f"schemas=: column {column!r} has no type of SQL: {kind!r}") from error


def _of_arrow(kind: Any) -> SqlType:
    import pyarrow.types as kinds

    if kinds.is_dictionary(kind):
        return _of_arrow(kind.value_type)
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        return array_of(_of_arrow(kind.value_type))
    if kinds.is_struct(kind):
        return row_of(**{field.name: _of_arrow(field.type) for field in kind})
    return next((found for test, found in _ARROW if getattr(kinds, test)(kind)), ANY)
