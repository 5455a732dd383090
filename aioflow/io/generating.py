"""A source whose elements a function or expressions compute from an index, as fast as possible or
at a fixed rate.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar, overload

from aioflow.advice.hints import explained
from aioflow.core.errors import GraphError
from aioflow.core.signatures import check_takes
from aioflow.io.arguments import checked_whole
from aioflow.operators.source import BaseReader, BaseSource, Split

if TYPE_CHECKING:
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["DatagenSource", "datagen"]

T = TypeVar("T")

NAP_S = 0.001
"""Minimum time in seconds that a reader with a rate sleeps. At high rates, several elements are
made after one sleep.
"""


INDEX = "index"
"""The name of the field that expressions read the index from."""


@overload
def datagen(
    fn: Callable[[int], T], rate: float | None = ..., count: int | None = ..., *, splits: int = ...
) -> DatagenSource[T]: ...
@overload
def datagen(
    fn: Mapping[str, Any], rate: float | None = ..., count: int | None = ..., *, splits: int = ...
) -> DatagenSource[dict[str, Any]]: ...
@explained
def datagen(
    fn: Callable[[int], T] | Mapping[str, Any],
    rate: float | None = None,
    count: int | None = None,
    *,
    splits: int = 1,
) -> DatagenSource[Any]:
    """Returns a source that generates `fn(0), fn(1), ...`: `count` elements, or infinitely many
    without `count`.

    `rate` is the number of elements a second in total; None means as fast as possible. `fn` may be
    a dict of expressions of `af.col.index`. The elements are then dicts, made column by column if
    the next steps work on columns: `datagen({"user": af.col.index % 10, "value": af.col.index *
    0.5})`.

    `splits` is the number of splits, which get the indices in turn; set it to the parallelism of
    the source. A restart continues after the last index that the checkpoint covers.
    """
    return DatagenSource(fn, rate, count, splits)


class DatagenSource(BaseSource[T]):
    """A source that generates elements in splits. Of n splits, split k generates the elements with
    the indices k, k + n, k + 2n, ...

    The position of a split is its next index.
    """

    name = "datagen"
    offers_columns = True

    def __init__(
        self,
        fn: Callable[[int], T] | Mapping[str, Any],
        rate: float | None,
        count: int | None,
        splits: int,
    ) -> None:
        if isinstance(fn, Mapping):
            _check_fields(fn)
        elif not callable(fn):
            raise GraphError(
                f"datagen: fn is {fn!r}, expected a function of the index, or expressions of "
                "af.col.index by name"
            )
        else:
            check_takes(fn, "datagen", "index")
        if rate is not None and not (
            isinstance(rate, (int, float))
            and not isinstance(rate, bool)
            and rate > 0
            and math.isfinite(rate)
        ):
            raise GraphError(f"datagen: rate is {rate!r}, expected elements a second, more than 0")
        if count is not None:
            checked_whole(count, "count", "datagen", least=0)
        checked_whole(splits, "splits", "datagen")
        self._fn = fn
        self._rate = rate
        self._count = count
        self._splits = splits
        self.parallelism_max = splits  # A subtask without a split would be idle.

    def __repr__(self) -> str:
        return (
            f"datagen({getattr(self._fn, '__qualname__', self._fn)}, rate={self._rate}, "
            f"count={self._count})"
        )

    @property
    def bounded(self) -> bool:
        return self._count is not None

    async def discover(self) -> list[Split]:
        return [Split(str(k), k) for k in range(self._splits)]

    def with_columns(self) -> DatagenSource[T] | None:
        """Returns a copy of this source that emits columns, with the same positions.

        Returns None if the elements are made by a function instead of expressions.
        """
        if not isinstance(self._fn, Mapping) or find_spec("numpy") is None:
            return None
        source = copy.copy(self)
        source.columnar = True
        return source

    @property
    def why_rows(self) -> str:
        """Returns the reason why `with_columns` returns None, for the output of `explain()`."""
        if isinstance(self._fn, Mapping):
            return "numpy is not installed: pip install 'aioflow[columns]'"
        return (
            "datagen calls a function: expressions by name, as datagen({'x': af.col.index % 10}), "
            "make columns"
        )

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return _DatagenReader(self._maker(), self.columnar, self._rate, self._count, self._splits)

    def _maker(self) -> Callable[[range], Any]:
        """Returns the function that makes the elements of a range of indices."""
        fn: Any = self._fn
        if isinstance(fn, Mapping):
            from aioflow.expressions.rows import columns_to_function

            if self.columnar:
                return _columns_of(fn)
            row = columns_to_function(fn)
            return lambda indices: [row({INDEX: index}) for index in indices]
        return lambda indices: list(map(fn, indices))


def _columns_of(fields: Mapping[str, Any]) -> Callable[[range], Sequence[Any]]:
    """Returns a function that makes the elements of a range of indices as columns.

    If an expression fails on columns, the function makes rows instead, so that the error names the
    faulty element.
    """
    import numpy as np

    from aioflow.columns.expressions import ColumnSelect, NotOnColumns
    from aioflow.core.column_batch import ColumnBatch, NumberColumn
    from aioflow.expressions.nodes import as_expression
    from aioflow.expressions.rows import columns_to_function

    select = ColumnSelect({name: as_expression(e) for name, e in fields.items()})
    row = columns_to_function(fields)

    def elements(indices: range) -> Sequence[Any]:
        index = NumberColumn(np.arange(indices.start, indices.stop, indices.step, dtype=np.int64))
        try:
            return select(ColumnBatch({INDEX: index}, len(indices)))
        except NotOnColumns:
            return [row({INDEX: i}) for i in indices]

    return elements


def _check_fields(fields: Mapping[str, Any]) -> None:
    from aioflow.expressions.nodes import as_expression
    from aioflow.expressions.trees import column_names

    unknown = [name for name in column_names(*map(as_expression, fields.values())) if name != INDEX]
    if unknown or not fields:
        what = f"reads {unknown[0]!r}" if unknown else "has no field"
        raise GraphError(
            f"datagen: {dict(fields)!r} {what}, expected expressions of af.col.index by name"
        )


class _DatagenReader(BaseReader[Any]):
    def __init__(
        self,
        make: Callable[[range], Any],
        columnar: bool,
        rate: float | None,
        count: int | None,
        splits: int,
    ) -> None:
        self.columnar = columnar
        self._make = make
        self._rate = rate
        self._count = count
        self._step = splits
        self._next: dict[str, int] = {}
        self._turn: list[str] = []
        self._began_s = 0.0
        self._made = 0
        self.current_split = ""
        self.finished_splits: set[str] = set()

    async def open(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self._next[split.id] = int(split.id) if split.position is None else split.position
            self._turn.append(split.id)
            self._drop_finished(split.id)
        self._began_s = asyncio.get_running_loop().time()
        self._made = 0

    def poll_batch(self, max_records: int) -> Sequence[Any] | None:
        if not self._turn:
            return None
        room = max_records if self._rate is None else min(max_records, self._due())
        if room <= 0:
            return None
        split_id = self._turn.pop(0)
        self._turn.append(split_id)
        start, step = self._next[split_id], self._step
        end = start + room * step
        if self._count is not None:
            end = min(end, self._count + (start - self._count) % step)
        batch: Sequence[Any] = self._make(range(start, end, step))
        self._next[split_id] = end
        self._made += len(batch)
        self.current_split = split_id
        self._drop_finished(split_id)
        return batch

    def _drop_finished(self, split_id: str) -> None:
        if self._count is not None and self._next[split_id] >= self._count:
            self._turn.remove(split_id)
            self.finished_splits.add(split_id)

    def _due(self) -> int:
        """Returns how many elements the reader has to make now to keep the rate.

        The reader's share of the rate depends on how many of the splits it has.
        """
        share = self._rate_here()
        elapsed = asyncio.get_running_loop().time() - self._began_s
        return int(elapsed * share) + 1 - self._made

    def _rate_here(self) -> float:
        assert self._rate is not None
        return self._rate * len(self._next) / self._step

    async def wait(self) -> None:
        if not self._turn or self._rate is None:
            return
        loop = asyncio.get_running_loop()
        due_s = self._began_s + self._made / self._rate_here()
        left_s = due_s - loop.time()
        if left_s > 0:
            await asyncio.sleep(max(left_s, NAP_S))

    @property
    def finished(self) -> bool:
        return not self._turn

    def position(self, split_id: str) -> int:
        return self._next[split_id]

    async def close(self) -> None:
        """Does nothing: the reader holds no resources."""
