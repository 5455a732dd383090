"""Converts Arrow arrays to columns, and columns to Arrow arrays.

The values of a column equal those of `to_pylist`, with one exception. A timestamp or duration in
nanoseconds becomes a `datetime` or `timedelta`, with a resolution of microseconds. Integers and
floats of every width become Python's int and float, as with `to_pylist`.

`ArrowPages` converts the Arrow pages of one reader to batches. All batches share one list of
entries for each text column. Arrow itself looks up the known texts, so only new texts become Python
values. `read` does nearly all of this work, and may be called in a thread. `settle` extends the
lists of entries. It runs in the thread that emits the batches, because batches of earlier pages
still share the lists. A page must be settled before the next page is read.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aioflow.columns.build import GrowingEntries, nothing
from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch, NumberColumn, ObjectColumn

__all__ = [
    "ArrowPages",
    "codes_of",
    "from_arrow",
    "numbers_of",
    "plain_texts",
    "to_arrow",
    "to_table",
]


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
            pass  # Arrow has no dictionaries of durations and the like: convert value by value.
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
    """Returns the indices of a dictionary array as codes of a coded column. A null has code -1."""
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
    """Returns the values of an array that has no nulls, as a list.

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


RECORDS_PER_ENTRY = 8
"""Minimum number of records per distinct text of a page. With fewer records, looking up the texts
costs more than it saves.
"""

RECORDS_PER_KNOWN = 2
"""Minimum number of records of a page per known text. With fewer records, the page is read without
the known texts.
"""


class _Found(CodedColumn):
    """A coded column with texts that `entries` may lack. A code below `len(entries)` is the index
    of a known text. Code `len(entries) + i` stands for `new[i]`.
    """

    __slots__ = ("new",)

    def __init__(self, codes: np.ndarray, entries: list[Any], new: Any) -> None:
        super().__init__(codes, entries)
        self.new = new


class _Texts:
    """All distinct texts that were read so far from one column. Later pages use these Python texts
    instead of making equal texts again.
    """

    def __init__(self) -> None:
        self.growing = GrowingEntries()
        self._known: tuple[list[Any], Any] | None = (
            None  # The list of texts, and the same as an Arrow array.
        )

    def read(self, array: Any) -> Column:
        """Returns `array` as a column. `settle` adds new texts to the known texts later."""
        entries = self.growing.entries
        if self.growing.is_full or len(entries) * RECORDS_PER_KNOWN > len(array):
            return from_arrow(array)
        missing = None
        if entries:
            places = pc.index_in(array, value_set=self._those_known(array.type))
            if places.null_count == array.null_count:
                return CodedColumn(codes_of(places), entries)
            missing = pc.and_(pc.is_null(places), pc.is_valid(array))
        new = (array if missing is None else array.filter(missing)).dictionary_encode()
        if len(new.dictionary) * RECORDS_PER_ENTRY > len(array):
            return from_arrow(new if missing is None else array)
        codes = codes_of(new.indices)
        if missing is not None:
            codes, codes_of_new = codes_of(places), codes + np.int32(len(entries))
            codes[numbers_of(missing)] = codes_of_new
        return _Found(codes, entries, new.dictionary)

    def settle(self, column: CodedColumn) -> CodedColumn:
        """Adds the new texts of `column` to the known texts. Returns the column with codes that
        refer to the known texts.
        """
        growing = self.growing
        if isinstance(column, _Found):
            entries = column.entries
            self._known = (
                entries,
                pa.concat_arrays([self._those_known(column.new.type), column.new])
                if entries
                else column.new,
            )
            for text in plain_texts(column.new):
                growing[text]  # Adds the text to the entries.
            return CodedColumn(column.codes, entries)
        if column.entries is growing.entries:
            return column
        if len(column.entries) * RECORDS_PER_ENTRY > len(column) or list(
            map(type, column.entries)
        ).count(str) < len(column.entries):
            return column
        return growing.recoded(column)

    def _those_known(self, kind: Any) -> Any:
        """Returns the known texts as an Arrow array of the type `kind`."""
        entries = self.growing.entries
        of, known = self._known or (entries, None)
        if known is None or of is not entries or known.type != kind or len(known) < len(entries):
            known = pa.array(entries, kind)
            self._known = entries, known
        return known


class ArrowPages:
    """Converts the Arrow pages of one reader to batches of columns. Remembers the texts of each
    column.
    """

    def __init__(self) -> None:
        self._texts: dict[Any, _Texts] = {}

    def read(self, table: Any) -> ColumnBatch:
        """Returns an Arrow table or record batch as columns, to be passed to `settle`.

        It may run in any thread. Each page must be passed to `settle` before the next call.
        """
        columns = {
            name: self._read(name, table.column(i)) for i, name in enumerate(table.schema.names)
        }
        return ColumnBatch(columns, table.num_rows)

    def settle(self, page: ColumnBatch) -> ColumnBatch:
        """Adds the new texts of `page` to the lists of entries, and returns the page with the final
        codes. `page` must be the last page that was read.

        Only columns whose texts recur often use these lists.
        """
        columns = {name: self._settled(name, column) for name, column in page.columns.items()}
        return ColumnBatch(columns, len(page), page.make)

    def _read(self, name: Any, array: Any) -> Column:
        if isinstance(array, pa.ChunkedArray) and array.num_chunks == 1:
            array = array.chunk(0)
        if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
            return from_arrow(array)
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        return (
            from_arrow(array) if isinstance(array, pa.ChunkedArray) else self._of(name).read(array)
        )

    def _settled(self, name: Any, column: Column) -> Column:
        return self._of(name).settle(column) if isinstance(column, CodedColumn) else column

    def _of(self, name: Any) -> _Texts:
        texts = self._texts.get(name)
        if texts is None:
            texts = self._texts[name] = _Texts()
        return texts
