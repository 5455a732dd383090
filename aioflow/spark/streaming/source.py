"""A source that reads a streaming query of Spark: `af.io.spark(bridge, query,
checkpoint="/var/lib/app/spark")`.

    Spark     computes batch n, and calls this source (foreachBatch)
              tasks of Spark push the rows over channels to this process
    source    writes the rows to files (`Handover`), then answers
              only now Spark continues with batch n + 1
    the flow  reads the files, batch by batch
              when a checkpoint after a batch completes, the batch is deleted

So rows are read exactly once, even if either side restarts. Spark sends a batch again until it is
answered, and a batch that is in files is not received again. The flow continues at the position in
its checkpoint. At most `BACKLOG` batches wait, so a slow flow slows the query down.

Batches and the rows in them keep their order: the source has one split.

`Handover` stores the batches of the query as local files, until a checkpoint of the flow covers
them.

    <batch>.arrow      the Arrow batches, one after the other, written while Spark's tasks push
                       them
    <batch>.batch      marks the batch as complete, with the size of each Arrow batch; written
                       after the batch, and durable before Spark gets the answer
    query              the id of the query, so that its batches are not mixed with another's

Spark sends a batch again, under the same number, when it does not know whether the batch was
received. A batch that has a `.batch` file is not received again. So the content of a batch is
decided once, even if Spark computes it differently a second time. A batch is deleted when a
completed checkpoint covers it. The `.batch` file of the newest batch stays, because its number is
needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import posixpath
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgpack
import pyarrow as pa

from aioflow.core.aio import cancel_and_wait, wait_all
from aioflow.core.errors import Closed, RemoteProtocolError, RestoreError, StateError
from aioflow.operators.source import BaseReader, BaseSource, Split
from aioflow.spark.bridge.channels import ChannelListener
from aioflow.spark.bridge.connect import is_connect
from aioflow.spark.bridge.executor import RESULT_SCHEMA, PushBatch, PushRows, batch_stream
from aioflow.spark.bridge.frames import FrameKind, Start, decode_words, encode_words
from aioflow.spark.bridge.source import frame_of
from aioflow.spark.bridge.transfers import InboundStream
from aioflow.spark.failures import SparkError, SparkGone

if TYPE_CHECKING:
    from aioflow.core.host import Host
    from aioflow.operators.source import SourceContext, SourceReader
    from aioflow.spark.bridge.calls import Bridge
    from aioflow.spark.bridge.channels import Channel
    from aioflow.spark.bridge.frames import Hello

__all__ = ["Handover", "StreamSource", "Taken"]

QUERY = "query"


class Taken(NamedTuple):
    """The description of a batch that is complete in the directory: its number, schema and
    sizes.
    """

    number: int
    schema: bytes
    lengths: list[int]
    """Sizes of the batch's Arrow batches, in bytes. Empty for a batch without rows."""


