"""Lines of text over TCP: a source that connects and reads, and a sink that connects and writes.
Meant for tests and simple feeds.

TCP does not report what the peer processed. So the source is at-most-once. After a broken
connection, the sink sends its buffered lines again, and lines in transit may be lost or repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from aioflow.advice.hints import explained
from aioflow.core.errors import Broken
from aioflow.io.arguments import (
    PORT_MAX,
    Malformed,
    checked_encoding,
    checked_on_error,
    checked_seconds,
    checked_text,
    checked_whole,
)
from aioflow.io.backoff import Backoff
from aioflow.io.brokers.readers import BufferedReader
from aioflow.operators.sink import BaseSink, BaseWriter
from aioflow.operators.source import BaseSource, Split

if TYPE_CHECKING:
    from aioflow.core.timeunits import Duration
    from aioflow.io.arguments import OnError
    from aioflow.operators.operator import OperatorContext
    from aioflow.operators.source import SourceContext, SourceReader

__all__ = ["SocketConnector", "socket"]

LINE_BYTES_MAX = 1024 * 1024
"""Maximum length of a line, because an unfinished line is held in memory.

The connection to a peer that sends a longer line is closed.
"""

LINES_AHEAD = 1024
"""Number of waiting lines at which the connection stops reading, so TCP slows the peer down."""


@explained
def socket(
    host: str,
    port: int,
    *,
    encoding: str = "utf-8",
    reconnect: bool = True,
    backoff: Duration = "100ms",
    on_error: OnError = "fail",
) -> SocketConnector:
    """Returns a connector that reads lines from, or writes lines to, the TCP server at `host:port`.

    With `reconnect` it retries forever when the connection ends or is refused. Otherwise the end of
    the connection ends the source, and a refused connection is an error. As a sink it writes
    `str(value)`, one value a line.
    """
    place = f"socket({host!r}, {port})"
    checked_text(host, "host", place)
    checked_whole(port, "port", place, 1, PORT_MAX)
    checked_seconds(backoff, "backoff", place, may_be_zero=True)
    checked_encoding(encoding, place)
    return SocketConnector(
        host, port, encoding, reconnect, backoff, checked_on_error(on_error, place)
    )


@dataclass(eq=False, repr=False)
class SocketConnector(BaseSource[str], BaseSink[Any]):
    """A `Source` and a `Sink` of lines over TCP. Made by `socket`."""

    name = "socket"

    host: str
    port: int
    encoding: str
    reconnect: bool
    backoff: Duration
    on_error: OnError

    def __repr__(self) -> str:
        return f"socket({self.host!r}, {self.port})"

    @property
    def bounded(self) -> bool:
        return not self.reconnect

    async def discover(self) -> list[Split]:
        return [Split("0")]

    def reader(self, ctx: SourceContext) -> SourceReader[str]:
        return _SocketReader(ctx, self)

    def writer(self, ctx: OperatorContext) -> SocketWriter:
        return SocketWriter(ctx, self)

    def committer(self) -> None:
        return None


class _SocketReader(BufferedReader):
    at_most_once = "a socket cannot be asked again for what it gave"

    def __init__(self, ctx: SourceContext, config: SocketConnector) -> None:
        super().__init__(ctx)
        self._config = config
        self._malformed = Malformed(ctx, config.on_error)

    async def run(self, split: Split) -> None:
        config = self._config
        backoff = Backoff(self.ctx.host.rng, config.backoff)
        await backoff.reconnecting(
            partial(self._listen, backoff), config, config.reconnect, (OSError, Broken)
        )

    async def _listen(self, backoff: Backoff) -> None:
        config = self._config
        transport, lines = await self.ctx.host.net.connect(_Lines, config.host, config.port)
        try:
            await self._read(lines, backoff)
        finally:
            transport.abort()
            await lines.lost

    async def _read(self, lines: _Lines, backoff: Backoff) -> None:
        encoding = self._config.encoding
        while (batch := await lines.take()) is not None:
            backoff.reset()
            for line in batch:
                try:
                    text = line.decode(encoding)
                except UnicodeDecodeError as error:
                    self._malformed.report(line, f"{self._config!r}: {error}", error)
                    continue
                await self.put(text)


class _Lines(asyncio.Protocol):
    """A connection that divides the received data into lines, and stops reading while many lines
    wait.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()
        self._lines: list[bytes] = []
        self._ended = False
        self._error: Exception | None = None
        self._paused = False
        self._news: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._rest += data
        if b"\n" in data:  # Otherwise nothing is copied, because a line may arrive byte by byte.
            *lines, rest = bytes(self._rest).split(b"\n")
            self._rest = bytearray(rest)
            self._lines.extend([line.removesuffix(b"\r") for line in lines])
        if len(self._rest) > LINE_BYTES_MAX:
            self._error = Broken(
                f"the peer sent {len(self._rest)} bytes without a line end, expected at most "
                f"{LINE_BYTES_MAX}"
            )
            self._transport.abort()
        elif len(self._lines) >= LINES_AHEAD and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if self._rest:
            self._lines.append(bytes(self._rest.removesuffix(b"\r")))
            self._rest = bytearray()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        if exc is not None and self._error is None:
            self._error = Broken(f"the connection broke: {exc}")
        if not self.lost.done():
            self.lost.set_result(None)
        self.resume_writing()
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    async def take(self) -> list[bytes] | None:
        """Waits for lines. Returns all lines that have arrived, at least one, or None at the end of
        the stream.

        Raises Broken if the connection was lost.
        """
        while not self._lines:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        lines, self._lines = self._lines, []
        if self._paused and not self._ended:
            assert self._transport is not None
            self._paused = False
            self._transport.resume_reading()
        return lines

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    async def write(self, data: bytes) -> None:
        """Writes `data`, and returns when the transport can accept more. Raises Broken if the
        connection has ended.
        """
        if not self._ended:
            assert self._transport is not None
            self._transport.write(data)
            if self._writable is not None:
                await self._writable
        if self._ended:
            raise self._error or Broken("the peer closed the connection")

    async def close(self) -> None:
        """Sends the buffered data, then closes the connection."""
        assert self._transport is not None
        self._transport.close()
        await self.lost


class SocketWriter(BaseWriter[Any]):
    """A writer that sends the lines of one subtask."""

    def __init__(self, ctx: OperatorContext, config: SocketConnector) -> None:
        self._ctx = ctx
        self._config = config
        self._buffer: list[bytes] = []
        self._lines: _Lines | None = None
        self.full = False

    async def open(self) -> None:
        await self._connect()

    async def _connect(self) -> _Lines:
        config = self._config
        _, lines = await Backoff(self._ctx.host.rng, config.backoff).persistently(
            partial(self._ctx.host.net.connect, _Lines, config.host, config.port),
            config,
            lambda error: config.reconnect and isinstance(error, OSError),
        )
        self._lines = lines
        return lines

    def write_batch(self, values: Sequence[Any], timestamps: Sequence[int] | None) -> None:
        if values:
            self._buffer.append(("\n".join(map(str, values)) + "\n").encode(self._config.encoding))
            self.full = True

    async def flush(self) -> None:
        self.full = False
        buffer, self._buffer = self._buffer, []
        data = b"".join(buffer)
        while data:
            lines = self._lines or await self._connect()
            try:
                await lines.write(data)
                return
            except Broken:
                self._lines = None
                if not self._config.reconnect:
                    raise

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        await self.flush()
        return []

    async def close(self) -> None:
        lines, self._lines = self._lines, None
        if lines is not None:
            await lines.close()
