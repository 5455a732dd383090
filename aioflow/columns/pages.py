"""Reads the Arrow pages of one reader as batches whose text columns share one list of entries.

Arrow itself looks up known texts, so they never become Python values again. So `read`, which may be
called in a thread, does nearly all of the work. The lists of entries grow in `settle`, in the
thread that emits the batches, because batches of earlier pages still share the lists. A page must
be settled before the next one is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aioflow.columns.arrow import codes_of, from_arrow, numbers_of, plain_texts
from aioflow.columns.growing import GrowingEntries
from aioflow.core.column_batch import CodedColumn, Column, ColumnBatch

__all__ = ["ArrowPages"]

RECORDS_PER_ENTRY = 8
"""Minimum number of records per distinct text of a page. With fewer, looking up the texts costs
more than it saves.
"""

RECORDS_PER_KNOWN = 2
"""Minimum number of records of a page per known text. With fewer, the page is read without them."""


class _Found(CodedColumn):
    """A coded column whose texts are partly new. A code below `len(entries)` stands for a known
    text; code `len(entries) + i` stands for `new[i]`.
    """

    __slots__ = ("new",)

    def __init__(self, codes: np.ndarray, entries: list[Any], new: Any) -> None:
        super().__init__(codes, entries)
        self.new = new


class _Texts:
    """All different texts of one column that were read so far. Later pages share them instead of
    making new Python texts.
    """

    def __init__(self) -> None:
        self.growing = GrowingEntries()
        self._known: tuple[list[Any], Any] | None = (
            None  # The list of texts, and the same as an Arrow array.
        )

    def read(self, array: Any) -> Column:
        """Returns `array` as a column. New texts are added to the known ones later, by `settle`."""
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
        """Adds the new texts of `column` to the known ones, and returns the column that refers to
        them.
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
    """A converter of Arrow pages to batches of columns, which remembers the texts of each column of
    one reader.
    """

    def __init__(self) -> None:
        self._texts: dict[Any, _Texts] = {}

    def read(self, table: Any) -> ColumnBatch:
        """Returns an Arrow table or record batch as columns, to be passed to `settle`.

        It may run in any thread, one page at a time.
        """
        columns = {
            name: self._read(name, table.column(i)) for i, name in enumerate(table.schema.names)
        }
        return ColumnBatch(columns, table.num_rows)

    def settle(self, page: ColumnBatch) -> ColumnBatch:
        """Adds the new texts of `page`, the last page read, to the lists of entries, and returns
        the page with the final codes.

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
