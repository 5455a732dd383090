"""Columns from Arrow arrays and back.

A row holds what `to_pylist` would give, with two exceptions: integers and floats of every width are the int and float of Python, as
there, and a timestamp or duration of nanoseconds becomes a `datetime` or `timedelta`, which end at microseconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aioflow.columns.making import nothing
from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch, NumberColumn, ObjectColumn

__all__ = ["from_arrow", "from_table", "to_arrow", "to_table"]


def from_table(table: Any) -> ColumnBatch:
    """The columns of an Arrow table or record batch."""
    return ColumnBatch({name: from_arrow(table.column(i)) for i, name in enumerate(table.schema.names)}, table.num_rows)


def from_arrow(array: Any) -> Column:
    """The column of an array or chunked array."""
    if isinstance(array, pa.ChunkedArray):
        if pa.types.is_dictionary(array.type):
            array = array.unify_dictionaries()
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # What one array cannot hold, as text beyond 2 GiB.
            return ObjectColumn(array.to_pylist())
    kind = array.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _numbers(array)
    if pa.types.is_null(kind):
        return nothing(len(array))
    if pa.types.is_dictionary(kind):
        if _is_text(kind.value_type) and array.dictionary.null_count == 0:
            return _coded(array)
        return from_arrow(array.dictionary_decode())
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return from_arrow(array.cast(pa.timestamp("us", kind.tz), safe=False))
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return from_arrow(array.cast(pa.duration("us"), safe=False))
    if pa.types.is_struct(kind) and array.null_count == 0 and kind.num_fields:
        fields = {kind.field(i).name: from_arrow(array.field(i)) for i in range(kind.num_fields)}
        return ColumnBatch(fields, len(array))
    if _is_text(kind) or pa.types.is_temporal(kind):
        try:
            return _coded(array.dictionary_encode())
        except pa.ArrowNotImplementedError:
            pass  # Durations and the like: one by one.
    return ObjectColumn(array.to_pylist())


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _numbers(array: Any) -> Column:
    kind, valid = array.type, None
    target = pa.bool_() if pa.types.is_boolean(kind) else pa.float64() if pa.types.is_floating(kind) else pa.int64()
    try:
        cast = array.cast(target)
    except pa.ArrowInvalid:
        return ObjectColumn(array.to_pylist())  # Of 64 bits without a sign.
    if array.null_count:
        valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
        cast = cast.fill_null(pa.scalar(0, target) if target != pa.bool_() else pa.scalar(False))
    return NumberColumn(cast.to_numpy(zero_copy_only=False), valid)


def _coded(array: Any) -> CodedColumn:
    indices = array.indices
    if indices.null_count:
        indices = indices.cast(pa.int64()).fill_null(-1)
    return CodedColumn(indices.to_numpy(zero_copy_only=False).astype(np.int32, copy=False), array.dictionary.to_pylist())


def to_table(batch: ColumnBatch) -> Any:
    """The Arrow table of a batch. Raises pyarrow.ArrowInvalid or ArrowTypeError for a column of values that have no common type."""
    return pa.table({str(name): to_arrow(column) for name, column in batch.columns.items()})


def to_arrow(column: Column) -> Any:
    """The array of a column."""
    if isinstance(column, NumberColumn):
        return pa.array(column.values, mask=None if column.valid is None else ~column.valid)
    if isinstance(column, CodedColumn):
        codes = pa.array(column.codes, pa.int32(), mask=column.codes < 0)
        return pa.DictionaryArray.from_arrays(codes, pa.array(column.entries)).dictionary_decode()
    if isinstance(column, ColumnBatch) and column.columns and column.make is None and not column.has_positions:
        return pa.StructArray.from_arrays([to_arrow(one) for one in column.columns.values()], names=list(column.columns))
    try:
        return pa.array(column.to_list())
    except OverflowError:
        return pa.array(column.to_list(), pa.uint64())
