"""Sends batches to the tasks of a Spark job: each attempt gets its partition from the beginning.

The batches of a partition are made when a task asks, by `open(partition)`, which returns the same
ones each time. An attempt that Spark runs again gets them from the beginning. The next batch is
made when the task has credit and the connection takes more, so nothing piles up here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

import pyarrow as pa

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import RemoteProtocolError
from aioflow.spark.frames import BatchBody, FrameKind, Hello, Start, decode_words, encode_words

if TYPE_CHECKING:
    from aioflow.spark.channels import Channel

__all__ = ["OutboundStream"]

WINDOW = 4
"""Number of batches that a task accepts before it has processed the first."""

logger = logging.getLogger(__name__)


class OutboundStream:
    """Sends batches to pulling tasks, as a `ChannelStream`.

    `error` is the first error of `open` or its generator. The tasks get only the text of this
    error.
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
            # The task closes the connection: if we did, its last credit would find no connection.
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
        """Waits for the next call of `wake`."""
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def wake(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)