class Handover:
    """The directory that stores the batches of one source.

    `taken` are the complete batches in order, including those that may be deleted.
    """

    def __init__(self, host: Host, directory: str) -> None:
        self._fs = host.fs
        self._host = host
        self._directory = directory
        self.taken: dict[int, Taken] = {}
        self._newest = -1
        self._schema = b""
        self._lengths: list[int] = []

    async def open(self, start: int | None) -> None:
        """Reads the directory. `start` is the number of the batch with which to continue; None
        means the first batch in the directory.

        Raises RestoreError if a batch that is needed is gone.
        """
        await self._fs.mkdirs(self._directory, private=True)
        names = await self._fs.list(self._directory)
        for name in names:
            number, _, kind = name.partition(".")
            if kind == "batch":
                content = msgpack.unpackb(await self._fs.read(self._path(name)))
                self._newest = max(self._newest, int(number))
                if f"{number}.arrow" in names or not content["lengths"]:
                    self.taken[int(number)] = Taken(
                        int(number), content["schema"], content["lengths"]
                    )
        self.taken = dict(sorted(self.taken.items()))
        for name in names:
            number, _, kind = name.partition(".")
            if kind == "aside" or (kind == "arrow" and int(number) not in self.taken):
                # An earlier attempt left the file: it ended before it had completed the batch or
                # deleted the file.
                await self._fs.delete(self._path(name))
        if start is not None and start not in self.taken and start != self._newest + 1:
            what = (
                "a later checkpoint was behind it"
                if start <= self._newest
                else "the directory was emptied"
            )
            raise RestoreError(
                f"batch {start} of the streaming query is not in {self._directory}: {what}. "
                "Restore the newest checkpoint, or start with "
                "restore=None, fresh=True"
            )

    @property
    def first(self) -> int:
        """Number of the first batch in the directory, or of the next batch if the directory is
        empty.
        """
        return min(self.taken, default=self._newest + 1)

    def knows(self, number: int) -> bool:
        """Whether batch `number`, or a later batch, was received completely before."""
        return number <= self._newest

    async def check_query(self, query_id: str) -> None:
        """Raises StateError if the batches in the directory came from another query."""
        path = self._path(QUERY)
        if not await self._fs.exists(path):
            await self._fs.write(path, query_id.encode(), sync=True)
            await self._fs.fsync_dir(self._directory)
            return
        known = (await self._fs.read(path)).decode()
        if known != query_id:
            raise StateError(
                f"{self._directory} belongs to the streaming query {known}, and this is "
                f"{query_id}, whose batches count from 0 again: give "
                "it a checkpoint= directory of its own"
            )

    async def begin(self, number: int) -> None:
        """Begins to receive a batch, and deletes the files that an earlier attempt at the batch
        left.
        """
        await self._fs.delete(self._path(_data(number)))
        self._schema, self._lengths = b"", []

    async def append(self, number: int, batches: Sequence[pa.RecordBatch]) -> None:
        """Appends Arrow batches to the batch that is being received."""
        if not self._schema:
            self._schema = batches[0].schema.serialize().to_pybytes()

        def encode() -> list[bytes]:
            return [batch.serialize().to_pybytes() for batch in batches]

        pieces = await self._host.blocking(encode)
        await self._fs.append(self._path(_data(number)), b"".join(pieces))
        self._lengths += [len(piece) for piece in pieces]

    async def seal(self, number: int) -> Taken:
        """Marks the batch as complete. The batch and the mark are durable when this returns."""
        if self._lengths:
            await self._fs.fsync(self._path(_data(number)))
        content = msgpack.packb({"schema": self._schema, "lengths": self._lengths})
        aside = self._path(f"{number:010}.aside")
        await self._fs.write(aside, content, sync=True)
        await self._fs.rename(aside, self._path(f"{number:010}.batch"))
        await self._fs.fsync_dir(self._directory)
        taken = self.taken[number] = Taken(number, self._schema, self._lengths)
        self._newest = max(self._newest, number)
        return taken

    async def read(self, taken: Taken, place: int) -> pa.RecordBatch:
        """Returns the Arrow batch at the index `place` of a complete batch."""
        offset = sum(taken.lengths[:place])
        data = await self._fs.read(self._path(_data(taken.number)), offset, taken.lengths[place])
        return pa.ipc.read_record_batch(
            pa.py_buffer(data), pa.ipc.read_schema(pa.py_buffer(taken.schema))
        )

    async def release(self, before: int) -> None:
        """Deletes the batches before number `before`, which will not be read again."""
        for number in [number for number in self.taken if number < before]:
            del self.taken[number]
            # The mark is deleted first: alone it would stand for a batch without rows.
            if number != self._newest:
                await self._fs.delete(self._path(f"{number:010}.batch"))
            await self._fs.delete(self._path(_data(number)))
        for name in await self._fs.list(self._directory):
            number_text, _, kind = name.partition(".")
            if kind == "batch" and int(number_text) < min(before, self._newest):
                await self._fs.delete(self._path(name))

    def _path(self, name: str) -> str:
        return posixpath.join(self._directory, name)


def _data(number: int) -> str:
    return f"{number:010}.arrow"


T = TypeVar("T")

BACKLOG = 2
"""Maximum number of Spark's batches that wait to be read: one is read while the next one is written
to files.
"""

TOO_LATE = "Python worker failed to connect back"
"""Error message of a Connect server whose Python process for a query takes ten seconds to start.

This happens on a busy machine. The server has no setting for the limit.
"""

STARTS_MAX = 20
"""Maximum number of starts of a query whose Python process is always late."""

STOP_TIMEOUT = "20s"

RELEASE_TIMEOUT_S = 5.0

ONCE = "once"
"""Trigger of a query that reads the data which exists now, and then ends."""


