"""Reads and writes topics of MQTT. `mqtt(url, topic)` subscribes with a session that the server
keeps. It acknowledges a message once a completed checkpoint covers the message.

Needs the extra `aioflow[mqtt]` (paho-mqtt). `mqtt_client` publishes messages. A source refuses QoS
2, because paho answers the first half of the handshake before a checkpoint can cover the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aioflow.advice.hints import explained
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import GraphError
from aioflow.io.arguments import (
    T,
    checked_on_error,
    checked_seconds,
    checked_text,
    checked_whole,
    one_or_more,
)
from aioflow.io.backoff import Backoff, reached
from aioflow.io.brokers.mqtt_client import (
    Connection,
    MqttConfig,
    MqttMessage,
    MqttWriter,
    connected,
    is_away,
)
from aioflow.io.brokers.readers import AcknowledgingReader, Message, say_at_most_once
from aioflow.io.formats.format import checked_format
from aioflow.io.web.http_client import checked_url
from aioflow.operators.sink import BaseSink
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    import ssl

    from aioflow.core.host import Host
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.formats.format import Format
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["MqttTopics", "mqtt"]

PREFETCH = 10_000

PREFETCH_MAX = 65_535
"""The largest `prefetch` that the protocol can express."""

TOPIC_BYTES = 65_535


@explained
def mqtt(
    url: str,
    topic: str | Sequence[str] | Callable[[Any], str],
    type: type[T] | None = None,
    *,
    format: str | Format[T] = "json",
    qos: int = 1,
    client_id: str | None = None,
    session_expiry: Duration = "7d",
    version: str = "5",
    records: bool = False,
    retain: bool = False,
    prefetch: int = PREFETCH,
    tls: ssl.SSLContext | None = None,
    backoff: Duration = "100ms",
    on_error: OnError = "fail",
) -> MqttTopics[T]:
    """Returns a connector that subscribes to one or several topics, or publishes to a topic.

    `url` is "mqtt://user:password@host:port", or "mqtts" for TLS; `tls` is an optional SSLContext.
    A topic to subscribe to may have the wildcards `+` and `#`. Each element is the body of a
    message, decoded by `format`: "json" (to plain values or a `type`), "text", "bytes", or a format
    of `af.io.formats`. With `records`, each element is an `MqttMessage` of this value, the
    message's topic, and whether it was retained or sent before.

    With `client_id` and `qos=1`, delivery is at least once: while the job is down, the server keeps
    the session of this client for `session_expiry`. A message is acknowledged once a completed
    checkpoint covers it. After a failure the server sends the unacknowledged messages again. No
    other client may have this id. Without `client_id`, or with `qos=0`, delivery is at most once
    over a restart.

    The server sends at most `prefetch` messages without an acknowledgement, so a flow reads at most
    `prefetch` messages between two checkpoints. With `version="3.1.1"` instead of "5" the server's
    own limit applies.

    A sink publishes to the topic, or to the topic that `topic(record)` names, with `qos` 0, 1 or 2.
    With `retain` the server keeps the last message of a topic for later subscribers. With QoS 1 and
    2 the server confirms the messages before a checkpoint is complete: delivery is at least once.
    """
    topic_of = topic if callable(topic) else None
    topics = [] if callable(topic) else one_or_more(topic)
    place = f"mqtt(..., {', '.join(map(repr, topics)) or 'topic=function'})"
    try:
        checked_url(url, place, ("mqtt", "mqtts"))
    except GraphError as error:
        if "cannot be used" in str(error):
            raise
        raise GraphError(
            f"{place}: expected a URL mqtt://USER:PASSWORD@HOST:PORT, or mqtts:// for TLS"
        ) from None
    if urlsplit(url).path.strip("/"):
        raise GraphError(f"{place}: the URL has a path, expected the topic as an argument")
    if topic_of is None and (
        not topics
        or not all(isinstance(name, str) and _is_topic(name) for name in topics)
        or len(set(topics)) < len(topics)
    ):
        raise GraphError(
            f"{place}: topic is {topic!r}, expected a topic like 'rooms/+/heat' or 'rooms/#', or a "
            "list of different ones"
        )
    if version not in ("5", "3.1.1"):
        raise GraphError(f"{place}: version is {version!r}, expected '5' or '3.1.1'")
    if client_id is not None:
        checked_text(client_id, "client_id", place)
    if tls is not None and urlsplit(url).scheme.lower() != "mqtts":
        raise GraphError(f"{place}: tls is given, expected a URL mqtts://")
    checked_seconds(backoff, "backoff", place, may_be_zero=True)
    return MqttTopics(
        url,
        topics,
        topic_of,
        checked_format(format, type, place),
        checked_whole(qos, "qos", place, 0, 2),
        client_id,
        checked_seconds(session_expiry, "session_expiry", place),
        version,
        bool(records),
        bool(retain),
        checked_whole(prefetch, "prefetch", place, 1, PREFETCH_MAX),
        tls,
        backoff,
        checked_on_error(on_error, place),
    )


def _is_topic(topic: str) -> bool:
    """Returns whether `topic` is a valid filter. A wildcard must be a whole level, and `#` must be
    the last level.
    """
    levels = topic.split("/")
    return (
        0 < len(topic.encode()) <= TOPIC_BYTES
        and "\0" not in topic
        and all(level in "+#" or not set(level) & {"+", "#"} for level in levels)
        and "#" not in levels[:-1]
    )


class MqttTopics(MqttConfig, BaseSource[T], BaseSink[Any]):
    """A `Source` and a `Sink` of topics. Made by `mqtt`. The source has one split."""

    name = "mqtt"
    parallelism_max = None

    def check_source(self) -> None:
        """Raises GraphError if the arguments fit only a sink."""
        if not self.topics:
            raise GraphError(
                f"{self!r}: a function chooses the topic of each record of a sink, but a source "
                "subscribes to topics by their names"
            )
        if self.qos == 2:
            raise GraphError(
                f"{self!r}: qos is 2, expected 0 or 1 for a source: with QoS 2 a message could be "
                "lost when the process ends before a checkpoint"
            )

    async def discover(self, host: Host) -> list[Split]:  # type: ignore[override]
        """Returns one split. Creates the session at the server, so that no message from now on is
        missed.
        """
        self.check_source()
        await reached(partial(self._subscribe, host), self, is_away, host.rng)
        return [Split("mqtt")]

    async def _subscribe(self, host: Host) -> None:
        async with connected(self, host, self.client_id) as connection:
            await connection.subscribe()

    def reader(self, ctx: SourceContext) -> SourceReader[T]:
        return _MqttReader(ctx, self)

    def writer(self, ctx: OperatorContext) -> MqttWriter:
        return MqttWriter(ctx, self)


class _MqttReader(AcknowledgingReader):
    """A reader of topics. A receipt, which identifies a message to acknowledge, is the number of
    the connection and the number of the message on this connection.
    """

    def __init__(self, ctx: SourceContext, config: MqttConfig) -> None:
        decode, prepare = config.format.decoder(ctx.host)

        async def fetch(messages: Sequence[Message]) -> None:
            assert prepare is not None
            await prepare(message.content.payload for message in messages)

        def plain(message: Any) -> Any:
            return decode(message.payload)

        def whole(message: Any) -> MqttMessage:
            return MqttMessage(
                decode(message.payload),
                message.topic,
                message.qos,
                bool(message.retain),
                bool(message.dup),
            )

        super().__init__(
            ctx,
            whole if config.records else plain,
            config.on_error,
            prepare=None if prepare is None else fetch,
            capacity=config.prefetch,
        )
        self._config = config
        self._number = 0
        self._connection: Connection | None = None
        self._arrived: list[Message] = []
        self._stirred = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Whether the subtask has no split to read. Topics themselves never end."""
        return not self.splits

    def content_of(self, content: Any) -> bytes:
        return bytes(content.payload)

    def acknowledge(self, receipts: list[Any]) -> None:
        connection = self._connection
        if connection is not None and not connection.ended.done():
            for number, mid in receipts:
                if mid and number == self._number:
                    connection.client.ack(mid, 1)

    async def open(self, splits: Sequence[Split]) -> None:
        await super().open(splits)
        if splits and self.ctx.replays and self.ctx.runtime.attempt == 0:
            config = self._config
            if config.qos == 0:
                say_at_most_once(self.ctx, "the server does not send messages of QoS 0 again")
            elif config.client_id is None:
                say_at_most_once(self.ctx, "without client_id= the server keeps no session")

    async def run(self) -> None:
        config = self._config
        backoff = Backoff(self.ctx.host.rng, config.backoff)
        while True:  # A connection may end without an error.
            await backoff.persistently(partial(self._attempt, backoff), config, is_away)
            await backoff.sleep()

    async def _attempt(self, backoff: Backoff) -> None:
        config = self._config
        self._number += 1
        self._arrived.clear()
        if config.client_id is not None and config.qos:
            self.forget_unpolled()  # The server sends them again.
        try:
            async with connected(
                config, self.ctx.host, config.client_id, self._received
            ) as connection:
                await self._read(connection, backoff)
        finally:
            self._connection = None

    async def _read(self, connection: Connection, backoff: Backoff) -> None:
        """Reads until the connection ends."""
        self._connection = connection
        connection.ended.add_done_callback(lambda _: self._stirred.set())
        # Messages of the kept session come before the answer.
        subscribing = asyncio.get_running_loop().create_task(connection.subscribe())
        subscribing.add_done_callback(lambda _: self._stirred.set())
        try:
            await self._deliver(connection, subscribing, backoff)
        finally:
            await cancel_and_wait([subscribing])

    async def _deliver(
        self, connection: Connection, subscribing: asyncio.Task[None], backoff: Backoff
    ) -> None:
        while not connection.ended.done():
            await self._stirred.wait()
            self._stirred.clear()
            if subscribing.done():
                subscribing.result()
            arrived, self._arrived = self._arrived, []
            if arrived:
                backoff.reset()
                # QoS 0 has no window: the server drops messages that it cannot send.
                connection.pause(len(arrived) + self._buffered >= self._capacity)
                await self.put("mqtt", arrived)
                connection.pause(False)
        await connection.ended

    def _received(self, message: Any) -> None:
        receipt = (self._number, message.mid)
        where = f"mqtt topic {message.topic!r}"
        time_ms = self.ctx.host.clock.wall_ms()
        self._arrived.append(Message(message, receipt, time_ms, where))
        self._stirred.set()
