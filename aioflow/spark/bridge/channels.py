"""The service's side of the channels to Spark: a listener for the tasks of Spark jobs.

A task proves that it knows the secret, and names a stream and a partition. The listener then passes
the task's frames to this stream. Bodies of frames are received straight into the memory that Arrow
will read, so nothing is copied on the loop. A connection is closed if the task sends an unexpected
frame or names an unknown stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from aioflow.core.aio import wait_all
from aioflow.core.errors import Closed, NotAuthenticated, ProtocolError, RemoteProtocolError
from aioflow.network.admission import WaitingRoom, peer_of, tune
from aioflow.network.connection import HANDSHAKE_TIMEOUT_S, fresh_nonce, fresh_secret
from aioflow.network.security import is_loopback
from aioflow.protocol.handshake import PeerRole, ServerHandshake, Side, direction_key
from aioflow.spark.bridge.executor import ServiceAddress
from aioflow.spark.bridge.frames import (
    HEADER_BYTES,
    FrameKind,
    Hello,
    Sealer,
    encode_words,
    parse_header,
    parse_hello,
)

if TYPE_CHECKING:
    from aioflow.core.host import Host, Listener
    from aioflow.spark.bridge.settings import Reach

__all__ = ["Channel", "ChannelListener", "ChannelStream"]

CLOSE_TIMEOUT_S = 2.0


class ChannelStream(Protocol):
    """The interface of an object that receives the frames of channels. Its methods are called on
    the event loop.
    """

    @property
    def op(self) -> str:
        """Direction of the tasks of the stream: push, pull or batch, as in `Hello`."""

    def on_task(self, channel: Channel, hello: Hello) -> None:
        """Handles a newly connected task, which waits for a START frame."""

    def on_frame(self, channel: Channel, kind: FrameKind, body: bytearray) -> None:
        """Handles a frame. The stream may keep the body. If it raises a ProtocolError, the channel
        is closed.
        """

    def on_writable(self, channel: Channel) -> None: ...
    def on_lost(self, channel: Channel, error: Exception | None) -> None: ...


class ChannelListener:
    """Listens for connections of the tasks of Spark jobs, at the address `reach`.

    `add` gives a stream the name by which tasks find it.
    """

    def __init__(self, host: Host, reach: Reach) -> None:
        self._host = host
        self._reach = reach
        self._secret = fresh_secret(host)
        self._streams: dict[str, ChannelStream] = {}
        self._channels: dict[Channel, None] = {}
        self._strangers: WaitingRoom[Channel] = WaitingRoom("the listener for tasks of Spark")
        self._listener: Listener | None = None

    @property
    def rejected(self) -> int:
        """Number of connections that failed the handshake or asked for an unknown stream."""
        return self._strangers.rejected

    async def open(self) -> None:
        """Starts to listen.

        Raises NotAuthenticated if the certificates are invalid, or if others on the network could
        read the rows and plain text is not allowed.
        """
        reach = self._reach
        reach.check()
        ssl = None if reach.tls is None else reach.tls.load().server
        self._listener = await self._host.net.listen(
            lambda: Channel(self), reach.address, 0, ssl=ssl
        )

    @property
    def where(self) -> ServiceAddress:
        """Returns the address and secret that a task needs to connect."""
        if self._listener is None:
            raise Closed("no listener for the tasks of Spark: open() comes first")
        return ServiceAddress(
            self._reach.address, self._listener.port, self._secret, self._reach.tls
        )

    def add(self, stream: ChannelStream, name: str = "") -> str:
        """Adds a stream. Returns its name, which is never used for another stream."""
        name = name or self._host.ids.new("spark stream")
        self._streams[name] = stream
        return name

    def remove(self, name: str) -> None:
        """Removes a stream. Tasks that ask for it later get the answer that it is over.

        Has no effect for an unknown name.
        """
        stream = self._streams.pop(name, None)
        for channel in list(self._channels):
            if channel.stream is stream and stream is not None:
                channel.abort()

    async def close(self) -> None:
        """Stops listening and closes every channel."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        channels = [*self._channels, *self._strangers.close()]
        for channel in self._channels:
            channel.abort()
        if channels:
            await wait_all([channel.closed for channel in channels], timeout_s=CLOSE_TIMEOUT_S)

    # Called by the channels.

    def handshake(self) -> ServerHandshake:
        return ServerHandshake(
            self._secret, fresh_nonce(self._host), frozenset((PeerRole.EXECUTOR,))
        )

    def entered(self, channel: Channel) -> None:
        self._strangers.enter(channel)

    def find(self, channel: Channel, hello: Hello) -> ChannelStream | None:
        stream = self._streams.get(hello.stream)
        if stream is not None and stream.op != hello.op:
            raise RemoteProtocolError(
                f"a task wants to {hello.op} at a stream of those that {stream.op}"
            )
        self._strangers.leave(channel)
        self._channels[channel] = None
        return stream

    def left(self, channel: Channel, error: Exception | None) -> None:
        self._channels.pop(channel, None)
        self._strangers.reject(channel, error)


