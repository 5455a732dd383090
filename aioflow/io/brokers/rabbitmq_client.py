"""Connects to RabbitMQ: connections, their errors, and the writer that publishes.

Writers use publisher confirms, so a sink delivers at least once. If a message is published again
after a lost confirmation, it keeps its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from aioflow.core.contexts import asynccontextmanager
from aioflow.core.errors import Broken, GraphError
from aioflow.core.wire.types import register_type
from aioflow.io.backoff import reached
from aioflow.io.brokers.writers import PIECE_MESSAGES, ConfirmedWriter, wrong_result

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.io.formats.format import Format
    from aioflow.operators.operator import OperatorContext

__all__ = [
    "RabbitmqConfig",
    "RabbitmqMessage",
    "RabbitmqWriter",
    "connected",
    "existing",
    "is_away",
    "refusal",
]

CONNECT_TIMEOUT_S = 10.0
"""Time without an answer after which a server counts as unreachable."""

CLOSE_TIMEOUT_S = 5.0

KEY_BYTES = 255
"""Maximum size of a routing key."""

HEADER_TYPES = (str, bytes, int, float, type(None))


class RabbitmqMessage(NamedTuple):
    """An element of `rabbitmq(..., records=True)`."""

    value: Any
    message_id: str | None
    redelivered: bool
    """Whether the server has sent the message before."""
    routing_key: str
    exchange: str
    headers: dict[str, Any]
    offset: int | None
    """The offset of a message in a stream; None for a message of a queue."""


register_type(RabbitmqMessage, name="aioflow.io.rabbitmq:RabbitmqMessage")


@dataclass(eq=False, repr=False)
class RabbitmqConfig:
    """The checked arguments of `rabbitmq(...)`. Its repr is the user's call, for log and error
    messages.
    """

    urls: list[str]
    queues: list[str]
    stream: bool
    exchange: str
    routing_key: str | Callable[[Any], str] | None
    headers: Callable[[Any], Mapping[str, Any]] | None
    message_id: Callable[[Any], str] | None
    mandatory: bool
    format: Format[Any]
    records: bool
    start: str | int
    until: str | None
    prefetch: int
    options: dict[str, Any]
    backoff: Duration
    on_error: OnError

    @property
    def bounded(self) -> bool:
        return self.until is not None

    def __repr__(self) -> str:
        names = list(map(repr, self.queues))
        if self.exchange:
            names.append(f"exchange={self.exchange!r}")
        return f"rabbitmq(..., {', '.join(names)})"


@asynccontextmanager
async def connected(config: RabbitmqConfig) -> AsyncIterator[Any]:
    """Yields a connection to one of the servers. It does not reconnect when it breaks.

    Raises ModuleNotFoundError naming the extra, GraphError if the server refuses, and Broken naming
    the servers if none answers.
    """
    connection = await _connect(config)
    try:
        yield connection
    finally:
        await close(connection)


async def _connect(config: RabbitmqConfig) -> Any:
    try:
        import aiormq
    except ImportError:
        raise ModuleNotFoundError(
            "af.io.rabbitmq needs aiormq: pip install 'aioflow[rabbitmq]'"
        ) from None
    last: Exception | None = None
    for url in config.urls:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await aiormq.connect(url, **config.options)
        except TypeError as error:
            raise GraphError(
                f"{config!r}: aiormq.connect does not take what options= says: {error}"
            ) from None
        except (aiormq.AMQPError, OSError, TimeoutError) as error:
            if (explanation := refusal(config, error)) is not None:
                raise explanation from None
            last = error
    places = ", ".join(_place(url) for url in config.urls)
    why = str(last) or type(last).__name__
    raise Broken(
        f"{config!r}: no server of RabbitMQ answers at {places} ({why}): start it, or give its "
        "URL amqp://USER:PASSWORD@HOST:PORT/VHOST"
    ) from None


def _place(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (5671 if parts.scheme == 'amqps' else 5672)}"


async def close(connection: Any) -> None:
    """Closes a connection, even if it is broken."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await connection.close()
    except TimeoutError:
        pass  # The server ends the connection when it misses heartbeats.


def is_away(error: BaseException) -> bool:
    """Returns whether the server cannot be reached or is not ready, so a retry may succeed."""
    if isinstance(error, (ImportError, GraphError)):
        return False
    from aiormq import exceptions

    if isinstance(
        error,
        (
            exceptions.AuthenticationError,
            exceptions.ProbableAuthenticationError,
            exceptions.ConnectionNotAllowed,
            exceptions.PublishError,
        ),
    ):
        return False
    if isinstance(error, exceptions.ChannelClosed):
        code = error.args[0] if error.args else None
        return "home node" in str(error) or code is None or code in (320, 541)
    return isinstance(
        error,
        (
            exceptions.AMQPConnectionError,
            exceptions.ChannelInvalidStateError,
            exceptions.DeliveryError,
            OSError,
            TimeoutError,
            Broken,
        ),
    )


