"""Computes window aggregates on columns, with one `Cells` object for each slice of event time.

`settle` writes unwritten content into the table. Call `release` before rows are added to a slice.
Both, and the results of a window, are iterators, so that the event loop can run between steps.
Between two steps a query may read the state, and `settle` is called before; no records may be
added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from aioflow.columns.cells import WRITTEN_MAX, Cells, Merged
from aioflow.columns.expressions import NotOnColumns
from aioflow.columns.keys import KeyEncoder
from aioflow.columns.making import repeat
from aioflow.columns.plans import Inputs, Plan
from aioflow.core.column_batch import COLUMN_RECORDS_MAX, Column, ColumnBatch
from aioflow.core.functions import WindowResult

__all__ = ["SliceColumns"]

KEYS_MIN = 100_000
"""Minimum number of codes before all codes are discarded. There must also be four times as many as
keys in a slice.
"""

SLICE_KEYS = 64
"""Number of keys whose writes cost about as much as one more slice."""

TableOf = Callable[[int, list[Any]], MutableMapping[Any, Any]]
"""Function of a slice's start and some keys; it returns the table for writing these keys."""


class SliceColumns:
    """The slices of one window operator that are held in columns.

    `table_of` and `peek` return the table's content of a slice, for writing and for reading.
    """

    def __init__(
        self, plan: Plan, table_of: TableOf, peek: Callable[[int], Mapping[Any, Any]]
    ) -> None:
        self._plan = plan
        self._table_of = table_of
        self._peek = peek
        self._encoder = KeyEncoder()
        self._cells: dict[int, Cells] = {}
        self._count_before = 0
        """Number of keys of the slice that was dropped last: the next one, still small, will have
        about as many.
        """

    @property
    def starts(self) -> list[int]:
        """The start of each slice that is held in columns."""
        return list(self._cells)

    def make_room(self) -> Iterator[None]:
        """Discards the codes of all keys if many of the keys are no longer in any slice. Call it
        before `prepare`.

        Yields after each part, like `settle`.
        """
        count = len(self._encoder)
        if count > KEYS_MIN and count > 4 * max(
            self._count_before, *(cells.count for cells in self._cells.values()), 0
        ):
            yield from self.release(self.starts)
            self._encoder = KeyEncoder()

    def prepare(self, keys: Any, values: Any) -> tuple[np.ndarray, list[Inputs]]:
        """Returns the codes of `keys`, and the inputs of the aggregates from `values`.

        Raises NotOnColumns.
        """
        if not isinstance(values, ColumnBatch):
            raise NotOnColumns("the values are no records of columns")
        inputs = self._plan.inputs(values)
        codes = self._encoder.encode_plain(keys)
        if codes is None:
            raise NotOnColumns("keys that are neither ints nor texts")
        return codes, inputs

    def fold(
        self,
        start: int,
        codes: np.ndarray,
        inputs: list[Inputs],
        which: np.ndarray | None,
        *,
        new: bool,
    ) -> None:
        """Adds records to the slice that starts at `start`. `new` means that the table has no data
        for the slice.

        Raises NotOnColumns before any change.
        """
        cells = self._cells.get(start)
        if cells is None:
            cells = Cells(self._plan, complete=new)
        cells.fold(
            codes,
            inputs,
            which,
            self._encoder.entries,
            None if cells.complete else self._peek(start),
        )
        self._cells[start] = cells

    def settle(self) -> Iterator[None]:
        """Writes all changes into the table. Yields after each part.

        No records may be added until the iterator has ended.
        """
        return self._settle(self.starts)

    def _settle(self, starts: Iterable[int]) -> Iterator[None]:
        written = 0
        for start in starts:
            cells = self._cells[start]
            for count in cells.write(
                lambda keys, at=start: self._table_of(at, keys),  # type: ignore[misc]
                self._encoder.entries,
            ):
                written += count + SLICE_KEYS
                if written >= WRITTEN_MAX:
                    yield
                    written = 0

    def release(self, starts: Sequence[int]) -> Iterator[None]:
        """Writes the slices at `starts` into the table, and forgets them. Yields after each part.

        Call it before rows are added to these slices.
        """
        yield from self._settle(starts)
        for start in starts:
            del self._cells[start]

    def drop(self, start: int) -> None:
        """Drops a slice, because no window needs it any more."""
        cells = self._cells.pop(start, None)
        if cells is not None:
            self._count_before = cells.count

    def results(self, starts: Sequence[int], begin: int, end: int) -> Iterator[ColumnBatch] | None:
        """Returns an iterator over the results of the window from `begin` to `end`, which consists
        of the slices at `starts`.

        Returns None if the table has content of these slices that is not held here. No records may
        be added until the iterator has ended.
        """
        cells = [one for one in map(self._cells.get, starts) if one is not None and one.complete]
        if len(cells) < len(starts):
            return None
        try:
            return self._pieces(Merged(cells), begin, end)
        except NotOnColumns:
            return None

    def _pieces(self, merged: Merged, begin: int, end: int) -> Iterator[ColumnBatch]:
        codes = merged.codes()
        for first in range(0, len(codes), COLUMN_RECORDS_MAX):
            part = codes[first : first + COLUMN_RECORDS_MAX]
            columns: dict[str, Column] = {
                "key": self._encoder.decode(part),
                "start": repeat(begin, len(part)),
                "end": repeat(end, len(part)),
                "value": merged.results(part),
            }
            yield ColumnBatch(columns, len(part), WindowResult)
