"""The commands about clusters: their processes (`jobmanager`, `taskmanager`, `cluster`), and what is asked of them (`submit` ...)."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from aioflow.api.checkpoint_options import shown_path, store_url
from aioflow.api.options import parse_options
from aioflow.api.runner import new_event_loop
from aioflow.cli.checkpoints import add_checkpoint_options, checkpoint_options
from aioflow.cli.monitor import add_monitor_options, monitor_arguments, served
from aioflow.cli.security import add_tls_options, secured_host, tls_arguments, tls_files
from aioflow.cli.target import UsageError, load_flow
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.jobmanager import JobManager, JobManagerOptions, check_bind
from aioflow.cluster.remote import RETURN_TIMEOUT_S, RemoteCluster
from aioflow.cluster.restart import fixed_delay, no_restart
from aioflow.cluster.secret_file import create_secret, read_secret
from aioflow.cluster.submission import ClusterClient, JobLine, submission_of
from aioflow.cluster.taskmanager import TaskManager, TaskManagerOptions
from aioflow.cluster.whereabouts import Whereabouts, parse_address, parse_addresses
from aioflow.core.errors import AioflowError, Broken, CheckpointError, GraphError, NotAuthenticated
from aioflow.core.host import Host, SystemHost
from aioflow.core.timeunits import to_seconds
from aioflow.graph.job_graph import build_job_graph

__all__ = ["add_commands", "remote_cluster"]

FINISHED, FAILED, USAGE = 0, 1, 2
DATA = Path(".aioflow")
"""Where a cluster keeps its jobs, its secret and its logs, unless told otherwise."""

PORT = 6123
LOCAL = Whereabouts((("127.0.0.1", PORT),))
POLL_S = 0.05
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0


def add_commands(commands: Any) -> None:
    """Add the commands to an argparse subparsers object."""
    jobmanager = commands.add_parser("jobmanager", help="run a JobManager", description="Take jobs and hand out the slots of TaskManagers.")
    jobmanager.add_argument("--port", type=int, default=PORT, help=f"where to listen ({PORT}); 0: any free port")
    jobmanager.add_argument("--bind", type=_bind, default="127.0.0.1", metavar="ADDRESS", help="address to listen at (127.0.0.1)")
    jobmanager.add_argument("--data", type=Path, default=DATA, metavar="DIR", help=f"jobs and lease are kept there ({DATA})")
    jobmanager.add_argument("--secret-file", type=Path, metavar="FILE", help="the shared secret (DIR/secret, made when absent)")
    jobmanager.add_argument("--request-timeout", default="30s", metavar="TIME", help="a job that gets no slots for so long fails (30s)")
    add_monitor_options(jobmanager)
    jobmanager.set_defaults(carry_out=_jobmanager)

    taskmanager = commands.add_parser("taskmanager", help="run a TaskManager", description="Lend slots to a cluster and run tasks in them.")
    taskmanager.add_argument("--jobmanager", type=_addresses, metavar="HOST:PORT[,...]", help=f"whom to register at (127.0.0.1:{PORT})")
    taskmanager.add_argument("--data", type=Path, metavar="DIR", help="of the JobManagers: the lease in it says which of them leads")
    taskmanager.add_argument("--slots", type=_positive, default=1, help="how many (1)")
    reached = "address at which others reach it (127.0.0.1)"
    taskmanager.add_argument("--bind", type=_bind, default="127.0.0.1", metavar="ADDRESS", help=reached)
    taskmanager.add_argument("--secret-file", type=Path, default=DATA / "secret", metavar="FILE", help=f"the shared secret ({DATA}/secret)")
    taskmanager.set_defaults(carry_out=_taskmanager)

    for process in (jobmanager, taskmanager):
        process.add_argument("--allow-plaintext", action="store_true", help="listen off loopback without TLS: others may read along")

    cluster = commands.add_parser("cluster", help="start, stop or show a cluster on this machine")
    actions = cluster.add_subparsers(dest="action", metavar="ACTION", required=True)
    start = actions.add_parser("start", help="start a JobManager and TaskManagers in the background")
    start.add_argument("--workers", type=int, default=1, metavar="N", help="how many TaskManagers (1)")
    start.add_argument("--slots", type=_positive, default=os.cpu_count() or 1, help="slots of each (one a processor)")
    start.add_argument("--port", type=int, default=PORT, help=f"of the JobManager ({PORT}); 0: any free port")
    start.add_argument("--request-timeout", default="30s", metavar="TIME", help="a job that gets no slots for so long fails (30s)")
    add_monitor_options(start)
    start.set_defaults(carry_out=_start)
    status = actions.add_parser("status", help="show its processes, slots and jobs")
    status.set_defaults(carry_out=_status)
    stop = actions.add_parser("stop", help="end all its processes; jobs that run are taken up again at the next start")
    stop.set_defaults(carry_out=_stop_cluster)
    for action in (start, status, stop):
        action.add_argument("--data", type=Path, default=DATA, metavar="DIR", help=f"everything about it is there ({DATA})")

    submit = commands.add_parser("submit", help="run a flow on a cluster", description="Run a flow on a cluster and wait for its end.")
    submit.add_argument("target", metavar="TARGET", help="MODULE:FLOW or PATH.py:FLOW, where FLOW is a Flow or a function that returns one")
    submit.add_argument("-d", "--detach", action="store_true", help="do not wait: print the job's id")
    submit.add_argument("--restarts", type=int, metavar="N", help="try again so often when a task fails (0; with --checkpoints always)")
    add_checkpoint_options(submit)
    submit.set_defaults(carry_out=_submit)
    listing = commands.add_parser("list", help="list the jobs of a cluster")
    listing.set_defaults(carry_out=_list)
    cancel = commands.add_parser("cancel", help="end a job of a cluster at once")
    cancel.set_defaults(carry_out=_cancel)
    stop_job = commands.add_parser("stop", help="end the sources of a job; what is under way reaches the sinks")
    stop_job.add_argument("--drain", action="store_true", help="end event time too: open windows fire")
    how = stop_job.add_mutually_exclusive_group()
    how.add_argument("--savepoint", metavar="DIR", help="where the savepoint goes that a job with checkpoints ends with (its store)")
    how.add_argument("--no-savepoint", action="store_true", help="make none: the job goes on from its last checkpoint")
    stop_job.set_defaults(carry_out=_stop_job)
    savepoint = commands.add_parser("savepoint", help="write the state of a job, which goes on, where it stays until you delete it")
    savepoint.set_defaults(carry_out=_savepoint)
    for command in (cancel, stop_job, savepoint):
        command.add_argument("job", metavar="JOB", help="id of the job, or its beginning")
    savepoint.add_argument("directory", metavar="DIR", nargs="?", help="where it goes (the store of the job's checkpoints)")
    for command in (jobmanager, taskmanager, start, status, stop, submit, listing, cancel, stop_job, savepoint):
        add_tls_options(command)
    for command in (submit, listing, cancel, stop_job, savepoint):
        where = f"the JobManager, or several (of the cluster whose secret it is; 127.0.0.1:{PORT})"
        command.add_argument("--at", type=_addresses, metavar="HOST:PORT[,...]", help=where)
        command.add_argument("--secret-file", type=Path, default=DATA / "secret", metavar="FILE", help=f"the shared secret ({DATA}/secret)")


def _addresses(text: str) -> Whereabouts:
    try:
        return Whereabouts(parse_addresses(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bind(text: str) -> str:
    """An address of this machine to listen at, without a port."""
    host, colon, port = text.rpartition(":")
    if colon and port.isdecimal() and ":" not in host:
        raise argparse.ArgumentTypeError(f"expected an address without a port, got {text!r}: the port of a jobmanager goes into --port")
    try:
        socket.getaddrinfo(text, None)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no address of this machine: {error.strerror}") from None
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


# Processes of a cluster.


def _jobmanager(arguments: argparse.Namespace) -> int:
    async def body(host: Host) -> int:
        path = arguments.secret_file or arguments.data / "secret"
        check_bind(arguments.bind, arguments.secret_file is not None)
        secret = _secret(path) if arguments.secret_file else create_secret(str(path), _new_secret(host))
        arguments.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        options = JobManagerOptions(
            data=str(arguments.data), bind=arguments.bind, port=arguments.port, request_timeout_s=to_seconds(arguments.request_timeout)
        )

        def on_listening(address: str, port: int) -> None:
            whole = arguments.data / f"address.{os.getpid()}"  # Whoever waits for the file must not find it empty.
            whole.write_text(f"{address}:{port}\n", encoding="utf-8")
            whole.replace(arguments.data / "address")
            print(f"jobmanager listens at {address}:{port}", flush=True)

        manager = JobManager(host, secret, options, on_listening)
        with _stopped_by_signals(manager.stop):
            async with served(manager, arguments):
                await manager.run()
        return FINISHED

    return _run(arguments, body)


def _taskmanager(arguments: argparse.Namespace) -> int:
    async def body(host: Host) -> int:
        named = LOCAL if arguments.jobmanager is None and arguments.data is None else arguments.jobmanager or Whereabouts()
        where = Whereabouts(named.addresses, None if arguments.data is None else str(arguments.data))
        options = TaskManagerOptions(jobmanagers=where, slots=arguments.slots, bind=arguments.bind)
        manager = TaskManager(host, _secret(arguments.secret_file), options)
        manager.inspector.start()
        print(f"taskmanager {manager.id[:8]} offers {arguments.slots} slots", flush=True)
        with _stopped_by_signals(manager.stop):
            await manager.run()
        return FINISHED

    return _run(arguments, body)


def _run(arguments: argparse.Namespace, body: Callable[[Host], Coroutine[Any, Any, int]]) -> int:
    """Run `body` in a loop of its own; errors of the world become a line and a code."""

    async def on_a_host() -> int:
        host = secured_host(arguments)
        try:
            return await body(host)
        finally:
            await host.close()

    if arguments.command in ("jobmanager", "taskmanager"):
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(on_a_host())
    except (AioflowError, OSError) as error:
        return _failed(arguments, error)


def _failed(arguments: argparse.Namespace, error: Exception) -> int:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        text = f"port {arguments.port} is in use: another jobmanager may run there; choose another with --port"
    elif isinstance(error, ConnectionError):
        text = f"no jobmanager listens at {arguments.at}: {_remedy(arguments)}"
    else:
        text = str(error)
    print(f"aioflow {arguments.command}: {text}", file=sys.stderr)
    return USAGE if isinstance(error, (NotAuthenticated, GraphError, OSError)) else FAILED


def _remedy(arguments: argparse.Namespace) -> str:
    """What to do when no JobManager listens."""
    data = arguments.data if "data" in arguments else arguments.secret_file.parent
    alive = [] if arguments.at.data is None else _alive(data)
    if alive:
        others = f"processes {', '.join(map(str, alive))} of its cluster still run"
        return f"it is gone, {others}; end them with aioflow cluster stop, and start it again (its jobs are kept)"
    return "start a cluster with aioflow cluster start" + ("" if "data" in arguments else ", or name one with --at")


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


def _new_secret(host: Host) -> bytes:
    return (host.ids.new("secret") + host.ids.new("secret")).encode()


def _secret(path: Path) -> bytes:
    try:
        return read_secret(str(path))
    except FileNotFoundError:
        raise NotAuthenticated(f"there is no secret file {path}: name that of the cluster with --secret-file") from None


# A cluster on this machine.


def _start(arguments: argparse.Namespace) -> int:
    data = arguments.data
    alive = _alive(data)
    if alive:
        raise UsageError(f"a cluster runs with {data} already (processes {', '.join(map(str, alive))}); stop it first")
    monitoring = monitor_arguments(arguments)
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    (data / "address").unlink(missing_ok=True)
    (data / "pids").unlink(missing_ok=True)
    tls = tls_arguments(arguments)
    port = ["--port", str(arguments.port), "--request-timeout", arguments.request_timeout]
    jobmanager = _spawn(data, "jobmanager", ["jobmanager", "--data", str(data), *port, *tls, *monitoring])
    listens = _wait_until(lambda: (data / "address").exists() or jobmanager.poll() is not None, START_TIMEOUT_S)
    if not listens or jobmanager.poll() is not None:
        jobmanager.kill()
        jobmanager.wait()
        lines = (data / "jobmanager.log").read_text(encoding="utf-8").splitlines()
        raise UsageError(f"the jobmanager did not start: {lines[-1] if lines else 'it said nothing'}")
    address = (data / "address").read_text(encoding="utf-8").strip()
    for number in range(arguments.workers):
        options = ["--jobmanager", address, "--data", str(data), "--slots", str(arguments.slots), "--secret-file", str(data / "secret")]
        _spawn(data, f"taskmanager-{number + 1}", ["taskmanager", *options, *tls])
    arguments.at, arguments.secret_file = _at(data), data / "secret"

    async def all_registered(client: ClusterClient) -> int:
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while True:
            found = await client.taskmanagers()
            if len(found) >= arguments.workers or asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(POLL_S)
        slots = sum(line[1] for line in found)
        print(f"cluster at {address}: {len(found)} taskmanagers with {slots} slots; logs in {data}")
        return FINISHED if len(found) == arguments.workers else FAILED

    return _asking(arguments, all_registered)


def _spawn(data: Path, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
    log = os.open(data / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        command = [sys.executable, "-m", "aioflow", *argv]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    finally:
        os.close(log)
    with (data / "pids").open("a", encoding="utf-8") as pids:
        pids.write(f"{process.pid}\n")
    return process


def _alive(data: Path) -> list[int]:
    """Processes of the cluster of `data` that run."""
    try:
        pids = [int(line) for line in (data / "pids").read_text(encoding="utf-8").split()]
    except FileNotFoundError:
        return []
    return [pid for pid in pids if _is_ours(pid, data)]


def _is_ours(pid: int, data: Path) -> bool:
    """Whether this process still is the one that was started: numbers are used again."""
    try:
        os.waitpid(pid, os.WNOHANG)  # A child of this very process has to be reaped before it is gone.
    except ChildProcessError:
        pass
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"aioflow" in command and str(data).encode() in command


def _status(arguments: argparse.Namespace) -> int:
    _find(arguments)

    async def show(client: ClusterClient) -> int:
        found = await client.taskmanagers()
        print("jobmanager   {}:{}".format(*client.address))
        for worker_id, slots, free in found:
            print(f"taskmanager  {worker_id[:8]}  {slots} slots, {free} free")
        print(f"fenced_total {await client.fenced_total()}")
        _print_jobs(await client.jobs())
        return FINISHED

    return _asking(arguments, show)


def _stop_cluster(arguments: argparse.Namespace) -> int:
    alive = _alive(arguments.data)
    if not alive:
        raise UsageError(f"no cluster runs with {arguments.data}")
    _find(arguments)
    try:
        asyncio.run(_ask_once(arguments, ClusterClient.shutdown, timeout_s=STOP_TIMEOUT_S / 3))
    except (AioflowError, OSError) as error:
        print(f"aioflow cluster: the jobmanager does not answer ({error}), its processes are ended", file=sys.stderr)
        for pid in alive:
            _signal(pid, signal.SIGTERM)
    if not _wait_until(lambda: not _alive(arguments.data), STOP_TIMEOUT_S):
        for pid in _alive(arguments.data):
            _signal(pid, signal.SIGKILL)
        _wait_until(lambda: not _alive(arguments.data), STOP_TIMEOUT_S)
    (arguments.data / "pids").unlink(missing_ok=True)
    (arguments.data / "address").unlink(missing_ok=True)
    print("cluster stopped")
    return FINISHED


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for something that processes of this machine do. False if it takes too long."""

    async def poll() -> bool:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    return asyncio.run(poll())


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _find(arguments: argparse.Namespace) -> None:
    try:
        arguments.at = _at(arguments.data)
    except FileNotFoundError:
        raise UsageError(f"no cluster was started with {arguments.data}") from None
    arguments.secret_file = arguments.data / "secret"


