"""A TCP proxy with faults on demand: put it between a client and a real server to test their
connection.

    async with FaultProxy(host, "127.0.0.1", server_port) as proxy:
        connect_to(proxy.port)
        proxy.stall()        # silence: nothing arrives, nothing is reported
        proxy.resume()
        proxy.reset()        # every connection breaks now
        proxy.cut_after(100) # the next 100 bytes to the server arrive, then the connection breaks
                             # in the middle

Invariant: without faults every byte arrives once, in order, in both directions, with back pressure.
If one side half-closes its connection, so does the proxy on the other side.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from aioflow.core.aio import cancel_and_wait

if TYPE_CHECKING:
    from aioflow.core.host import Host, Listener

__all__ = ["FaultProxy"]

NO_LINGER = struct.pack("ii", 1, 0)
"""Value of SO_LINGER (on, 0 s) with which closing a socket sends RST instead of FIN."""


class FaultProxy:
    """Forwards connections to `target_host:target_port`.

    It is used as an async context manager. All methods affect all connections, immediately.
    """

    def __init__(self, host: Host, target_host: str, target_port: int) -> None:
        self.delay_s = 0.0
        """Delay of every chunk of bytes in seconds, in both directions."""
        self.connections_made = 0
        self.bytes_up = 0
        """Number of bytes sent to the server."""
        self.bytes_down = 0
        """Number of bytes received from the server."""
        self._host = host
        self._target = (target_host, target_port)
        self._listener: Listener | None = None
        self._links: dict[_Link, None] = {}
        self._stalled = False
        self._is_cut = False
        self._cut_after: int | None = None
        self._corrupt = False

    async def __aenter__(self) -> Self:
        self._listener = await self._host.net.listen(lambda: _Link(self).near, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._listener is not None
        self._listener.close()
        links = list(self._links)
        self.reset()
        await cancel_and_wait([link.connecting for link in links if link.connecting is not None])
        await asyncio.sleep(0)  # The transports notify their protocols in the next iteration.

    @property
    def port(self) -> int:
        """The port for clients, on 127.0.0.1."""
        assert self._listener is not None, "the proxy listens inside of `async with`"
        return self._listener.port

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._links)

    def reset(self) -> None:
        """Breaks all connections with a TCP reset. New connections are accepted."""
        for link in list(self._links):
            link.abort()

    def cut(self) -> None:
        """Breaks all connections. Until `heal`, breaks new connections as soon as they are made."""
        self._is_cut = True
        self.reset()

    def heal(self) -> None:
        """Accepts connections and passes on bytes again, without delay or planned faults."""
        self._is_cut = self._corrupt = False
        self._cut_after = None
        self.delay_s = 0.0
        self.resume()

    def stall(self) -> None:
        """Silently holds back all bytes, in both directions and on new connections too."""
        self._stalled = True

    def resume(self) -> None:
        """Delivers the bytes that were held back, and passes on later bytes at once."""
        self._stalled = False
        for link in list(self._links):
            link.release()

    def cut_after(self, count: int) -> None:
        """Lets `count` more bytes reach the server, then breaks the connection that carried the
        last byte.
        """
        self._cut_after = count

    def corrupt_next(self) -> None:
        """Changes one bit of the next chunk that goes to the server."""
        self._corrupt = True

    def passes(self, link: _Link, data: bytes, *, up: bool) -> bytes:
        """Returns the bytes to pass on for the received `data`, after faults. Breaks `link` once
        the limit of `cut_after` is reached. `up` is whether the bytes go to the server.
        """
        if not up:
            self.bytes_down += len(data)
            return data
        if self._corrupt and data:
            self._corrupt = False
            middle = len(data) // 2
            data = data[:middle] + bytes((data[middle] ^ 1,)) + data[middle + 1 :]
        if self._cut_after is not None:
            data, rest = data[: self._cut_after], len(data) - self._cut_after
            self._cut_after -= len(data)
            if rest >= 0:
                self._cut_after = None
                link.break_after_writing()
        self.bytes_up += len(data)
        return data

    @property
    def is_stalled(self) -> bool:
        return self._stalled

    def made(self, link: _Link) -> asyncio.Task[None] | None:
        """Notes the connection of a new client, and returns the task that connects to the server.
        Returns None if `cut` is in force.
        """
        self.connections_made += 1
        if self._is_cut:
            return None
        self._links[link] = None
        return asyncio.get_running_loop().create_task(self._connect(link), name="fault proxy")

    def lost(self, link: _Link) -> None:
        self._links.pop(link, None)

    async def _connect(self, link: _Link) -> None:
        try:
            await self._host.net.connect(lambda: link.far, *self._target)
        except OSError:  # There is no server: the client sees a reset, as from the server.
            link.abort()
            return
        link.release()


class _Link:
    """A connection through the proxy: a protocol for each end, and the bytes held back."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.near = _End(self, up=True)
        self.far = _End(self, up=False)
        self.near.other, self.far.other = self.far, self.near
        self.connecting: asyncio.Task[None] | None = None

    def release(self) -> None:
        for end in (self.near, self.far):
            end.release()

    def abort(self) -> None:
        for end in (self.near, self.far):
            end.abort()
        if self.connecting is not None and self.far.transport is None:
            self.connecting.cancel()
        self.proxy.lost(self)

    def break_after_writing(self) -> None:
        """Closes the connection to the server after the last write, without a reset. So the server
        gets the bytes before the break, and its stream ends in the middle of a message.
        """
        self.far.closes_after_writing = True


