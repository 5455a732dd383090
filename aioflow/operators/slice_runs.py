"""Merges neighbouring slices into runs, so that a window of many slices fires at the cost of a few.

A run is 2**level slices that start at a multiple of its length. It is the merge of its two halves,
made when a window first needs it. So each slice is merged about once on each level, and a window of
n slices is covered by at most 2 log2(n) runs instead of n slices. A run is a cache over the slices:
no snapshot contains it, and a late record for a slice drops the runs above the slice. Runs take
about as much memory as the slices.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any

from aioflow.state.snapshot import frozen_copy

if TYPE_CHECKING:
    from aioflow.operators.folding import FoldingAggregate

__all__ = ["SliceRuns", "merge_parts", "merge_tables"]

MERGES_AT_ONCE = 1_024
"""Number of keys merged between two yields, if each merge is a call."""

LOOP_MERGES_AT_ONCE = 4_096
"""Number of keys merged between two yields by a generated loop.

This takes 0.3 ms for counts and 1.6 ms for several aggregates together; a yield costs some 15 us
more.
"""

COPIED_AT_ONCE = 16_384
"""Number of keys copied between two yields: 1 to 2 ms."""

Table = Mapping[Any, Any]

_NOTHING: Table = {}

_ABSENT: Any = object()


def merge_parts(aggregate: FoldingAggregate, copies: bool, parts: list[Any]) -> Any:
    """Merges two or more accumulators, in order of time, into a new one.

    With `copies`, `merge` may change either argument.
    """
    if copies:
        parts = [frozen_copy(part) for part in parts]
    elif aggregate.in_place:
        parts = [aggregate.create_accumulator(), *parts]
    return reduce(aggregate.merge, parts)


def merge_tables(
    aggregate: FoldingAggregate, copies: bool, tables: list[Table]
) -> Generator[None, None, Table]:
    """Merges `tables`, in order of time, into one: for each key, the accumulators are merged.

    No accumulator of `tables` is changed. There is one lookup for each key of each table; going key
    by key over all tables costs three times as much. Yields while there is much to merge.
    """
    merged = yield from _copied(tables[0])
    if not copies and (merger := aggregate.merger) is not None:
        for table in tables[1:]:
            for number, items in enumerate(_parts(table)):
                if number:
                    yield
                merger(merged, items)
        return merged
    get, merge = merged.get, aggregate.merge
    changes = copies or aggregate.in_place
    own: set[Any] = set()  # Keys whose accumulator was made here.
    for table in tables[1:]:
        for done, (key, held) in enumerate(table.items(), 1):
            before = get(key, _ABSENT)
            if before is _ABSENT:
                merged[key] = held
            elif not changes:
                merged[key] = merge(before, held)
            elif key in own:
                merged[key] = merge(before, frozen_copy(held) if copies else held)
            else:
                own.add(key)
                merged[key] = merge_parts(aggregate, copies, [before, held])
            if done % MERGES_AT_ONCE == 0:
                yield
    return merged


def _parts(table: Table) -> Iterator[Iterable[tuple[Any, Any]]]:
    """Yields the items of `table` in parts of `LOOP_MERGES_AT_ONCE`.

    Each part must be read before the next is requested. Iterating over `dict.items()` directly
    reuses one tuple as long as no reference to it is kept: merging then costs 0.6 of the time.
    """
    items = iter(table.items())
    if type(table) is dict:
        for _ in range(0, len(table), LOOP_MERGES_AT_ONCE):
            yield islice(items, LOOP_MERGES_AT_ONCE)
    else:  # The number of keys may be expensive to find out.
        while part := list(islice(items, LOOP_MERGES_AT_ONCE)):
            yield part


def _copied(table: Table) -> Generator[None, None, dict[Any, Any]]:
    """Copies `table` to a new dict. A million keys at once would block the loop for 60 ms."""
    if len(table) <= COPIED_AT_ONCE:
        return dict(table)
    copy: dict[Any, Any] = {}
    items = iter(table.items())
    while len(copy) < len(table):
        copy.update(islice(items, COPIED_AT_ONCE))
        yield
    return copy


class SliceRuns:
    """The runs of a table of slices, which can cover any range of slice numbers.

    `slice_of(number)` returns key -> accumulator, empty if there is no such slice. `any_in(first,
    stop)` returns whether a slice in this range has keys.
    """

    __slots__ = ("_aggregate", "_any_in", "_copies", "_levels", "_merged", "_runs", "_slice_of")

    def __init__(
        self,
        aggregate: FoldingAggregate,
        copies: bool,
        slice_of: Callable[[int], Table],
        any_in: Callable[[int, int], bool],
    ) -> None:
        self._aggregate = aggregate
        self._copies = copies
        self._slice_of = slice_of
        self._any_in = any_in
        self._runs: dict[tuple[int, int], Table] = {}
        self._levels = 0
        self._merged = 0
        """Keys merged since the last yield: hundreds of small tables take as long as one large."""

    def cover(self, first: int, stop: int) -> Generator[None, None, list[Table]]:
        """Returns the tables that together cover the slices from `first` up to `stop` (exclusive),
        in order.

        Yields while there is much to merge.
        """
        tables = []
        while first < stop:
            length = first & -first or 1 << (stop - first).bit_length()
            while first + length > stop:
                length >>= 1
            level = length.bit_length() - 1
            table = yield from self._run(level, first >> level)
            if table:
                tables.append(table)
            first += length
        return tables

    def drop(self, number: int) -> None:
        """Drops the runs that contain slice `number`, because the slice changes or is dropped."""
        for level in range(1, self._levels + 1):
            self._runs.pop((level, number >> level), None)

    def _run(self, level: int, index: int) -> Generator[None, None, Table]:
        if level == 0:
            return self._slice_of(index)
        run = self._runs.get((level, index))
        if run is not None:
            return run
        if not self._any_in(index << level, (index + 1) << level):
            return _NOTHING
        left = yield from self._run(level - 1, 2 * index)
        right = yield from self._run(level - 1, 2 * index + 1)
        merged = yield from merge_tables(self._aggregate, self._copies, [left, right])
        self._runs[level, index] = merged
        self._levels = max(self._levels, level)
        self._merged += len(right)
        if self._merged >= MERGES_AT_ONCE:
            self._merged = 0
            yield
        return merged