class StreamSource(BaseSource[T]):
    """A `Source` that reads a streaming query.

    It stays in the process that has the bridge. `trigger` is a duration, or "once".
    """

    bounded: bool
    parallelism_max = 1
    stays_here = True
    in_spark = True

    def __init__(
        self,
        bridge: Bridge,
        what: Any,
        make: Callable[[dict[str, Any]], T] | None,
        *,
        batches: bool,
        checkpoint: str,
        trigger: str,
    ) -> None:
        self.bridge = bridge
        self.what = what
        self.make = make
        self.batches = batches
        self.checkpoint = checkpoint
        self.trigger = trigger
        self.bounded = trigger == ONCE

    def __repr__(self) -> str:
        return f"spark({self.what!r:.60})" if isinstance(self.what, str) else "spark()"

    async def discover(self) -> list[Split]:
        return [Split("0")]

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return _StreamReader(ctx, self)


class _Gate:
    """Receives the calls of `foreachBatch` from a Connect server, as a `ChannelStream`.

    Each connection belongs to one batch. The answer START admits the batch, and the frame END says
    that the batch is complete.
    """

    op = "batch"

    def __init__(self, reader: _StreamReader) -> None:
        self._reader = reader
        self._attempts = itertools.count(1)

    def on_task(self, channel: Channel, hello: Hello) -> None:
        attempt = next(self._attempts)
        self._serve(channel, self._admit(channel, hello, attempt))

    def on_frame(self, channel: Channel, kind: FrameKind, body: bytearray) -> None:
        if kind is not FrameKind.END or channel.hello is None:
            raise RemoteProtocolError(f"the call of a batch sent a {kind.name}")
        (rows,) = decode_words(kind, body, int)
        self._serve(channel, self._take(channel, channel.hello.partition, rows))

    def on_writable(self, channel: Channel) -> None:
        """Does nothing: answers are short, so the sender never waits for the transport."""

    def on_lost(self, channel: Channel, error: Exception | None) -> None:
        """Does nothing. The rows of this attempt are dropped when Spark repeats the batch."""

    def _serve(self, channel: Channel, work: Coroutine[Any, Any, None]) -> None:
        self._reader.serve(self._answer(channel, work))

    async def _answer(self, channel: Channel, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        # The server fails its query for this reason; the reader has kept the error itself.
        except Exception as error:  # noqa: BLE001
            channel.fail(f"{type(error).__name__}: {error}")

    async def _admit(self, channel: Channel, hello: Hello, attempt: int) -> None:
        name = await self._reader.admit(hello.partition, batch_stream(hello.stream, attempt))
        start = Start(0, attempt, done=name is None)
        channel.send(FrameKind.START, encode_words(*start))

    async def _take(self, channel: Channel, number: int, rows: int) -> None:
        await self._reader.take(number, rows)
        channel.send(FrameKind.ACK)


class _StreamReader(BaseReader[Any]):
    """Reads the batches of a streaming query.

    The position is the number of the batch, the number of the Arrow batch in it, and how many rows
    of the Arrow batch were read.
    """

    finished: bool

    def __init__(self, ctx: SourceContext, source: StreamSource[Any]) -> None:
        self._ctx = ctx
        self._source = source
        self._handover = Handover(ctx.host, posixpath.join(source.checkpoint, "aioflow"))
        self._listener = ChannelListener(ctx.host, source.bridge.reach)
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._releases: list[asyncio.Task[None]] = []
        self._asked: set[asyncio.Task[Any]] = set()
        self._position = [0, 0, 0]
        self._current: pa.RecordBatch | None = None
        self._next_batch: asyncio.Queue[pa.RecordBatch] = asyncio.Queue(1)
        # Notified of rows, of a batch that was written or read, and of the end of the query.
        self._news = asyncio.Condition()
        self._query: Any = None
        self._ended = False
        self._closing = False
        self._error: BaseException | None = None
        self._released: dict[int, int] = {}
        self._incoming: tuple[int, InboundStream, str, asyncio.Task[None]] | None = None
        self.finished = True

    async def open(self, splits: Sequence[Split]) -> None:
        if not splits:
            return
        self.finished = False
        position = splits[0].position
        await self._handover.open(None if position is None else position[0])
        self._position = list(position) if position is not None else [self._handover.first, 0, 0]
        await self._listener.open()
        await self._start_query()
        self._tasks = [
            self._loop.create_task(self._guarded(work), name=f"spark-stream-{name}")
            for name, work in (("query", self._watch), ("rows", self._read_ahead))
        ]

    # The query. Its calls come from threads of Py4J, one batch at a time.

    async def _start_query(self) -> None:
        source = self._source
        session = await source.bridge.session()

        def on_batch(frame: Any, number: int) -> None:
            name = self._ask(self._admit(number))
            if name is None:
                return
            results = frame.mapInArrow(
                PushRows(self._listener.where, name), RESULT_SCHEMA
            ).collect()
            self._ask(self._take(number, sum(row.rows for row in results)))

        # A Connect server calls the function in another process, which talks to us through a
        # channel.
        gate: PushBatch | None = None
        if is_connect(source.bridge.master):
            gate = PushBatch(self._listener.where, self._listener.add(_Gate(self)))

        def start() -> Any:
            frame = frame_of(session, source.what, streaming=True)
            if not frame.isStreaming:
                raise SparkError(
                    f"{source!r} is no streaming query, expected one with checkpoint=: leave that "
                    "out to read it once"
                )
            trigger = (
                {"availableNow": True} if source.bounded else {"processingTime": source.trigger}
            )
            writer = frame.writeStream.foreachBatch(gate or on_batch).trigger(**trigger)
            return writer.option(
                "checkpointLocation", posixpath.join(source.checkpoint, "spark")
            ).start()

        for tries_left in reversed(range(STARTS_MAX)):
            try:
                self._query = await source.bridge.call(start)
                break
            except SparkError as error:
                if TOO_LATE not in str(error) or not tries_left:
                    raise
        await self._tell()

    def _ask(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the loop, and waits for its result in a thread of Py4J."""
        if self._closing:
            coroutine.close()
            raise Closed("the flow that takes this query's rows is over")
        return asyncio.run_coroutine_threadsafe(self._noted(coroutine), self._loop).result()

    async def _noted(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a coroutine, and remembers the asyncio task, so that `close` can cancel it and
        free the waiting thread.
        """
        task = asyncio.current_task()
        assert task is not None
        self._asked.add(task)
        try:
            if self._closing:
                coroutine.close()
                raise Closed("the flow that takes this query's rows is over")
            return await self._kept(coroutine)
        finally:
            self._asked.discard(task)

    # The same calls from a Connect server.

    def serve(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` in a task that `close` cancels."""
        task = self._loop.create_task(work, name="spark-connect-batch")
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def admit(self, number: int, name: str) -> str | None:
        return await self._kept(self._admit(number, name))

    async def take(self, number: int, rows: int) -> None:
        await self._kept(self._take(number, rows))

    async def _kept(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Awaits a coroutine, and keeps its error, so that the flow fails with this error."""
        try:
            return await coroutine
        except Exception as error:
            self._error = self._error or error
            raise

    async def _query_id(self) -> str:
        """Returns the id of the query, which a restart keeps."""
        if is_connect(self._source.bridge.master):  # Its files may be on another machine.
            async with self._news:
                await self._news.wait_for(lambda: self._query is not None)
            return str(self._query.id)
        metadata = await self._ctx.host.fs.read(
            posixpath.join(self._source.checkpoint, "spark", "metadata")
        )
        return str(json.loads(metadata.partition(b"\n")[0])["id"])

    async def _admit(self, number: int, name: str = "") -> str | None:
        """Waits until there is room for batch `number`. Returns the name of the stream that
        receives its rows, or None if the batch was received before.

        `name` is the name for the stream; "" lets the listener choose a name.
        """
        await self._handover.check_query(await self._query_id())
        if self._handover.knows(number):
            return None
        async with self._news:
            await self._news.wait_for(
                lambda: sum(one >= self._position[0] for one in self._handover.taken) < BACKLOG
            )
        await self._drop_incoming()
        await self._handover.begin(number)
        stream = InboundStream()
        name = self._listener.add(stream, name)
        draining = self._loop.create_task(
            self._drain(number, stream, name), name=f"spark-batch-{number}"
        )
        self._incoming = number, stream, name, draining
        return name

    async def _drain(self, number: int, stream: InboundStream, name: str) -> None:
        try:
            await self._write_down(number, stream)
        except Exception as error:  # Without further credit its tasks would wait for ever.
            self._error = self._error or error
            self._listener.remove(name)
            await self._tell()
            raise

    async def _write_down(self, number: int, stream: InboundStream) -> None:
        while True:
            batches = []
            while (arrival := stream.take()) is not None:
                batches.append(arrival.batch)
            if batches:
                await self._handover.append(number, batches)
            elif stream.closed:
                return
            else:
                await stream.wait()

    async def _take(self, number: int, rows: int) -> None:
        """Completes a batch after all its tasks have ended. When this returns, the batch's rows are
        durable.
        """
        assert self._incoming is not None and self._incoming[0] == number, (
            "a batch is admitted before it is taken"
        )
        _, stream, name, draining = self._incoming
        stream.close()
        await draining
        self._incoming = None
        self._listener.remove(name)
        if rows != stream.rows:
            raise SparkError(
                f"Spark's tasks have handed over {rows} rows of batch {number}, and {stream.rows} "
                "arrived"
            )
        await self._handover.seal(number)
        await self._tell()

    async def _drop_incoming(self) -> None:
        """Drops the rows of a batch whose job failed."""
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            self._listener.remove(incoming[2])
            await cancel_and_wait([incoming[3]])

    async def _watch(self) -> None:
        await self._source.bridge.job(self._query.awaitTermination)

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001  # Raised from poll_batch.
            self._error = self._error or error
        finally:
            if work == self._watch:
                self._ended = True
            await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    # The rows.

    async def _read_ahead(self) -> None:
        """Reads the Arrow batches from the files, one after the other."""
        place = self._position[1]
        while True:
            async with self._news:
                await self._news.wait_for(
                    lambda: self._position[0] in self._handover.taken or self._ended
                )
            number = self._position[0]
            taken = self._handover.taken.get(number)
            if taken is None:
                return  # The query has ended, and everything was read.
            for at in range(place, len(taken.lengths)):
                await self._next_batch.put(await self._handover.read(taken, at))
                await self._tell()
            await self._next_batch.join()
            # Reading the last Arrow batch has moved the position on, but a batch without rows has
            # no Arrow batch.
            self._position = max(self._position, [number + 1, 0, 0])
            if not self._ctx.checkpointing:
                await self._handover.release(number + 1)
            await self._tell()
            place = 0

    def poll_batch(self, max_records: int) -> list[Any] | None:
        if self.finished:
            return None
        if self._current is None and not self._next():
            if self._error is not None:
                raise self._error
            return None
        batch, source, position = self._current, self._source, self._position
        assert batch is not None
        if source.batches:
            values: list[Any] = [batch]
            position[2] = batch.num_rows
        else:
            piece = batch.slice(position[2], max_records)
            values = piece.to_pylist()
            if source.make is not None:
                values = [source.make(row) for row in values]
            position[2] += piece.num_rows
        if position[2] == batch.num_rows:
            self._end_batch()
        return values

    def _next(self) -> bool:
        if self._next_batch.empty():
            self.finished = self._is_over()
            return False
        self._current = self._next_batch.get_nowait()
        return True

    def _end_batch(self) -> None:
        """Advances the position after all rows of an Arrow batch were read."""
        self._current = None
        number, place, _ = self._position
        last = place + 1 == len(self._handover.taken[number].lengths)
        self._position = [number + 1, 0, 0] if last else [number, place + 1, 0]
        self._next_batch.task_done()

    def _is_over(self) -> bool:
        if not self._ended or self._error is not None or not self._next_batch.empty():
            return False
        return not any(number >= self._position[0] for number in self._handover.taken)

    async def wait(self) -> None:
        if self.finished or self._current is not None:
            return
        async with self._news:
            await self._news.wait_for(
                lambda: not self._next_batch.empty() or self._error is not None or self._is_over()
            )
        self.finished = self._is_over()

    def position(self, split_id: str) -> list[int]:
        return list(self._position)

    def checkpoint(self, checkpoint_id: int) -> None:
        self._released[checkpoint_id] = self._position[0]

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Deletes the batches before the checkpoint's position, which are never read again."""
        completed = [taken for taken in self._released if taken <= checkpoint_id]
        before = max((self._released.pop(taken) for taken in completed), default=0)
        if any(number < before for number in self._handover.taken):
            self._releases = [task for task in self._releases if not task.done()]
            release = self._guarded(lambda: self._handover.release(before))
            self._releases.append(self._loop.create_task(release, name="spark-stream-release"))

    async def close(self) -> None:
        """Stops the query. Spark repeats an unfinished batch later."""
        self._closing = True
        await cancel_and_wait(list(self._asked))
        query, self._query = self._query, None
        try:
            if query is not None and not self._ended:
                with contextlib.suppress(SparkGone):  # The query ended with its Java process.
                    await self._source.bridge.call(query.stop, timeout=STOP_TIMEOUT)
        finally:
            # An interrupted release would leave rows without their mark until the directory is next
            # opened.
            await wait_all(self._releases, timeout_s=RELEASE_TIMEOUT_S)
            await cancel_and_wait(
                [task for task in (*self._tasks, *self._releases) if not task.done()]
            )
            await self._drop_incoming()
            await self._listener.close()