class Channel(asyncio.BufferedProtocol):
    """The connection to one attempt of a Spark task."""

    def __init__(self, listener: ChannelListener) -> None:
        self._listener = listener
        self._handshake = listener.handshake()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self._writes: Sealer | None = None
        self._reads = Sealer()
        # What is being received: handshake bytes, or header, body and trailer in turn.
        self._buffer = bytearray(HEADER_BYTES)
        self._have = 0
        self._take: Callable[[], None] | None = None
        self._header = b""
        self._kind = FrameKind.HELLO
        self._body = bytearray()
        self.stream: ChannelStream | None = None
        self.hello: Hello | None = None
        self.is_writable = True
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = self._transport = cast("asyncio.Transport", transport)
        tune(transport)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._on_late)
        self._buffer = bytearray(256)
        self._listener.entered(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._take is None:
                self._prove(bytes(self._buffer[:nbytes]))
                return
            self._have += nbytes
            while self._have == len(self._buffer):
                take = self._take
                self._have = 0
                take()
        except (NotAuthenticated, ProtocolError) as error:
            self.abort(error)

    def eof_received(self) -> None:
        """Does nothing. The transport then closes itself."""

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        if self.stream is not None:
            self.stream.on_writable(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        error = self._error or exc
        self._listener.left(self, error)
        if not self.closed.done():
            self.closed.set_result(None)
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.on_lost(self, error)

    @property
    def peer(self) -> str:
        """Address of the task, for log and error messages."""
        return peer_of(self._transport)

    # Called by the stream.

    def send(self, kind: FrameKind, *parts: bytes | memoryview) -> None:
        """Sends a frame. Drops the frame if the connection is lost, which `on_lost` reports to the
        stream.
        """
        transport = self._transport
        assert self._writes is not None, "a stream has the channel after the handshake"
        if transport is not None and not transport.is_closing():
            for piece in self._writes.seal(kind, *parts):
                transport.write(piece)

    def fail(self, reason: str) -> None:
        """Sends an error, so that the Spark task fails with this reason.

        The task closes the connection. If the service closed it, a frame that the task is sending
        would reset the connection, and the reason would be lost.
        """
        self.send(FrameKind.ERROR, encode_words(reason[:10_000]))
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self.abort)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self, error: Exception | None = None) -> None:
        self._error = self._error or error
        if self._transport is not None:
            self._transport.abort()

    # Receiving.

    def _prove(self, data: bytes) -> None:
        answer = self._handshake.receive(data)
        assert self._transport is not None
        if answer:
            self._transport.write(answer)
        done = self._handshake.done
        if done is None:
            return
        if self._transport.get_extra_info("ssl_object") is not None or is_loopback(
            self._transport.get_extra_info("peername")
        ):
            self._writes, self._reads = Sealer(), Sealer()
        else:
            key = done.session_key
            self._writes, self._reads = (
                Sealer(direction_key(key, Side.SERVER)),
                Sealer(direction_key(key, Side.CLIENT)),
            )
        self._await_header()
        # Bytes that arrived together with the proof.
        rest = done.leftover
        while rest and not self._transport.is_closing():
            view = self.get_buffer(len(rest))
            count = min(len(view), len(rest))
            view[:count] = rest[:count]
            rest = rest[count:]
            view.release()
            self.buffer_updated(count)

    def _await_header(self) -> None:
        self._buffer, self._take = bytearray(HEADER_BYTES), self._on_header

    def _on_header(self) -> None:
        self._header = bytes(self._buffer)
        self._kind, length = parse_header(self._header)
        if self.hello is None and self._kind is not FrameKind.HELLO:
            raise RemoteProtocolError(f"a task began with a {self._kind.name}, expected a HELLO")
        self._buffer, self._take = bytearray(length), self._on_body
        if not length:
            self._on_body()

    def _on_body(self) -> None:
        self._body = self._buffer
        if self._reads.trailer_bytes:
            self._buffer, self._take = bytearray(self._reads.trailer_bytes), self._on_trailer
        else:
            self._on_frame()

    def _on_trailer(self) -> None:
        self._reads.check(self._header, self._body, bytes(self._buffer))
        self._on_frame()

    def _on_frame(self) -> None:
        kind, body, self._body = self._kind, self._body, bytearray()
        self._await_header()
        if self.hello is None:
            self.hello = parse_hello(body)
            stream = self._listener.find(self, self.hello)
            self._cancel_timer()
            if stream is None:
                self.fail(
                    "the service does not wait for this task any more: its job was cancelled, or "
                    "it is over"
                )
                return
            self.stream = stream
            stream.on_task(self, self.hello)
        elif self.stream is not None:
            if kind in (FrameKind.HELLO, FrameKind.START, FrameKind.ACK):
                raise RemoteProtocolError(f"a task sent a {kind.name}")
            self.stream.on_frame(self, kind, body)

    def _on_late(self) -> None:
        self.abort(
            NotAuthenticated(f"a task did not say who it is within {HANDSHAKE_TIMEOUT_S:g} s")
        )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
