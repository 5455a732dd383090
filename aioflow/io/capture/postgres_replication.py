"""A replication connection to PostgreSQL: simple queries, then the stream of a replication slot.

asyncpg opens the connection: it parses the dsn, encrypts, authenticates, and tries several hosts.
asyncpg lacks the replication protocol, so this module then uses the connection's transport
directly. Only a few kinds of messages are needed: a query, its rows, and "copy both". In this mode
the server sends changes and keepalives, and the client reports how far it has come. See "Streaming
Replication Protocol" in PostgreSQL's documentation.

Invariant: a bounded number of received bytes waits in memory, see `Frames`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from struct import Struct
from typing import Any, NamedTuple

from aioflow.core.errors import MalformedInput
from aioflow.io.capture.change_reader import Frames
from aioflow.io.capture.pgoutput import EPOCH_US

__all__ = ["Keepalive", "ReplicationConnection", "XLogData", "literal"]

SETTINGS = {
    "replication": "database",
    "datestyle": "ISO",
    "timezone": "UTC",
    "intervalstyle": "iso_8601",
    "bytea_output": "hex",
    "extra_float_digits": "3",
    # A snapshot of a large table takes long, also while the flow downstream is slow.
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
"""Settings of the session. They make the server write values in the formats that `postgres_types`
reads.
"""

_HEAD = Struct(">cI").unpack_from
_SHORT = Struct(">h").unpack_from
_INT = Struct(">i").unpack_from
_KEEPALIVE = Struct(">qqB").unpack_from
_STATUS = Struct(">cIcqqqqB").pack

Frame = tuple[bytes, bytes]


class XLogData(NamedTuple):
    """One message of the output plugin."""

    message: bytes


class Keepalive(NamedTuple):
    """The server's message that it has sent everything before `wal_end`."""

    wal_end: int
    reply_requested: bool


def literal(text: str) -> str:
    """Returns `text` as an SQL literal."""
    quoted = text.replace("'", "''")
    return f" E'{quoted.replace(chr(92), chr(92) * 2)}'" if "\\" in text else f"'{quoted}'"


def _complete(buffer: bytearray) -> tuple[list[Frame], int]:
    """Returns the complete messages in `buffer`, and their total length."""
    frames: list[Frame] = []
    at, size = 0, len(buffer)
    content = b""
    while size - at >= 5:
        kind, length = _HEAD(buffer, at)
        end = at + 1 + length
        if end > size:
            break
        if not content:
            content = bytes(buffer)
        frames.append((kind, content[at + 5 : end]))
        at = end
    return frames, at


