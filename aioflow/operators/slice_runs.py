"""Merged runs of slices: a window of many slices fires at the cost of a few.

A run is 2**level slices, begun at a multiple of its length; it is the merge of its two halves, made
when a window first needs it. So each slice is merged about once on each level, once in all, and a
window of n slices is covered by at most 2 log2(n) runs instead of n slices. A run is a cache over
the slices: it is in no snapshot, and a record that comes late for a slice drops the runs above it.
They take about as much memory again as the slices.
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
"""Keys that are merged before other work gets its turn, where each is a call."""

LOOP_MERGES_AT_ONCE = 4_096
"""Keys that a generated loop merges before: 0.3 ms of counts, 1.6 of several aggregates
together; a turn costs some 15 us more.
"""

COPIED_AT_ONCE = 16_384
"""Keys that are copied before: 1 to 2 ms."""

Table = Mapping[Any, Any]

_NOTHING: Table = {}

_ABSENT: Any = object()


def merge_parts(aggregate: FoldingAggregate, copies: bool, parts: list[Any]) -> Any:
    """The accumulators `parts`, two or more in order of time, as a new one.

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
    """`tables`, in order of time, as one: what two of them hold for a key is merged, and no
    accumulator of theirs is changed.

    One look-up for each key of each table; key by key over all tables costs three times as much.
    Yields while there is much to merge.
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
    """The items of `table`, `LOOP_MERGES_AT_ONCE` at a time; each part is to be read before the
    next is asked for.

    Iterating over `dict.items()` directly reuses one tuple as long as no reference to it is kept:
    merging then costs 0.6 of the time.
    """
    items = iter(table.items())
    if type(table) is dict:
        for _ in range(0, len(table), LOOP_MERGES_AT_ONCE):
            yield islice(items, LOOP_MERGES_AT_ONCE)
    else:  # How many there are may be dear to say.
        while part := list(islice(items, LOOP_MERGES_AT_ONCE)):
            yield part


def _copied(table: Table) -> Generator[None, None, dict[Any, Any]]:
    """`table` as a dict of its own. A million keys at once hold the loop for 60 ms."""
    if len(table) <= COPIED_AT_ONCE:
        return dict(table)
    copy: dict[Any, Any] = {}
    items = iter(table.items())
    while len(copy) < len(table):
        copy.update(islice(items, COPIED_AT_ONCE))
        yield
    return copy


class SliceRuns:
    """Covers ranges of slice numbers by runs.

    `slice_of(number)` gives key -> accumulator, empty for none; `any_in(first, stop)` whether some
    slice there holds something.
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
        """Keys since others got their turn: hundreds of small tables are as long as a large one."""

    def cover(self, first: int, stop: int) -> Generator[None, None, list[Table]]:
        """The tables that hold slices [first, stop), in order.

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
        """Slice `number` changes, or goes: so do the runs that hold it."""
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
