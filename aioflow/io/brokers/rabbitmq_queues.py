"""Reads and writes queues and streams of RabbitMQ, over AMQP 0-9-1.

Needs the extra `aioflow[rabbitmq]` (aiormq). A queue drops a message once it is acknowledged. The
reader acknowledges a message once a completed checkpoint covers it, so delivery is at least once. A
stream keeps its messages, and the checkpoint contains the offset, so each message counts exactly
once. `rabbitmq_client` publishes messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.advice.hints import explained
from aioflow.core.errors import Broken, GraphError, StateError, did_you_mean
from aioflow.io.arguments import (
    T,
    checked_on_error,
    checked_options,
    checked_seconds,
    checked_whole,
    one_or_more,
)
from aioflow.io.backoff import Backoff, reached
from aioflow.io.brokers.rabbitmq_client import (
    KEY_BYTES,
    RabbitmqConfig,
    RabbitmqMessage,
    RabbitmqWriter,
    connected,
    existing,
    is_away,
    refusal,
)
from aioflow.io.brokers.readers import AcknowledgingReader, Message
from aioflow.io.formats.format import checked_format
from aioflow.io.web.http_client import checked_url
from aioflow.operators.sink import BaseSink
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.formats.format import Format
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["RabbitmqQueues", "rabbitmq"]

PREFETCH = 10_000

PREFETCH_MAX = 65_535
"""The largest `prefetch` that the protocol can express."""

EMPTY_AFTER_S = 2.0
"""Time without a message after which a stream counts as empty."""

ASK_EVERY_S = 0.2
"""Interval at which the server is asked whether a queue is empty."""

OFFSET = "x-stream-offset"

logger = logging.getLogger(__name__)


@explained
def rabbitmq(
    url: str | Sequence[str],
    queue: str | Sequence[str] | None = None,
    type: type[T] | None = None,
    *,
    format: str | Format[T] = "json",
    stream: bool = False,
    records: bool = False,
    start: str | int = "earliest",
    until: str | None = None,
    prefetch: int = PREFETCH,
    exchange: str = "",
    routing_key: str | Callable[[Any], str] | None = None,
    headers: Callable[[Any], Mapping[str, Any]] | None = None,
    message_id: Callable[[Any], str] | None = None,
    mandatory: bool = True,
    options: Mapping[str, Any] | None = None,
    backoff: Duration = "100ms",
    on_error: OnError = "fail",
) -> RabbitmqQueues[T]:
    """Returns a connector that reads the messages of one or several queues or streams, or publishes
    messages.

    `url` is "amqp://user:password@host:port/vhost", "amqps" for TLS, or a list of the nodes of a
    cluster. Each element is the body of a message, decoded by `format`: "json" (to plain values or
    a `type`), "text", "bytes", or a format of `af.io.formats`. With `records`, each element is a
    `RabbitmqMessage` of this value and the message's id, routing key, exchange, headers, and
    whether it was sent before.

    A queue's messages are acknowledged once a completed checkpoint covers them. After a failure the
    server sends the unacknowledged messages again: delivery is at least once. The server sends at
    most `prefetch` messages of a queue without an acknowledgement, so a flow reads at most
    `prefetch` messages between two checkpoints. With `until="empty"` the source ends when no
    message waits in the queue.

    With `stream`, the queues are streams. The checkpoint contains their offsets, so each message
    counts exactly once. `start` is "earliest", "latest" or an offset; the offset in a checkpoint
    takes precedence. With `until="latest"` the source ends with the last message that exists when
    the job begins.

    A sink publishes to the queue, or to `exchange` with `routing_key`, a text or a function of the
    record. `headers(record)` returns the headers, and `message_id(record)` the id by which a reader
    recognises a message that was published twice. Messages are persistent. The server confirms them
    before a checkpoint is complete: delivery is at least once. A message that is routed to no queue
    is an error, unless `mandatory` is False. `options` are further arguments of `aiormq.connect`,
    such as `context`, an SSLContext.
    """
    urls, queues = one_or_more(url), [] if queue is None else one_or_more(queue)
    named = ", ".join(map(repr, queues)) or f"exchange={exchange!r}"
    place = f"rabbitmq(..., {named})"  # Without the URL: it may hold a password.
    for one in urls:
        try:
            checked_url(one, place, ("amqp", "amqps"))
        except GraphError as error:
            if "cannot be used" in str(error):
                raise
            raise GraphError(
                f"{place}: expected a URL amqp://USER:PASSWORD@HOST:PORT/VHOST, or amqps:// for TLS"
            ) from None
    if not urls:
        raise GraphError(f"{place}: expected the URL of a server, or a list of them")
    if not all(
        isinstance(name, str) and 0 < len(name.encode()) <= KEY_BYTES for name in queues
    ) or len(set(queues)) < len(queues):
        raise GraphError(
            f"{place}: queue is {queue!r}, expected the name of a queue, or a list of different "
            "names"
        )
    if not isinstance(exchange, str):
        raise GraphError(f"{place}: exchange is {exchange!r}, expected the name of an exchange")
    if not queues and not exchange and routing_key is None:
        raise GraphError(f"{place}: expected a queue to read or write, or exchange= to publish to")
    if routing_key is not None and not isinstance(routing_key, str) and not callable(routing_key):
        raise GraphError(
            f"{place}: routing_key is {routing_key!r}, expected a text, or a function of a record "
            "that gives one"
        )
    for name, fn in (("headers", headers), ("message_id", message_id)):
        if fn is not None and not callable(fn):
            raise GraphError(f"{place}: {name} is {fn!r}, expected a function of a record")
    if start not in ("earliest", "latest") and (
        isinstance(start, bool) or not isinstance(start, int) or start < 0
    ):
        hint = did_you_mean(start, ("earliest", "latest"))
        raise GraphError(
            f"{place}: start is {start!r}, expected 'earliest', 'latest' or an offset{hint}"
        )
    if start != "earliest" and not stream:
        raise GraphError(
            f"{place}: start is {start!r}, which needs stream=True: a queue has no start"
        )
    end = "latest" if stream else "empty"
    if until not in (None, end):
        raise GraphError(
            f"{place}: until is {until!r}, expected {end!r} for a "
            f"{'stream' if stream else 'queue'}, or None{did_you_mean(until, (end,))}"
        )
    window = checked_whole(prefetch, "prefetch", place, 1, PREFETCH_MAX)
    checked_seconds(backoff, "backoff", place, may_be_zero=True)
    return RabbitmqQueues(
        urls,
        queues,
        bool(stream),
        exchange,
        routing_key,
        headers,
        message_id,
        bool(mandatory),
        checked_format(format, type, place),
        bool(records),
        start,
        until,
        window,
        checked_options(options, "options", place),
        backoff,
        checked_on_error(on_error, place),
    )


class RabbitmqQueues(RabbitmqConfig, BaseSource[T], BaseSink[Any]):
    """A `Source` and a `Sink` of queues or streams. Made by `rabbitmq`.

    A split is a queue or a stream. The position in a stream is the offset of the next message. The
    payload is the offset at which to end, or None.
    """

    name = "rabbitmq"

    async def discover(self) -> list[Split]:
        """Returns one split for each queue. Raises GraphError if a queue does not exist, or is a
        stream and `stream` is false.
        """
        if not self.queues:
            raise GraphError(f"{self!r} has no queue, expected the queue to read")
        return await reached(self._splits, self, is_away, explained=partial(refusal, self))

    async def _splits(self) -> list[Split]:
        async with connected(self) as connection:
            return [await self._split(connection, queue) for queue in self.queues]

    async def _split(self, connection: Any, queue: str) -> Split:
        await existing(connection, queue)
        if not self.stream:
            await self._check_no_stream(connection, queue)
            return Split(queue)
        first = self.start if isinstance(self.start, int) else 0
        if self.start != "latest" and self.until is None:
            return Split(queue, first)
        last = await last_offset(connection, queue)
        end = 0 if last is None else last + 1
        return Split(
            queue, end if self.start == "latest" else first, end if self.until is not None else None
        )

    async def _check_no_stream(self, connection: Any, queue: str) -> None:
        """Raises GraphError if `queue` is a stream."""
        from aiormq.exceptions import ChannelPreconditionFailed

        channel = await connection.channel(publisher_confirms=False)
        try:
            await channel.basic_qos(prefetch_count=1)
            await channel.basic_consume(queue, _ignore, arguments={OFFSET: "next"})
        except ChannelPreconditionFailed:
            return
        await channel.close()
        raise GraphError(f"{self!r}: {queue!r} is a stream: give stream=True")

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return _RabbitmqReader(ctx, self)

    def writer(self, ctx: OperatorContext) -> RabbitmqWriter:
        return RabbitmqWriter(ctx, self)


async def _ignore(message: Any) -> None:
    """Does nothing with a message."""


async def last_offset(connection: Any, stream: str) -> int | None:
    """Returns the offset of the last message of a stream, or None if the stream is empty.

    The server sends the last chunk of the stream before it answers a later request.
    """
    offsets: list[int] = []
    arrived = asyncio.Event()

    async def received(message: Any) -> None:
        offsets.append(message.header.properties.headers[OFFSET])
        arrived.set()

    channel = await connection.channel(publisher_confirms=False)
    await channel.basic_qos(prefetch_count=PREFETCH_MAX)
    await channel.basic_consume(stream, received, arguments={OFFSET: "last"})
    try:
        async with asyncio.timeout(EMPTY_AFTER_S):
            await arrived.wait()
    except TimeoutError:
        return None
    finally:
        if not channel.is_closed:
            await channel.queue_declare(stream, passive=True)
    await asyncio.sleep(0)  # Lets the tasks of the last messages run.
    await channel.close()
    return max(offsets, default=None)


class _RabbitmqReader(AcknowledgingReader):
    """A reader of queues or streams, with one channel for each on one connection.

    A receipt identifies a message to acknowledge: the number of the connection, the queue, and the
    delivery tag on the queue's channel. Its last item is the next offset of a stream, or None for a
    queue.
    """

    def __init__(self, ctx: SourceContext, config: RabbitmqConfig) -> None:
        decode, prepare = config.format.decoder(ctx.host)

        async def fetch(messages: Sequence[Message]) -> None:
            assert prepare is not None
            await prepare(message.content.body for message in messages)

        def plain(delivered: Any) -> Any:
            return decode(delivered.body)

        def whole(delivered: Any) -> RabbitmqMessage:
            delivery, properties = delivered.delivery, delivered.header.properties
            headers = properties.headers or {}
            return RabbitmqMessage(
                decode(delivered.body),
                properties.message_id,
                bool(delivery.redelivered),
                delivery.routing_key,
                delivery.exchange,
                headers,
                headers.get(OFFSET),
            )

        super().__init__(
            ctx,
            whole if config.records else plain,
            config.on_error,
            prepare=None if prepare is None else fetch,
            # `prefetch` already bounds the buffer, and `put` must never wait, because it would
            # delay the acknowledgements.
            capacity=1 << 60,
        )
        self._config = config
        self.acknowledges_polled = config.stream
        self._connection = 0
        self._arrived: dict[str, list[Message]] = {}
        self._tags: dict[str, int] = {}
        """Maps a queue to the last delivery tag to acknowledge."""
        self._lost = ""
        """The queue whose consumer the server has cancelled, or ""."""
        self._ended: set[str] = set()
        """Queues that were found empty, and are no longer read."""
        self._stirred = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Whether all queues were read to their end.

        The reading task continues afterwards, because a later checkpoint acknowledges the last
        messages.
        """
        return not self._chunks and len(self.finished_splits) == len(self.splits)

    def content_of(self, content: Any) -> bytes:
        return bytes(content.body)

    def position(self, split_id: str) -> Any:
        if not self._config.stream:
            return None
        receipt = self._positions[split_id]
        return receipt[3] if isinstance(receipt, tuple) else receipt

    def acknowledge(self, receipts: list[Any]) -> None:
        for connection, queue, tag, _ in receipts:
            if connection == self._connection:
                self._tags[queue] = tag
        self._stirred.set()

    async def run(self) -> None:
        config = self._config
        backoff = Backoff(self.ctx.host.rng, config.backoff)
        explained = partial(refusal, config)
        await backoff.persistently(partial(self._attempt, backoff), config, is_away, explained)

    async def _attempt(self, backoff: Backoff) -> None:
        async with connected(self._config) as connection:
            await self._read(connection, backoff)

    async def _read(self, connection: Any, backoff: Backoff) -> None:
        self.forget_unpolled()
        self._connection += 1
        self._arrived.clear()
        self._tags.clear()
        self._lost = ""
        channels: dict[str, Any] = {}
        for split in self.splits.values():
            if split.id in self.finished_splits:
                continue
            if split.payload is not None and (self.position(split.id) or 0) >= split.payload:
                await self.put(split.id, [], last=True)
                continue
            channels[split.id] = await self._consume(connection, split)
        closing = {queue: channel.closing for queue, channel in channels.items()}
        for future in closing.values():
            future.add_done_callback(lambda _: self._stirred.set())
        try:
            while channels:
                await self._woken()
                if self._lost:
                    raise Broken(f"the server ended the reading of {self._lost!r}")
                for queue, future in closing.items():
                    if queue in channels and future.done():
                        error = None if future.cancelled() else future.exception()
                        raise (
                            error
                            if isinstance(error, Exception)
                            else Broken(f"the channel of {queue!r} was closed")
                        )
                arrived, self._arrived = self._arrived, {}
                for queue, messages in arrived.items():
                    backoff.reset()
                    await self._deliver(queue, messages, channels)
                await self._acknowledge(channels)
                if self._config.until == "empty" and not arrived:
                    for queue in channels.keys() - self._ended:
                        await self._end_if_empty(queue, channels[queue])
        finally:
            try:
                async with asyncio.timeout(1.0):
                    await self._acknowledge(channels)
            except Exception:  # noqa: BLE001
                pass  # The server sends these messages again.

    async def _woken(self) -> None:
        """Waits for a message, for a message to acknowledge, or for the end of a channel. With
        `until="empty"` it waits at most `ASK_EVERY_S`.
        """
        if self._config.until == "empty" and len(self._ended) < len(self.splits):
            try:
                async with asyncio.timeout(ASK_EVERY_S):
                    await self._stirred.wait()
            except TimeoutError:
                return
        else:
            await self._stirred.wait()
        self._stirred.clear()

    async def _consume(self, connection: Any, split: Split) -> Any:
        """Returns a channel on which the server sends the messages of a queue."""
        channel = await connection.channel(publisher_confirms=False)
        await channel.basic_qos(prefetch_count=self._config.prefetch)
        arguments: dict[str, Any] = {}
        if self._config.stream:
            offset = self.position(split.id) or 0
            if offset not in (0, self._config.start):
                await self._check(connection, split.id, offset)
            arguments[OFFSET] = offset

        def cancelled(frame: Any) -> None:
            self._lost = split.id
            self._stirred.set()

        channel.on_consumer_cancel_callbacks.add(cancelled)
        if split.id not in self._ended:
            await channel.basic_consume(
                split.id,
                partial(self._received, split.id, self._connection),
                consumer_tag=split.id,
                arguments=arguments,
            )
        return channel

    async def _check(self, connection: Any, stream: str, offset: int) -> None:
        """Raises StateError if the stream ends before `offset`, the offset that was read last."""
        last = await last_offset(connection, stream)
        if last is not None and offset > last + 1:
            raise StateError(
                f"{self._config!r}: {stream!r} was read up to {offset - 1}, and its last message "
                f"ever is {last}: it was recreated or set back since; restore it too, or start "
                "with restore=None, fresh=True"
            )

    async def _received(self, queue: str, connection: int, delivered: Any) -> None:
        if connection != self._connection:
            return
        tag, properties = delivered.delivery.delivery_tag, delivered.header.properties
        offset = (properties.headers or {}).get(OFFSET) if self._config.stream else None
        sent = properties.timestamp
        time_ms = self.ctx.host.clock.wall_ms() if sent is None else int(sent.timestamp() * 1000)
        where = f"rabbitmq queue {queue!r}, message {tag if offset is None else offset}"
        receipt = (connection, queue, tag, None if offset is None else offset + 1)
        self._arrived.setdefault(queue, []).append(Message(delivered, receipt, time_ms, where))
        self._stirred.set()

    async def _deliver(self, queue: str, messages: list[Message], channels: dict[str, Any]) -> None:
        end = self.splits[queue].payload
        if queue not in channels or queue in self._ended:
            return
        if end is None:
            await self.put(queue, messages)
            return
        last = messages[-1].position[3] >= end
        await self.put(queue, [one for one in messages if one.position[3] <= end], last=last)
        if last:
            await channels.pop(queue).close()

    async def _acknowledge(self, channels: dict[str, Any]) -> None:
        tags, self._tags = self._tags, {}
        for queue, tag in tags.items():
            channel = channels.get(queue)
            if channel is not None and not channel.is_closed:
                await channel.basic_ack(tag, multiple=True)

    async def _end_if_empty(self, queue: str, channel: Any) -> None:
        """Ends the split if no message waits in the queue."""
        declared = await channel.queue_declare(queue, passive=True)
        await asyncio.sleep(0)  # Lets the tasks of earlier messages run.
        if declared.message_count == 0 and not self._arrived:
            await channel.basic_cancel(queue)
            self._ended.add(queue)
            await self.put(queue, [], last=True)
