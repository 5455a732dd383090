"""Converts Arrow arrays to columns, and columns to Arrow arrays.

The values of a column equal those of `to_pylist`, with one exception. A timestamp or duration in
nanoseconds becomes a `datetime` or `timedelta`, which end at microseconds. Integers and floats of
every width become Python's int and float, as with `to_pylist`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from aioflow.columns.making import nothing
from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch, NumberColumn, ObjectColumn

__all__ = ["codes_of", "from_arrow", "numbers_of", "plain_texts", "to_arrow", "to_table"]


def from_arrow(array: Any) -> Column:
    """Returns an array or chunked array as a column."""
    if isinstance(array, pa.ChunkedArray):
        if pa.types.is_dictionary(array.type):
            array = array.unify_dictionaries()
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # One array cannot hold text beyond 2 GiB.
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
            pass  # Durations and the like are converted value by value.
    return ObjectColumn(array.to_pylist())


def _is_text(kind: Any) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _numbers(array: Any) -> Column:
    kind = array.type
    target = (
        pa.bool_()
        if pa.types.is_boolean(kind)
        else pa.float64()
        if pa.types.is_floating(kind)
        else pa.int64()
    )
    try:
        cast = array.cast(target)
    except pa.ArrowInvalid:
        return ObjectColumn(array.to_pylist())  # Unsigned integers of 64 bits.
    values, valid = numbers_of(cast), valid_of(array)
    return NumberColumn(
        values if valid is None else np.where(valid, values, values.dtype.type(0)), valid
    )


def _coded(array: Any) -> CodedColumn:
    return CodedColumn(codes_of(array.indices), plain_texts(array.dictionary))


def codes_of(indices: Any) -> np.ndarray:
    """Returns the indices of a dictionary array as codes of a coded column, -1 for null."""
    codes, valid = numbers_of(indices).astype(np.int32, copy=False), valid_of(indices)
    return codes if valid is None else np.where(valid, codes, np.int32(-1))


# Arrow's own functions for the next two load pandas, if it is installed. That costs half a second
# and 50 MB.


def numbers_of(array: Any) -> np.ndarray:
    """Returns the values of a numeric or bool array. A null gets an arbitrary value."""
    if pa.types.is_boolean(array.type):
        return _bits(array, 1)
    buffer, dtype = array.buffers()[1], array.type.to_pandas_dtype()
    if buffer is None:
        return np.zeros(len(array), dtype)
    return np.frombuffer(buffer, dtype)[array.offset : array.offset + len(array)]


def valid_of(array: Any) -> np.ndarray | None:
    """Returns a mask that is True where the array has a value, or None if it has no nulls."""
    return _bits(array, 0) if array.null_count else None


def _bits(array: Any, number: int) -> np.ndarray:
    buffer = array.buffers()[number]
    if buffer is None:
        return np.zeros(len(array), np.bool_)
    first, skipped = divmod(array.offset, 8)  # A page is a slice of a table that may be very long.
    bits = np.unpackbits(
        np.frombuffer(buffer, np.uint8)[first:], count=skipped + len(array), bitorder="little"
    )
    return bits[skipped:].view(np.bool_)


def plain_texts(array: Any) -> list[Any]:
    """Returns the values of an array without nulls.

    For texts this takes a third of the time of `to_pylist`.
    """
    kind = array.type
    is_large = pa.types.is_large_string(kind)
    if not len(array) or not (is_large or pa.types.is_string(kind)):
        return array.to_pylist()  # type: ignore[no-any-return]
    _, places, content = array.buffers()
    ends = np.frombuffer(places, np.int64 if is_large else np.int32)[
        array.offset : array.offset + len(array) + 1
    ]
    first = int(ends[0])
    text = bytes(memoryview(content)[first : int(ends[-1])])
    stops: list[int] = (ends - first).tolist()
    if not text.isascii():
        return [str(text[start:stop], "utf-8") for start, stop in pairwise(stops)]
    whole = text.decode("ascii")
    return [whole[start:stop] for start, stop in pairwise(stops)]


def to_table(batch: ColumnBatch) -> Any:
    """Returns a batch as an Arrow table.

    Raises pyarrow.ArrowInvalid or ArrowTypeError for a column of values that have no common type.
    """
    return pa.table({str(name): to_arrow(column) for name, column in batch.columns.items()})


def to_arrow(column: Column) -> Any:
    """Returns a column as an Arrow array."""
    if isinstance(column, NumberColumn):
        return pa.array(column.values, mask=None if column.valid is None else ~column.valid)
    if isinstance(column, CodedColumn):
        codes = pa.array(column.codes, pa.int32(), mask=column.codes < 0)
        return pa.DictionaryArray.from_arrays(codes, pa.array(column.entries)).dictionary_decode()
    if (
        isinstance(column, ColumnBatch)
        and column.columns
        and column.make is None
        and not column.has_positions
    ):
        return pa.StructArray.from_arrays(
            [to_arrow(one) for one in column.columns.values()], names=list(column.columns)
        )
    try:
        return pa.array(column.to_list())
    except OverflowError:
        return pa.array(column.to_list(), pa.uint64())