class _End(asyncio.Protocol):
    """One end of a connection.

    It passes all received data to the other end. None in place of data is the end of the stream.
    """

    other: _End

    def __init__(self, link: _Link, *, up: bool) -> None:
        self._link = link
        self._up = up
        self._late: deque[tuple[float, bytes | None]] = deque()
        self._held: list[bytes | None] = []
        self._has_ended = False
        self.transport: Any = None
        self.closes_after_writing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if self._up:
            self._link.connecting = self._link.proxy.made(self._link)
            if self._link.connecting is None:
                self.abort()

    def data_received(self, data: bytes) -> None:
        self._take(data)

    def eof_received(self) -> bool:
        self._take(None)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if exc is not None or not self._has_ended:
            self._link.abort()
        elif self.other.transport is None:
            self._link.proxy.lost(self._link)

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def abort(self) -> None:
        if self.transport is not None:
            connection = self.transport.get_extra_info("socket")
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            self.transport.abort()

    def release(self) -> None:
        """Passes on the bytes that were held back, unless a fault still holds them back."""
        if self.other.transport is not None and not self._link.proxy.is_stalled:
            held, self._held = self._held, []
            for data in held:
                self._pass(data)

    def _take(self, data: bytes | None) -> None:
        loop, delay_s = asyncio.get_running_loop(), self._link.proxy.delay_s
        if delay_s <= 0 and not self._late:
            self._hold(data)
            return
        # Never before earlier bytes, even if the delay has become shorter since.
        due = max(loop.time() + delay_s, self._late[-1][0] if self._late else 0.0)
        self._late.append((due, data))
        if len(self._late) == 1:
            loop.call_at(due, self._arrive)

    def _arrive(self) -> None:
        self._hold(self._late.popleft()[1])
        if self._late:
            asyncio.get_running_loop().call_at(self._late[0][0], self._arrive)

    def _hold(self, data: bytes | None) -> None:
        self._held.append(data)
        self.release()

    def _pass(self, data: bytes | None) -> None:
        target = self.other.transport
        if target is None or target.is_closing():
            return
        if data is None:
            self._has_ended = True
            if not self.other._has_ended:
                target.write_eof()
                return
            for end in (self, self.other):
                if end.transport is not None:
                    end.transport.close()
            return
        target.write(self._link.proxy.passes(self._link, data, up=self._up))
        if self.other.closes_after_writing:
            target.close()
            self.abort()
