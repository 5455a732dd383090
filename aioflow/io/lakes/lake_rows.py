"""Prepares Arrow tables for a lake's sink: converts them to the table's columns and types, and
keeps one row for each key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aioflow.core.errors import GraphError

__all__ = ["fitted", "latest_rows", "stored_type"]


def fitted(rows: Any, schema: Any, place: str, key: Sequence[str] = ()) -> Any:
    """Returns the Arrow table `rows` with the columns and types of `schema`.

    Raises GraphError naming a column whose type or nulls do not fit.
    """
    import pyarrow as pa

    columns = []
    for field in schema:
        if field.name in rows.schema.names:
            column = rows.column(field.name)
        else:
            column = pa.nulls(rows.num_rows, field.type)
        if column.null_count and (not field.nullable or field.name in key):
            what = "is required" if field.name not in key else "is in key="
            raise GraphError(
                f"{place}: column {field.name!r} {what}, and {column.null_count} of "
                f"{rows.num_rows} records have no value for it: fill it before the sink"
            )
        columns.append(_cast(column, field, place))
    return pa.Table.from_arrays(columns, schema=schema)


def _cast(column: Any, field: Any, place: str) -> Any:
    import pyarrow as pa

    if column.type == field.type:
        return column
    try:
        if (difference := _difference(column.type, field.type)) is not None:
            raise pa.ArrowInvalid(difference)
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        # ArrowNotImplementedError: Arrow has no cast between these types.
        raise GraphError(
            f"{place}: column {field.name!r} is {field.type}, and the records have {column.type} "
            f"({error}): convert it before the sink, as with "
            f"select(..., {field.name}=af.col({field.name!r}).cast(...)) or map(...)"
        ) from error


def _difference(given: Any, wanted: Any) -> str | None:
    """Returns the reason why a cast from type `given` to `wanted` would change the meaning of
    values. Returns None if the cast is safe.

    The cast must not parse texts, format numbers as text, or drop fields.
    """
    import pyarrow as pa

    types = pa.types
    kinds: tuple[tuple[Callable[[Any], bool], ...], ...] = (
        (types.is_integer, types.is_floating, types.is_decimal),
        (types.is_string, types.is_large_string, types.is_dictionary),
        (types.is_binary, types.is_large_binary, types.is_fixed_size_binary),
        (types.is_timestamp,),
        (types.is_date,),
        (types.is_time,),
        (types.is_list, types.is_large_list, types.is_fixed_size_list),
        (types.is_struct, types.is_map),
    )
    if types.is_null(given) or given == wanted:
        return None
    if not any(
        any(is_one(given) for is_one in kind) and any(is_one(wanted) for is_one in kind)
        for kind in kinds
    ):
        return "the types are of different kinds"
    if types.is_struct(given) and types.is_struct(wanted):
        known = {field.name: field.type for field in wanted}
        for field in given:
            if field.name not in known:
                return f"the column has no field {field.name!r}"
            if (difference := _difference(field.type, known[field.name])) is not None:
                return f"field {field.name!r}: {difference}"
    if not types.is_nested(given) or types.is_struct(given) or types.is_map(given):
        return None
    return _difference(given.value_type, wanted.value_type)


def latest_rows(rows: Any, key: Sequence[str]) -> Any:
    """Returns the last row of each key. The returned rows keep their order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    numbered = rows.select(key).append_column(
        "__number", pa.array(range(rows.num_rows), pa.int64())
    )
    last = numbered.group_by(list(key)).aggregate([("__number", "max")])["__number_max"]
    if len(last) == rows.num_rows:
        return rows
    last = last.combine_chunks()
    return rows.take(last.take(pc.sort_indices(last)))


def stored_type(type_: Any) -> Any:
    """Returns the column type for values of the Arrow type `type_`. Dictionary types become their
    value type.
    """
    import pyarrow as pa

    return type_.value_type if pa.types.is_dictionary(type_) else type_
