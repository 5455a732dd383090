"""A PostgreSQL server for tests: of its own directory, on a socket in it, ended with the session.

PostgreSQL refuses to run as root, so a session of root starts it as `nobody`.
"""

from __future__ import annotations

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

    @property
    def dsn(self) -> str:
        return f"postgresql://{USER}@/postgres?host={quote(str(self.directory), safe='')}"

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


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Yields a server that answers."""
    initdb = program("initdb")
    directory = Path(tempfile.mkdtemp(prefix="aioflow-pg-"))
    as_user: dict[str, object] = {}
    if os.geteuid() == 0:
        shutil.chown(directory, "nobody", "nogroup")
        as_user = {"user": "nobody", "group": "nogroup", "extra_groups": []}
    try:
        data = directory / "data"
        subprocess.run(
            [initdb, "-D", str(data), "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=directory,
            timeout=100,
            **as_user,  # type: ignore[call-overload]
        )
        server = PostgresServer(directory)
        settings = {"listen_addresses": "", "unix_socket_directories": str(directory), "fsync": "off", "max_connections": "50"}
        start = [program("pg_ctl"), "-D", str(data), "-w", "-t", "90", "-l", str(server.log)]
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        # pg_ctl returns once the server answers; it ends with it, by the same tool.
        subprocess.run(
            [*start, "-o", options, "start"],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=directory,
            timeout=100,
            **as_user,  # type: ignore[call-overload]
        )
        try:
            yield server
        finally:
            subprocess.run(
                [program("pg_ctl"), "-D", str(data), "-m", "immediate", "-w", "stop"],
                check=True,
                stdout=subprocess.DEVNULL,
                cwd=directory,
                timeout=100,
                **as_user,  # type: ignore[call-overload]
            )
    finally:
        shutil.rmtree(directory)
