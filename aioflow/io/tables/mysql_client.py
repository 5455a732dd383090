"""Connections to MySQL and MariaDB, over asyncmy.

A session is in strict mode and in the time zone UTC, and accepts names in double quotes, such as
`quoted` returns. Errors of the server keep their class, and name the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from aioflow.core.errors import GraphError, note_once
from aioflow.io.arguments import check_host_and_port
from aioflow.io.capture.change_reader import Frames
from aioflow.io.capture.mysql_binlog import lenenc

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BinlogStream",
    "MysqlConnection",
    "check_mysql_dsn",
    "database_of",
    "error_number",
    "is_away",
]

AWAY = frozenset({1040, 1053, 1077, 1079, 1203, 1927, 2006, 2013, 3169, 4031})
"""Error numbers which mean that the server shuts down, has too many connections, or has closed the
connection.
"""

CONNECT_TIMEOUT_S = 8.0
"""Maximum time for connecting, so that a wrong address soon becomes an error."""

CLOSE_TIMEOUT_S = 5.0
"""Maximum time for closing a connection."""

HEARTBEAT_S = 5.0
"""Interval of the server's heartbeats while the log has no new events."""

SILENCE_S = 30.0
"""Time without any message after which the connection counts as broken."""

OWN_IDS = 1 << 31
"""Lowest `server_id` of a reader. A server ends the stream of a replica when another replica
connects with the same number.
"""

LONGEST_PACKET = 0xFFFFFF
"""Length of a packet after which the message continues in the next packet."""

SESSION = (
    "SET SESSION sql_mode = CONCAT(REPLACE(@@sql_mode, 'NO_BACKSLASH_ESCAPES', ''), "
    "',ANSI_QUOTES,STRICT_ALL_TABLES'), "
    "time_zone = '+00:00'"
)

OPTIONS = frozenset({"unix_socket"})


def check_mysql_dsn(dsn: Any, place: str) -> None:
    """Raises GraphError unless `dsn` is the URL of a database."""
    if not isinstance(dsn, str) or not dsn.startswith(("mysql://", "mariadb://")):
        raise GraphError(
            f"{place}: expected a URL as dsn, mysql://USER:PASSWORD@HOST:PORT/DATABASE"
        )
    check_host_and_port(dsn, place, needs_host=False)
    parts = urlsplit(dsn)
    if not parts.path.strip("/"):
        raise GraphError(
            f"{place}: the dsn names no database, expected mysql://USER:PASSWORD@HOST:PORT/DATABASE"
        )
    unknown = sorted({name for name, _ in parse_qsl(parts.query)} - OPTIONS)
    if unknown:
        raise GraphError(f"{place}: the dsn has {unknown[0]!r}, expected only unix_socket=")


def error_number(error: BaseException) -> int:
    """Returns the number of an error of the server or of asyncmy; 0 for any other error."""
    number = error.args[0] if error.args else 0
    return number if isinstance(number, int) else 0


def database_of(dsn: str) -> str:
    """Returns the database of a dsn."""
    return unquote(urlsplit(dsn).path.strip("/"))


def is_away(error: BaseException) -> bool:
    """Returns whether `error` means that the server cannot be reached now."""
    return isinstance(error, (OSError, TimeoutError)) or error_number(error) in AWAY


def _place(dsn: str) -> str:
    """Returns the host and port of `dsn`, without the password."""
    parts = urlsplit(dsn)
    socket = dict(parse_qsl(parts.query)).get("unix_socket")
    return socket or parts.netloc.rpartition("@")[2] or "of this machine"


