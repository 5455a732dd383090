"""Transfers of batches between the service and the tasks of one Spark job.

Each batch from the tasks arrives exactly once, even if task attempts fail. Spark may run a task
again, or twice at the same time. So the rows of every partition are counted. A later attempt gets
the number of the rows that have arrived, and skips them. The chain (a checksum) shows whether
the skipped rows are the same. Of two attempts at the same time the first one sends, and the second
one waits until the first has finished or is gone.

Invariants: a partition's batches come in order, none twice and none left out. At most `WINDOW`
batches of each partition wait here, since credit is returned only for batches that were taken. A
partition that has ended gets no further batches.

Each attempt of a pulling task gets the batches from the beginning of its partition. The function
`open(partition)` makes them when a task asks, and must return the same batches each time. The next
batch is made when the task has granted credit and the connection accepts more, so batches do not
accumulate here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import RemoteProtocolError, RestoreError
from aioflow.spark.bridge.frames import (
    BatchBody,
    FrameKind,
    Hello,
    Start,
    decode_words,
    encode_words,
)

if TYPE_CHECKING:
    from aioflow.spark.bridge.channels import Channel

__all__ = ["Arrival", "InboundStream", "OutboundStream", "Progress"]

WINDOW = 4
"""Maximum number of batches of a partition in transit or waiting: one being sent, one being
read, and some between.
"""


class Progress(NamedTuple):
    """The number of rows of a partition that were taken, and the checksum (`chain`) over them.

    `done` means that the partition has ended.
    """

    rows: int = 0
    chain: int = 0
    done: bool = False


class Arrival(NamedTuple):
    """A received batch of a partition, with the partition's progress before and after the batch."""

    partition: int
    batch: pa.RecordBatch
    before: Progress
    after: Progress


@dataclass(slots=True)
class _Partition:
    progress: Progress
    schema: pa.Schema | None = None
    sending: Channel | None = None
    waiting: deque[Channel] = field(default_factory=deque)


class InboundStream:
    """Receives the batches of pushing tasks, as a `ChannelStream`.

    `start` maps numbers of partitions to their progress. It holds the partitions that were already
    read in part.
    """

    op = "push"

    def __init__(self, start: Mapping[int, Progress] | None = None) -> None:
        self._partitions: dict[int, _Partition] = {}
        self.resume(start or {})
        self._arrivals: deque[tuple[Arrival, Channel]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._closed = False

    def resume(self, start: Mapping[int, Progress]) -> None:
        """Sets the progress of partitions that were partly read before. It must be called before
        the tasks of these partitions connect.
        """
        for number, progress in start.items():
            assert number not in self._partitions, "its task is there already"
            self._partitions[number] = _Partition(progress)

    def __len__(self) -> int:
        """Returns the number of batches that wait to be taken."""
        return len(self._arrivals)

    def take(self) -> Arrival | None:
        """Returns the next batch; None if there is none now. Raises errors that tasks reported."""
        if not self._arrivals:
            if self._error is not None:
                raise self._error
            return None
        arrival, channel = self._arrivals.popleft()
        channel.send(FrameKind.CREDIT, encode_words(1))
        return arrival

    async def wait(self) -> None:
        """Returns once `take` may have a batch, or after `close`."""
        while not (self._arrivals or self._closed or self._error is not None):
            if self._waiter is None:
                self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._waiter)

    def close(self) -> None:
        """Refuses further batches. Batches that were received before can still be taken."""
        self._closed = True
        self._wake()

    @property
    def closed(self) -> bool:
        return self._closed

    def progress(self, number: int) -> Progress:
        """Returns the number of rows of a partition that were received, with their checksum."""
        return self._partitions[number].progress if number in self._partitions else Progress()

    @property
    def rows(self) -> int:
        """Number of rows received so far, in all partitions together."""
        return sum(partition.progress.rows for partition in self._partitions.values())

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ChannelStream

    def on_task(self, channel: Channel, hello: Hello) -> None:
        partition = self._partitions.setdefault(hello.partition, _Partition(Progress()))
        if partition.sending is None:
            self._start(partition, channel)
        else:
            partition.waiting.append(channel)

    def _start(self, partition: _Partition, channel: Channel) -> None:
        rows, chain, done = partition.progress
        if not done:
            partition.sending = channel
            partition.schema = None
        channel.send(FrameKind.START, encode_words(*Start(WINDOW, rows, chain, done)))
        if not done:
            channel.send(FrameKind.CREDIT, encode_words(WINDOW))

    def on_frame(self, channel: Channel, kind: FrameKind, body: bytearray) -> None:
        assert channel.hello is not None
        number = channel.hello.partition
        partition = self._partitions[number]
        if partition.sending is not channel:
            raise RemoteProtocolError(f"a task sent a {kind.name} before it was its turn")
        if kind is FrameKind.BATCH:
            self._on_batch(channel, number, partition, body)
        elif kind is FrameKind.SCHEMA:
            partition.schema = _parsed(lambda: pa.ipc.read_schema(pa.py_buffer(body)), "schema")
        elif kind is FrameKind.END:
            (rows,) = decode_words(kind, body, int)
            if rows != partition.progress.rows:
                raise RemoteProtocolError(
                    f"partition {number} ended with {rows} rows, and {partition.progress.rows} "
                    "arrived"
                )
            partition.progress = partition.progress._replace(done=True)
            channel.send(FrameKind.ACK)
            self._next_attempt(partition)
        elif kind is FrameKind.ERROR:
            (what,) = decode_words(kind, body, str)
            self._error = RestoreError(
                f"partition {number} of the DataFrame was read up to row "
                f"{partition.progress.rows} before, and now {what}: it must give "
                "the same rows in the same order each time it is computed; sort it, or save it "
                "and read what was saved"
            )
            self._wake()
            channel.close()
        else:
            raise RemoteProtocolError(f"a pushing task sent a {kind.name}")

    def _on_batch(
        self, channel: Channel, number: int, partition: _Partition, body: bytearray
    ) -> None:
        schema = partition.schema
        if schema is None:
            raise RemoteProtocolError("a batch came before its schema")
        chain, data = BatchBody.split(body)
        batch = _parsed(lambda: pa.ipc.read_record_batch(pa.py_buffer(data), schema), "batch")
        before = partition.progress
        after = partition.progress = Progress(before.rows + batch.num_rows, chain)
        self._arrivals.append((Arrival(number, batch, before, after), channel))
        self._wake()

    def on_writable(self, channel: Channel) -> None:
        """Does nothing. This side sends only short frames (grants of credit), and never waits for
        the transport.
        """

    def on_lost(self, channel: Channel, error: Exception | None) -> None:
        assert channel.hello is not None
        partition = self._partitions[channel.hello.partition]
        if channel in partition.waiting:
            partition.waiting.remove(channel)
        elif partition.sending is channel:
            self._next_attempt(partition)

    def _next_attempt(self, partition: _Partition) -> None:
        partition.sending = None
        while partition.waiting and partition.sending is None:
            self._start(partition, partition.waiting.popleft())


