"""Frames: cuts, checks and classifies the bytes of a connection, before any body is parsed.

    4 magic | 1 version | 1 type | 4 channel | 4 length of the body | 4 CRC-32
        || 8 sequence | body | 16 MAC, if keyed

All integers are big endian. The CRC covers the whole frame except the magic and the MAC. `channel`
is a number that the consumer chose for one of its inputs. `sequence` numbers the frames of a
channel's batches and events, or is the id of a call.

Invariants: magic, version, type and length are checked from the header alone, as soon as its bytes
are there. So the decoder never waits for a body that it would refuse. Each type has a maximum
length of its own. Types that do not belong to the connection's plane are refused, so a peer that
may send data cannot make calls. After an error the decoder raises the same error at every call. The
cost is linear in the number of bytes, even if they arrive in small pieces.

With a key, each frame ends in an HMAC-SHA256, cut to 16 bytes, over the frame's number in its
direction and the frame. This MAC is for connections between machines without TLS. Each direction
has a key of its own, so an attacker cannot send a frame back to its sender.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import IntEnum
from typing import Final, NamedTuple
from zlib import crc32

from aioflow.core.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "CONTROL_BYTES_MAX",
    "CONTROL_PLANE",
    "DATA_PLANE",
    "NO_CHANNEL",
    "PROTOCOL_VERSION",
    "SEGMENT_BYTES",
    "Frame",
    "FrameDecoder",
    "FrameEncoder",
    "FrameType",
]

MAGIC: Final = b"aioF"
PROTOCOL_VERSION = 1
"""Version of the protocol, which both ends of a connection must have."""

NO_CHANNEL = 0xFFFF_FFFF
"""Channel number of a frame that concerns the connection as a whole."""

SEGMENT_BYTES = 32_768
"""Maximum size of the body of a data frame: one segment of network memory."""

CONTROL_BYTES_MAX = 1 << 20
"""Maximum size of the body of any other frame."""

_SMALL_BYTES_MAX = 1024
"""Maximum size of the body of a frame that contains only a few numbers and an id."""

HEADER: Final = struct.Struct(">4sBBIIIQ")
"""Format of the header including the sequence number: 26 bytes."""

_COVERED: Final = struct.Struct(">BBII")
_LENGTH_AT = 10
"""Offset of the length in the header. Magic, version, type and channel come before it."""

_MAC_BYTES = 16
_COUNTER: Final = struct.Struct(">Q")


class FrameType(IntEnum):
    """Type of a frame. Types 0 to 12 are those of Flink's NettyMessage; types from 16 on are
    aioflow's own.

    Type 9, Flink's BacklogAnnouncement, is not needed, because each channel has buffers of its own.
    """

    BUFFER_RESPONSE = 0
    ERROR_RESPONSE = 1
    PARTITION_REQUEST = 2
    CANCEL_PARTITION_REQUEST = 4
    CLOSE_REQUEST = 5
    ADD_CREDIT = 6
    RESUME_CONSUMPTION = 7
    ACK_ALL_USER_RECORDS_PROCESSED = 8
    NEW_BUFFER_SIZE = 10
    SEGMENT_ID = 11
    """Type that is never sent: only Flink's tiered storage has it."""
    EVENT_RESPONSE = 12
    RPC_REQUEST = 16
    RPC_REPLY = 17
    RPC_ERROR = 18
    RPC_NOTIFY = 19
    HEARTBEAT = 20
    HEARTBEAT_REPLY = 21
    HELLO = 22
    """First frame of a data connection, which names the link between two processes."""


_HEARTBEATS = (FrameType.HEARTBEAT, FrameType.HEARTBEAT_REPLY)

DATA_PLANE: Final = frozenset(
    [
        *(kind for kind in FrameType if kind <= 12 and kind is not FrameType.SEGMENT_ID),
        *_HEARTBEATS,
        FrameType.HELLO,
    ]
)
"""Frame types of connections between TaskManagers."""