def refusal(config: RabbitmqConfig, error: BaseException) -> GraphError | None:
    """Returns a GraphError if `error` is a refusal that a retry would not change. Returns None for
    any other error.
    """
    if is_away(error) or isinstance(error, (ImportError, GraphError)):
        return None
    from aiormq import exceptions

    text = str(error.args[-1]) if error.args else type(error).__name__
    match error:
        case exceptions.AuthenticationError() | exceptions.ProbableAuthenticationError():
            remedy = "give amqp://USER:PASSWORD@HOST:PORT/VHOST, with %40 for @ in a password"
        case exceptions.ConnectionNotAllowed() | exceptions.InvalidFrameError():
            text = "the server does not open the virtual host of the URL"
            remedy = (
                "make it, or give the user rights on it (`rabbitmqctl add_vhost`, "
                "`rabbitmqctl set_permissions`); its name / is %2F in the URL, or left out"
            )
        case exceptions.ChannelAccessRefused():
            remedy = "give the user the right, with `rabbitmqctl set_permissions`"
        case exceptions.ChannelNotFoundEntity():
            remedy = "declare it first, or give another name"
        case exceptions.ChannelPreconditionFailed() if "x-stream-offset" in text:
            remedy = "it is not a stream: leave out stream=True, or declare it as one"
        case exceptions.ChannelLockedResource():
            remedy = "another connection uses the queue exclusively: end it, or read another queue"
        case exceptions.AMQPChannelError():
            remedy = "see the log of the server"
        case _:
            return None
    return GraphError(f"{config!r}: {text}: {remedy}")


async def existing(connection: Any, queue: str) -> int:
    """Returns the number of messages in a queue. Raises ChannelNotFoundEntity if the queue does not
    exist.
    """
    channel = await connection.channel(publisher_confirms=False)
    declared = await channel.queue_declare(queue, passive=True)
    await channel.close()
    return int(declared.message_count)


class _Publication(NamedTuple):
    body: bytes
    routing_key: str
    properties: Any


class RabbitmqWriter(ConfirmedWriter[_Publication]):
    """A writer of the messages of one subtask."""

    _config: RabbitmqConfig

    def __init__(self, ctx: OperatorContext, config: RabbitmqConfig) -> None:
        super().__init__(ctx, config, is_away, partial(refusal, config))
        self._ids = ctx.host.ids.new("message")
        self._count = 0
        self._connection: Any = None
        self._channel: Any = None
        self._properties: Any = None

    async def open(self) -> None:
        config = self._config
        if len(config.queues) > 1 and not config.exchange:
            raise GraphError(
                f"sink {config!r} names {len(config.queues)} queues, expected the one to write "
                "to, or exchange="
            )
        await self._learn(config.exchange or (config.queues or ["default"])[0])
        await reached(self._check, config, is_away, self._ctx.host.rng, self._explained)
        from aiormq import spec

        self._properties = spec.Basic.Properties

    async def _check(self) -> None:
        """Connects, and checks that the destination exists."""
        channel = await self._connected()
        config = self._config
        if config.exchange:
            await channel.exchange_declare(config.exchange, passive=True)
        for queue in config.queues:
            await channel.queue_declare(queue, passive=True)

    async def _connected(self) -> Any:
        if self._channel is None or self._channel.is_closed:
            await self.close()
            self._connection = await _connect(self._config)
            self._channel = await self._connection.channel(publisher_confirms=True)
        return self._channel

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        config = self._config
        for value in values:
            body = self._head + self._encode(value)
            if config.message_id is None:
                self._count += 1
                id_ = f"{self._ids}:{self._count}"
            else:
                id_ = self._text(config.message_id(value), "message_id", value)
            properties = self._properties(
                delivery_mode=2,
                message_id=id_,
                headers=None if config.headers is None else self._headers(value),
            )
            self._pending.append(_Publication(body, self._key(value), properties))
            self._bytes += len(body)

    def _key(self, value: Any) -> str:
        key = self._config.routing_key
        if callable(key):
            return self._text(key(value), "routing_key", value)
        if key is not None:
            return key
        return "" if self._config.exchange else self._config.queues[0]

    def _text(self, text: Any, name: str, value: Any) -> str:
        if isinstance(text, str) and len(text.encode()) <= KEY_BYTES:
            return text
        expected = f"a text of at most {KEY_BYTES} bytes"
        raise wrong_result(self._config, name, text, value, expected)

    def _headers(self, value: Any) -> dict[str, Any]:
        assert self._config.headers is not None
        headers = self._config.headers(value)
        if isinstance(headers, Mapping) and all(
            isinstance(name, str) and isinstance(content, HEADER_TYPES)
            for name, content in headers.items()
        ):
            return dict(headers)
        expected = "a mapping of names to texts, bytes and numbers"
        raise wrong_result(self._config, "headers", headers, value, expected)

    async def _publish(self, pending: list[_Publication]) -> None:
        config = self._config
        channel = await self._connected()
        piece = pending[:PIECE_MESSAGES]
        answers = await asyncio.gather(
            *(
                channel.basic_publish(
                    one.body,
                    exchange=config.exchange,
                    routing_key=one.routing_key,
                    properties=one.properties,
                    mandatory=config.mandatory,
                    wait=False,
                )
                for one in piece
            ),
            return_exceptions=True,
        )
        failed = [
            (one, answer)
            for one, answer in zip(piece, answers, strict=True)
            if isinstance(answer, BaseException)
        ]
        pending[: len(piece)] = [one for one, _ in failed]
        if not failed:
            return
        # Prefer an error that a retry cannot help: the others are consequences of the closed
        # connection.
        errors = [error for _, error in failed if isinstance(error, Exception)]
        error = next((one for one in errors if not is_away(one)), errors[0] if errors else None)
        if error is None:
            raise Broken("the channel was closed")
        from aiormq.exceptions import PublishError

        if isinstance(error, PublishError):
            key = next(one.routing_key for one, answer in failed if answer is error)
            if not config.exchange:  # The server may still be recovering the queue.
                await existing(self._connection, key)
            where = f"the exchange {config.exchange!r}" if config.exchange else "a queue name"
            raise GraphError(
                f"sink {config!r}: no queue takes a message with the routing key {key!r} of "
                f"{where}: bind a queue, or give mandatory=False to drop such messages"
            )
        raise error

    async def close(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            await close(connection)
