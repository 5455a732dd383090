"""Connects a command to a cluster: the addresses of its JobManagers, the secret, the TLS options,
and the message if no JobManager answers.

`processes_of` finds the processes of a cluster on this machine by their command lines. `aioflow
cluster start` records only the processes that it starts (`pids`). Other processes are started by
hand or by a supervisor: a JobManager after a crash, a standby, further TaskManagers. `aioflow
cluster stop` must find and end them too.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from aioflow.api.runner import new_event_loop
from aioflow.api.settings import read_settings
from aioflow.cli.options import UsageError, in_flags
from aioflow.cli.terminal import reader_is_gone
from aioflow.cluster.leadership import DATA, LeaderRetrieval, parse_address, parse_addresses
from aioflow.cluster.submission import ClusterClient, NoJobManager
from aioflow.core.errors import AioflowError, GraphError, NotAuthenticated
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.inspection.json_logs import configure_logging
from aioflow.network.security import SecuredHost, Security, TlsFiles, read_secret

__all__ = [
    "DATA",
    "FAILED",
    "FINISHED",
    "LOCAL",
    "PORT",
    "add_access_options",
    "add_tls_options",
    "addresses",
    "asking",
    "find_started",
    "jobmanagers_of",
    "leader_retrieval_of",
    "processes_of",
    "run_on_host",
    "secret_of",
    "secured_host",
    "tls_arguments",
    "tls_files",
]

OPTIONS = ("--tls-cert", "--tls-key", "--tls-ca")


def add_tls_options(command: argparse.ArgumentParser) -> None:
    """Adds the TLS options to a command. A user must give all three of them (certificate, key and
    authority) or none.
    """
    group = command.add_argument_group(
        "TLS between the processes of a cluster, each of which proves itself by a certificate"
    )
    group.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate of this process (PEM)"
    )
    group.add_argument(
        "--tls-key", type=Path, metavar="FILE", help="its private key (PEM, not encrypted)"
    )
    group.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="certificate of the authority that signed all the certificates (PEM)",
    )


def add_access_options(command: argparse.ArgumentParser) -> None:
    """Adds the options with which a command finds its cluster and connects to it."""
    add_tls_options(command)
    command.add_argument(
        "--at",
        type=addresses,
        metavar="HOST:PORT[,...]",
        help=f"the JobManagers (the address in the secret's directory, or 127.0.0.1:{PORT})",
    )
    whose = command.add_mutually_exclusive_group()
    secret = DATA / "secret"
    whose.add_argument(
        "--secret-file",
        type=Path,
        default=secret,
        metavar="FILE",
        help=f"file with the shared secret ({secret})",
    )
    whose.add_argument(
        "--data",
        type=_secret_in,
        dest="secret_file",
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="directory of the cluster, as for aioflow cluster start; has its secret and address "
        f"({DATA})",
    )


def _secret_in(directory: str) -> Path:
    """Returns the path of the secret in a cluster's directory.

    The same directory contains the file with the cluster's address, so `find_started` can derive
    the address from the returned path.
    """
    return Path(directory) / "secret"


def tls_files(arguments: argparse.Namespace) -> TlsFiles | None:
    """Returns the TLS files that the user gave, or None.

    Raises NotAuthenticated if only some are given.
    """
    certificate, key, authority = (
        None if path is None else str(path) for path in _given(arguments)
    )
    return TlsFiles.of(certificate, key, authority, OPTIONS)


def tls_arguments(arguments: argparse.Namespace) -> list[str]:
    """Returns the TLS options as command line arguments for another process."""
    return [
        text
        for name, path in zip(OPTIONS, _given(arguments), strict=True)
        if path is not None
        for text in (name, str(path))
    ]


def secured_host(arguments: argparse.Namespace) -> Host:
    """Returns a host that uses TLS for cluster connections if the TLS options were given.

    Raises NotAuthenticated if one of the TLS files cannot be used.
    """
    files = tls_files(arguments)
    allow_plaintext = getattr(arguments, "allow_plaintext", False)
    if files is None and not allow_plaintext:
        return SystemHost()
    return SecuredHost(SystemHost(), Security.of(files, allow_plaintext=allow_plaintext))


def _given(arguments: argparse.Namespace) -> tuple[Path | None, Path | None, Path | None]:
    return arguments.tls_cert, arguments.tls_key, arguments.tls_ca


PROC = Path("/proc")
JOBMANAGER, TASKMANAGER = "jobmanager", "taskmanager"


def processes_of(data: Path) -> list[int]:
    """Returns the pids of JobManagers and TaskManagers on this machine with `--data` set to
    `data`.
    """
    return [pid for pid, _ in _found(data)]


def jobmanagers_of(data: Path) -> list[int]:
    """Returns the pids of the JobManagers on this machine with `--data` set to `data`: leaders and
    standbys.
    """
    return [pid for pid, command in _found(data) if command == JOBMANAGER]


def _found(data: Path) -> Iterator[tuple[int, str]]:
    """Yields (pid, command) for each process of the cluster in the directory `data`."""
    whole = os.path.realpath(data)
    for pid, argv in _from_proc() if PROC.exists() else _from_ps():
        command = _command(argv)
        if not command:
            continue
        try:
            # Without /proc, a relative directory is taken to be below the present one.
            base = (PROC / str(pid) / "cwd").readlink() if PROC.exists() else Path()
            directory = _data(argv, command, _environment(pid), base)
            if directory is not None and os.path.realpath(base / directory) == whole:
                yield pid, command
        except OSError:  # The process has ended, or belongs to another user.
            continue


def _from_proc() -> Iterator[tuple[int, list[str]]]:
    """Yields the pid and the arguments of each process on this machine, from /proc."""
    for pid in sorted(int(entry.name) for entry in PROC.glob("[0-9]*") if entry.name.isdecimal()):
        try:
            line = (PROC / str(pid) / "cmdline").read_bytes()
        except OSError:  # The process has ended.
            continue
        yield pid, line.decode("utf-8", "surrogateescape").split("\0")


def _from_ps() -> Iterator[tuple[int, list[str]]]:
    """Yields the pid and the arguments of each process from the output of `ps`, on systems without
    /proc. An argument that contains spaces becomes several.
    """
    listing = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    for line in listing.splitlines():
        pid, *argv = line.split()
        if argv:
            yield int(pid), argv


def _command(argv: list[str]) -> str:
    """Returns the role of the process with the arguments `argv`: "jobmanager", "taskmanager", or ""
    for any other process.

    A wrapper such as `timeout`, which only starts a JobManager or TaskManager, does not count.
    """
    if os.path.basename(argv[0]).lower().startswith("python"):
        for program, command in pairwise(argv):
            if os.path.basename(program) == "aioflow" and command in (JOBMANAGER, TASKMANAGER):
                return command
    return ""


def _environment(pid: int) -> dict[str, str]:
    """Returns the environment with which a process was started; empty if it cannot be read."""
    try:
        text = (PROC / str(pid) / "environ").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return {}
    pairs = (one.partition("=") for one in text.split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def _data(argv: list[str], command: str, environ: dict[str, str], base: Path) -> str | None:
    """Returns the value of `--data`: from `argv`, from the settings of the process, or the default.

    Returns None for a TaskManager without `--data`. `aioflow cluster stop` need not find it,
    because its JobManager ends it.
    """
    given = None
    for option, value in zip(argv, [*argv[1:], ""], strict=True):
        if option == "--data":
            given = value
        elif option.startswith("--data="):
            given = option.removeprefix("--data=")
    if given is not None:
        return given
    try:
        found = read_settings(environ, base).get("data", command)
    except ValueError:  # The file has changed since the process started.
        found = None
    if found is not None:
        return found.text
    return None if command == TASKMANAGER else str(DATA)


FINISHED, FAILED, USAGE = 0, 1, 2
PORT = 6123
LOCAL = LeaderRetrieval((("127.0.0.1", PORT),))


def addresses(text: str) -> LeaderRetrieval:
    try:
        return LeaderRetrieval(parse_addresses(text))
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
    """Runs `body(host)` in a new event loop, and returns its result, the exit code of the command.

    A failure of the cluster or the operating system is printed as one line.
    """

    async def on_a_host() -> int:
        host = secured_host(arguments)
        try:
            return await body(host)
        finally:
            await host.close()

    if arguments.command in ("jobmanager", "taskmanager"):
        configure_logging(arguments.log_format)
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
    """Returns advice for the user when no JobManager answers."""
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
    if path == DATA / "secret" and not path.exists():
        # The user gave no path, and probably has not started a cluster here yet.
        here = f"no cluster was started in this directory: there is no {path}"
        raise NotAuthenticated(
            f"{here}. Start one with aioflow cluster start, or name the secret of another with "
            "--secret-file"
        )
    return read_secret(str(path), "with --secret-file")


def find_started(arguments: argparse.Namespace) -> None:
    """Sets `--at` if the user did not give it.

    The address is read from the directory of the secret file, where a started cluster has written
    it. If there is none, the default address is used.
    """
    if arguments.at is None:
        data = arguments.secret_file.parent
        arguments.at = leader_retrieval_of(data) if (data / "address").exists() else LOCAL


def leader_retrieval_of(data: Path) -> LeaderRetrieval:
    """Returns an object that finds the leading JobManager of the cluster in the directory `data`.
    It first tries the address of the JobManager that started last.

    Raises FileNotFoundError if there is no file with the address, and UsageError if the file has no
    valid address.
    """
    path = data / "address"
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        return LeaderRetrieval((parse_address(text),), str(data))
    except ValueError as error:
        remedy = (
            "start the jobmanager of this directory again, which writes it, or name one with --at"
        )
        raise UsageError(
            f"{path} should hold the address of a jobmanager: {error}; {remedy}"
        ) from error
