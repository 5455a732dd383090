"""A DataFrame as the source of a flow: `af.io.spark(bridge, "SELECT ...")`.

Each partition of the DataFrame is a split with event time of its own; partitions come in the order
in which Spark computes them. Where order or lateness matters, give the DataFrame one partition
(`coalesce(1)`).

A split's position is the number of rows that were read, with a checksum over them. After a restart
Spark computes the partition again, and its task skips the rows that were read. The checksum shows
whether these are the same rows; if not, it is an error. So a restored flow reads each row exactly
once, if the DataFrame gives the same rows in the same order. Files and sorted results do.

Columns stay columns up to here: rows are made of them in slices, as the flow asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aioflow.core.errors import RestoreError
from aioflow.operators.source import BaseReader, Split
from aioflow.spark.inbound import Arrival, Progress
from aioflow.spark.reading import FrameReading

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.operators.source import SourceContext, SourceReader
    from aioflow.spark.session import SparkBridge

__all__ = ["FrameSource"]

T = TypeVar("T")

NOT_BEGUN = Progress()


class FrameSource(Generic[T]):
    """A `Source` that reads a DataFrame. It stays in the process that has the bridge."""

    bounded = True
    parallelism_max = 1
    stays_here = True
    in_spark = True
    """Whether Spark itself may apply the filters and fields that follow, in a job of Spark."""

    def __init__(
        self,
        bridge: SparkBridge,
        what: Any,
        make: Callable[[dict[str, Any]], T] | None,
        *,
        batches: bool,
    ) -> None:
        """Makes the source. `make` turns a row into an element; with None the elements are dicts.

        With `batches` the elements are Arrow's record batches.
        """
        self._bridge = self.bridge = bridge
        self._what = self.what = what
        self.make = make
        self.batches = batches
        # discover() makes the plan for the next reader, because planning may compute a part of
        # the query.
        self._planned: tuple[FrameReading, int] | None = None

    def __repr__(self) -> str:
        return f"spark({self._what!r:.60})" if isinstance(self._what, str) else "spark()"

    async def discover(self, host: Host | None = None) -> list[Split]:
        """Returns one split for each partition. Its payload is the number of partitions."""
        reading, count = await self._plan(self._bridge.host if host is None else host)
        await self.drop_plan()
        self._planned = reading, count
        return [Split(str(number), None, count) for number in range(count)]

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return _FrameReader(ctx, self)

    async def take_plan(self, host: Host) -> tuple[FrameReading, int]:
        """Returns the planned job and its number of partitions. The caller closes the job."""
        planned, self._planned = self._planned, None
        return planned or await self._plan(host)

    async def drop_plan(self) -> None:
        """Closes the plan if it was not taken."""
        planned, self._planned = self._planned, None
        if planned is not None:
            await planned[0].close()

    async def _plan(self, host: Host) -> tuple[FrameReading, int]:
        reading = FrameReading(self._bridge, host, self._what)
        try:
            return reading, await reading.plan()
        except BaseException:
            await reading.close()
            raise


class _FrameReader(BaseReader[Any]):
    finished: bool

    def __init__(self, ctx: SourceContext, source: FrameSource[Any]) -> None:
        self._ctx = ctx
        self._source = source
        self._reading: FrameReading | None = None
        # By partition: what was read whole, and how many rows of the batch behind that were taken
        # in an attempt before.
        self._read: dict[int, Progress] = {}
        self._skip: dict[int, int] = {}
        self._arrival: Arrival | None = None
        self._offset = 0
        self.current_split = ""
        self.finished = True

    async def open(self, splits: Sequence[Split]) -> None:
        if not splits:
            await self._source.drop_plan()
            return
        self.finished = False
        reading, count = await self._source.take_plan(self._ctx.host)
        self._reading = reading
        for split in splits:
            if split.payload != count:
                raise RestoreError(
                    f"{self._source!r} had {split.payload} partitions when its positions were "
                    f"saved, and has {count} now: it cannot go "
                    "on in the middle of them; give it the same number (repartition), or start "
                    "with restore=None, fresh=True"
                )
            rows, chain, offset = split.position or (0, 0, 0)
            self._read[int(split.id)] = Progress(rows, chain)
            self._skip[int(split.id)] = offset
        start = {number: self._read.get(number, Progress(done=True)) for number in range(count)}
        reading.begin(start)

    def poll_batch(self, max_records: int) -> list[Any] | None:
        reading = self._reading
        if reading is None or self.finished:
            return None
        if self._arrival is None and not self._next(reading):
            return None
        arrival, source = self._arrival, self._source
        assert arrival is not None
        self.current_split = str(arrival.partition)
        size = arrival.batch.num_rows
        if source.batches:
            values: list[Any] = [arrival.batch]
            self._offset = size
        else:
            piece = arrival.batch.slice(self._offset, max_records)
            values = piece.to_pylist()
            if source.make is not None:
                values = [source.make(row) for row in values]
            self._offset += piece.num_rows
        if self._offset == size:
            self._read[arrival.partition] = arrival.after
            self._arrival = None
            self._offset = 0
        return values

    def _next(self, reading: FrameReading) -> bool:
        """Takes the next batch. Returns False if there is none now."""
        arrival = reading.take()
        if arrival is None:
            self.finished = reading.finished
            return False
        self._arrival = arrival
        self._offset = self._skip.pop(arrival.partition, 0)
        return True

    async def wait(self) -> None:
        if self._reading is not None and self._arrival is None and not self.finished:
            await self._reading.wait()
            self.finished = self._reading.finished

    @property
    def finished_splits(self) -> set[str]:  # type: ignore[override]
        """Returns the partitions that were read to their end."""
        reading = self._reading
        if reading is None:
            return set()
        ended = set()
        for number, read in self._read.items():
            progress = reading.progress(number)
            if progress.done and progress.rows == read.rows:
                ended.add(str(number))
        return ended

    def position(self, split_id: str) -> list[int]:
        number = int(split_id)
        rows, chain, _ = self._read.get(number, NOT_BEGUN)
        arrival = self._arrival
        offset = (
            self._offset
            if arrival is not None and arrival.partition == number
            else self._skip.get(number, 0)
        )
        return [rows, chain, offset]

    async def close(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            await reading.close()
        await self._source.drop_plan()  # The task has failed before it could read.
