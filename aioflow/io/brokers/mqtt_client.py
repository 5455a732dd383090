"""Connects to an MQTT server: connections, their errors, and the writer that publishes.

paho's client runs on the event loop. Only the blocking call that connects runs in the executor.
With QoS 1 or 2 the server confirms each message, so a sink delivers at least once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from aioflow.core.aio import wait_all, wait_first
from aioflow.core.contexts import asynccontextmanager
from aioflow.core.errors import Broken, GraphError, describe_record
from aioflow.core.wire.types import register_type
from aioflow.io.backoff import reached
from aioflow.io.brokers.writers import PIECE_MESSAGES, ConfirmedWriter, wrong_result

if TYPE_CHECKING:
    import ssl

    from aioflow.core.host import Host
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.formats.format import Format
    from aioflow.operators.operator import OperatorContext

__all__ = ["Connection", "MqttConfig", "MqttMessage", "MqttWriter", "connected", "is_away"]

CONNECT_TIMEOUT_S = 10.0
"""Time without an answer after which the server counts as unreachable."""

CLOSE_TIMEOUT_S = 2.0

KEEPALIVE_S = 30

PACKETS_PER_TURN = 100
"""Maximum number of packets that are read in one turn of the event loop."""

BODY_BYTES_MAX = 256 * 1024 * 1024 - 70_000
"""Maximum size in bytes of a body that fits into a packet of the protocol, together with a
topic.
"""

TRANSIENT = (0x80, 0x83, 0x88, 0x89, 0x8B, 0x93, 0x97, 0x9C, 0x9D, 0x9F)
"""Codes of refusals for which a retry may succeed: busy, unavailable, over a quota, moved."""


class MqttMessage(NamedTuple):
    """An element of `mqtt(..., records=True)`."""

    value: Any
    topic: str
    qos: int
    retain: bool
    """Whether this is a retained message, published before the subscription."""
    duplicate: bool
    """Whether the server may have sent the message before."""


register_type(MqttMessage, name="aioflow.io.mqtt:MqttMessage")


@dataclass(eq=False, repr=False)
class MqttConfig:
    """The checked arguments of `mqtt(...)`. Its repr is the user's call, for log and error
    messages.
    """

    url: str
    topics: list[str]
    topic_of: Callable[[Any], str] | None
    """Returns the topic for a record of a sink; used instead of `topics`."""
    format: Format[Any]
    qos: int
    client_id: str | None
    session_expiry_s: float
    version: str
    records: bool
    retain: bool
    prefetch: int
    tls: ssl.SSLContext | None
    backoff: Duration
    on_error: OnError

    bounded = False

    def __repr__(self) -> str:
        return f"mqtt(..., {', '.join(map(repr, self.topics)) or 'topic=function'})"


class Refused(Exception):
    """A refusal by the server, with its reason code."""

    def __init__(self, reason: Any) -> None:
        super().__init__(str(reason))
        self.code = int(reason.value)


def is_away(error: BaseException) -> bool:
    """Returns whether the server cannot be reached or is not ready, so a retry may succeed."""
    import ssl

    if isinstance(error, Refused):
        return error.code in TRANSIENT
    if isinstance(error, ssl.SSLCertVerificationError):
        return False
    return isinstance(error, (OSError, TimeoutError, Broken))


def refusal(config: MqttConfig, error: BaseException, what: str) -> GraphError | None:
    """Returns a GraphError if `error` is a refusal that a retry would not change. Returns None for
    any other error. `what` describes the refused request.
    """
    if not isinstance(error, Refused) or is_away(error):
        return None
    remedy = (
        "give mqtt://USER:PASSWORD@HOST of a user that has the right"
        if error.code in (0x86, 0x87)
        else "see the log of the server"
    )
    return GraphError(f"{config!r}: the server refuses {what}: {error}: {remedy}")


class Connection:
    """One connection of paho's client, which runs on the event loop. It does not reconnect."""

    def __init__(
        self,
        config: MqttConfig,
        host: Host,
        client_id: str | None,
        received: Callable[[Any], None] | None = None,
    ) -> None:
        """Makes a connection that is not open yet. `received` is called with each message that
        arrives. If the server has kept the session, messages may arrive before `subscribe`.
        """
        try:
            from paho.mqtt import client as paho
            from paho.mqtt.enums import CallbackAPIVersion
        except ImportError:
            raise ModuleNotFoundError(
                "af.io.mqtt needs paho-mqtt: pip install 'aioflow[mqtt]'"
            ) from None
        self._config = config
        self._host = host
        self._loop = loop = asyncio.get_running_loop()
        self._is_v5 = config.version == "5"
        self._persistent = client_id is not None
        own: dict[str, Any] = {} if self._is_v5 else {"clean_session": client_id is None}
        self.client = client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id or host.ids.new("aioflow"),
            protocol=paho.MQTTv5 if self._is_v5 else paho.MQTTv311,
            reconnect_on_failure=False,
            manual_ack=True,
            **own,
        )
        client.connect_timeout = CONNECT_TIMEOUT_S / 2
        client.max_queued_messages_set(0)
        parts = urlsplit(config.url)
        if parts.username is not None:
            password = None if parts.password is None else unquote(parts.password)
            client.username_pw_set(unquote(parts.username), password)
        if config.tls is not None:
            client.tls_set_context(config.tls)
        elif parts.scheme == "mqtts":
            client.tls_set()
        self._address = parts.hostname, parts.port or (8883 if parts.scheme == "mqtts" else 1883)
        self._open: asyncio.Future[Any] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Completes when the connection has ended. If the connection was lost, the exception of the
        future is the cause.
        """
        self.packet_bytes_max = BODY_BYTES_MAX
        """Maximum size in bytes of a packet that the server accepts."""
        self._subscriptions: dict[int, asyncio.Future[Any]] = {}
        self.confirmed: Callable[[int, Any], None] = lambda mid, reason: None
        """Called with the number of each confirmed message, and the server's reason code."""
        self._misc: asyncio.TimerHandle | None = None
        self._reads = False
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        if received is not None:
            client.on_message = lambda client, data, message: received(message)
        client.on_publish = lambda client, data, mid, reason, properties: self.confirmed(
            mid, reason
        )
        client.on_subscribe = self._on_subscribe
        client.on_socket_open = self._on_socket_open
        client.on_socket_close = self._on_socket_close
        client.on_socket_register_write = self._on_register_write
        client.on_socket_unregister_write = self._on_unregister_write
        self._sock: Any = None

    async def open(self) -> None:
        """Connects.

        Raises GraphError if the server refuses, and Broken naming the server if none answers.
        """
        config = self._config
        connecting = self._host.blocking(self._connect)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.shield(connecting)
                properties = await self._open
        except asyncio.CancelledError:
            await wait_all([connecting])  # The thread uses the socket until then.
            raise
        except Exception as error:
            await wait_all([connecting])
            if (explanation := refusal(config, error, "the connection")) is not None:
                raise explanation from None
            if not is_away(error):
                if isinstance(error, OSError):
                    raise GraphError(f"{config!r}: {error}: give tls=, an SSLContext") from None
                raise
            host, port = self._address
            raise Broken(
                f"{config!r}: no server of MQTT answers at {host}:{port} "
                f"({str(error) or type(error).__name__}): start it, or give its URL "
                "mqtt://HOST:PORT"
            ) from None
        self.packet_bytes_max = getattr(properties, "MaximumPacketSize", BODY_BYTES_MAX)

    def _connect(self) -> None:
        """Opens the socket and sends the first packet, in a thread."""
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        own: dict[str, Any] = {}
        if self._is_v5:
            # paho has no type annotations here.
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.ReceiveMaximum = self._config.prefetch
            if self._persistent:
                properties.SessionExpiryInterval = int(self._config.session_expiry_s)
            own = {"clean_start": not self._persistent, "properties": properties}
        host, port = self._address
        self.client.connect(host or "", port, KEEPALIVE_S, **own)

    async def subscribe(self) -> None:
        """Subscribes to the topics, and waits for the server's answer.

        The server first sends the messages of a kept session, as many as its window allows.

        Raises GraphError if the server refuses a topic, and Broken if the connection ends before
        the answer.
        """
        from paho.mqtt.subscribeoptions import SubscribeOptions

        config = self._config
        topics: list[Any] = [
            (
                topic,
                SubscribeOptions(
                    qos=config.qos, retainHandling=SubscribeOptions.RETAIN_SEND_IF_NEW_SUB
                )
                if self._is_v5
                else config.qos,
            )
            for topic in config.topics
        ]
        _, mid = self.client.subscribe(topics)
        if mid is None:
            raise Broken("the connection has ended")
        answer = self._subscriptions[mid] = self._loop.create_future()
        await wait_first([answer, self.ended])
        if not answer.done():
            raise Broken("the connection ended before the server had answered")
        for topic, reason in zip(config.topics, answer.result(), strict=True):
            if reason.is_failure:
                error = Refused(reason)
                raise refusal(config, error, f"the topic {topic!r}") or error

    async def close(self) -> None:
        """Ends the connection."""
        if not self.ended.done() and self._sock is not None:
            self.client.disconnect()
            # Waits until DISCONNECT is written.
            await wait_first([self.ended], timeout_s=CLOSE_TIMEOUT_S)
        self._end(None)
        self._forget_socket()
        if (sock := self.client.socket()) is not None:
            sock.close()

    def pause(self, paused: bool) -> None:
        """Stops reading from the socket if `paused`, otherwise resumes."""
        if self._sock is not None and paused == self._reads:
            self._reads = not paused
            if paused:
                self._loop.remove_reader(self._sock)
            else:
                self._loop.add_reader(self._sock, self._read)

    # Callbacks of paho. The socket callbacks may be called in the thread that connects.

    def _on_socket_open(self, client: Any, data: Any, sock: Any) -> None:
        self._loop.call_soon_threadsafe(self._watch, sock.fileno())

    def _watch(self, sock: int) -> None:
        if self.ended.done():
            return
        self._sock = sock
        self.pause(False)
        self._tick()

    def _tick(self) -> None:
        """Runs paho's keepalive work, and schedules itself again a second later."""
        if not self.ended.done():
            self.client.loop_misc()
            self._misc = self._loop.call_later(1.0, self._tick)

    def _on_socket_close(self, client: Any, data: Any, sock: Any) -> None:
        self._loop.call_soon_threadsafe(self._forget_socket)
        try:
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
        except (ValueError, OSError):
            pass  # The socket is closed already.

    def _forget_socket(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
        if self._misc is not None:
            self._misc.cancel()

    def _on_register_write(self, client: Any, data: Any, sock: Any) -> None:
        self._loop.call_soon_threadsafe(self._watch_writes, sock)

    def _watch_writes(self, sock: Any) -> None:
        if sock.fileno() >= 0 and not self.ended.done():
            self._loop.add_writer(sock.fileno(), self._write)

    def _on_unregister_write(self, client: Any, data: Any, sock: Any) -> None:
        if sock.fileno() >= 0:
            self._loop.remove_writer(sock.fileno())

    def _read(self) -> None:
        try:
            for _ in range(PACKETS_PER_TURN):
                self.client.loop_read()
                sock = self.client.socket()
                if sock is None or not _has_data(sock):
                    return
        except Exception as error:  # noqa: BLE001  # The connection cannot go on.
            self._end(error)

    def _write(self) -> None:
        try:
            self.client.loop_write()
        except Exception as error:  # noqa: BLE001  # The connection cannot go on.
            self._end(error)

    def _on_connect(self, client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        if not self._open.done():
            if reason.is_failure:
                self._open.set_exception(Refused(reason))
                self._open.exception()  # The answer may come after the time limit.
            else:
                self._open.set_result(properties)

    def _on_disconnect(
        self, client: Any, data: Any, flags: Any, reason: Any, properties: Any
    ) -> None:
        self._end(Broken(f"the connection has ended ({reason})"))

    def _end(self, error: BaseException | None) -> None:
        if not self._open.done():
            self._open.set_exception(error or Broken("the connection has ended"))
            self._open.exception()
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)
                self.ended.exception()

    def _on_subscribe(
        self, client: Any, data: Any, mid: int, reasons: Any, properties: Any
    ) -> None:
        answer = self._subscriptions.pop(mid, None)
        if answer is not None and not answer.done():
            answer.set_result(reasons)


def _has_data(sock: Any) -> bool:
    """Returns whether a read from `sock` would return data immediately."""
    pending = getattr(sock, "pending", None)
    if pending is not None:  # TLS: bytes that are decrypted already.
        return bool(pending())
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


@asynccontextmanager
async def connected(
    config: MqttConfig,
    host: Host,
    client_id: str | None,
    received: Callable[[Any], None] | None = None,
) -> AsyncIterator[Connection]:
    """Yields an open connection. Raises what `Connection.open` raises."""
    connection = await opened(config, host, client_id, received)
    try:
        yield connection
    finally:
        await connection.close()


async def opened(
    config: MqttConfig,
    host: Host,
    client_id: str | None,
    received: Callable[[Any], None] | None = None,
) -> Connection:
    """Returns an open connection. Raises what `Connection.open` raises."""
    connection = Connection(config, host, client_id, received)
    is_open = False
    try:
        await connection.open()
        is_open = True
        return connection
    finally:
        if not is_open:
            await connection.close()


class MqttWriter(ConfirmedWriter[tuple[str, bytes]]):
    """Publishes the messages of one subtask. Each writer has its own session and client id."""

    _config: MqttConfig

    def __init__(self, ctx: OperatorContext, config: MqttConfig) -> None:
        super().__init__(ctx, config, is_away, partial(refusal, config, what="a message"))
        self._connection: Connection | None = None
        self._most = BODY_BYTES_MAX

    async def open(self) -> None:
        config = self._config
        if len(config.topics) > 1 or any(sign in name for name in config.topics for sign in "+#"):
            raise GraphError(
                f"sink {config!r}: expected the one topic to publish to, without a wildcard, or a "
                "function of a record"
            )
        await self._learn((config.topics or ["mqtt"])[0])
        await reached(self._connected, config, is_away, self._ctx.host.rng)

    async def _connected(self) -> Connection:
        connection = self._connection
        if connection is None or connection.ended.done():
            await self.close()
            connection = self._connection = await opened(self._config, self._ctx.host, None)
            self._most = connection.packet_bytes_max
        return connection

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        topic_of, topic = self._config.topic_of, (self._config.topics or [""])[0]
        for value in values:
            body = self._head + self._encode(value)
            if topic_of is not None:
                topic = self._topic(topic_of(value), value)
            if len(body) + len(topic) > self._most:
                raise ValueError(
                    f"sink {self._config!r} got {describe_record(value)}, of {len(body)} bytes, "
                    f"the server takes packets of at most {self._most}: see its max_packet_size"
                )
            self._pending.append((topic, body))
            self._bytes += len(body)

    def _topic(self, topic: Any, value: Any) -> str:
        if isinstance(topic, str) and topic and not any(sign in topic for sign in "+#\0"):
            return topic
        raise wrong_result(self._config, "topic", topic, value, "a topic without a wildcard")

    async def _publish(self, pending: list[tuple[str, bytes]]) -> None:
        connection = await self._connected()
        piece = pending[:PIECE_MESSAGES]
        unconfirmed: dict[int, int] = {}
        early: dict[int, Any] = {}
        done = asyncio.get_running_loop().create_future()
        refused: list[Refused] = []

        def confirmed(mid: int, reason: Any) -> None:
            index = unconfirmed.pop(mid, None)
            if index is None:
                early[mid] = reason
                return
            if reason.is_failure:
                unconfirmed[-mid] = index
                refused.append(Refused(reason))
            if len(unconfirmed) == len(refused) and len(sent) == len(piece) and not done.done():
                done.set_result(None)

        sent: list[int] = []
        connection.confirmed = confirmed
        try:
            for index, (topic, body) in enumerate(piece):
                info = connection.client.publish(
                    topic, body, qos=self._config.qos, retain=self._config.retain
                )
                unconfirmed[info.mid] = index
                sent.append(info.mid)
                if info.mid in early:
                    confirmed(info.mid, early.pop(info.mid))
            if not done.done() and len(unconfirmed) > len(refused):
                await wait_first([done, connection.ended])
        finally:
            connection.confirmed = lambda mid, reason: None
            pending[: len(piece)] = [piece[index] for index in sorted(unconfirmed.values())]
        if refused:
            raise next((one for one in refused if not is_away(one)), refused[0])
        if unconfirmed:
            await self.close()
            raise Broken("the connection ended before the server had confirmed the messages")

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
