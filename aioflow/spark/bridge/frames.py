"""The frames between a service and the tasks of a Spark job, after the handshake.

The frames carry whole Arrow batches, and a few short messages before and after them.

    4 length of the body | 1 kind || body | 16 MAC, if keyed

    task -> service   HELLO  {op, stream, partition, attempt}
                      BATCH, SCHEMA, END when it pushes; CREDIT when it pulls
    service -> task   START  {window} and where to go on
                      CREDIT, ACK when it pushes; BATCH, SCHEMA, END when it pulls
    either            ERROR  a sentence; the connection ends with it

Each batch needs one credit; other frames need none. The receiver checks the length of a body before
it waits for the first byte.

The `chain` of a partition is a checksum over the batches sent so far. A task that continues after n
rows finds out by the chain whether the rows are the same as before. The frame of a pushed batch
contains the chain that includes this batch.

On connections that are not on loopback, each frame ends in a MAC. It is an HMAC-SHA256, cut to 16
bytes, over the frame's number in its direction and the frame.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import IntEnum
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgpack

from aioflow.core.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "HEADER_BYTES", "MAC_BYTES", "BatchBody", "FrameKind", "Hello", "Sealer", "Start",
    "decode_words", "encode_words", "parse_header", "parse_hello", "parse_start",
]  # fmt: skip

HEADER: Final = struct.Struct(">IB")
HEADER_BYTES: Final = HEADER.size
MAC_BYTES: Final = 16
_COUNTER: Final = struct.Struct(">Q")
_CHAIN: Final = struct.Struct(">I")

BATCH_BYTES_MAX: Final = 1 << 30
"""Maximum size of a batch, in bytes. Arrow's own limit is 2 GiB. Spark makes batches of 10,000
rows.
"""

WORDS_BYTES_MAX: Final = 1 << 16
SCHEMA_BYTES_MAX: Final = 1 << 22


class FrameKind(IntEnum):
    """The type of a frame."""

    HELLO = 1
    START = 2
    CREDIT = 3
    SCHEMA = 4
    BATCH = 5
    END = 6
    ACK = 7
    ERROR = 8


class Hello(NamedTuple):
    """The first message of a task. `attempt` is Spark's id of the task attempt, unique in an
    application.
    """

    op: str
    """Direction of the rows: "push" or "pull". Or "batch", which announces a batch that a Connect
    server has computed. Then `partition` is the batch's number, and the answer START has the number
    of the attempt as `rows`."""
    stream: str
    partition: int
    attempt: int


class Start(NamedTuple):
    """The position at which a task begins: after `rows` rows, whose checksum is `chain`.

    `done` means that no more rows of this partition are needed.
    """

    window: int
    rows: int = 0
    chain: int = 0
    done: bool = False


class BatchBody:
    """Functions for the body of a BATCH frame: 4 bytes of checksum (the chain), then the batch in
    Arrow's IPC format.
    """

    @staticmethod
    def prefix(chain: int) -> bytes:
        return _CHAIN.pack(chain)

    @staticmethod
    def split(body: bytes | bytearray | memoryview) -> tuple[int, memoryview]:
        """Returns the checksum (the chain) and the bytes of the batch, which are not copied.

        Raises RemoteProtocolError if the body is too short.
        """
        if len(body) < _CHAIN.size:
            raise RemoteProtocolError(
                f"the body of a batch has {len(body)} bytes, expected a chain of {_CHAIN.size} "
                "and the batch"
            )
        return _CHAIN.unpack_from(body)[0], memoryview(body)[_CHAIN.size :]

    @staticmethod
    def link(chain: int, batch: bytes | memoryview) -> int:
        """Returns the new chain. This is the checksum over the batches that `chain` covers and then
        `batch`.
        """
        return crc32(batch, chain)


class Sealer:
    """Encodes the frames of one direction at the sender, or checks them at the receiver.

    With a key it adds a MAC to each frame, or checks the MAC.
    """

    __slots__ = ("_count", "_key")

    def __init__(self, mac_key: bytes | None = None) -> None:
        self._key = None if mac_key is None else hmac.new(mac_key, digestmod=hashlib.sha256)
        self._count = 0

    @property
    def trailer_bytes(self) -> int:
        return 0 if self._key is None else MAC_BYTES

    def seal(self, kind: FrameKind, *parts: bytes | memoryview) -> list[bytes | memoryview]:
        """Returns the frame as pieces to write one after the other.

        `parts` make up the body and are not copied.
        """
        length = sum(len(part) for part in parts)
        limit = _limit(kind)
        if length > limit:
            raise LocalProtocolError(
                f"the body of a {kind.name} takes {length} bytes, expected up to {limit}"
            )
        pieces: list[bytes | memoryview] = [HEADER.pack(length, kind), *parts]
        if self._key is not None:
            pieces.append(self._mac(pieces))
        return pieces

    def check(
        self, header: bytes | bytearray, body: bytes | bytearray, trailer: bytes | bytearray
    ) -> None:
        """Raises RemoteProtocolError if the frame is not the one that the peer sent."""
        if self._key is not None and not hmac.compare_digest(
            self._mac([header, body]), bytes(trailer)
        ):
            raise RemoteProtocolError(
                "a frame was changed on the way, expected the MAC of the session"
            )

    def _mac(self, pieces: list[Any]) -> bytes:
        assert self._key is not None
        mac = self._key.copy()
        mac.update(_COUNTER.pack(self._count))
        for piece in pieces:
            mac.update(piece)
        self._count += 1
        return mac.digest()[:MAC_BYTES]


def parse_header(header: bytes | bytearray | memoryview) -> tuple[FrameKind, int]:
    """Returns the kind of the frame and the length of its body in bytes.

    Raises RemoteProtocolError for an unknown kind, and for a length above its limit.
    """
    length, number = HEADER.unpack(header)
    try:
        kind = FrameKind(number)
    except ValueError:
        raise RemoteProtocolError(
            f"a frame is of kind {number}, expected 1 to {max(FrameKind)}; run the same release"
        ) from None
    if length > _limit(kind):
        raise RemoteProtocolError(
            f"the body of a {kind.name} takes {length} bytes, expected up to {_limit(kind)}"
        )
    return kind, length


def encode_words(*words: Any) -> bytes:
    """Encodes plain values as the body of a frame that is neither a batch nor a schema."""
    body: bytes = msgpack.packb(words)
    return body


def decode_words(kind: FrameKind, body: bytes | bytearray | memoryview, *types: type) -> list[Any]:
    """Returns the values in the body of a frame. They must have the types `types`, in this order.

    Raises RemoteProtocolError if values have other types, or if the body cannot be read.
    """
    try:
        words = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"the body of a {kind.name} cannot be read: {error}") from None
    if not isinstance(words, list) or [type(word) for word in words] != list(types):
        expected = ", ".join(type_.__name__ for type_ in types)
        raise RemoteProtocolError(
            f"the body of a {kind.name} is {words!r:.200}, expected ({expected})"
        )
    return words


def parse_hello(body: bytes | bytearray | memoryview) -> Hello:
    """Decodes the body of a HELLO. Raises RemoteProtocolError if it is invalid."""
    hello = Hello(*decode_words(FrameKind.HELLO, body, str, str, int, int))
    if hello.op not in ("push", "pull", "batch") or hello.partition < 0:
        raise RemoteProtocolError(
            f"a task said {hello}, expected to push or pull a partition, or to give a batch"
        )
    return hello


def parse_start(body: bytes | bytearray | memoryview) -> Start:
    """Decodes the body of a START. Raises RemoteProtocolError if it is invalid."""
    return Start(*decode_words(FrameKind.START, body, int, int, int, bool))


def _limit(kind: FrameKind) -> int:
    if kind is FrameKind.BATCH:
        return BATCH_BYTES_MAX
    return SCHEMA_BYTES_MAX if kind is FrameKind.SCHEMA else WORDS_BYTES_MAX
