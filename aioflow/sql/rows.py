"""Converts elements of a connector to rows, and rows to elements, for tables of CREATE TABLE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from aioflow.core.errors import StateError
from aioflow.expressions.nodes import Expr
from aioflow.expressions.rows import compile_row
from aioflow.io.changes import Change, upserts_of
from aioflow.io.conversion import struct_like
from aioflow.sql.relation import PASSES

__all__ = ["CheckedRow", "as_row", "json_text", "row_of_event", "rows_of_change"]


def json_text(row: dict[str, Any]) -> str:
    return msgspec.json.encode(row).decode()


def as_row(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


def rows_of_change(
    table: str,
    names: tuple[str, ...],
    key: tuple[str, ...],
    decode: Callable[[Any], Change[dict[str, Any]] | None] | None,
    element: Any,
) -> list[dict[str, Any]]:
    """Returns the records of a change. The record of an existing row has all columns `names`, and
    the record of a deletion only the columns `key`.

    `decode` converts the element to a change; None means that the element is a change.
    """
    change: Change[dict[str, Any]] | None = element if decode is None else decode(element)
    if change is None:
        return []
    if change.unchanged and not {*change.unchanged} & {*names}:
        change = msgspec.structs.replace(change, unchanged=())
    if change.kind == "truncate":
        raise StateError(
            f"{change.table!r} was truncated, and a change of {table} names each row that goes: "
            "empty the tables that the script writes, and start with restore=None, fresh=True for "
            "a new snapshot. In the database DELETE FROM removes rows without this error"
        )
    found = []
    for one in upserts_of(change):
        if {*one.key} != {*key}:
            raise ValueError(
                f"the rows of {one.table!r} have the key {', '.join(one.key)}, and PRIMARY KEY of "
                f"{table} says {', '.join(key)}: declare the key of the database"
            )
        row = one.key if one.row is None else one.row
        if one.row is not None and (missing := [name for name in names if name not in row]):
            raise ValueError(
                f"{one.table!r} has no column {', '.join(missing)}, which {table} declares: the "
                f"columns are {', '.join(row)}"
            )
        found.append({name: row.get(name) for name in names} | {PASSES: one.row is not None})
    return found


class CheckedRow:
    """Converts a JSON object, or its text, to a row. Raises an error of `arguments.MALFORMED` if
    the object does not match the column types, or has no event time. The sender of a posted object
    then gets 400.

    `type_` is the class of the object, and `attributes` has its attribute for each column. `values`
    has expressions that convert columns, which may fail. `event_time` is the column of WATERMARK,
    or None.
    """

    def __init__(
        self,
        attributes: Mapping[str, str],
        type_: Any,
        values: Mapping[str, Expr[Any]],
        event_time: str | None,
    ) -> None:
        self._given = attributes, type_, values, event_time
        self.attributes = attributes
        # A NamedTuple would accept a JSON array, and read its values by position.
        struct: Any = struct_like(type_)
        self._read = msgspec.json.Decoder(struct).decode
        self._make = partial(msgspec.convert, type=struct)
        self._values = {name: compile_row(value) for name, value in values.items()}
        self._event_time = event_time

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given

    def __call__(self, value: Any) -> dict[str, Any]:
        made = (self._read if isinstance(value, bytes | str) else self._make)(value)
        row = {name: getattr(made, one) for name, one in self.attributes.items()}
        for name, read in self._values.items():
            try:
                found = read(row)
            except (ValueError, TypeError, ArithmeticError) as error:
                raise ValueError(f"the column {name}: {error}") from error
            if found is None and name == self._event_time:
                raise ValueError(f"the column {name} is NULL, expected the event time of the row")
        return row


def row_of_event(row: CheckedRow, event: Any) -> dict[str, Any]:
    """Returns the row of a server-sent event. The columns are fields of the event itself, or fields
    of the event's JSON data.
    """
    if {*row.attributes} <= {*event._fields}:
        return {name: getattr(event, name) for name in row.attributes}
    return row(event.data)