def _find_started(arguments: argparse.Namespace) -> None:
    """Without --at: the cluster that was started here, whatever its port is, or the usual one."""
    if arguments.at is None:
        data = arguments.secret_file.parent
        arguments.at = _at(data) if (data / "address").exists() else LOCAL


def _at(data: Path) -> Whereabouts:
    """The JobManager that started last, or whoever leads by now."""
    return Whereabouts((parse_address((data / "address").read_text(encoding="utf-8").strip()),), str(data))


# Jobs.


def remote_cluster(arguments: argparse.Namespace) -> RemoteCluster:
    """What `--at` and `--secret-file` name."""
    address = str(arguments.at) if arguments.at.data is None else Path(arguments.at.data)  # Its lease knows the next leader too.
    return RemoteCluster(address, secret=_secret(arguments.secret_file), tls=tls_files(arguments))


def _submit(arguments: argparse.Namespace) -> int:
    _find_started(arguments)
    given = checkpoint_options(arguments)
    if arguments.restarts is not None:
        given["restart"] = fixed_delay(arguments.restarts, "1s") if arguments.restarts else no_restart()
    flow = load_flow(arguments.target)
    options = replace(parse_options(given), debug=False)
    try:
        graph = build_job_graph(flow.graph, apart=True)
        at_home = [node.name for vertex in graph.vertices for node in vertex.nodes if node.stays_here]
        if at_home and arguments.detach:
            raise UsageError(f"{', '.join(at_home)} runs in the submitting process, which has to stay: leave out --detach")
        job = submission_of(graph, options.restart, options.task_options(flow.name), options.checkpoint_settings())
    except (GraphError, CheckpointError) as error:
        raise UsageError(str(error)) from error
    if not at_home:
        return _asking(arguments, partial(_submit_and_wait, job=job, detach=arguments.detach))
    return _run(arguments, partial(_execute, flow=flow, cluster=remote_cluster(arguments), given=given))


