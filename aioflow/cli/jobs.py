"""The commands that manage the jobs of a cluster: `submit`, `list`, `cancel`, `stop`, `checkpoint`,
`savepoint`, `rescale`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from aioflow.api.build import warn_of_loose_ends
from aioflow.api.checkpoint_options import shown_path, store_url
from aioflow.api.options import parse_options
from aioflow.checkpoint.savepoint import delete_savepoint
from aioflow.cli.cluster_access import (
    FAILED,
    FINISHED,
    add_access_options,
    asking,
    find_started,
    run_on_host,
    secret_of,
    tls_files,
)
from aioflow.cli.options import (
    UsageError,
    add_checkpoint_options,
    checkpoint_options,
    count,
    id_beginning,
    in_flags,
    key_in,
)
from aioflow.cli.targets import load_flow
from aioflow.cli.terminal import describe
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.remote import RETURN_TIMEOUT_S, RemoteCluster
from aioflow.cluster.restart import fixed_delay, no_restart
from aioflow.cluster.submission import ClusterClient, JobLine, submission_of
from aioflow.core.errors import AioflowError, Broken, CheckpointError, GraphError, RestoreError
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.graph.job_graph import build_job_graph

__all__ = ["add_commands", "how_far", "print_jobs", "remote_cluster"]

DISPOSE = "dispose"
"""Word that `savepoint` accepts in place of a job. It cannot be the beginning of a job id, because
ids consist of hex digits.
"""

STATUS_WIDTH = 12
"""Width of the longest status, INITIALIZING, so that the next columns are aligned."""

OWN_ERRORS = ("CheckpointError:", "RestoreError:")
"""Beginnings of the texts of job errors that may name arguments of the API, which are shown as
command line flags.
"""


def add_commands(commands: Any) -> None:
    """Adds the commands to an argparse subparsers object."""
    submit = _add_submit(commands)
    listing = commands.add_parser("list", help="list the jobs of a cluster")
    listing.set_defaults(carry_out=_list)
    cancel = commands.add_parser("cancel", help="end a job of a cluster at once")
    _add_job(cancel)
    cancel.set_defaults(carry_out=_cancel)
    stop_job = _add_stop(commands)
    checkpoint = commands.add_parser(
        "checkpoint", help="take a checkpoint of a job now, and print its number"
    )
    _add_job(checkpoint)
    checkpoint.set_defaults(carry_out=_checkpoint)
    savepoint = _add_savepoint(commands)
    rescale = _add_rescale(commands)
    for command in (submit, listing, cancel, stop_job, checkpoint, savepoint, rescale):
        add_access_options(command)


def _add_submit(commands: Any) -> argparse.ArgumentParser:
    submit: argparse.ArgumentParser = commands.add_parser(
        "submit",
        help="run a flow on a cluster",
        description="Run a flow on a cluster and wait for its end.",
    )
    submit.add_argument(
        "target",
        metavar="TARGET",
        help="MODULE:FLOW or PATH.py:FLOW, where FLOW is a Flow or a function that returns one",
    )
    submit.add_argument(
        "-d", "--detach", action="store_true", help="do not wait: print the job's id"
    )
    submit.add_argument(
        "--restarts",
        type=count,
        metavar="N",
        help="number of restarts after failures (0; with --checkpoints: no limit)",
    )
    add_checkpoint_options(submit)
    submit.set_defaults(carry_out=_submit)
    return submit


def _add_stop(commands: Any) -> argparse.ArgumentParser:
    stop_job: argparse.ArgumentParser = commands.add_parser(
        "stop", help="end the sources of a job; records in transit still reach the sinks"
    )
    stop_job.add_argument(
        "--drain", action="store_true", help="also end event time, so that open windows fire"
    )
    how = stop_job.add_mutually_exclusive_group()
    how.add_argument(
        "--savepoint",
        metavar="DIR",
        help="directory for the last savepoint of a job with checkpoints (its store)",
    )
    how.add_argument(
        "--no-savepoint",
        action="store_true",
        help="take no savepoint: the next run continues from the last checkpoint",
    )
    _add_job(stop_job)
    stop_job.set_defaults(carry_out=_stop_job)
    return stop_job


def _add_savepoint(commands: Any) -> argparse.ArgumentParser:
    savepoint: argparse.ArgumentParser = commands.add_parser(
        "savepoint",
        help="write the state of a running job, and keep it until you delete it",
        description="Write the state of a job to DIR; or delete a savepoint: "
        "aioflow savepoint dispose PATH.",
    )
    savepoint.add_argument(
        "--key-file", metavar="FILE", help="with dispose: file with the key of the savepoint"
    )
    _add_job(savepoint)
    savepoint.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="the target (the store of the job's checkpoints); with dispose: the savepoint",
    )
    savepoint.set_defaults(carry_out=_savepoint, after_options="directory")
    return savepoint


def _add_rescale(commands: Any) -> argparse.ArgumentParser:
    rescale: argparse.ArgumentParser = commands.add_parser(
        "rescale", help="change the parallelism of a job with checkpoints"
    )
    _add_job(rescale)
    rescale.add_argument(
        "parallelism", type=int, metavar="N", help="new number of subtasks of each task"
    )
    rescale.add_argument(
        "--operator",
        metavar="UID",
        help="only the task with this operator (all tasks without their own parallelism)",
    )
    rescale.set_defaults(carry_out=_rescale)
    return rescale


def _add_job(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "job", type=id_beginning, metavar="JOB", help="id of the job, or the beginning of the id"
    )


def remote_cluster(arguments: argparse.Namespace) -> RemoteCluster:
    """Returns the cluster that `--at` and `--secret-file` name."""
    # The lease in that directory also names the next leader.
    address = str(arguments.at) if arguments.at.data is None else Path(arguments.at.data)
    return RemoteCluster(address, secret=secret_of(arguments.secret_file), tls=tls_files(arguments))


def _submit(arguments: argparse.Namespace) -> int:
    find_started(arguments)
    given = checkpoint_options(arguments)
    if arguments.restarts is not None:
        if "restart" in given:
            raise UsageError("--restarts N is a --restart fixed_delay(attempts=N): give one")
        given["restart"] = (
            fixed_delay(arguments.restarts, "1s") if arguments.restarts else no_restart()
        )
    flow = load_flow(arguments.target)
    options = replace(parse_options(given), debug=False)
    try:
        graph = build_job_graph(flow.graph, apart=True)
        at_home = [
            node.name for vertex in graph.vertices for node in vertex.nodes if node.stays_here
        ]
        if at_home and arguments.detach:
            raise UsageError(
                f"{', '.join(at_home)} runs in the submitting process, which has to stay: leave "
                "out --detach"
            )
        job = submission_of(
            graph, options.restart, options.task_options(flow.name), options.checkpoint_settings()
        )
    except (GraphError, CheckpointError) as error:
        raise UsageError(in_flags(str(error))) from error
    warn_of_loose_ends(flow.graph)
    if not at_home:
        return asking(arguments, partial(_submit_and_wait, job=job, detach=arguments.detach))
    return run_on_host(
        arguments, partial(_execute, flow=flow, cluster=remote_cluster(arguments), given=given)
    )


async def _submit_and_wait(client: ClusterClient, job: Any, detach: bool) -> int:
    job_id = SystemHost().ids.new("job")
    await client.submit(job_id, job, RETURN_TIMEOUT_S)
    print(job_id, flush=True)
    if detach:
        return FINISHED
    try:
        return await _followed(client, job_id)
    except asyncio.CancelledError:
        print(
            f"aioflow submit: job {job_id} goes on; aioflow cancel {job_id[:8]} ends it",
            file=sys.stderr,
        )
        raise


async def _followed(
    client: ClusterClient, job_id: str, ask: Callable[[], Awaitable[None]] | None = None
) -> int:
    """Waits for the end of a job, and returns the exit code. `ask` sends the request that ends the
    job, if there is one.

    If the JobManager dies in the meantime, its successor is asked.
    """
    try:
        return _ended(await client.follow(job_id, RETURN_TIMEOUT_S, ask))
    except CheckpointError:  # The cluster refused the request.
        raise
    except (OSError, AioflowError) as error:
        gone = f"the jobmanager of job {job_id} is gone, and none was found that has it: {error}"
        raise Broken(f"{gone}; the job may go on, see aioflow list") from error


async def _execute(host: Host, flow: Any, cluster: RemoteCluster, given: dict[str, Any]) -> int:
    try:
        async with flow.run(on=cluster, **given) as job:
            print(job.id, flush=True)
            result = await job.wait()
    except (AioflowError, OSError):
        raise
    except Exception as error:  # noqa: BLE001  # The job's own, as for `aioflow run`.
        told = "\n  ".join(describe(error))
        print(f"{flow.name}: {JobStatus.FAILED.value}: {told}", file=sys.stderr)
        return FAILED
    print(f"{result.name}: {result.status}", file=sys.stderr)
    return FINISHED


def _ended(line: JobLine) -> int:
    error = (in_flags(line.error) if line.error.startswith(OWN_ERRORS) else line.error).replace(
        "\n", "\n  "
    )
    print(f"{line.name}: {line.status.value}{': ' + error if error else ''}", file=sys.stderr)
    if line.savepoint:
        print(shown_path(line.savepoint))
    return FINISHED if line.status is JobStatus.FINISHED and not line.error else FAILED


def _list(arguments: argparse.Namespace) -> int:
    async def show(client: ClusterClient) -> int:
        print_jobs(await client.jobs())
        return FINISHED

    return asking(arguments, show)


def print_jobs(lines: list[JobLine]) -> None:
    shown = [how_far(line) for line in lines]
    width = max(STATUS_WIDTH, *map(len, shown)) if shown else STATUS_WIDTH
    for line, state in zip(lines, shown, strict=True):
        error = line.error.partition("\n")[0]  # One line for each job.
        print(f"{line.job_id}  {state:{width}}  {line.name}{'  ' + error if error else ''}")
    if not lines:
        print("no jobs")


def how_far(line: JobLine) -> str:
    """Returns a text with the status of a job, the number of its running tasks, and the number of
    slots that the job waits for.

    The status RUNNING alone means only that the job was started.
    """
    if line.status.is_terminal or not line.tasks:
        return line.status.value
    waits = (
        f"waits for {line.slots_missing} slot{'s' * (line.slots_missing > 1)}"
        if line.slots_missing
        else ""
    )
    more = ", ".join(
        part
        for part in (waits, f"{line.tasks_finished} finished" if line.tasks_finished else "")
        if part
    )
    return (
        f"{line.status.value} {line.tasks_running}/{line.tasks} tasks{f' ({more})' if more else ''}"
    )


def _cancel(arguments: argparse.Namespace) -> int:
    async def cancel(client: ClusterClient) -> int:
        line = await _job(client, arguments.job)
        if line.status.is_terminal:
            _had_ended(line, "cancelled")  # It has ended, as the user wanted.
        else:
            line = await client.follow(
                line.job_id, RETURN_TIMEOUT_S, partial(client.cancel, line.job_id)
            )
        print(f"{line.job_id}  {line.status.value}")
        return FINISHED

    return asking(arguments, cancel)


def _stop_job(arguments: argparse.Namespace) -> int:
    async def stop(client: ClusterClient) -> int:
        line = await _job(client, arguments.job)
        if line.status.is_terminal:
            return _had_ended(line, "stopped")
        how = {
            "drain": arguments.drain,
            "savepoint": not arguments.no_savepoint,
            "directory": directory,
        }
        return await _followed(client, line.job_id, partial(client.stop, line.job_id, **how))

    directory = _directory(arguments.savepoint)
    return asking(arguments, stop)


def _checkpoint(arguments: argparse.Namespace) -> int:
    async def checkpoint(client: ClusterClient) -> int:
        line = await _job(client, arguments.job)
        if line.status.is_terminal:
            return _had_ended(line, "saved")
        print(await client.checkpoint(line.job_id))
        return FINISHED

    return asking(arguments, checkpoint)


def _dispose(arguments: argparse.Namespace) -> int:
    """Deletes a savepoint directly from its store, without a cluster."""
    if arguments.directory is None:
        raise UsageError("expected the savepoint: aioflow savepoint dispose PATH")
    key = key_in(arguments.key_file)
    url = store_root(arguments.directory)
    if url is not None:
        raise UsageError(f"{url} is the root of a store, expected the directory of a savepoint")
    try:
        deleted = asyncio.run(delete_savepoint(arguments.directory, key=key))
    except (CheckpointError, RestoreError) as error:
        print(f"aioflow savepoint: {error}", file=sys.stderr)
        return FAILED
    print(f"deleted {shown_path(deleted)}")
    return FINISHED


def store_root(path: str) -> str | None:
    """Returns `path` if it is the root of the machine or of a bucket, otherwise None."""
    scheme, colon, rest = path.partition("://")
    if colon and scheme != "file":
        return path if "/" not in rest.rstrip("/") else None
    whole = Path("/", rest) if colon else Path(path).absolute()
    return path if whole.resolve() == Path("/") else None


def _savepoint(arguments: argparse.Namespace) -> int:
    if arguments.job == DISPOSE:
        return _dispose(arguments)
    if arguments.key_file is not None:
        raise UsageError("--key-file is for aioflow savepoint dispose PATH")

    async def savepoint(client: ClusterClient) -> int:
        line = await _job(client, arguments.job)
        if line.status.is_terminal:
            return _had_ended(line, "saved")
        print(shown_path(await client.savepoint(line.job_id, directory)))
        return FINISHED

    directory = _directory(arguments.directory)
    return asking(arguments, savepoint)


def _rescale(arguments: argparse.Namespace) -> int:
    async def rescale(client: ClusterClient) -> int:
        line = await _job(client, arguments.job)
        if line.status.is_terminal:
            return _had_ended(line, "rescaled")
        operator, count = arguments.operator, arguments.parallelism
        try:
            if operator is None:
                await client.rescale(line.job_id, count, {})
            else:
                await client.rescale(line.job_id, None, {operator: count})
        except GraphError as error:
            raise UsageError(str(error)) from error
        return FINISHED

    return asking(arguments, rescale)


def _directory(given: str | None) -> str | None:
    """Returns the URL of the directory `given` for a savepoint, or None if the user gave no
    directory.

    Raises UsageError if `given` is neither a directory nor the URL of a store.
    """
    try:
        return None if given is None else store_url(given, "the directory")
    except ValueError as error:
        raise UsageError(in_flags(str(error))) from error


def _had_ended(line: JobLine, done: str) -> int:
    """Prints that a job had already ended, so that the request had no effect. `done` names the
    request, such as "cancelled". Returns the exit code.
    """
    print(
        f"{line.name}: had ended already, {line.status.value}: nothing was {done}", file=sys.stderr
    )
    return FAILED


async def _job(client: ClusterClient, beginning: str) -> JobLine:
    """Returns the job whose id begins with `beginning`. Raises UsageError unless there is exactly
    one.
    """
    found = [line for line in await client.jobs() if line.job_id.startswith(beginning)]
    if len(found) != 1:
        what = "no job has" if not found else f"{len(found)} jobs have"
        raise UsageError(f"{what} an id that begins with {beginning!r}: see aioflow list")
    return found[0]
