"""A cluster on this machine: `aioflow cluster start` and `stop`, and the replacement of lost
TaskManagers.

`start_cluster` starts a JobManager, which starts the TaskManagers and keeps them running. A
TaskManager with exit code 0 was ended on purpose, and is not replaced. A TaskManager that ended in
another way is replaced after a delay. The delay doubles with each replacement, until a process has
run for `HEALTHY_S`.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aioflow.api.settings import variable_of, without_settings
from aioflow.cli.cluster_access import (
    FAILED,
    FINISHED,
    asking,
    jobmanagers_of,
    leader_retrieval_of,
    processes_of,
    secret_of,
    secured_host,
    tls_arguments,
)
from aioflow.cli.options import UsageError, monitor_arguments
from aioflow.cluster.submission import ClusterClient
from aioflow.core.contexts import contextmanager
from aioflow.core.errors import AioflowError, counted

__all__ = [
    "Replacements",
    "in_directory",
    "keep_running",
    "shape_of",
    "spawn_taskmanager",
    "start_cluster",
    "stop_cluster",
]

T = TypeVar("T")

LOG_FORMAT_VARIABLE = variable_of("log-format")
POLL_S = 0.05
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0

logger = logging.getLogger(__name__)

ENDED_POLL_S = 0.2
FIRST_S, LONGEST_S = 1.0, 60.0
"""Shortest and longest delay before a replacement, in seconds."""

HEALTHY_S = 60.0
"""Time in seconds after which a process counts as healthy, so that the delay begins again at
`FIRST_S`.
"""

REPLACEMENTS_MAX = 10
"""Maximum number of consecutive replacements without a process that ran for `HEALTHY_S`."""

WRONG_USAGE = 2
"""Exit code of a command with invalid arguments. Such a process is not replaced, because its
replacement would fail too.
"""


@dataclass(slots=True)
class Replacements:
    """Decides when to replace a process that has ended. Times are in seconds of a
    monotonic clock.
    """

    _started_at: float = 0.0
    in_a_row: int = field(default=0, init=False)
    """Number of replacements since a process ran for `HEALTHY_S`."""

    def started(self, now: float) -> None:
        self._started_at = now

    def ended(self, code: int, now: float) -> float | None:
        """Returns the seconds to wait before the process is replaced, or None if it is not
        replaced.

        `code` is the exit code of the process that ended.
        """
        if now - self._started_at >= HEALTHY_S:
            self.in_a_row = 0
        if code in (0, WRONG_USAGE) or self.in_a_row >= REPLACEMENTS_MAX:
            return None
        self.in_a_row += 1
        return min(math.ldexp(FIRST_S, self.in_a_row - 1), LONGEST_S)


async def keep_running(
    start: Callable[[int], subprocess.Popen[bytes]],
    count: int,
    is_stopping: Callable[[], bool],
    now: Callable[[], float],
) -> None:
    """Starts TaskManagers 1 to `count`, and replaces those that end unexpectedly.

    `start(number)` starts a TaskManager. While `is_stopping()` is true, none is replaced. `now` is
    a monotonic clock in seconds.
    """
    keeping = [
        asyncio.get_running_loop().create_task(
            _keep_one(start, number, is_stopping, now), name=f"keep taskmanager {number}"
        )
        for number in range(1, count + 1)
    ]
    try:
        for task in keeping:
            await task
    finally:
        for task in keeping:
            task.cancel()


async def _keep_one(
    start: Callable[[int], subprocess.Popen[bytes]],
    number: int,
    is_stopping: Callable[[], bool],
    now: Callable[[], float],
) -> None:
    replacements = Replacements()
    while not is_stopping():
        replacements.started(now())
        try:
            code = await _end_of(start(number))
            how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        except OSError as error:
            code, how = 1, f"could not be started ({error})"
        if is_stopping():
            return
        delay_s = replacements.ended(code, now())
        if delay_s is None:
            level = logging.INFO if code == 0 else logging.ERROR
            logger.log(level, "taskmanager %d %s, and is not replaced: see its log", number, how)
            return
        logger.warning(
            "taskmanager %d %s, another one takes its place in %g s (%d of %d)",
            number,
            how,
            delay_s,
            replacements.in_a_row,
            REPLACEMENTS_MAX,
        )
        await asyncio.sleep(delay_s)


async def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end of a process, and returns its exit code."""
    while (code := process.poll()) is None:  # noqa: ASYNC110  # Another process ends it.
        await asyncio.sleep(ENDED_POLL_S)
    return code