async def _submit_and_wait(client: ClusterClient, job: Any, detach: bool) -> int:
    job_id = SystemHost().ids.new("job")
    await client.submit(job_id, job)
    print(job_id, flush=True)
    return FINISHED if detach else await _followed(client, job_id)


async def _followed(client: ClusterClient, job_id: str, ask: Callable[[], Awaitable[None]] | None = None) -> int:
    """Wait for the end of a job; its JobManager may die before it, and the next one is asked again."""
    try:
        return _ended(await client.follow(job_id, RETURN_TIMEOUT_S, ask))
    except (OSError, AioflowError) as error:
        gone = f"the jobmanager of job {job_id} is gone, and none was found that has it: {error}"
        raise Broken(f"{gone}; the job may go on, see aioflow list") from error


async def _execute(host: Host, flow: Any, cluster: RemoteCluster, given: dict[str, Any]) -> int:
    async with flow.run(on=cluster, **given) as job:
        print(job.id, flush=True)
        result = await job.wait()
    print(f"{result.name}: {result.status}", file=sys.stderr)
    return FINISHED


def _ended(line: JobLine) -> int:
    print(f"{line.name}: {line.status.value}{': ' + line.error if line.error else ''}", file=sys.stderr)
    if line.savepoint:
        print(shown_path(line.savepoint))
    return FINISHED if line.status is JobStatus.FINISHED and not line.error else FAILED


