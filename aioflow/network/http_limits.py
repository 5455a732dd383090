"""Limits number, duration and memory of an HTTP server's connections, even with hostile clients.

The HTTP server parses and answers requests. This module is a layer between the server and its
transports. A connection is *working* while a request is being answered, *stalled* while its client
does not read the answer, and otherwise *quiet*. A connection is aborted if its client neither sends
a whole request nor reads a part of an answer within `SILENCE_S`.

If there are too many connections, or too many unread bytes, one connection of the address with the
most connections is aborted: the one that has been stalled longest or, if none is stalled, quiet
longest. A well-behaved client needs its connection for milliseconds only, so other clients cannot
keep it out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import cast

from aioflow.core.contexts import contextmanager
from aioflow.network.admission import Refusals, peer_of

__all__ = ["SILENCE_S", "Door"]

logger = logging.getLogger(__name__)

SILENCE_S = 20.0
"""Maximum time in seconds for a client to send a whole request, or to read a part of an answer."""

GRACE_S = 1.0
"""Time in seconds for which a new quiet connection is not aborted.

Because such connections are not aborted, up to twice the maximum number of connections may be open.
"""

CHECK_S = 1.0
"""Time in seconds between two checks of the clients."""

UNREAD_BYTES_MAX = 16 * 1024 * 1024
"""Maximum total number of unread bytes of all stalled connections."""

INPUT_BYTES = 256 * 1024
"""Maximum number of bytes of pipelined requests in a connection: the number that asyncio reads at
once.
"""

PIPELINED_MAX = 16
"""Maximum number of requests that a client may send without waiting. Browsers send one at a
time.
"""

FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: "
    b"0\r\n\r\n"
)


class Door:
    """The protocol factory of an HTTP server. It wraps each protocol to limit the connections.

    The server calls `open` before the first connection, and `close` when it stops. It logs to
    `complaints`, and answers each request inside `with door.answering(...)`. `subject` names the
    server in warnings.
    """

    def __init__(self, connections_max: int, subject: str) -> None:
        self._make: Callable[[], asyncio.Protocol] | None = None
        self._connections_max = connections_max
        self._connections: dict[asyncio.Protocol, _Connection] = {}
        """Maps each protocol object of the server to the connection that wraps it."""
        self._refusals = Refusals(logger, subject)
        self.complaints = _Complaints(self._refusals)
        self._watching: asyncio.Task[None] | None = None

    def __call__(self) -> asyncio.Protocol:
        assert self._make is not None, "open() comes before the first connection"
        return _Connection(self._make(), self)

    def open(self, make: Callable[[], asyncio.Protocol]) -> None:
        """Starts the periodic check of the clients.

        `make` is called to create the server's protocol for each connection.
        """
        self._make = make
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="HTTP clients")

    def close(self) -> None:
        """Aborts all remaining connections. Otherwise a client that does not read its answer would
        keep its connection open.
        """
        if self._watching is not None:
            self._watching.cancel()
        for connection in list(self._connections.values()):
            connection.abort()
        self._refusals.close()

    @contextmanager
    def answering(self, protocol: asyncio.Protocol) -> Iterator[None]:
        """Marks the connection of the server's `protocol` as working inside the `with` block."""
        connection = self._connections.get(protocol)
        if connection is None:
            yield
            return
        connection.requests += 1
        connection.unasked += 1
        if connection.unasked > PIPELINED_MAX:
            self._cut(
                connection, f"it sent more than {PIPELINED_MAX} requests at once", is_news=True
            )
        try:
            yield
        finally:
            connection.requests -= 1
            connection.since_s = asyncio.get_running_loop().time()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_S)
            now = loop.time()
            for connection in list(self._connections.values()):
                connection.note_reading(now)
                if not connection.is_working and now - connection.since_s >= SILENCE_S:
                    missing = (
                        "read anything of its answers"
                        if connection.is_stalled
                        else "send a whole request"
                    )
                    self._cut(
                        connection,
                        f"it did not {missing} within {SILENCE_S:g} s",
                        is_news=connection.is_stalled,
                    )

    # For connections.

    def enter(self, connection: _Connection) -> bool:
        """Admits a new connection. If there are too many, aborts another connection on which no
        request is being answered.

        Returns False if requests are being answered on all connections, so that none can be
        aborted.
        """
        most = self._connections_max
        if len(self._connections) >= most:
            young_s = asyncio.get_running_loop().time() - GRACE_S
            weakest = self._weakest(
                lambda one: one.is_stalled or (not one.is_working and one.since_s < young_s)
            )
            if weakest is None and len(self._connections) >= 2 * most:
                weakest = self._weakest(lambda one: not one.is_working)
            if weakest is not None:
                self._cut(
                    weakest, f"{most} connections were open, and a new one came", is_news=True
                )
            elif all(one.is_working for one in self._connections.values()):
                self._refusals.add(connection.peer, f"all {most} connections are at work")
                return False
        self._connections[connection.inner] = connection
        return True

    def leave(self, connection: _Connection) -> None:
        self._connections.pop(connection.inner, None)

    def stalled(self) -> None:
        """Handles that a client has stopped reading. Aborts stalled connections while the limit for
        unread bytes is exceeded.
        """
        stalled = [one for one in self._connections.values() if one.is_stalled]
        unread = sum(one.memory_bytes for one in stalled)
        while unread > UNREAD_BYTES_MAX and len(stalled) > 1:
            weakest = self._weakest(lambda one: one.is_stalled)
            assert weakest is not None, "more than one is stalled"
            stalled.remove(weakest)
            unread -= weakest.memory_bytes
            self._cut(
                weakest, f"clients left more than {UNREAD_BYTES_MAX} bytes unread", is_news=True
            )

    def _weakest(self, may_go: Callable[[_Connection], bool]) -> _Connection | None:
        """Returns the connection to abort, of those for which `may_go` returns True. Returns None
        if there are none.

        Prefers the address with the most connections. Of its connections, chooses the one that has
        been stalled longest or, if none is stalled, quiet longest.
        """
        by_host = Counter(one.host for one in self._connections.values())
        candidates = [one for one in self._connections.values() if may_go(one)]
        return min(
            candidates,
            key=lambda one: (-by_host[one.host], not one.is_stalled, one.since_s),
            default=None,
        )

    def _cut(self, connection: _Connection, reason: str, *, is_news: bool) -> None:
        """Aborts a connection. Logs `reason` only if `is_news` is True, because aborting a
        connection of an idle browser is normal.
        """
        if is_news:
            self._refusals.add(connection.peer, reason)
        self.leave(connection)
        connection.abort()


