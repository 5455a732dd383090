"""The commands about the processes of a cluster: `jobmanager`, `taskmanager` and `cluster`.

`cluster` starts and ends the processes on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aioflow.api.settings import variable_of, without_settings
from aioflow.cli.cluster_access import (
    DATA,
    FAILED,
    FINISHED,
    LOCAL,
    PORT,
    add_access_options,
    add_tls_options,
    addresses,
    asking,
    find_started,
    jobmanagers_of,
    leader_retrieval_of,
    processes_of,
    run_on_host,
    secret_of,
    secured_host,
    tls_arguments,
    tls_files,
)
from aioflow.cli.jobs import print_jobs
from aioflow.cli.options import (
    UsageError,
    add_configuration,
    add_log_options,
    add_monitor_options,
    bind_address,
    count,
    duration,
    monitor_address,
    monitor_arguments,
    network_memory,
    port,
    positive,
    served,
    serving_health,
)
from aioflow.cli.supervision import keep_running
from aioflow.cluster.jobmanager import JobManager, JobManagerOptions, check_bind
from aioflow.cluster.leadership import LeaderRetrieval
from aioflow.cluster.submission import ClusterClient
from aioflow.cluster.taskmanager import TaskManager, TaskManagerOptions
from aioflow.core.aio import cancel_and_wait
from aioflow.core.contexts import contextmanager
from aioflow.core.errors import AioflowError, counted
from aioflow.core.host import Host
from aioflow.core.timeunits import to_seconds
from aioflow.network.local_pool import NETWORK_MEMORY_BYTES
from aioflow.network.security import create_secret

__all__ = ["add_commands"]

T = TypeVar("T")

LOG_FORMAT_VARIABLE = variable_of("log-format")
POLL_S = 0.05
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0


def add_commands(commands: Any) -> None:
    """Adds the commands to an argparse subparsers object."""
    _add_jobmanager(commands)
    _add_taskmanager(commands)
    _add_cluster(commands)


def _add_jobmanager(commands: Any) -> None:
    jobmanager = commands.add_parser(
        "jobmanager",
        help="run a JobManager",
        description="Take jobs and hand out the slots of TaskManagers.",
    )
    jobmanager.add_argument(
        "--port", type=port, default=PORT, help=f"where to listen ({PORT}); 0: any free port"
    )
    jobmanager.add_argument(
        "--bind",
        type=bind_address,
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen at (127.0.0.1)",
    )
    jobmanager.add_argument(
        "--data",
        type=Path,
        default=DATA,
        metavar="DIR",
        help=f"jobs and lease are kept there ({DATA})",
    )
    jobmanager.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="the shared secret (DIR/secret, made when absent)",
    )
    jobmanager.add_argument(
        "--taskmanagers",
        type=count,
        default=0,
        metavar="N",
        help="start N TaskManagers here too, and replace those that end unexpectedly (0)",
    )
    jobmanager.add_argument(
        "--slots", type=positive, default=1, help="slots of each of these TaskManagers (1)"
    )
    add_monitor_options(jobmanager)
    _add_process_options(jobmanager)
    _add_request_timeout(jobmanager)
    _add_network_memory(jobmanager)
    add_configuration(jobmanager)
    add_tls_options(jobmanager)
    jobmanager.set_defaults(carry_out=_jobmanager)


def _add_taskmanager(commands: Any) -> None:
    taskmanager = commands.add_parser(
        "taskmanager",
        help="run a TaskManager",
        description="Lend slots to a cluster and run tasks in them.",
    )
    taskmanager.add_argument(
        "--jobmanager",
        type=addresses,
        metavar="HOST:PORT[,...]",
        help=f"whom to register at (127.0.0.1:{PORT})",
    )
    taskmanager.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="of the JobManagers: the lease in it says which of them leads",
    )
    taskmanager.add_argument("--slots", type=positive, default=1, help="how many (1)")
    reached = "address at which others reach it (127.0.0.1)"
    taskmanager.add_argument(
        "--bind", type=bind_address, default="127.0.0.1", metavar="ADDRESS", help=reached
    )
    taskmanager.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help=f"the shared secret (DIR/secret, without DIR {DATA}/secret)",
    )
    taskmanager.add_argument(
        "--health",
        type=monitor_address,
        metavar="HOST:PORT",
        help="serve /healthz and /readyz there, for probes; port 0: any free one",
    )
    _add_process_options(taskmanager)
    _add_network_memory(taskmanager)
    add_configuration(taskmanager)
    add_tls_options(taskmanager)
    taskmanager.set_defaults(carry_out=_taskmanager)


def _add_cluster(commands: Any) -> None:
    cluster = commands.add_parser(
        "cluster", help="start or stop a cluster on this machine, or show one"
    )
    actions = cluster.add_subparsers(dest="action", metavar="ACTION", required=True)
    start = actions.add_parser(
        "start", help="start a JobManager and TaskManagers in the background"
    )
    start.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="how many TaskManagers (one a processor; with --slots 1)",
    )
    start.add_argument(
        "--slots",
        type=positive,
        help="slots of each, which share its process (1; with --workers one a processor)",
    )
    start.add_argument(
        "--port", type=port, default=PORT, help=f"of the JobManager ({PORT}); 0: any free port"
    )
    add_monitor_options(start)
    add_log_options(start)
    _add_request_timeout(start)
    _add_network_memory(start)
    add_configuration(start)
    start.set_defaults(carry_out=partial(_in_directory, _start))
    status = actions.add_parser("status", help="show the processes, slots and jobs of a cluster")
    status.set_defaults(carry_out=_status)
    add_access_options(status)
    stop = actions.add_parser(
        "stop", help="end all its processes; jobs that run are taken up again at the next start"
    )
    stop.set_defaults(carry_out=partial(_in_directory, _stop_cluster))
    for action in (start, stop):
        action.add_argument(
            "--data",
            type=Path,
            default=DATA,
            metavar="DIR",
            help=f"everything about it is there ({DATA})",
        )
        add_tls_options(action)


def _add_process_options(process: argparse.ArgumentParser) -> None:
    """Adds the options of a process of a cluster that runs in the foreground."""
    add_log_options(process)
    process.add_argument(
        "--allow-plaintext",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="listen off loopback without TLS: others may read along",
    )


def _add_request_timeout(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--request-timeout",
        type=duration,
        default="30s",
        metavar="TIME",
        help="how long a job waits for all its slots before it runs with fewer (30s)",
    )


def _add_network_memory(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--network-memory",
        type=network_memory,
        default=NETWORK_MEMORY_BYTES,
        metavar="SIZE",
        help="memory of each TaskManager for data between tasks, of all its jobs (64MiB)",
    )


# Processes of a cluster.


def _jobmanager(arguments: argparse.Namespace) -> int:
    async def body(host: Host) -> int:
        path = arguments.secret_file or arguments.data / "secret"
        check_bind(arguments.bind, arguments.secret_file is not None)
        secret = (
            secret_of(path)
            if arguments.secret_file
            else create_secret(str(path), _new_secret(host))
        )
        arguments.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        options = JobManagerOptions(
            data=str(arguments.data),
            bind=arguments.bind,
            port=arguments.port,
            request_timeout_s=to_seconds(arguments.request_timeout),
        )

        def on_listening(address: str, number: int) -> None:
            # Atomic, because a process that waits for the file must not find it empty.
            whole = arguments.data / f"address.{os.getpid()}"
            whole.write_text(f"{address}:{number}\n", encoding="utf-8")
            whole.replace(arguments.data / "address")
            print(f"jobmanager listens at {address}:{number}", flush=True)
            start = partial(_spawn_taskmanager, arguments, f"{address}:{number}", path)
            keeping.append(
                asyncio.get_running_loop().create_task(
                    keep_running(
                        start,
                        arguments.taskmanagers,
                        lambda: manager.is_stopping,
                        host.clock.monotonic,
                    ),
                    name="keep taskmanagers",
                )
            )

        keeping: list[asyncio.Task[None]] = []
        manager = JobManager(host, secret, options, on_listening)
        with _stopped_by_signals(manager.stop):
            try:
                async with served(manager, arguments):
                    await manager.run()
            finally:
                await cancel_and_wait(keeping)
        return FINISHED

    return run_on_host(arguments, body)


PRELOADED = (
    "aioflow.io.memory",
    "aioflow.operators.aggregate.running",
    "aioflow.operators.sink",
    "aioflow.state.heap",
    "encodings.idna",
)
"""Modules that most jobs import when they are loaded."""


def _conf_arguments(arguments: argparse.Namespace) -> list[str]:
    """Returns the configuration as command line arguments for another process."""
    return [text for name, value in arguments.conf for text in ("--conf", f"{name}={value}")]


def _spawn_taskmanager(
    arguments: argparse.Namespace, jobmanager: str, secret: Path, number: int
) -> subprocess.Popen[bytes]:
    """Starts TaskManager `number` of the JobManager that has these arguments."""
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


def _taskmanager(arguments: argparse.Namespace) -> int:
    async def body(host: Host) -> int:
        named = (
            LOCAL
            if arguments.jobmanager is None and arguments.data is None
            else arguments.jobmanager or LeaderRetrieval()
        )
        where = LeaderRetrieval(
            named.addresses, None if arguments.data is None else str(arguments.data)
        )
        options = TaskManagerOptions(
            jobmanagers=where,
            slots=arguments.slots,
            bind=arguments.bind,
            network_bytes=arguments.network_memory,
            isolated=True,
            tls=tls_files(arguments),
            preloaded=PRELOADED,
            configuration=dict(arguments.conf),
        )
        secret = secret_of(arguments.secret_file or (arguments.data or DATA) / "secret")
        manager = TaskManager(host, secret, options)
        manager.inspector.start()
        print(f"taskmanager {manager.id[:8]} offers {counted(arguments.slots, 'slot')}", flush=True)
        with _stopped_by_signals(manager.stop):
            async with serving_health(host, arguments.health, manager.unready_reasons):
                await manager.run()
        return FINISHED

    return run_on_host(arguments, body)


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        # Shutdown has begun: ignore further SIGTERMs, which `cluster stop` sends to all processes
        # that still run.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _new_secret(host: Host) -> bytes:
    return (host.ids.new("secret") + host.ids.new("secret")).encode()


# A cluster on this machine.


def _in_directory(
    action: Callable[[argparse.Namespace], int], arguments: argparse.Namespace
) -> int:
    """Runs `action`, which reads or writes the directory of a cluster.

    Raises UsageError for a directory that cannot be used.
    """
    try:
        if arguments.data.exists() and not arguments.data.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return action(arguments)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(
            f"{arguments.data} cannot be used: {error.strerror}; --data names a directory"
        ) from error


def _start(arguments: argparse.Namespace) -> int:
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
    """Returns how many TaskManagers are started, and the slots of each. None: not given.

    By default each processor has a process with one slot. So the jobs use all processors, and a
    function that blocks its event loop holds up no other job.
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
    """Starts a JobManager, which starts the TaskManagers, and waits until these are registered.

    The process is appended to `started`. Returns the exit code.
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

    During the start of a process, Ctrl-C would leave a process that is not recorded yet, and that
    `aioflow cluster stop` could not find.
    """
    if (before := signal.getsignal(signal.SIGINT)) is not signal.default_int_handler:
        # A program that ignores Ctrl-C still does.
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


def _status(arguments: argparse.Namespace) -> int:
    find_started(arguments)

    async def show(client: ClusterClient) -> int:
        found = await client.taskmanagers()
        print("jobmanager   {}:{}".format(*client.address))
        for worker_id, slots, free in found:
            print(f"taskmanager  {worker_id[:8]}  {counted(slots, 'slot')}, {free} free")
        print(f"fenced_total {await client.fenced_total()}")
        print_jobs(await client.jobs())
        return FINISHED

    return asking(arguments, show)


def _stop_cluster(arguments: argparse.Namespace) -> int:
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
    """Waits until `condition` holds. Returns False if that takes too long."""

    async def poll() -> bool:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    return asyncio.run(poll())


def _recorded(data: Path) -> list[int]:
    """Returns the processes that were started with the cluster: the JobManager, the TaskManagers,
    and their replacements.
    """
    path = data / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def _signal(pid: int, number: int) -> bool:
    """Sends a signal. Returns whether there is such a process."""
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