class MysqlConnection:
    """A connection. If a statement is cancelled, the connection can no longer be used."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.broken = False

    @classmethod
    async def open(cls, dsn: str, owner: object) -> MysqlConnection:
        """Connects. Errors name `owner`, a source or sink. Raises ModuleNotFoundError naming the
        extra if asyncmy is missing.
        """
        try:
            import asyncmy
            from asyncmy.constants.CLIENT import FOUND_ROWS
        except ImportError:
            raise ModuleNotFoundError(
                "af.io.mysql needs asyncmy: pip install 'aioflow[mysql]'"
            ) from None
        parts = urlsplit(dsn)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await asyncmy.connect(
                    host=parts.hostname or "localhost",
                    port=parts.port or 3306,
                    user=unquote(parts.username or ""),
                    password=unquote(parts.password or ""),
                    database=database_of(dsn),
                    unix_socket=dict(parse_qsl(parts.query)).get("unix_socket"),
                    charset="utf8mb4",
                    autocommit=True,
                    binary_prefix=True,
                    client_flag=FOUND_ROWS,
                    init_command=SESSION,
                    connect_timeout=int(CONNECT_TIMEOUT_S),
                )
        except TimeoutError as error:
            raise TimeoutError(
                f"{owner!r}: the server {_place(dsn)} did not answer within "
                f"{CONNECT_TIMEOUT_S:g} s: check host and port of the dsn, and the network"
            ) from error
        except asyncmy.errors.MySQLError as error:
            number = error_number(error)
            if number >= 2000:  # An error of the client: there is no server.
                told = error.args[1] if len(error.args) > 1 else error
                raise ConnectionError(
                    f"{owner!r}: the server {_place(dsn)} cannot be reached: {told}"
                ) from error
            note_once(error, f"{owner!r}: the server {_place(dsn)} refused the connection")
            raise
        return cls(connection)

    async def execute(self, sql: str, values: Sequence[Any] | None = None) -> int:
        """Runs a statement. Returns the number of affected rows. Each `%s` in `sql` stands for one
        of `values`.
        """
        count, _ = await self._run(sql, values)
        return count

    async def rows(self, sql: str, values: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        """Returns the rows of a statement."""
        _, rows = await self._run(sql, values)
        return rows

    async def dicts(self, sql: str, values: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """Returns the rows of a statement, as dicts by column."""
        names: list[str] = []
        _, rows = await self._run(sql, values, names)
        return [dict(zip(names, row, strict=True)) for row in rows]

    async def _run(
        self, sql: str, values: Sequence[Any] | None, names: list[str] | None = None
    ) -> tuple[int, list[tuple[Any, ...]]]:
        done = False
        cursor = self._connection.cursor()
        try:
            count = await cursor.execute(sql, None if values is None else tuple(values))
            rows = list(await cursor.fetchall()) if cursor.description else []
            if names is not None:
                names += [column[0] for column in cursor.description or ()]
            done = True
            return count, rows
        except BaseException as error:
            # After an error of the server the connection can still be used, after a cancelled call
            # it cannot.
            done = 1000 <= error_number(error) < 2000
            raise
        finally:
            self.broken = self.broken or not done

    @property
    def transport(self) -> Any:
        """The transport, for protocol commands that asyncmy does not support."""
        return self._connection._transport

    @property
    def lacks_eof(self) -> bool:
        """Whether the server sends no EOF packet between the columns and the rows of a result."""
        return bool(self._connection._deprecate_eof)

    def abort(self) -> None:
        """Ends the connection at once."""
        self._connection.close()

    async def close(self) -> None:
        """Closes the connection. Aborts it if closing takes too long."""
        if self.broken:
            self._connection.close()
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._connection.ensure_closed()
        except (OSError, TimeoutError):
            self._connection.close()


class BinlogStream:
    """A connection that reads the log, or the rows of a statement, as the server sends them."""

    def __init__(self, connection: MysqlConnection) -> None:
        """Makes a stream on `connection`, which no other code may use from now on."""
        self._transport = connection.transport
        self._frames = Frames(self._transport, _packets)
        self._transport.set_protocol(self._frames)
        self._before_rows = 0 if connection.lacks_eof else 1
        """Number of messages between the columns and the rows of a result."""
        self._parts: list[bytes] = []
        """The packets received so far of an incomplete message, which consists of several
        packets.
        """
        self._failure: bytes | None = None
        """The error packet that came after the last messages; None if there was none."""

    @classmethod
    async def open(
        cls,
        connection: MysqlConnection,
        file: str,
        offset: int,
        server_id: int | None,
        *,
        waits: bool = True,
    ) -> BinlogStream:
        """Starts reading the log at `offset` in `file`. `server_id` is the number of this reader
        among the replicas; None means a large number that contains the id of the connection. With
        `waits` the stream continues with new events at the end of the log; otherwise it ends there.
        """
        for statement in (
            "SET @mariadb_slave_capability = 4",
            "SET @master_binlog_checksum = @@global.binlog_checksum",
            "SET @source_binlog_checksum = @@global.binlog_checksum",
            f"SET @master_heartbeat_period = {int(HEARTBEAT_S * 1e9)}",
            f"SET @source_heartbeat_period = {int(HEARTBEAT_S * 1e9)}",
            "SET SESSION net_write_timeout = 31536000",
        ):
            await connection.execute(statement)
        if server_id is None:
            ((number,),) = await connection.rows("SELECT connection_id()")
            server_id = OWN_IDS | int(number)
        stream = cls(connection)
        stream._send(
            b"\x12"
            + offset.to_bytes(4, "little")
            + (0 if waits else 1).to_bytes(2, "little")
            + server_id.to_bytes(4, "little")
            + file.encode()
        )
        return stream

    def _send(self, command: bytes) -> None:
        self._transport.write(len(command).to_bytes(3, "little") + b"\0" + command)

    async def take(self) -> list[bytes]:
        """Waits for messages. Returns all messages that have arrived, at least one. Raises an error
        if the server has sent one.
        """
        while True:
            if self._failure is not None:
                raise _server_error(self._failure)
            async with asyncio.timeout(SILENCE_S):
                packets = await self._frames.take()
            found: list[bytes] = []
            for packet in packets:
                if self._parts or len(packet) == LONGEST_PACKET:
                    self._parts.append(packet)
                    if len(packet) == LONGEST_PACKET:
                        continue
                    packet, self._parts = b"".join(self._parts), []
                if packet[:1] == b"\xff":
                    self._failure = packet
                    break
                found.append(packet)
            if found:
                return found

    async def pages(self, sql: str) -> AsyncIterator[list[list[bytes | None]]]:
        """Yields lists of the rows of `sql` as they arrive, with cells as encoded texts."""
        self._send(b"\x03" + sql.encode())
        columns, left = 0, 0
        while True:
            rows: list[list[bytes | None]] = []
            for message in await self.take():
                if not columns:
                    columns, _ = lenenc(message, 0)
                    left = columns + self._before_rows
                elif left:
                    left -= 1
                elif message[:1] == b"\xfe" and len(message) < LONGEST_PACKET:
                    if rows:
                        yield rows
                    return
                else:
                    rows.append(_cells(message, columns))
            if rows:
                yield rows

    def close(self) -> None:
        """Ends the connection at once."""
        self._transport.abort()


def _packets(buffer: bytearray) -> tuple[list[bytes], int]:
    """Returns the complete packets in `buffer`, without their headers, and their total length."""
    packets: list[bytes] = []
    at, size = 0, len(buffer)
    content = b""
    while size - at >= 4:
        end = at + 4 + (buffer[at] | buffer[at + 1] << 8 | buffer[at + 2] << 16)
        if end > size:
            break
        if not content:
            content = bytes(buffer)
        packets.append(content[at + 4 : end])
        at = end
    return packets, at


def _server_error(message: bytes) -> BaseException:
    """Returns asyncmy's exception for an error packet of the server."""
    from asyncmy.errors import OperationalError

    text = message[9:] if message[3:4] == b"#" else message[3:]
    error: BaseException = OperationalError(
        int.from_bytes(message[1:3], "little"), text.decode(errors="replace")
    )
    return error


def _cells(message: bytes, columns: int) -> list[bytes | None]:
    cells: list[bytes | None] = []
    at = 0
    for _ in range(columns):
        if message[at] == 251:
            cells.append(None)
            at += 1
        else:
            length, at = lenenc(message, at)
            cells.append(message[at : at + length])
            at += length
    return cells
