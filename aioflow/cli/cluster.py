"""The commands that start and stop the processes of a cluster: `jobmanager`, `taskmanager` and
`cluster`.

The module `local_cluster` starts and ends the processes for the command `cluster`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from aioflow.cli.cluster_access import (
    DATA,
    FINISHED,
    LOCAL,
    PORT,
    add_access_options,
    add_tls_options,
    addresses,
    asking,
    find_started,
    run_on_host,
    secret_of,
    tls_files,
)
from aioflow.cli.jobs import print_jobs
from aioflow.cli.local_cluster import (
    in_directory,
    keep_running,
    spawn_taskmanager,
    start_cluster,
    stop_cluster,
)
from aioflow.cli.options import (
    add_configuration,
    add_log_options,
    add_monitor_options,
    bind_address,
    count,
    duration,
    monitor_address,
    network_memory,
    port,
    positive,
    served,
    serving_health,
)
from aioflow.cluster.jobmanager import JobManager, JobManagerOptions, check_bind
from aioflow.cluster.leadership import LeaderRetrieval
from aioflow.cluster.submission import ClusterClient
from aioflow.cluster.taskmanager import TaskManager, TaskManagerOptions
from aioflow.core.aio import cancel_and_wait
from aioflow.core.contexts import contextmanager
from aioflow.core.errors import counted
from aioflow.core.host import Host
from aioflow.core.timeunits import to_seconds
from aioflow.network.local_pool import NETWORK_MEMORY_BYTES
from aioflow.network.security import create_secret

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Adds the commands to an argparse subparsers object."""
    _add_jobmanager(commands)
    _add_taskmanager(commands)
    _add_cluster(commands)


def _add_jobmanager(commands: Any) -> None:
    jobmanager = commands.add_parser(
        "jobmanager",
        help="run a JobManager",
        description="Accept jobs, and run them in the slots of TaskManagers.",
    )
    jobmanager.add_argument(
        "--port", type=port, default=PORT, help=f"port to listen at ({PORT}); 0: any free port"
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
        help=f"directory for the jobs and the lease ({DATA})",
    )
    jobmanager.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="file with the shared secret (DIR/secret, created if missing)",
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
        help=f"JobManager to register with (127.0.0.1:{PORT})",
    )
    taskmanager.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="directory of the JobManagers; its lease names the leader",
    )
    taskmanager.add_argument("--slots", type=positive, default=1, help="number of slots (1)")
    reached = "address at which other processes reach it (127.0.0.1)"
    taskmanager.add_argument(
        "--bind", type=bind_address, default="127.0.0.1", metavar="ADDRESS", help=reached
    )
    taskmanager.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help=f"file with the shared secret (DIR/secret; without --data {DATA}/secret)",
    )
    taskmanager.add_argument(
        "--health",
        type=monitor_address,
        metavar="HOST:PORT",
        help="serve /healthz and /readyz at this address, for probes; port 0: any free port",
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
        help="number of TaskManagers (one per processor; if --slots is given, 1)",
    )
    start.add_argument(
        "--slots",
        type=positive,
        help="slots of each TaskManager (1; if --workers is given, one per processor)",
    )
    start.add_argument(
        "--port", type=port, default=PORT, help=f"port of the JobManager ({PORT}); 0: any free port"
    )
    add_monitor_options(start)
    add_log_options(start)
    _add_request_timeout(start)
    _add_network_memory(start)
    add_configuration(start)
    start.set_defaults(carry_out=partial(in_directory, start_cluster))
    status = actions.add_parser("status", help="show the processes, slots and jobs of a cluster")
    status.set_defaults(carry_out=_status)
    add_access_options(status)
    stop = actions.add_parser(
        "stop", help="end all processes of a cluster; its running jobs continue at the next start"
    )
    stop.set_defaults(carry_out=partial(in_directory, stop_cluster))
    for action in (start, stop):
        action.add_argument(
            "--data",
            type=Path,
            default=DATA,
            metavar="DIR",
            help=f"directory of the cluster ({DATA})",
        )
        add_tls_options(action)


def _add_process_options(process: argparse.ArgumentParser) -> None:
    """Adds the options of a cluster process that runs in the foreground."""
    add_log_options(process)
    process.add_argument(
        "--allow-plaintext",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="allow an address off loopback without TLS; others can then read the traffic",
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
        help="memory of each TaskManager for data between tasks, shared by all jobs (64MiB)",
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
            start = partial(spawn_taskmanager, arguments, f"{address}:{number}", path)
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
"""Modules that most jobs import, so a process imports them before a job arrives."""


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
