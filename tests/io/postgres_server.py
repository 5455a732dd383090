"""A PostgreSQL server for tests: of its own directory, on a socket in it, ended with the session.

PostgreSQL refuses to run as root, so a session of root starts it as `nobody`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from tests import needs

USER = "aioflow"


def program(name: str) -> str:
    """Returns the path of a program of the server. Debian keeps them out of the PATH."""
    return needs.program(name, f"usr/lib/postgresql/*/bin/{name}")


class PostgresServer:
    """`create(name)` makes an empty schema and gives a dsn that leads to it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        self._data = directory / "data"
        self._settings: dict[str, str] = {}
        self._as_user: dict[str, object] = {}
        if os.geteuid() == 0:
            shutil.chown(directory, "nobody", "nogroup")
            self._as_user = {"user": "nobody", "group": "nogroup", "extra_groups": []}

    @property
    def dsn(self) -> str:
        return f"postgresql://{USER}@/postgres?host={quote(str(self.directory), safe='')}"

    def initialize(self) -> None:
        """Make the directory of the data."""
        options = ["-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._run("initdb", "-D", str(self._data), *options)

    def start(self, **settings: str) -> None:
        """Returns once the server answers. `settings` are those of postgresql.conf, by default
        those of the last start.
        """
        self._settings = settings = settings or self._settings
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.directory),
            "fsync": "off",
            "max_connections": "50",
            **settings,
        }
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        self._run(
            "pg_ctl",
            "-D",
            str(self._data),
            "-w",
            "-t",
            "90",
            "-l",
            str(self.log),
            "-o",
            options,
            "start",
        )

    def crash(self) -> None:
        """End all of its processes at once; the next start recovers from the log."""
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")

    def reload(self) -> None:
        """Read the files of the configuration again."""
        self._run("pg_ctl", "-D", str(self._data), "reload")

    def create(self, name: str) -> str:
        self.query("public", f'CREATE SCHEMA "{name}"')
        return f"{self.dsn}&search_path={name}"

    def query(self, schema: str, sql: str) -> list[str]:
        """The lines of the result."""
        done = subprocess.run(
            [program("psql"), "-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-c", sql, self.dsn],
            check=False,
            env={**os.environ, "PGOPTIONS": f"-c search_path={schema}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    async def run(self, schema: str, sql: str) -> list[str]:
        """Does the same beside the event loop."""
        return await asyncio.to_thread(self.query, schema, sql)

    def _run(self, name: str, *options: str) -> None:
        subprocess.run(
            [program(name), *options],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=self.directory,
            timeout=100,
            **self._as_user,  # type: ignore[call-overload]
        )


@contextmanager
def postgres_server(**settings: str) -> Iterator[PostgresServer]:
    """Yields a server that answers. `settings` are those of postgresql.conf."""
    program("initdb")  # A test without it is skipped before there is a directory.
    directory = Path(tempfile.mkdtemp(prefix="aioflow-pg-"))
    try:
        server = PostgresServer(directory)
        server.initialize()
        server.start(**settings)
        try:
            yield server
        finally:
            server.crash()
    finally:
        shutil.rmtree(directory)