class _Complaints(logging.Logger):
    """A logger for an HTTP server of aiohttp.

    Counts a malformed request as a refused connection, and logs no traceback for it.
    """

    def __init__(self, refusals: Refusals) -> None:
        super().__init__(logger.name, logging.ERROR)
        self._refusals = refusals

    def handle(self, record: logging.LogRecord) -> None:
        from aiohttp.http_exceptions import HttpProcessingError

        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            peer = record.args[0] if isinstance(record.args, tuple) and record.args else "unknown"
            self._refusals.add(
                str(peer), f"malformed request: {' '.join(str(error).split())[:200]}"
            )
        else:
            logger.handle(record)


class _Connection(asyncio.Protocol):
    """A connection that the door watches. The connection passes every event on to `inner`, the
    protocol of the server.
    """

    def __init__(self, inner: asyncio.Protocol, door: Door) -> None:
        self.inner = inner
        self._door = door
        self._transport: asyncio.Transport | None = None
        self._is_in = False
        self.host = self.peer = ""
        self.is_stalled = False
        self.requests = 0
        """Number of requests that are being answered: 0 or 1."""
        self.unasked = 0
        """Number of requests that the server began to answer since the client last sent
        anything.
        """
        self.since_s = asyncio.get_running_loop().time()
        """Monotonic time when the connection last worked or became stalled, or when its client last
        read.
        """
        self._unread_bytes = 0
        """Number of unread bytes at the last check; valid while the connection is stalled."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not subclasses.
        self.peer = peer_of(self._transport)
        self.host = self.peer.rpartition(":")[0]
        self._is_in = self._door.enter(self)
        if self._is_in:
            self.inner.connection_made(transport)
        else:
            self._transport.write(FULL)
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self.unasked = 0
        if self._is_in:
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received() if self._is_in else None

    def pause_writing(self) -> None:
        self.is_stalled = True
        self.since_s = asyncio.get_running_loop().time()
        self._unread_bytes = self.memory_bytes
        if self._is_in:
            self.inner.pause_writing()
        self._door.stalled()

    def note_reading(self, now_s: float) -> None:
        """Notes whether the client of a stalled connection has read a part of its answer.

        So a client on a slow network that takes long to read a large answer is not aborted.
        """
        if self.is_stalled and (unread := self.memory_bytes) != self._unread_bytes:
            if unread < self._unread_bytes:
                self.since_s = now_s
            self._unread_bytes = unread

    def resume_writing(self) -> None:
        self.is_stalled = False
        self.since_s = asyncio.get_running_loop().time()
        if self._is_in:
            self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self)
        if self._is_in:
            self.inner.connection_lost(exc)

    @property
    def is_working(self) -> bool:
        return self.requests > 0 and not self.is_stalled

    @property
    def memory_bytes(self) -> int:
        """Upper bound for the number of unread bytes of the connection."""
        return INPUT_BYTES + (
            0 if self._transport is None else self._transport.get_write_buffer_size()
        )

    def abort(self) -> None:
        """Closes the connection without waiting until the client reads."""
        if self._transport is not None:
            self._transport.abort()
