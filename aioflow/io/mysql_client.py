"""Connections to MySQL and MariaDB, over asyncmy.

A session has strict types and the time zone UTC, and takes names in double quotes, as `quoted`
writes them. Errors of the server keep their class, and say which server it was.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from aioflow.core.errors import GraphError, note_once
from aioflow.io.arguments import check_host_and_port

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MysqlConnection", "check_mysql_dsn", "error_number"]

CONNECT_TIMEOUT_S = 8.0
"""Maximum time for connecting: a wrong address must not look like a job that runs."""

CLOSE_TIMEOUT_S = 5.0
"""Maximum time for closing a connection."""

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
    """Returns the number of an error of the server or its client, or 0."""
    number = error.args[0] if error.args else 0
    return number if isinstance(number, int) else 0


def _place(dsn: str) -> str:
    """Returns the host and port of `dsn`, without the password."""
    parts = urlsplit(dsn)
    socket = dict(parse_qsl(parts.query)).get("unix_socket")
    return socket or parts.netloc.rpartition("@")[2] or "of this machine"


class MysqlConnection:
    """A connection. A statement that was cancelled breaks it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.broken = False

    @classmethod
    async def open(cls, dsn: str, owner: object) -> MysqlConnection:
        """Connects. `owner` is named in errors. Raises ModuleNotFoundError naming the extra."""
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
                    database=unquote(parts.path.strip("/")),
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
        """Runs a statement. Returns the number of its rows. `%s` in `sql` is a value."""
        count, _ = await self._run(sql, values)
        return count

    async def rows(self, sql: str, values: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        """Returns the rows of a statement."""
        _, rows = await self._run(sql, values)
        return rows

    async def dicts(self, sql: str, values: Sequence[Any] | None = None) -> list[dict[str, Any]]:
        """Returns the rows of a statement by column."""
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
            # An error of the server leaves the connection in order, a cancelled call does not.
            done = 1000 <= error_number(error) < 2000
            raise
        finally:
            self.broken = self.broken or not done

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
