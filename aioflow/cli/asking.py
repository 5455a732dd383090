"""Connects a command to a cluster: the addresses of its JobManagers, the secret, and the message if
no JobManager answers.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from aioflow.api.runner import new_event_loop
from aioflow.cli.flags import in_flags
from aioflow.cli.processes import processes_of
from aioflow.cli.security import secured_host
from aioflow.cli.target import UsageError
from aioflow.cli.terminal import reader_is_gone
from aioflow.cluster.secret_file import read_secret
from aioflow.cluster.submission import ClusterClient, NoJobManager
from aioflow.cluster.whereabouts import DATA, Whereabouts, parse_address, parse_addresses
from aioflow.core.errors import AioflowError, GraphError, NotAuthenticated
from aioflow.core.host import Host

__all__ = [
    "DATA",
    "FAILED",
    "FINISHED",
    "LOCAL",
    "PORT",
    "addresses",
    "asking",
    "find_started",
    "run_on_host",
    "secret_of",
    "whereabouts_of",
]

FINISHED, FAILED, USAGE = 0, 1, 2
PORT = 6123
LOCAL = Whereabouts((("127.0.0.1", PORT),))


def addresses(text: str) -> Whereabouts:
    try:
        return Whereabouts(parse_addresses(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def asking(
    arguments: argparse.Namespace, body: Callable[[ClusterClient], Coroutine[Any, Any, int]]
) -> int:
    find_started(arguments)

    async def connected(host: Host) -> int:
        async with ClusterClient(host, arguments.at, secret_of(arguments.secret_file)) as client:
            return await body(client)

    return run_on_host(arguments, connected)


def run_on_host(
    arguments: argparse.Namespace, body: Callable[[Host], Coroutine[Any, Any, int]]
) -> int:
    """Runs `body` in a new event loop, and returns the exit code of the command.

    A failure of the cluster or the system is printed as one line.
    """

    async def on_a_host() -> int:
        host = secured_host(arguments)
        try:
            return await body(host)
        finally:
            await host.close()

    if arguments.command in ("jobmanager", "taskmanager"):
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(on_a_host())
    except (AioflowError, OSError) as error:
        return _failed(arguments, error)


def _failed(arguments: argparse.Namespace, error: Exception) -> int:
    if isinstance(error, BrokenPipeError) and reader_is_gone():
        return FAILED
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        text = (
            f"port {arguments.port} is in use: another jobmanager may run there; choose another "
            "with --port"
        )
    elif isinstance(error, NoJobManager):
        text = f"{error.what}: {_remedy(arguments)}"
    else:
        text = in_flags(str(error))
    print(f"aioflow {arguments.command}: {text}", file=sys.stderr)
    return USAGE if isinstance(error, (NotAuthenticated, GraphError, OSError)) else FAILED


def _remedy(arguments: argparse.Namespace) -> str:
    """Returns what the user can do when no JobManager listens."""
    data = arguments.data if "data" in arguments else arguments.secret_file.parent
    alive = [] if arguments.at.data is None else processes_of(data)
    if alive:
        others = f"processes {', '.join(map(str, alive))} of its cluster still run"
        return (
            f"it is gone, {others}; end them with aioflow cluster stop, and start it again (its "
            "jobs are kept)"
        )
    return "start a cluster with aioflow cluster start" + (
        "" if "data" in arguments else ", or name one with --at"
    )


def secret_of(path: Path) -> bytes:
    """Returns the secret in the file `path`. Raises NotAuthenticated if it cannot be read."""
    if (
        path == DATA / "secret" and not path.exists()
    ):  # The user gave no path, and probably has not started a cluster here yet.
        here = f"no cluster was started in this directory: there is no {path}"
        raise NotAuthenticated(
            f"{here}. Start one with aioflow cluster start, or name the secret of another with "
            "--secret-file"
        )
    return read_secret(str(path), "with --secret-file")


def find_started(arguments: argparse.Namespace) -> None:
    """Sets `--at` if it is missing: to the cluster started in this directory, or the default
    address.
    """
    if arguments.at is None:
        data = arguments.secret_file.parent
        arguments.at = whereabouts_of(data) if (data / "address").exists() else LOCAL


def whereabouts_of(data: Path) -> Whereabouts:
    """Returns where to find the JobManager of the directory `data` that started last, or the
    leader.

    Raises FileNotFoundError, or UsageError for a file with other contents.
    """
    path = data / "address"
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        return Whereabouts((parse_address(text),), str(data))
    except ValueError as error:
        remedy = (
            "start the jobmanager of this directory again, which writes it, or name one with --at"
        )
        raise UsageError(
            f"{path} should hold the address of a jobmanager: {error}; {remedy}"
        ) from error