CONTROL_PLANE: Final = frozenset(
    [
        FrameType.RPC_REQUEST,
        FrameType.RPC_REPLY,
        FrameType.RPC_ERROR,
        FrameType.RPC_NOTIFY,
        *_HEARTBEATS,
    ]
)
"""Frame types of connections between a JobManager and its peers."""

LENGTH_MAX: Final[dict[FrameType, int]] = {
    kind: SEGMENT_BYTES
    if kind in (FrameType.BUFFER_RESPONSE, FrameType.EVENT_RESPONSE)
    else CONTROL_BYTES_MAX
    if kind is FrameType.ERROR_RESPONSE or FrameType.RPC_REQUEST <= kind <= FrameType.RPC_NOTIFY
    else _SMALL_BYTES_MAX
    for kind in FrameType
}
"""Maximum size of the body in bytes, by type of frame.

The limit is low for bodies of a few numbers. This also limits how many objects decoding creates.
"""


class Frame(NamedTuple):
    """One complete and intact frame."""

    type: FrameType
    channel: int
    sequence: int
    body: bytes


class FrameEncoder:
    """Encodes the frames of one direction of one connection, in the order of the calls."""

    __slots__ = ("_count", "_key")

    def __init__(self, mac_key: bytes | None = None) -> None:
        """Makes an encoder. `mac_key` is the MAC key of this direction, from the handshake; None
        means that frames have no MAC.
        """
        self._key = None if mac_key is None else hmac.new(mac_key, digestmod=hashlib.sha256)
        self._count = 0

    def encode(
        self, kind: FrameType, channel: int = NO_CHANNEL, sequence: int = 0, body: bytes = b""
    ) -> bytes:
        """Returns the whole frame as bytes."""
        return b"".join(self.encode_parts(kind, channel, sequence, body))

    def encode_parts(
        self,
        kind: FrameType,
        channel: int,
        sequence: int,
        prefix: bytes,
        payload: bytes | memoryview = b"",
    ) -> list[bytes | memoryview]:
        """Returns the frame with body `prefix + payload` as pieces to write. Does not copy
        `payload`.

        Raises LocalProtocolError if the body exceeds the limit of its type.
        """
        length = len(prefix) + len(payload)
        if length > LENGTH_MAX[kind]:
            raise LocalProtocolError(
                f"the body of a {kind.name} takes {length} bytes, expected up to {LENGTH_MAX[kind]}"
            )
        checksum = crc32(_COVERED.pack(PROTOCOL_VERSION, kind, channel, length))
        checksum = crc32(payload, crc32(prefix, crc32(_COUNTER.pack(sequence), checksum)))
        head = (
            HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, channel, length, checksum, sequence) + prefix
        )
        pieces: list[bytes | memoryview] = [head, payload] if len(payload) else [head]
        if self._key is not None:
            mac = self._key.copy()
            mac.update(_COUNTER.pack(self._count))
            mac.update(head)
            mac.update(payload)
            pieces.append(mac.digest()[:_MAC_BYTES])
            self._count += 1
        return pieces


