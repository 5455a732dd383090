"""The types of SQL expressions.

The type of a value determines its Python type in a row: INTEGER is int, FLOAT float, DECIMAL
`decimal.Decimal`, STRING str, BYTES bytes, ARRAY list, MAP and ROW dict. TIMESTAMP and DATE are int
milliseconds since the epoch in UTC (DATE: of midnight), INTERVAL is int milliseconds. NULL is None
in every type. A bare NULL has the type NULL, and a value of unknown type has ANY. Both are accepted
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlglot import exp

from aioflow.sql.errors import SqlError

__all__ = [
    "ANY",
    "BOOLEAN",
    "BYTES",
    "DATE",
    "DECIMAL",
    "FLOAT",
    "INTEGER",
    "INTERVAL",
    "NULL",
    "NUMERIC",
    "STRING",
    "TIMESTAMP",
    "SqlType",
    "array_of",
    "map_of",
    "row_of",
    "type_of_declaration",
    "unify",
]


@dataclass(frozen=True, slots=True)
class SqlType:
    """A type by its name, such as "INTEGER".

    `element` is the type of the elements of an ARRAY, and of the values of a MAP, whose keys are
    STRING. `fields` are the names and types of a ROW. `scale` is the number of decimals to which a
    cast to DECIMAL rounds.
    """

    name: str
    element: SqlType | None = None
    fields: tuple[tuple[str, SqlType], ...] = ()
    scale: int | None = field(default=None, compare=False)

    def may_be(self, *kinds: SqlType) -> bool:
        """Returns whether the type is one of `kinds`, or NULL or ANY."""
        return self in (*kinds, ANY, NULL)

    def __str__(self) -> str:
        if self.name == "ROW":
            return f"ROW<{', '.join(f'{name} {kind}' for name, kind in self.fields)}>"
        if self.element is None:
            return self.name
        return f"{self.name}<{'STRING, ' if self.name == 'MAP' else ''}{self.element}>"


BOOLEAN = SqlType("BOOLEAN")
INTEGER = SqlType("INTEGER")
FLOAT = SqlType("FLOAT")
DECIMAL = SqlType("DECIMAL")
STRING = SqlType("STRING")
BYTES = SqlType("BYTES")
TIMESTAMP = SqlType("TIMESTAMP")
DATE = SqlType("DATE")
INTERVAL = SqlType("INTERVAL")
ANY = SqlType("ANY")
NULL = SqlType("NULL")

NUMERIC = (INTEGER, DECIMAL, FLOAT)
"""The numeric types. The common type of two numeric types is the later of both in this tuple."""

_KINDS: dict[SqlType, str] = {
    BOOLEAN: "BOOLEAN BIT",
    INTEGER: "TINYINT SMALLINT INT MEDIUMINT BIGINT INT128 INT256 UTINYINT USMALLINT UINT UBIGINT",
    FLOAT: "FLOAT DOUBLE",
    DECIMAL: "DECIMAL DECIMAL32 DECIMAL64 DECIMAL128 BIGDECIMAL",
    STRING: "TEXT CHAR NCHAR VARCHAR NVARCHAR NAME UUID JSON",
    BYTES: "BINARY VARBINARY BLOB",
    TIMESTAMP: "TIMESTAMP TIMESTAMPTZ TIMESTAMPLTZ TIMESTAMPNTZ TIMESTAMP_S TIMESTAMP_MS "
    "TIMESTAMP_NS DATETIME DATETIME64",
    DATE: "DATE",
    INTERVAL: "INTERVAL",
    ANY: "VARIANT OBJECT",
}
_DECLARED = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def array_of(element: SqlType) -> SqlType:
    return SqlType("ARRAY", element)


def map_of(values: SqlType) -> SqlType:
    return SqlType("MAP", values)


def row_of(**fields: SqlType) -> SqlType:
    return SqlType("ROW", fields=tuple(fields.items()))


def unify(a: SqlType, b: SqlType) -> SqlType | None:
    """Returns the common type of both types, or None.

    ANY and another type give ANY, because the values of ANY are not checked.
    """
    if a == b or b == NULL:
        return a
    if a == NULL:
        return b
    if ANY in (a, b):
        return ANY
    if a in NUMERIC and b in NUMERIC:
        return max(a, b, key=NUMERIC.index)
    if {a, b} == {DATE, TIMESTAMP}:
        return TIMESTAMP
    if a.name == b.name and a.element is not None and b.element is not None:
        element = unify(a.element, b.element)
        return None if element is None else SqlType(a.name, element)
    if a.name == b.name == "ROW" and len(a.fields) == len(b.fields):
        kinds = [unify(one, other) for (_, one), (_, other) in zip(a.fields, b.fields, strict=True)]
        if all(kind is not None for kind in kinds):
            return SqlType(
                "ROW",
                fields=tuple(
                    (name, kind) for (name, _), kind in zip(a.fields, kinds, strict=True) if kind
                ),
            )
    return None


def type_of_declaration(node: exp.DataType) -> SqlType:
    """Returns the type that a cast or a declared column names.

    Raises SqlError for an unknown type, or for an ARRAY, MAP or ROW with wrong arguments.
    """
    name = node.this.name if isinstance(node.this, exp.DType) else str(node.this).upper()
    arguments = node.expressions
    parts = [one.args.get("kind") if isinstance(one, exp.ColumnDef) else one for one in arguments]
    needed = {"ARRAY": (0, 1), "LIST": (0, 1), "MAP": (0, 2)}.get(name)
    if name in ("STRUCT", "NESTED") or needed:
        kinds = [type_of_declaration(one) for one in parts if isinstance(one, exp.DataType)]
        if len(kinds) != len(parts) or (needed and len(parts) not in needed):
            raise SqlError("write ARRAY<TYPE>, MAP<STRING, TYPE> or ROW<name TYPE, ...>", node)
        if needed:
            last = kinds[-1] if kinds else ANY
            return map_of(last) if name == "MAP" else array_of(last)
        return row_of(**{one.name: kind for one, kind in zip(arguments, kinds, strict=True)})
    kind = _DECLARED.get(name)
    if kind is None:
        raise SqlError(
            f"there is no type {node.sql()}: write one of BOOLEAN, BIGINT, DOUBLE, DECIMAL, "
            "VARCHAR, BYTES, TIMESTAMP, DATE, ARRAY<...>, MAP<STRING, ...>, ROW<...>",
            node,
        )
    if kind == DECIMAL:
        # Without arguments DECIMAL has no decimals in Flink, and keeps all of them in PostgreSQL.
        scale = int(arguments[1].name) if len(arguments) > 1 else 0 if arguments else None
        return SqlType("DECIMAL", scale=scale)
    return kind