def _list(arguments: argparse.Namespace) -> int:
    async def show(client: ClusterClient) -> int:
        _print_jobs(await client.jobs())
        return FINISHED

    return _asking(arguments, show)


def _print_jobs(lines: list[JobLine]) -> None:
    for line in lines:
        print(f"{line.job_id}  {line.status.value:12}  {line.name}{'  ' + line.error if line.error else ''}")
    if not lines:
        print("no jobs")


def _cancel(arguments: argparse.Namespace) -> int:
    async def cancel(client: ClusterClient) -> int:
        job_id = await _job_id(client, arguments.job)
        line = await client.follow(job_id, RETURN_TIMEOUT_S, partial(client.cancel, job_id))
        print(f"{line.job_id}  {line.status.value}")
        return FINISHED

    return _asking(arguments, cancel)


def _stop_job(arguments: argparse.Namespace) -> int:
    async def stop(client: ClusterClient) -> int:
        job_id = await _job_id(client, arguments.job)
        how = {"drain": arguments.drain, "savepoint": not arguments.no_savepoint, "directory": directory}
        return await _followed(client, job_id, partial(client.stop, job_id, **how))

    directory = _directory(arguments.savepoint)
    return _asking(arguments, stop)


def _savepoint(arguments: argparse.Namespace) -> int:
    async def savepoint(client: ClusterClient) -> int:
        print(shown_path(await client.savepoint(await _job_id(client, arguments.job), directory)))
        return FINISHED

    directory = _directory(arguments.directory)
    return _asking(arguments, savepoint)


