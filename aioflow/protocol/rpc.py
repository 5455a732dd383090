"""Calls between processes, without I/O: matches answers to calls.

Both sides may call. The caller numbers its calls. The number of a call is the sequence number of
its frames. The codec encodes arguments and results; errors are sent as data (`protocol.errors`).
Invariants: a call gets at most one answer. An answer to an abandoned call is dropped. An answer to
a call that was never made is a protocol error.

A body that is longer than one frame is sent in several frames, one after the other. The first byte
of each frame tells whether more frames follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from aioflow.core.errors import LocalProtocolError, RemoteProtocolError
from aioflow.core.wire.serializers import Codec, DecodeError
from aioflow.protocol.errors import describe_error, rebuild_error
from aioflow.protocol.framing import CONTROL_BYTES_MAX, NO_CHANNEL, Frame, FrameEncoder, FrameType
from aioflow.protocol.messages import ErrorResponse, decode_message, message_body, unpack_fields

__all__ = [
    "CALL_BYTES_MAX",
    "BadRequest",
    "CallError",
    "Notification",
    "Reply",
    "Request",
    "RpcPeer",
]

CALL_BYTES_MAX = 64 << 20
"""Maximum size in bytes of a call or an answer over all its frames. This limits the memory that a
peer can use.
"""

_METHOD_CHARS_MAX = 200
_CHUNK_BYTES = CONTROL_BYTES_MAX - 1
_LAST, _MORE = b"\x00", b"\x01"


class Request(msgspec.Struct, frozen=True):
    """The peer calls `method(*args)`. Answer with `reply` or `fail`, once."""

    call_id: int
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class BadRequest:
    """The peer calls `method` with arguments that cannot be decoded.

    Answer with `fail(call_id, error)`.
    """

    call_id: int
    method: str
    error: DecodeError = field(compare=False)


class Notification(msgspec.Struct, frozen=True):
    """The peer notifies `method(*args)` and expects no answer."""

    method: str
    args: tuple[Any, ...]


class Reply(msgspec.Struct, frozen=True):
    """The peer answers that call `call_id` has returned `value`."""

    call_id: int
    value: Any


@dataclass(frozen=True, slots=True)
class CallError:
    """The peer answers that call `call_id` has raised `error`, an exception that the caller can
    raise.
    """

    call_id: int
    error: Exception = field(compare=False)


Received = Request | BadRequest | Notification | Reply | CallError
"""Message that `RpcPeer.receive` returns for a complete frame or frames."""


class RpcPeer:
    """One side of a control connection.

    The object lives as long as the connection. When the connection ends, the calls in
    `open_calls` have failed.
    """

    __slots__ = (
        "_codec",
        "_encoder",
        "_gathered",
        "_gathered_bytes",
        "_gathering",
        "_next_call_id",
        "_open",
        "_requested",
    )

    def __init__(self, codec: Codec, encoder: FrameEncoder) -> None:
        self._codec = codec
        self._encoder = encoder
        self._next_call_id = 1
        self._open: dict[int, str] = {}
        """Method name of each call of this side that has no answer yet, by the id of the call."""
        self._requested: dict[int, str] = {}
        """Method name of each call of the peer that is not answered yet, by the id of the call."""
        self._gathering: tuple[FrameType, int] | None = None
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0

    # Sending.

    def call(self, method: str, args: Sequence[Any] = ()) -> tuple[int, bytes]:
        """Begins a call of `method`. Returns the id of the call and the bytes to send.

        Raises TypeNotSupported, which names the method, if an argument cannot be encoded.
        """
        call_id = self._next_call_id
        content = self._frames(
            FrameType.RPC_REQUEST, call_id, self._invocation(method, args), method
        )
        self._next_call_id = call_id + 1
        self._open[call_id] = method
        return call_id, content

    def notify(self, method: str, args: Sequence[Any] = ()) -> bytes:
        """Returns the bytes of a notification: a call that gets no answer."""
        return self._frames(FrameType.RPC_NOTIFY, 0, self._invocation(method, args), method)

    def reply(self, call_id: int, value: Any) -> bytes:
        """Returns the answer `value` to the peer's call `call_id`, as bytes to send.

        Raises TypeNotSupported if `value` cannot be encoded. Then call `fail` instead.
        """
        method = self._requested_method(call_id)
        body = self._codec.encode(value, owner=f"the result of {method}")
        content = self._frames(FrameType.RPC_REPLY, call_id, body, method)
        del self._requested[call_id]
        return content

    def fail(self, call_id: int, error: BaseException) -> bytes:
        """Returns the answer that the peer's call `call_id` has raised `error`, as bytes to
        send.
        """
        method = self._requested_method(call_id)
        content = self._frames(
            FrameType.RPC_ERROR, call_id, message_body(describe_error(error, self._codec)), method
        )
        del self._requested[call_id]
        return content

    def give_up(self, call_id: int) -> None:
        """Abandons the call `call_id` of this side, so that its answer will be dropped.
        Idempotent.
        """
        self._open.pop(call_id, None)

    @property
    def open_calls(self) -> Sequence[int]:
        """Ids of the calls that wait for an answer, in the order in which they were made."""
        return list(self._open)

    # Receiving.

    def receive(self, frame: Frame) -> Received | None:
        """Returns the message that the frame completes. Returns None if more frames must follow, or
        if the call was abandoned.

        Raises RemoteProtocolError for an invalid frame. The caller must then close the connection.
        """
        kind, _, call_id, body = frame
        handle = _HANDLERS.get(kind)
        if handle is None:
            raise RemoteProtocolError(f"a {kind.name} frame is no part of a call")
        gathered = self._gather(kind, call_id, body)
        return None if gathered is None else handle(self, call_id, gathered)

    def _gather(self, kind: FrameType, call_id: int, body: bytes) -> bytes | None:
        """Adds a part of a body. Returns the whole body if this is its last part, otherwise
        None.
        """
        flag = body[:1]
        if flag not in (_LAST, _MORE):
            raise RemoteProtocolError(f"a {kind.name} frame begins with {flag!r}, expected 0 or 1")
        if self._gathering is None:
            if flag == _LAST:
                return body[1:]
            self._gathering = kind, call_id
        elif self._gathering != (kind, call_id):
            was, of = self._gathering
            raise RemoteProtocolError(
                f"{kind.name} {call_id} came in the middle of {was.name} {of}"
            )
        self._gathered.append(body[1:])
        self._gathered_bytes += len(body)
        if self._gathered_bytes > CALL_BYTES_MAX + CONTROL_BYTES_MAX:
            raise RemoteProtocolError(
                f"{kind.name} {call_id} takes more than {CALL_BYTES_MAX} bytes"
            )
        if flag == _MORE:
            return None
        content = b"".join(self._gathered)
        self._gathering, self._gathered_bytes = None, 0
        self._gathered.clear()
        return content

    def _on_request(self, call_id: int, body: bytes) -> Request | BadRequest:
        method, args = self._invoked(body)
        if call_id in self._requested:
            raise RemoteProtocolError(f"call {call_id} of {method} was made twice")
        self._requested[call_id] = method
        try:
            return Request(call_id, method, tuple(self._codec.decode_batch(args)))
        except DecodeError as error:
            # Usually a class that is not loaded here, which concerns this call alone.
            return BadRequest(call_id, method, error)

    def _on_notification(self, call_id: int, body: bytes) -> Notification:
        method, args = self._invoked(body)
        return Notification(method, tuple(self._codec.decode_batch(args)))

    def _on_reply(self, call_id: int, body: bytes) -> Reply | CallError | None:
        if not self._close_call(call_id):
            return None
        try:
            return Reply(call_id, self._codec.decode(body))
        except DecodeError as error:
            return CallError(call_id, error)

    def _on_error(self, call_id: int, body: bytes) -> CallError | None:
        if not self._close_call(call_id):
            return None
        response = decode_message(FrameType.RPC_ERROR, body)
        assert isinstance(response, ErrorResponse), "the schema of RPC_ERROR"
        return CallError(call_id, rebuild_error(response, self._codec))

    def _close_call(self, call_id: int) -> bool:
        """Closes the call `call_id` of this side. Returns whether the call was waiting for its
        answer.
        """
        if not 0 < call_id < self._next_call_id:
            raise RemoteProtocolError(
                f"an answer came to call {call_id}, which was never made; the last one was "
                f"{self._next_call_id - 1}"
            )
        return self._open.pop(call_id, None) is not None

    def _invocation(self, method: str, args: Sequence[Any]) -> bytes:
        return _pack(
            [method, self._codec.encode_batch(list(args), owner=f"the arguments of {method}")]
        )

    def _invoked(self, body: bytes) -> tuple[str, bytes]:
        method, args = unpack_fields(body, "a call", 2)
        if (
            type(method) is not str
            or not 0 < len(method) <= _METHOD_CHARS_MAX
            or type(args) is not bytes
        ):
            raise RemoteProtocolError(
                f"a call has a method of {type(method).__name__} and arguments of "
                f"{type(args).__name__}"
            )
        return method, args

    def _requested_method(self, call_id: int) -> str:
        method = self._requested.get(call_id)
        if method is None:
            raise LocalProtocolError(f"call {call_id} was answered twice, or never made")
        return method

    def _frames(self, kind: FrameType, call_id: int, body: bytes, method: str) -> bytes:
        if len(body) > CALL_BYTES_MAX:
            raise LocalProtocolError(
                f"{kind.name} of {method} takes {len(body)} bytes, expected up to "
                f"{CALL_BYTES_MAX}; send less at once"
            )
        encode, view = self._encoder.encode, memoryview(body)
        stops = range(_CHUNK_BYTES, len(body), _CHUNK_BYTES)
        parts = [
            encode(kind, NO_CHANNEL, call_id, _MORE + view[stop - _CHUNK_BYTES : stop])
            for stop in stops
        ]
        parts.append(encode(kind, NO_CHANNEL, call_id, _LAST + view[len(stops) * _CHUNK_BYTES :]))
        return b"".join(parts)


_HANDLERS: Final[dict[FrameType, Callable[[RpcPeer, int, bytes], Received | None]]] = {
    FrameType.RPC_REQUEST: RpcPeer._on_request,
    FrameType.RPC_NOTIFY: RpcPeer._on_notification,
    FrameType.RPC_REPLY: RpcPeer._on_reply,
    FrameType.RPC_ERROR: RpcPeer._on_error,
}

_pack: Final[Callable[[Any], bytes]] = msgspec.msgpack.Encoder().encode
