"""Reads pandas, polars and Arrow tables (frames) as sources, and turns stream elements into a
table.

All data passes through Arrow's C interface. A library is imported only when one of its frames is
given.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from aioflow.core.errors import GraphError, describe_record
from aioflow.core.wire.kinds import Kind, fields_of, kind_of
from aioflow.io.arguments import require_columns
from aioflow.io.files.arrow_files import ArrowTable

__all__ = ["attribute_names", "frame_source", "is_frame", "table_of"]


logger = logging.getLogger(__name__)

_READ: WeakSet[Any] = WeakSet()
"""Record batch readers that a source has consumed. They are remembered, because a consumed reader
looks like the reader of an empty table.
"""


def is_frame(what: object) -> bool:
    """Returns whether `what` is a table that supports Arrow's C interface. A single column is not a
    table.
    """
    return (
        hasattr(type(what), "__arrow_c_stream__") or hasattr(type(what), "__arrow_c_array__")
    ) and (hasattr(what, "columns") or hasattr(what, "schema"))


def frame_source(what: Any) -> ArrowTable:
    """Returns a source of the rows of a frame, as dicts.

    Named levels of a pandas index become columns. A record batch reader can be read only once, so
    this call reads it.
    """
    named = f"{type(what).__name__} of {type(what).__module__.partition('.')[0]}"
    require_columns(f"flow.source({named})")
    import pyarrow as pa

    libraries = {base.__module__.partition(".")[0] for base in type(what).__mro__}
    if "polars" in libraries:
        for name, kind in what.schema.items():
            if str(kind) == "Object":  # Arrow would only get their addresses.
                raise GraphError(
                    f"flow.source got a {named} with Python objects in column {name!r}, "
                    "which Arrow does not have: write flow.source(rows) with a list of records"
                )
    is_reader = isinstance(what, pa.RecordBatchReader)
    if is_reader and what in _READ:
        raise GraphError(
            f"flow.source got a {named} that another source has read to its end: write "
            "table = reader.read_all() first, and flow.source(table) for each source"
        )
    try:
        if "pandas" in libraries:
            index = [name for name in what.index.names if name is not None]
            table = pa.Table.from_pandas(
                what.reset_index(level=index) if index else what, preserve_index=False
            )
        elif isinstance(what, pa.RecordBatch):
            table = pa.Table.from_batches([what])
        else:
            table = pa.table(what)
            if is_reader:
                _READ.add(what)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise GraphError(
            f"flow.source got a {named} that is no Arrow table: {error}; give its columns names "
            "of their own, and types that Arrow has, or write flow.source(rows) with a list of "
            "records"
        ) from error
    if is_reader and not table.num_rows:
        logger.warning(
            "flow.source got a %s without rows, perhaps because it was read before: pass its "
            "table, reader.read_all(), instead",
            named,
        )
    if twice := [name for name, times in Counter(table.column_names).items() if times > 1]:
        raise GraphError(
            f"flow.source got a {named} with two columns {twice[0]!r}, and rows are dicts: rename "
            "one of them"
        )
    for at, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type) and field.type.value_type == pa.string_view():
            # polars stores categories as string views, in which Arrow cannot look up values.
            kind = pa.dictionary(field.type.index_type, pa.large_string())
            table = table.set_column(at, field.name, table.column(at).cast(kind))
    return ArrowTable(table.replace_schema_metadata(None))


def table_of(rows: Sequence[Any], place: str) -> Any:
    """Returns the elements `rows` as a pyarrow Table. `place` is the user's call, for error
    messages.

    The columns are the keys of dicts, or the fields of records. The columns of tuples are f0, f1
    and so on. Any other element becomes one column `value`. A key that an element lacks is null.
    """
    require_columns(place)
    import pyarrow as pa

    columns: dict[str, list[Any]] = {}
    if rows:
        columns = _columns(rows, place)
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pa.array(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise TypeError(
                f"{place}: column {name!r} is no column of Arrow: {error}; convert it before, as "
                "with .map(...) or .select(...)"
            ) from error
    return pa.table(arrays)


def _columns(rows: Sequence[Any], place: str) -> dict[str, list[Any]]:
    kind = type(rows[0])
    names = attribute_names(kind)
    if kind is not dict and kind is not tuple and names is None:
        return {"value": list(rows)}
    stranger = next((row for row in rows if type(row) is not kind), None)
    if stranger is not None:
        raise TypeError(
            f"{place}: {describe_record(stranger)} is of type {type(stranger).__name__}, and the "
            f"elements before it are of type {kind.__name__}; expected one type for a table"
        )
    if kind is dict:
        keys = dict.fromkeys(key for row in rows for key in row)
        if len(set(map(str, keys))) < len(keys):
            raise TypeError(f"{place}: two keys give the same name of a column, among {list(keys)}")
        return {str(key): [row.get(key) for row in rows] for key in keys}
    if kind is tuple:
        if len(set(map(len, rows))) > 1:
            raise TypeError(f"{place}: the tuples have different lengths, expected one for a table")
        return {f"f{i}": [row[i] for row in rows] for i in range(len(rows[0]))}
    return {name: [getattr(row, name) for row in rows] for name in names or ()}


def attribute_names(kind: type) -> list[str] | None:
    """Returns the field names of a record class (dataclass, NamedTuple and so on); None for any
    other class.
    """
    form = kind_of(kind)
    if form in (None, Kind.ENUM, Kind.TEXT):
        return None
    return [name for name in fields_of(kind, form) if not name.startswith("__pydantic")]