def _conf_arguments(arguments: argparse.Namespace) -> list[str]:
    """Returns the configuration as command line arguments for another process."""
    return [text for name, value in arguments.conf for text in ("--conf", f"{name}={value}")]


def spawn_taskmanager(
    arguments: argparse.Namespace, jobmanager: str, secret: Path, number: int
) -> subprocess.Popen[bytes]:
    """Starts TaskManager `number` for the JobManager at the address `jobmanager`.

    `arguments` are the command line arguments of the JobManager, and `secret` is the file with the
    shared secret.
    """
    options = [
        "--jobmanager",
        jobmanager,
        "--data",
        str(arguments.data),
        "--slots",
        str(arguments.slots),
        "--network-memory",
        str(arguments.network_memory),
        "--secret-file",
        str(secret),
        *_conf_arguments(arguments),
    ]
    tls = tls_arguments(arguments)
    return _spawn(arguments.data, f"taskmanager-{number}", ["taskmanager", *options, *tls])


def in_directory(action: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Runs `action`, which reads or writes the directory of a cluster.

    Raises UsageError if the directory cannot be used.
    """
    try:
        if arguments.data.exists() and not arguments.data.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return action(arguments)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(
            f"{arguments.data} cannot be used: {error.strerror}; --data names a directory"
        ) from error


def start_cluster(arguments: argparse.Namespace) -> int:
    data = arguments.data
    alive = processes_of(data)
    if alive:
        raise UsageError(
            f"a cluster runs with {data} already (processes {', '.join(map(str, alive))}); stop "
            "it first"
        )
    monitoring = monitor_arguments(arguments)
    os.environ[LOG_FORMAT_VARIABLE] = arguments.log_format  # The processes inherit it.
    arguments.workers, arguments.slots = shape_of(arguments.workers, arguments.slots)
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    (data / "address").unlink(missing_ok=True)
    (data / "pids").unlink(missing_ok=True)
    started: list[subprocess.Popen[bytes]] = []
    try:
        return _bring_up(arguments, started, tls_arguments(arguments), monitoring)
    except KeyboardInterrupt:
        for process in started:
            process.kill()
            process.wait()
        for pid in {*_recorded(data), *processes_of(data)}:
            _signal(pid, signal.SIGKILL)
        (data / "pids").unlink(missing_ok=True)
        (data / "address").unlink(missing_ok=True)
        raise


def shape_of(workers: int | None, slots: int | None) -> tuple[int, int]:
    """Returns the number of TaskManagers to start, and the number of slots of each. None means that
    the user gave no number.

    By default there is one process with one slot for each processor. So the jobs use all
    processors, and a function that blocks its event loop delays no other job.
    """
    processors = os.cpu_count() or 1
    if workers is None:
        return (processors, 1) if slots is None else (1, slots)
    return workers, processors if slots is None else slots


def _bring_up(
    arguments: argparse.Namespace,
    started: list[subprocess.Popen[bytes]],
    tls: list[str],
    monitoring: list[str],
) -> int:
    """Starts a JobManager, which starts the TaskManagers. Waits until all TaskManagers have
    registered.

    Appends the JobManager's process to `started`. `tls` and `monitoring` are options for its
    command line. Returns the exit code.
    """
    data = arguments.data
    options = ["--port", str(arguments.port), "--request-timeout", arguments.request_timeout]
    options += ["--taskmanagers", str(arguments.workers), "--slots", str(arguments.slots)]
    options += ["--network-memory", str(arguments.network_memory), *_conf_arguments(arguments)]
    with _uninterrupted():
        jobmanager = _spawn(
            data, "jobmanager", ["jobmanager", "--data", str(data), *options, *tls, *monitoring]
        )
        started.append(jobmanager)
    listens = _wait_until(
        lambda: (data / "address").exists() or jobmanager.poll() is not None, START_TIMEOUT_S
    )
    if not listens or jobmanager.poll() is not None:
        jobmanager.kill()
        jobmanager.wait()
        raise UsageError(f"the jobmanager did not start: {_last_words(data, 'jobmanager')}")
    address = (data / "address").read_text(encoding="utf-8").strip()
    arguments.at, arguments.secret_file = leader_retrieval_of(data), data / "secret"
    return asking(
        arguments,
        partial(_all_registered, arguments=arguments, address=address),
    )


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block.

    While a process starts, Ctrl-C would leave the process running but not yet recorded, so `aioflow
    cluster stop` could not find it.
    """
    if (before := signal.getsignal(signal.SIGINT)) is not signal.default_int_handler:
        # A program that ignored Ctrl-C before still ignores it.
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


async def _all_registered(
    client: ClusterClient,
    arguments: argparse.Namespace,
    address: str,
) -> int:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while True:
        found = await client.taskmanagers()
        pids = _recorded(arguments.data)[1 : arguments.workers + 1]  # Those started first.
        ended = [number for number, pid in enumerate(pids, 1) if not _signal(pid, 0)]
        if (
            len(found) + len(ended) >= arguments.workers
            or asyncio.get_running_loop().time() > deadline
        ):
            break
        await asyncio.sleep(POLL_S)
    slots = sum(line[1] for line in found)
    print(
        f"cluster at {address}: {counted(len(found), 'taskmanager')} with "
        f"{counted(slots, 'slot')}; logs in "
        f"{arguments.data}"
    )
    if arguments.monitor is not None:  # Its port may be any free one.
        print(
            next(
                line
                for line in reversed(_log(arguments.data, "jobmanager"))
                if line.startswith("dashboard at ")
            )
        )
    for number in ended:
        said = _last_words(arguments.data, f"taskmanager-{number}")
        print(f"aioflow cluster: taskmanager {number} did not start: {said}", file=sys.stderr)
    return FINISHED if len(found) == arguments.workers else FAILED


def _last_words(data: Path, name: str) -> str:
    """Returns the last line in the log of a process that has ended."""
    lines = _log(data, name)
    return lines[-1] if lines else "it said nothing"


def _log(data: Path, name: str) -> list[str]:
    return (data / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()


def _spawn(data: Path, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
    log = os.open(data / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        command = [sys.executable, "-m", "aioflow", *argv]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=without_settings(os.environ, LOG_FORMAT_VARIABLE),
        )
    finally:
        os.close(log)
    with (data / "pids").open("a", encoding="utf-8") as pids:
        pids.write(f"{process.pid}\n")
    return process


def stop_cluster(arguments: argparse.Namespace) -> int:
    if not processes_of(arguments.data):
        raise UsageError(f"no cluster runs with {arguments.data}")
    _find(arguments)
    leader = None
    try:
        leader = asyncio.run(
            _ask_once(arguments, ClusterClient.shutdown, timeout_s=STOP_TIMEOUT_S / 3)
        )
    except (AioflowError, OSError) as error:
        print(
            f"aioflow cluster: the jobmanager does not answer ({error}), its processes are ended",
            file=sys.stderr,
        )
    # JobManagers end first. A standby would become leader, and a leader treats the end of a
    # TaskManager as a failure of its jobs.
    for pid in jobmanagers_of(arguments.data):
        if pid != leader:
            _signal(pid, signal.SIGTERM)
    _wait_until(lambda: not jobmanagers_of(arguments.data), STOP_TIMEOUT_S)
    for pid in processes_of(arguments.data):  # TaskManagers that no leader has ended.
        _signal(pid, signal.SIGTERM)
    if not _wait_until(lambda: not processes_of(arguments.data), STOP_TIMEOUT_S):
        for pid in processes_of(arguments.data):
            _signal(pid, signal.SIGKILL)
        _wait_until(lambda: not processes_of(arguments.data), STOP_TIMEOUT_S)
    (arguments.data / "pids").unlink(missing_ok=True)
    (arguments.data / "address").unlink(missing_ok=True)
    print("cluster stopped")
    return FINISHED


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Waits until `condition()` is true. Returns False if this takes longer than `timeout_s`."""

    async def poll() -> bool:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    return asyncio.run(poll())


def _recorded(data: Path) -> list[int]:
    """Returns the pids of the processes that were started with the cluster: the JobManager, the
    TaskManagers, and their replacements.
    """
    path = data / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def _signal(pid: int, number: int) -> bool:
    """Sends the signal `number` to the process `pid`. Returns whether there is such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _find(arguments: argparse.Namespace) -> None:
    try:
        arguments.at = leader_retrieval_of(arguments.data)
    except FileNotFoundError:
        raise UsageError(f"no cluster was started with {arguments.data}") from None
    arguments.secret_file = arguments.data / "secret"


async def _ask_once(
    arguments: argparse.Namespace,
    question: Callable[[ClusterClient], Coroutine[Any, Any, T]],
    timeout_s: float,
) -> T:
    host = secured_host(arguments)
    try:
        async with asyncio.timeout(timeout_s):
            async with ClusterClient(
                host, arguments.at, secret_of(arguments.secret_file)
            ) as client:
                return await question(client)
    finally:
        await host.close()
