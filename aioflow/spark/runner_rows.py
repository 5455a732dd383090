"""The rows of a DataFrame as the elements of a source, where Spark has them: in the task that
computed them.

They come as Arrow batches, and become elements in slices, as the flow asks for them. Each partition
is a split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aioflow.operators.source import Split

if TYPE_CHECKING:
    import pyarrow as pa

    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["FrameRows"]


class FrameRows:
    """Stands for a `FrameSource` in a job of Spark.

    What it reads is the payload of its split: an iterator of record batches.
    """

    bounded = True

    def __init__(self, make: Callable[[dict[str, Any]], Any] | None, *, batches: bool) -> None:
        self._make = make
        self._batches = batches

    @property
    def gives_dicts(self) -> bool:
        """Whether an element is a dict of the columns, as they are."""
        return self._make is None and not self._batches

    async def discover(self) -> list[Split]:
        """Spark knows the partitions, and each task its own."""
        return []

    def reader(self, ctx: SourceContext) -> SourceReader[Any]:
        return _RowReader(self._make, batches=self._batches)


class _RowReader:
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
        """Waits for Spark where it has to: nothing else goes on in this process."""
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
        """There is never anything to wait for."""

    def position(self, split_id: str) -> None:
        """None: there is no position. A task that is lost starts from the beginning."""

    async def close(self) -> None:
        """Nothing is held."""
