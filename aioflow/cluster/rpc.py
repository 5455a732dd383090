"""Calls between the roles over authenticated connections: the driver around `protocol.rpc`.

Both sides may call. A handler is a plain function or a coroutine function, found by name; an
exception of the handler is raised in the caller. When the connection ends, every waiting call fails
with Broken, and `on_closed` is called once. Every running handler is cancelled, since no caller
would get its result. Work that must survive its caller runs outside the handler.

Invariant: calls and notifications reach the handlers in the order in which they were made. A call
is written when it is made, not when it is awaited, and its handler begins when it is read. So a
deployment and a later cancellation arrive in that order.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import AioflowError, Broken, RemoteProtocolError
from aioflow.network.admission import WaitingRoom
from aioflow.network.connection import AuthenticatedConnection, close_all, fresh_nonce
from aioflow.network.security import check_listen, security_of
from aioflow.protocol.framing import CONTROL_PLANE, Frame
from aioflow.protocol.handshake import ClientHandshake, PeerRole, ServerHandshake
from aioflow.protocol.rpc import BadRequest, CallError, Notification, Reply, Request, RpcPeer

if TYPE_CHECKING:
    from aioflow.core.host import Host, Listener
    from aioflow.core.wire.serializers import Codec

__all__ = ["RpcConnection", "RpcServer", "connect_rpc"]

logger = logging.getLogger(__name__)

Handlers = Mapping[str, Callable[..., Any]]


class RpcConnection:
    """The connection to one peer.

    `handlers` are the functions that answer calls of the peer, by name. `on_closed(self)` is called
    once when the connection has ended.
    """

    def __init__(self, codec: Codec, on_closed: Callable[[RpcConnection], None]) -> None:
        self._codec = codec
        self._on_closed = on_closed
        self._connection: AuthenticatedConnection | None = None
        self._peer: RpcPeer | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[asyncio.Task[None], None] = {}
        self._error: Exception | None = None
        self.handlers: Handlers = {}
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # For the owner.

    def call(self, method: str, *args: Any) -> Coroutine[Any, Any, Any]:
        """Calls `method` of the peer at once.

        Awaiting the returned coroutine gives the result, or raises the error of the handler or
        Broken. Raises Broken at once if the connection has ended, and TypeNotSupported if an
        argument cannot be encoded.
        """
        peer = self._open_peer()
        call_id, content = peer.call(method, args)
        answer = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        self._write(content)
        return self._answer_of(call_id, answer, peer)

    def ask(self, method: str, *args: Any) -> asyncio.Future[None]:
        """Calls `method` of the peer at once, and returns a future.

        The future is done once the peer has answered, or is gone. The answer or the error in the
        answer is dropped. Raises TypeNotSupported if an argument cannot be encoded.
        """
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        peer = self._peer
        if peer is None:
            over.set_result(None)
            return over
        call_id, content = peer.call(method, args)
        answer = self._waiting[call_id] = asyncio.get_running_loop().create_future()

        def answered(_: asyncio.Future[Any]) -> None:
            self._waiting.pop(call_id, None)
            peer.give_up(call_id)
            if not over.done():
                over.set_result(None)

        answer.add_done_callback(answered)
        self._write(content)
        return over

    def notify(self, method: str, *args: Any) -> None:
        """Calls `method` of the peer without an answer. The call is dropped if the connection has
        ended."""
        if self._peer is not None:
            self._write(self._peer.notify(method, args))

    @property
    def is_open(self) -> bool:
        return self._peer is not None

    @property
    def is_writable(self) -> bool:
        """False while the send queue is so full that optional messages should be dropped."""
        return self._connection is not None and self._connection.is_writable

    async def close(self) -> None:
        """Sends what is queued, closes the connection, and cancels the handlers that still run.

        Returns once the socket is closed.
        """
        if self._connection is not None:
            await close_all([self._connection])
        await cancel_and_wait(self._answering)

    def abort(self, error: Exception) -> None:
        """Closes the connection at once.

        Messages of the peer that were not read yet are dropped, and waiting calls fail with Broken.
        """
        self._error = self._error or error
        self._peer = None
        self._cancel_answers()
        if self._connection is not None:
            self._connection.abort(error)

    # ConnectionOwner

    def on_connected(self, connection: AuthenticatedConnection) -> None:
        assert connection.encoder is not None
        self._connection = connection
        self._peer = RpcPeer(self._codec, connection.encoder)
        if not self.opened.done():
            self.opened.set_result(None)

    def on_frames(self, connection: AuthenticatedConnection, frames: list[Frame]) -> None:
        for frame in frames:
            peer = self._peer
            if peer is None:
                return  # A handler of an earlier frame closed the connection.
            match peer.receive(frame):
                case Reply(call_id, value):
                    self._settle(call_id, value, None)
                case CallError(call_id, error):
                    self._settle(call_id, None, error)
                case Request(call_id, method, args):
                    self._on_request(peer, call_id, method, args)
                case BadRequest(call_id, _, error):
                    self._write(peer.fail(call_id, error))
                case Notification(method, args):
                    self._on_notification(method, args)

    def on_writable(self, connection: AuthenticatedConnection) -> None:
        """Does nothing: the few control messages wait in the transport."""

    def on_connection_lost(
        self, connection: AuthenticatedConnection, error: Exception | None
    ) -> None:
        self._peer = None
        self._cancel_answers()
        broken = Broken(
            f"the connection to {connection.peer} ended: "
            f"{self._error or error or 'the other side closed it'}"
        )
        if not self.opened.done():
            self.opened.set_exception(broken)
            self.opened.exception()  # Marks it as retrieved; there may be no waiter.
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(broken)
                answer.exception()  # Likewise: the call may have been made and not awaited yet.
        self._on_closed(self)

    def _cancel_answers(self) -> None:
        for task in list(self._answering):
            task.cancel()

    def _open_peer(self) -> RpcPeer:
        if self._peer is None:
            raise Broken("the connection is gone; the call was not made")
        return self._peer

    async def _answer_of(self, call_id: int, answer: asyncio.Future[Any], peer: RpcPeer) -> Any:
        try:
            return await answer
        finally:
            self._waiting.pop(call_id, None)
            peer.give_up(call_id)

    def _handler(self, method: str) -> Callable[..., Any]:
        handler = self.handlers.get(method)
        if handler is None:
            raise RemoteProtocolError(f"the peer called {method!r}, which is not offered here")
        return handler

    def _on_notification(self, method: str, args: tuple[Any, ...]) -> None:
        try:
            self._handler(method)(*args)
        # The caller expects no answer, so only the connection can show the error.
        except Exception as error:
            logger.exception("the notification %r failed; its connection is closed", method)
            self.abort(error)

    def _on_request(self, peer: RpcPeer, call_id: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            result = self._handler(method)(*args)
        except Exception as error:  # noqa: BLE001  # Any error of a handler goes to the caller.
            self._fail(peer, call_id, method, error)
            return
        if inspect.isawaitable(result):
            task = asyncio.get_running_loop().create_task(
                self._answer(peer, call_id, method, result), name=f"rpc {method}"
            )
            self._answering[task] = None
            task.add_done_callback(partial(self._answering.pop))
            if inspect.iscoroutine(result):
                # It may have been cancelled before it began.
                task.add_done_callback(lambda _: result.close())
        else:
            self._reply(peer, call_id, method, result)

    async def _answer(
        self, peer: RpcPeer, call_id: int, method: str, result: Awaitable[Any]
    ) -> None:
        try:
            value = await result
        except Exception as error:  # noqa: BLE001  # As above.
            self._fail(peer, call_id, method, error)
        else:
            self._reply(peer, call_id, method, value)

    def _reply(self, peer: RpcPeer, call_id: int, method: str, value: Any) -> None:
        if self._peer is peer:
            try:
                content = peer.reply(call_id, value)
            except AioflowError as error:  # The result cannot be encoded.
                content = peer.fail(call_id, error)
            self._write(content)

    def _fail(self, peer: RpcPeer, call_id: int, method: str, error: Exception) -> None:
        if not isinstance(error, AioflowError):
            logger.debug("call of %s failed: %r", method, error)
        if self._peer is peer:
            self._write(peer.fail(call_id, error))

    def _settle(self, call_id: int, value: Any, error: BaseException | None) -> None:
        answer = self._waiting.get(call_id)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)
            answer.exception()  # Marks it as retrieved: the call may not be awaited yet.

    def _write(self, content: bytes) -> None:
        if self._connection is not None:
            self._connection.write([content])


class RpcServer:
    """Accepts connections of peers that have one of the `roles`.

    `on_peer(connection)` returns the handlers of a peer before its first call is read.
    """

    def __init__(
        self,
        host: Host,
        secret: bytes,
        codec: Codec,
        roles: frozenset[PeerRole],
        on_peer: Callable[[RpcConnection], Handlers],
        on_closed: Callable[[RpcConnection], None],
    ) -> None:
        self._host = host
        self._secret = secret
        self._codec = codec
        self._roles = roles
        self._on_peer = on_peer
        self._on_closed = on_closed
        self._listener: Listener | None = None
        self._connections: dict[RpcConnection, AuthenticatedConnection] = {}
        self._waiting: WaitingRoom[AuthenticatedConnection] = WaitingRoom("the RPC server")

    async def listen(self, address: str = "127.0.0.1", port: int = 0) -> int:
        """Starts to listen and returns the port.

        Raises NotAuthenticated for an unsafe address; see `check_listen`.
        """
        check_listen(self._host, address)
        tls = security_of(self._host).tls
        self._listener = await self._host.net.listen(
            self._accept, address, port, ssl=None if tls is None else tls.server
        )
        return self._listener.port

    async def close(self) -> None:
        """Stops listening and closes every connection.

        Returns when their sockets are closed. Idempotent.
        """
        if self._listener is not None:
            self._listener.close()
        strangers = self._waiting.close()
        peers = dict(self._connections)
        await close_all([*peers.values(), *strangers])
        await cancel_and_wait([task for connection in peers for task in connection._answering])

    def _accept(self) -> asyncio.BaseProtocol:
        connection = RpcConnection(self._codec, self._closed)
        connection.handlers = self._on_peer(connection)
        handshake = ServerHandshake(self._secret, fresh_nonce(self._host), self._roles)
        transport = AuthenticatedConnection(handshake, CONTROL_PLANE, connection, self._waiting)
        # Only once it is open: after a failed TLS handshake a connection ends without a callback.
        connection.opened.add_done_callback(partial(self._opened, connection, transport))
        return transport

    def _opened(
        self,
        connection: RpcConnection,
        transport: AuthenticatedConnection,
        opened: asyncio.Future[None],
    ) -> None:
        if opened.exception() is None and not transport.closed.done():
            self._connections[connection] = transport

    def _closed(self, connection: RpcConnection) -> None:
        self._connections.pop(connection, None)
        if connection.opened.exception() is None:  # The others never became peers.
            self._on_closed(connection)


async def connect_rpc(
    host: Host,
    secret: bytes,
    codec: Codec,
    role: PeerRole,
    address: tuple[str, int],
    handlers: Handlers,
    on_closed: Callable[[RpcConnection], None],
) -> RpcConnection:
    """Connects to the process at `address` as a peer with the role `role`.

    Raises OSError if no process listens, Broken if the peer refuses the connection.
    """
    connection = RpcConnection(codec, on_closed)
    connection.handlers = handlers
    handshake = ClientHandshake(secret, role, fresh_nonce(host))
    tls = security_of(host).tls
    transport, _ = await host.net.connect(
        partial(AuthenticatedConnection, handshake, CONTROL_PLANE, connection),
        *address,
        ssl=None if tls is None else tls.client,
    )
    try:
        await connection.opened
    except BaseException:
        transport.abort()
        raise
    return connection