def _directory(given: str | None) -> str | None:
    """The URL of a directory as it was given."""
    try:
        return None if given is None else store_url(given, "the directory")
    except ValueError as error:
        raise UsageError(str(error)) from error


async def _job_id(client: ClusterClient, beginning: str) -> str:
    found = [line.job_id for line in await client.jobs() if line.job_id.startswith(beginning)]
    if len(found) != 1:
        what = "no job has" if not found else f"{len(found)} jobs have"
        raise UsageError(f"{what} an id that begins with {beginning!r}: see aioflow list")
    return found[0]


def _asking(arguments: argparse.Namespace, body: Callable[[ClusterClient], Coroutine[Any, Any, int]]) -> int:
    _find_started(arguments)

    async def connected(host: Host) -> int:
        async with ClusterClient(host, arguments.at, _secret(arguments.secret_file)) as client:
            return await body(client)

    return _run(arguments, connected)


async def _ask_once(
    arguments: argparse.Namespace, question: Callable[[ClusterClient], Coroutine[Any, Any, None]], timeout_s: float
) -> None:
    host = secured_host(arguments)
    try:
        async with asyncio.timeout(timeout_s):
            async with ClusterClient(host, arguments.at, _secret(arguments.secret_file)) as client:
                await question(client)
    finally:
        await host.close()