def _parsed(parse: Any, what: str) -> Any:
    try:
        return parse()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RemoteProtocolError(f"a {what} from a task cannot be read: {error}") from None


logger = logging.getLogger(__name__)


class OutboundStream:
    """Sends batches to pulling tasks, as a `ChannelStream`.

    `error` is the first error of the function `open`, or of the generator that it returns. The
    tasks get only the text of this error.
    """

    op = "pull"

    def __init__(self, open: Callable[[int], AsyncGenerator[pa.RecordBatch, None]]) -> None:
        self._open = open
        self._sending: dict[Channel, _Sending] = {}
        self.error: Exception | None = None

    async def close(self) -> None:
        """Ends all asyncio tasks that send."""
        await cancel_and_wait([sending.task for sending in list(self._sending.values())])

    # ChannelStream

    def on_task(self, channel: Channel, hello: Hello) -> None:
        channel.send(FrameKind.START, encode_words(*Start(WINDOW)))
        sending = _Sending()
        self._sending[channel] = sending
        sending.task = asyncio.get_running_loop().create_task(
            self._send(channel, sending, hello.partition), name=f"spark-partition-{hello.partition}"
        )

    def on_frame(self, channel: Channel, kind: FrameKind, body: bytearray) -> None:
        if kind is not FrameKind.CREDIT:
            raise RemoteProtocolError(f"a pulling task sent a {kind.name}")
        (count,) = decode_words(kind, body, int)
        sending = self._sending.get(channel)
        if sending is not None:  # Otherwise the transfer has ended before its credit came.
            sending.credit += count
            sending.wake()

    def on_writable(self, channel: Channel) -> None:
        if channel in self._sending:
            self._sending[channel].wake()

    def on_lost(self, channel: Channel, error: Exception | None) -> None:
        sending = self._sending.pop(channel, None)
        if sending is not None:
            sending.task.cancel()

    async def _send(self, channel: Channel, sending: _Sending, partition: int) -> None:
        rows, schema = 0, None
        try:
            async with aclosing(self._open(partition)) as batches:
                async for batch in batches:
                    while not (sending.credit > 0 and channel.is_writable):
                        await sending.news()
                    if schema is None:
                        schema = batch.schema
                        channel.send(FrameKind.SCHEMA, memoryview(schema.serialize()))
                    sending.credit -= 1
                    rows += batch.num_rows
                    channel.send(
                        FrameKind.BATCH, BatchBody.prefix(0), memoryview(batch.serialize())
                    )
            # The task closes the connection. If the service did, the task's last credit could not
            # be sent.
            channel.send(FrameKind.END, encode_words(rows))
        # The error fails the Spark job, whose caller raises this error instead.
        except Exception as error:  # noqa: BLE001
            logger.debug("partition %d cannot be given to Spark: %r", partition, error)
            self.error = self.error or error
            channel.fail(f"{type(error).__name__}: {error}")
        finally:
            if self._sending.get(channel) is sending:
                del self._sending[channel]


class _Sending:
    """The state of one task attempt that pulls: its credit, and the asyncio task that sends."""

    __slots__ = ("_news", "credit", "task")

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.credit = 0
        self._news: asyncio.Future[None] | None = None

    async def news(self) -> None:
        """Waits until `wake` is called, which reports new credit or a writable connection."""
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def wake(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)
