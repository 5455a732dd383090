"""A source that reads the rows of a DataFrame inside the Spark task that computed them.

The rows come as Arrow batches, and become elements in slices, as the flow asks for them. Each
partition is a split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.operators.source import BaseReader, Split

if TYPE_CHECKING:
    import pyarrow as pa

    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["FrameRows"]


class FrameRows:
    """A source that replaces a `FrameSource` in a job of Spark.

    The payload of its split is an iterator of record batches, which the source reads.
    """

    bounded = True

    def __init__(self, make: Callable[[dict[str, Any]], Any] | None, *, batches: bool) -> None:
        self._make = make
        self._batches = batches

    @property
    def gives_dicts(self) -> bool:
        """Whether an element is a plain dict of the columns."""
        return self._make is None and not self._batches

    async def discover(self) -> list[Split]:
        """Returns no splits: Spark knows the partitions, and gives each task its own."""
        return []

    def reader(self, ctx: SourceContext) -> SourceReader[Any]:
        return _RowReader(self._make, batches=self._batches)


class _RowReader(BaseReader[Any]):
    finished: bool

    def __init__(self, make: Callable[[dict[str, Any]], Any] | None, *, batches: bool) -> None:
        self._make = make
        self._whole = batches
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._batch: pa.RecordBatch | None = None
        self._offset = 0
        self.finished = False

    async def open(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self._batches = split.payload

    def poll_batch(self, max_records: int) -> list[Any] | None:
        """Returns the next elements. Blocks until Spark has a batch: nothing else runs in this
        process.
        """
        while self._batch is None or self._offset >= self._batch.num_rows:
            self._batch = next(self._batches, None)
            self._offset = 0
            if self._batch is None:
                self.finished = True
                return None
        if self._whole:
            self._offset = self._batch.num_rows
            return [self._batch]
        piece = self._batch.slice(self._offset, max_records)
        self._offset += piece.num_rows
        rows: list[Any] = piece.to_pylist()
        make = self._make
        return rows if make is None else [make(row) for row in rows]

    async def wait(self) -> None:
        """Does nothing: `poll_batch` itself waits."""

    def position(self, split_id: str) -> None:
        """Returns None, because there are no positions. A task that is lost starts from the
        beginning.
        """

    async def close(self) -> None:
        """Does nothing: there is nothing to release."""
