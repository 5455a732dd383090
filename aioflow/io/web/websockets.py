"""A WebSocket client: a source of received messages, and a sink that sends messages.

The source is at-most-once, because messages have no position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.advice.hints import explained
from aioflow.core.errors import Broken, GraphError
from aioflow.inspection.redaction import redacted
from aioflow.io.arguments import checked_headers, checked_seconds
from aioflow.io.backoff import Backoff
from aioflow.io.bodies import json_encoder
from aioflow.io.brokers.readers import BufferedReader
from aioflow.io.web.http_client import checked_url, client_session, without_secrets
from aioflow.operators.sink import BaseSink, BaseWriter
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    import aiohttp

    from aioflow.core.timeunits import Duration
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["WebSocketConnector", "websocket"]

MESSAGE_BYTES_MAX = 4 * 1024 * 1024

HEARTBEAT_S = 20.0
"""Interval of pings. A vanished peer is noticed after one and a half intervals."""


@explained
def websocket(
    url: str,
    *,
    subscribe: Sequence[str | bytes] = (),
    headers: Mapping[str, str] | None = None,
    reconnect: bool = True,
    backoff: Duration = "100ms",
) -> WebSocketConnector:
    """Returns a connector that reads the messages (str or bytes) of the server at `url`, or sends
    messages to it.

    `subscribe` has messages that are sent first on each new connection. With `reconnect` the
    connector connects again when the connection ends; otherwise the source ends. As a sink it sends
    str and bytes as they are, and other values as JSON. After a broken connection it sends its
    buffered elements again.
    """
    checked_url(url, "websocket", ("ws", "wss", "http", "https"))
    place = f"websocket({redacted(url)!r})"
    if isinstance(subscribe, (str, bytes)) or not all(
        isinstance(message, (str, bytes)) for message in subscribe
    ):
        raise GraphError(
            f"{place}: subscribe is {type(subscribe).__name__}, expected a list of messages, each "
            "str or bytes"
        )
    checked_seconds(backoff, "backoff", place, may_be_zero=True)
    return WebSocketConnector(
        url, tuple(subscribe), checked_headers(headers, place), reconnect, backoff
    )


@dataclass(eq=False, repr=False)
class WebSocketConnector(BaseSource[str | bytes], BaseSink[Any]):
    """A `Source` and a `Sink` of the messages of a WebSocket. Made by `websocket`."""

    name = "websocket"

    url: str
    subscribe: tuple[str | bytes, ...]
    headers: dict[str, str]
    reconnect: bool
    backoff: Duration

    def __repr__(self) -> str:
        return f"websocket({redacted(self.url)!r})"

    @property
    def bounded(self) -> bool:
        return not self.reconnect

    async def discover(self) -> list[Split]:
        return [Split("0")]

    def reader(self, ctx: SourceContext) -> SourceReader[str | bytes]:
        return _WebSocketReader(ctx, self)

    def writer(self, ctx: OperatorContext) -> WebSocketWriter:
        return WebSocketWriter(ctx, self)

    def committer(self) -> None:
        return None


_ENCODER = json_encoder("websocket sink")


async def _send(connection: aiohttp.ClientWebSocketResponse, value: Any) -> None:
    if isinstance(value, bytes):
        await connection.send_bytes(value)
    else:
        await connection.send_str(
            value if isinstance(value, str) else _ENCODER.encode(value).decode()
        )


class _WebSocketReader(BufferedReader):
    at_most_once = "a WebSocket cannot be asked again for what it gave"

    def __init__(self, ctx: SourceContext, config: WebSocketConnector) -> None:
        super().__init__(ctx)
        self._config = config

    async def run(self, split: Split) -> None:
        import aiohttp

        config = self._config
        backoff = Backoff(self.ctx.host.rng, config.backoff)
        errors = (aiohttp.ClientError, TimeoutError, Broken)
        with without_secrets(config):
            async with client_session(config.headers, None) as session:
                listen = partial(self._listen, session, backoff)
                await backoff.reconnecting(listen, config, config.reconnect, errors)

    async def _listen(self, session: aiohttp.ClientSession, backoff: Backoff) -> None:
        import aiohttp

        async with session.ws_connect(
            self._config.url, heartbeat=HEARTBEAT_S, max_msg_size=MESSAGE_BYTES_MAX
        ) as connection:
            for message in self._config.subscribe:
                await _send(connection, message)
            async for received in connection:
                if received.type is aiohttp.WSMsgType.ERROR:
                    raise Broken(f"the connection broke: {connection.exception()}")
                backoff.reset()
                await self.put(received.data)


class WebSocketWriter(BaseWriter[Any]):
    """A writer that sends the records of one subtask."""

    def __init__(self, ctx: OperatorContext, config: WebSocketConnector) -> None:
        self._ctx = ctx
        self._config = config
        self._pending: list[Any] = []
        self._session: aiohttp.ClientSession | None = None
        self._connection: aiohttp.ClientWebSocketResponse | None = None
        self.full = False

    async def open(self) -> None:
        import aiohttp

        self._session = aiohttp.ClientSession(headers=self._config.headers)
        await self._connect()

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        with without_secrets(self._config):
            return await self._connected()

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        import aiohttp

        assert self._session is not None, "open() comes before the first flush"
        config = self._config
        errors = (aiohttp.ClientError, TimeoutError)
        self._connection = await Backoff(self._ctx.host.rng, config.backoff).persistently(
            partial(self._session.ws_connect, config.url, heartbeat=HEARTBEAT_S),
            config,
            lambda error: config.reconnect and isinstance(error, errors),
        )
        return self._connection

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        self._pending.extend(values)
        self.full = True

    async def flush(self) -> None:
        self.full = False
        pending, self._pending = self._pending, []
        sent = 0
        while sent < len(pending):
            connection = self._connection
            if connection is None or connection.closed:
                connection = await self._connect()
            try:
                await _send(connection, pending[sent])
            except (ConnectionError, RuntimeError) as error:
                self._connection = None
                if not self._config.reconnect:
                    raise Broken(
                        f"{self._config!r}: the connection broke: {redacted(str(error))}"
                    ) from error
            else:
                sent += 1

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        await self.flush()
        return []

    async def close(self) -> None:
        session, self._session = self._session, None
        if self._connection is not None:
            await self._connection.close()
        if session is not None:
            await session.close()