class FrameDecoder:
    """Decodes the frames of one direction of one connection. Refuses the frame types of the other
    plane: a data connection accepts no calls, and a control connection no data.
    """

    __slots__ = ("_accepted", "_buffer", "_count", "_error", "_key", "_wanted")

    def __init__(
        self, accepted: frozenset[FrameType] = DATA_PLANE, mac_key: bytes | None = None
    ) -> None:
        """Makes a decoder. `mac_key` is the MAC key of the peer's direction, from the handshake;
        None means that frames have no MAC.
        """
        self._accepted: dict[int, FrameType] = {
            int(kind): kind for kind in FrameType if kind in accepted
        }
        self._key = None if mac_key is None else hmac.new(mac_key, digestmod=hashlib.sha256)
        self._count = 0
        self._buffer = bytearray()
        self._wanted = 0
        """Size in bytes of the first frame in the buffer; 0 while unknown."""
        self._error: RemoteProtocolError | None = None

    def receive(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Returns the frames that `data` completes, and keeps a copy of the rest.

        Raises RemoteProtocolError at the first byte that cannot be part of a frame, and at every
        later call. Complete frames before that byte in the same `data` are lost, because the
        connection ends. Channels resume on the next connection.
        """
        if self._error is not None:
            raise self._error
        buffer = self._buffer
        try:
            if not buffer:
                frames, used, self._wanted = self._parse(memoryview(data))
                buffer += memoryview(data)[used:]
                return frames
            buffer += data
            if len(buffer) < self._wanted:
                return []
            # The view must be released before the buffer may shrink.
            with memoryview(buffer) as view:
                frames, used, self._wanted = self._parse(view)
        except RemoteProtocolError as error:
            self._error = error
            self._buffer = bytearray()  # The traceback still holds views of the old buffer.
            raise
        del buffer[:used]
        return frames

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes that belong to an incomplete frame."""
        return len(self._buffer)

    def _parse(self, view: memoryview) -> tuple[list[Frame], int, int]:
        """Returns the complete frames in `view`, their total size in bytes, and the size of the
        next frame, 0 if unknown.
        """
        accepted, limits, unpack_header, header_bytes = (
            self._accepted,
            LENGTH_MAX,
            HEADER.unpack_from,
            HEADER.size,
        )
        mac_bytes = 0 if self._key is None else _MAC_BYTES
        frames: list[Frame] = []
        at, size = 0, len(view)
        while size - at >= header_bytes:
            magic, version, number, channel, length, checksum, sequence = unpack_header(view, at)
            kind = accepted.get(number)
            if (
                magic != MAGIC
                or version != PROTOCOL_VERSION
                or kind is None
                or length > limits[kind]
            ):
                self._refuse(view[at : at + header_bytes])
                raise AssertionError("a header was refused without a reason")
            body_at = at + header_bytes
            end = body_at + length
            if end + mac_bytes > size:
                return frames, at, end + mac_bytes - at
            if crc32(view[at + 18 : end], crc32(view[at + 4 : at + 14])) != checksum:
                raise RemoteProtocolError(
                    f"the CRC of a {kind.name} frame of {length} bytes does not match: bytes were "
                    "changed"
                )
            if mac_bytes:
                self._check_mac(view[at:end], view[end : end + mac_bytes])
            frames.append(Frame(kind, channel, sequence, bytes(view[body_at:end])))
            at = end + mac_bytes
        if at < size:
            self._refuse(view[at:])
        return frames, at, 0

    def _refuse(self, header: memoryview) -> None:
        """Raises RemoteProtocolError if `header`, which may be incomplete, is invalid. Returns if
        it is valid so far.
        """
        start = bytes(header[:4])
        if start != MAGIC[: len(start)]:
            raise RemoteProtocolError(
                f"a frame begins with {start!r}, expected {MAGIC!r}; is this another protocol?"
            )
        if len(header) > 4 and header[4] != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"the peer speaks version {header[4]} of the protocol, expected "
                f"{PROTOCOL_VERSION}; run the same release on both sides"
            )
        if len(header) > 5 and header[5] not in self._accepted:
            raise RemoteProtocolError(
                f"a frame of type {header[5]} is not part of this conversation"
            )
        if len(header) >= _LENGTH_AT + 4:
            kind = self._accepted[header[5]]
            length = int.from_bytes(header[_LENGTH_AT : _LENGTH_AT + 4], "big")
            if length > LENGTH_MAX[kind]:
                raise RemoteProtocolError(
                    f"a {kind.name} frame announces {length} bytes, expected up to "
                    f"{LENGTH_MAX[kind]}"
                )

    def _check_mac(self, content: memoryview, given: memoryview) -> None:
        assert self._key is not None, "only called with a key"
        mac = self._key.copy()
        mac.update(_COUNTER.pack(self._count))
        mac.update(content)
        if not hmac.compare_digest(mac.digest()[:_MAC_BYTES], given):
            raise RemoteProtocolError(
                f"the MAC of frame {self._count} does not match: it was changed, repeated or left "
                "out on the way"
            )
        self._count += 1