class ReplicationConnection:
    """A connection for `CREATE_REPLICATION_SLOT`, queries, and the stream of a slot.

    `connection` is an asyncpg connection that was opened with `SETTINGS`. It must have no other
    user.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        # The only private attribute: asyncpg offers no other access to its socket.
        self._transport = connection._transport
        self._frames = Frames(self._transport, _complete)
        self._transport.set_protocol(self._frames)
        self._early: list[Frame] = []
        """Messages that came with the answer to START_REPLICATION."""

    async def query(self, sql: str) -> list[dict[str, str | None]]:
        """Returns the rows of `sql` as dicts of texts by column. Raises an error of the server as
        asyncpg's exception.
        """
        names: list[str] = []
        found: list[dict[str, str | None]] = []
        async for rows in self.pages(sql, names):
            for row in rows:
                texts = [None if cell is None else cell.decode() for cell in row]
                found.append(dict(zip(names, texts, strict=True)))
        return found

    async def pages(
        self, sql: str, names: list[str] | None = None
    ) -> AsyncIterator[list[list[bytes | None]]]:
        """Yields lists of the rows of `sql` as they arrive, with cells as encoded texts. The names
        of the columns are stored in `names` before the first row.
        """
        self._send(b"Q", sql.encode() + b"\0")
        failure: BaseException | None = None
        while True:
            rows: list[list[bytes | None]] = []
            ready = False
            try:
                frames = await self._frames.take()
            except ConnectionResetError:
                raise failure or ConnectionResetError("the connection has ended") from None
            for kind, body in frames:
                if kind == b"D":
                    rows.append(_data_row(body))
                elif kind == b"T":
                    if names is not None:
                        names[:] = _row_description(body)
                elif kind == b"E":
                    failure = failure or _server_error(body)
                elif kind == b"Z":
                    ready = True
            if rows:
                yield rows
            if ready:
                if failure is not None:
                    raise failure
                return

    async def start(self, slot: str, lsn: str, publication: str) -> None:
        """Starts the stream of changes of `slot`, after the place `lsn` in the log."""
        options = f"proto_version '1', publication_names {literal(publication)}"
        self._send(
            b"Q", f'START_REPLICATION SLOT "{slot}" LOGICAL {lsn} ({options})'.encode() + b"\0"
        )
        failure: BaseException | None = None
        while True:
            frames = await self._frames.take()
            for i, (kind, body) in enumerate(frames):
                if kind == b"W":
                    self._early = frames[i + 1 :]
                    return
                if kind == b"E":
                    failure = _server_error(body)
            if failure is not None:
                raise failure

    async def messages(self) -> list[XLogData | Keepalive]:
        """Waits for messages of the stream. Returns all messages that have arrived, at least one.
        Raises an OSError when the stream ends.
        """
        while True:
            frames, self._early = self._early or await self._frames.take(), []
            found: list[XLogData | Keepalive] = []
            for kind, body in frames:
                if kind == b"d":
                    found.append(_copy_data(body))
                elif kind == b"E":
                    if found:
                        self._early = [(kind, body)]
                        return found
                    raise _server_error(body)
                elif kind in b"cC":
                    raise ConnectionResetError("the server has ended the stream")
            if found:
                return found

    def send_status(self, written: int, flushed: int, wall_ms: int, *, reply: bool = False) -> None:
        """Reports to the server that everything before `written` was received, and everything
        before `flushed` is durable. With `reply`, asks for an answer.
        """
        if self._frames.lost is not None or self._transport.is_closing():
            return
        self._transport.write(
            _STATUS(
                b"d",
                38,
                b"r",
                written,
                flushed,
                flushed,
                wall_ms * 1000 - EPOCH_US,
                reply,
            )
        )

    def _send(self, kind: bytes, body: bytes) -> None:
        if self._frames.lost is not None:
            raise ConnectionResetError(str(self._frames.lost))
        self._transport.write(kind + (len(body) + 4).to_bytes(4, "big") + body)

    def close(self) -> None:
        """Ends the connection at once."""
        self._connection.terminate()


def _data_row(body: bytes) -> list[bytes | None]:
    (count,) = _SHORT(body, 0)
    at = 2
    cells: list[bytes | None] = []
    for _ in range(count):
        (length,) = _INT(body, at)
        at += 4
        if length < 0:
            cells.append(None)
        else:
            cells.append(body[at : at + length])
            at += length
    return cells


def _row_description(body: bytes) -> list[str]:
    (count,) = _SHORT(body, 0)
    at, names = 2, []
    for _ in range(count):
        end = body.index(b"\0", at)
        names.append(body[at:end].decode())
        at = end + 19
    return names


def _copy_data(body: bytes) -> XLogData | Keepalive:
    if body[:1] == b"w":
        return XLogData(body[25:])
    if body[:1] == b"k":
        wal_end, _time, reply = _KEEPALIVE(body, 1)
        return Keepalive(wal_end, bool(reply))
    raise MalformedInput(f"message {body[:40]!r} of the replication stream has no known kind")


def _server_error(body: bytes) -> BaseException:
    """Returns asyncpg's exception for the body of the server's error message."""
    import asyncpg

    fields: dict[str, str] = {}
    for part in body.split(b"\0"):
        if part:
            fields[chr(part[0])] = part[1:].decode(errors="replace")
    error: BaseException = asyncpg.PostgresError.new(fields)
    return error
