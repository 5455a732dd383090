"""A DataFrame as the source of a flow: `af.io.spark(bridge, "SELECT ...")`.

Each partition of the DataFrame is a split with event time of its own. The partitions arrive in the
order in which Spark computes them. If order or lateness matters, give the DataFrame one partition
(`coalesce(1)`). A DataFrame of Spark Connect always has one.

A split's position is the number of rows that were read, with a checksum over them. After a restart
Spark computes the partition again, and its task skips the rows that were read. If the checksum
shows that the skipped rows differ from the rows that were read, the task fails. So a restored flow
reads each row exactly once, if the DataFrame has the same rows in the same order each time. Files
and sorted results have this property.

Data arrives as columns. They are converted to rows in slices, as the flow asks for rows.

`FrameReading` reads one DataFrame: a Spark job whose tasks push their partitions to this process.

    async with FrameReading(bridge, host, "SELECT ...") as reading:
        count = await reading.plan()
        async for arrival in reading: ...

The plan is made once, with the number of partitions. Spark may choose that number while it runs
(adaptive execution), and the job must have the number that `plan` returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import GraphError, RestoreError
from aioflow.operators.source import BaseReader, BaseSource, Split
from aioflow.spark.bridge.channels import ChannelListener
from aioflow.spark.bridge.connect import is_connect
from aioflow.spark.bridge.executor import RESULT_SCHEMA, PushRows
from aioflow.spark.bridge.transfers import Arrival, InboundStream, Progress
from aioflow.spark.failures import SparkError
from aioflow.spark.versions import is_remote

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.operators.source import SourceContext, SourceReader
    from aioflow.spark.bridge.calls import Bridge

__all__ = ["FrameReading", "FrameSource", "frame_of"]


def frame_of(session: Any, what: Any, *, streaming: bool = False) -> Any:
    """Returns the DataFrame that `what` describes: SQL, a function of the session, or a DataFrame.

    Must run in a call of the bridge. Raises GraphError for any other `what`, and for a streaming
    query unless `streaming` is true.
    """
    frame = session.sql(what) if isinstance(what, str) else what
    if callable(what):
        frame = what(session)
    # A DataFrame of Spark Connect needs a session there, and has no Java object.
    if not (hasattr(frame, "_jdf") or (is_remote(frame) and is_remote(session))):
        raise GraphError(
            f"spark(...) reads {type(frame).__name__}, expected a query, a DataFrame of the "
            "bridge's session, or a function that takes the session and gives one"
        )
    if frame.isStreaming and not streaming:
        raise GraphError(
            "spark(...) reads a streaming query, and there is no checkpoint=: give a local "
            "directory that outlives the process, as "
            'checkpoint="/var/lib/app/spark", or read it once with session.read instead of '
            "session.readStream"
        )
    return frame


class FrameReading:
    """Reads a DataFrame once, from the plan to the last row."""

    def __init__(self, bridge: Bridge, host: Host, what: str | Callable[[Any], Any] | Any) -> None:
        self._bridge = bridge
        self._what = what
        self._listener = ChannelListener(host, bridge.reach)
        self._stream: InboundStream | None = None
        self._name = ""
        self._collect: Callable[[], Any]
        self._job: asyncio.Task[None] | None = None
        self._ended = False
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def plan(self) -> int:
        """Plans the job; returns the number of partitions.

        To do this, Spark may compute a part of the query.
        """
        await self._listener.open()
        session = await self._bridge.session()
        # The plan needs the name of the stream, which gets its progress later, with `begin`.
        stream = self._stream = InboundStream()
        name = self._name = self._listener.add(stream)
        where = self._listener.where

        def run() -> tuple[Callable[[], Any], int]:
            frame = frame_of(session, self._what)
            if is_connect(self._bridge.master):  # A Connect server does not report the number.
                frame = frame.coalesce(1).mapInArrow(PushRows(where, name), RESULT_SCHEMA)
                return frame.collect, 1
            rdd = frame.mapInArrow(PushRows(where, name), RESULT_SCHEMA).rdd
            return rdd.collect, rdd.getNumPartitions()

        self._collect, count = await self._bridge.call(run)
        return count

    def begin(self, start: Mapping[int, Progress] | None = None) -> None:
        """Starts the job. `start` is the progress of each partition that was partly read before."""
        assert self._stream is not None and self._job is None, (
            "plan() comes before begin(), which comes once"
        )
        self._stream.resume(start or {})
        # This reading owns the task: close() cancels it and waits for its end.
        self._job = asyncio.get_running_loop().create_task(
            self._run(self._stream), name="spark-reading"
        )

    async def _run(self, stream: InboundStream) -> None:
        try:
            results = await self._bridge.job(self._collect)
            told = sum(row.rows for row in results)
            if told != stream.rows:
                raise SparkError(
                    f"Spark's tasks have handed over {told} rows, and {stream.rows} arrived"
                )
        # take() raises the error after the batches that came before it.
        except Exception as error:  # noqa: BLE001
            self._error = error
        finally:
            self._ended = True
            stream.close()

    def take(self) -> Arrival | None:
        """Returns the next batch; None if there is none now. Raises the error of a failed job."""
        assert self._stream is not None, "plan() comes first"
        arrival = self._stream.take()
        if arrival is None and self._error is not None:
            raise self._error
        return arrival

    async def wait(self) -> None:
        """Returns once `take` may have a batch, or there are no more."""
        assert self._stream is not None, "plan() comes first"
        await self._stream.wait()

    @property
    def finished(self) -> bool:
        """Whether the job has ended and all its batches were taken."""
        return self._ended and self._error is None and not self._stream

    def progress(self, partition: int) -> Progress:
        """Returns the number of rows that were received of a partition, with their checksum."""
        assert self._stream is not None, "plan() comes first"
        return self._stream.progress(partition)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Arrival:
        if self._job is None:
            self.begin()
        while (arrival := self.take()) is None:
            if self.finished:
                raise StopAsyncIteration
            await self.wait()
        return arrival

    async def close(self) -> None:
        """Cancels the job if it has not ended, and closes the channels."""
        if self._job is not None:
            await cancel_and_wait([self._job])
        self._listener.remove(self._name)
        await self._listener.close()


T = TypeVar("T")

NOT_BEGUN = Progress()


class FrameSource(BaseSource[T]):
    """A `Source` that reads a DataFrame. It stays in the process that has the bridge."""

    bounded = True
    parallelism_max = 1
    stays_here = True
    in_spark = True
    """Whether Spark itself may apply the filters and the selection of fields that follow the
    source, if the flow runs as a Spark job.
    """

    def __init__(
        self,
        bridge: Bridge,
        what: Any,
        make: Callable[[dict[str, Any]], T] | None,
        *,
        batches: bool,
    ) -> None:
        """Makes the source. `make` converts a row to an element; None means that elements are
        dicts.

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
        """Closes the planned job if `take_plan` has not returned it."""
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
        # By partition: the progress over whole batches, and how many rows of the next batch an
        # earlier attempt has taken.
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
