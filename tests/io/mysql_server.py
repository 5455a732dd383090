"""A MariaDB server for tests: of its own directory, on a free port of the loopback, ended with the
session.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.io.servers import Server, free_port
from tests.needs import program

USER = "aioflow"
PASSWORD = "right"

LOGGED = (
    "--log-bin=log", "--server-id=1", "--binlog-format=ROW", "--binlog-row-metadata=FULL",
    "--sync-binlog=1",
)  # fmt: skip
"""Options of a server whose changes are read."""


class MysqlServer(Server):
    """`create(name)` makes an empty database and gives a dsn that leads to it."""

    @property
    def socket(self) -> Path:
        return self.directory / "socket"

    def create(self, name: str) -> str:
        self.query("mysql", f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")
        return f"mysql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{name}"

    def query(self, database: str, sql: str) -> list[str]:
        """The lines of the result, with tabs between the columns."""
        done = subprocess.run(
            [
                program("mariadb"), "--no-defaults", f"--socket={self.socket}", "-u", "root",
                "-N", "-B", "--default-character-set=utf8mb4", "-e", sql, database,
            ],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@contextmanager
def mysql_server(*options: str) -> Iterator[MysqlServer]:
    """Yields a server that answers."""
    mariadbd = program("mariadbd")
    directory = Path(tempfile.mkdtemp(prefix="aioflow-my-"))
    port = free_port()
    as_user = []
    try:
        if os.geteuid() == 0:  # The server warns of root, and may refuse it.
            shutil.chown(directory, "nobody", "nogroup")
            as_user = ["--user=nobody"]
        # A server that starts deletes the temporary tables of another server in the same directory.
        common = ["--no-defaults", f"--datadir={directory}/data", f"--tmpdir={directory}"]
        done = subprocess.run(
            [
                program("mariadb-install-db"), *common,
                "--auth-root-authentication-method=normal", "--skip-test-db", *as_user,
            ],
            check=False,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        command = [
            mariadbd, *common,
            f"--socket={directory}/socket", f"--port={port}", "--bind-address=127.0.0.1",
            f"--pid-file={directory}/pid", "--innodb-flush-log-at-trx-commit=2",
            "--innodb-buffer-pool-size=64M", *as_user, *options,
        ]  # fmt: skip
        server = MysqlServer(directory, port, command, lambda port: _answers(server))
        server.start()
        try:
            server.query(
                "mysql",
                f"CREATE USER {USER}@'%' IDENTIFIED BY '{PASSWORD}'; "
                f"GRANT ALL ON *.* TO {USER}@'%'; "
                f"CREATE USER {USER}@localhost IDENTIFIED BY '{PASSWORD}'; "
                f"GRANT ALL ON *.* TO {USER}@localhost",
            )
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory)


def _answers(server: MysqlServer) -> bool:
    try:
        return server.query("mysql", "SELECT 1") == ["1"]
    except AssertionError:
        return False
