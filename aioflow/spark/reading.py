"""Reads one DataFrame: a Spark job whose tasks push their partitions to this process.

    async with FrameReading(bridge, host, "SELECT ...") as reading:
        count = await reading.plan()
        async for arrival in reading: ...

The plan is made once, with the number of partitions. Spark may choose that number while it runs
(adaptive execution), and the job must have the number that `plan` returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import GraphError
from aioflow.spark.channels import ChannelListener
from aioflow.spark.executor import RESULT_SCHEMA, PushRows
from aioflow.spark.failures import SparkError
from aioflow.spark.inbound import Arrival, InboundStream, Progress

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.spark.session import SparkBridge

__all__ = ["FrameReading", "frame_of"]


def frame_of(session: Any, what: Any, *, streaming: bool = False) -> Any:
    """Returns the DataFrame that `what` describes: SQL, a function of the session, or a DataFrame.

    Must run in a call of the bridge. Raises GraphError for anything else, and for a streaming query
    unless `streaming` allows one.
    """
    frame = session.sql(what) if isinstance(what, str) else what
    if callable(what):
        frame = what(session)
    if not hasattr(
        frame, "_jdf"
    ):  # A DataFrame of Spark Connect lacks this, as its session is in another process.
        raise GraphError(
            f"spark(...) reads {type(frame).__name__}, expected a query, a DataFrame of this "
            "process's session, or a function that "
            "takes the session and gives one"
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
    """One reading of a DataFrame, from its plan to its end."""

    def __init__(
        self, bridge: SparkBridge, host: Host, what: str | Callable[[Any], Any] | Any
    ) -> None:
        self._bridge = bridge
        self._what = what
        self._listener = ChannelListener(host, bridge.reach)
        self._stream: InboundStream | None = None
        self._name = ""
        self._rdd: Any = None
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

        Spark may compute a part of the query for that.
        """
        await self._listener.open()
        session = await self._bridge.session()
        # The plan needs the name of the stream, which gets its progress later, with `begin`.
        stream = self._stream = InboundStream()
        name = self._name = self._listener.add(stream)
        where = self._listener.where

        def run() -> tuple[Any, int]:
            rdd = frame_of(session, self._what).mapInArrow(PushRows(where, name), RESULT_SCHEMA).rdd
            return rdd, rdd.getNumPartitions()

        self._rdd, count = await self._bridge.call(run)
        return count

    def begin(self, start: Mapping[int, Progress] | None = None) -> None:
        """Starts the job. `start` says how much of each partition was read before."""
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
            results = await self._bridge.job(self._rdd.collect)
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
        """Returns the next batch, None if there is none now. Raises the error of a failed job."""
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
        """Returns how much of a partition has been received."""
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
