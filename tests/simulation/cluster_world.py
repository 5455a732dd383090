"""Clusters in the simulated world: JobManagers and TaskManagers on machines of their own, and the
program that submits the job.

Every process is restarted when it ends, as a service manager does. The program is one of those that
faults strike: started again, it follows the job that it submitted before. Times are a tenth of the
shipped ones or less, so that a world stays short.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from aioflow.checkpoint.lease import LeaseOptions
from aioflow.cluster import jobmanager as jobmanager_module
from aioflow.cluster import submission as submission_module
from aioflow.cluster import taskmanager as taskmanager_module
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.heartbeat import HeartbeatOptions, OwnPauses
from aioflow.cluster.jobmanager import JobManager, JobManagerOptions
from aioflow.cluster.remote import RemoteCluster
from aioflow.cluster.submission import ClusterClient, JobLine
from aioflow.cluster.taskmanager import TaskManager, TaskManagerOptions
from aioflow.network.security import SecuredHost, Security
from aioflow.testing.simulation import SimulatedHost
from tests.simulation.worker_world import SimulatedPulse

__all__ = ["KINDS", "follow", "jobmanager", "remote_cluster", "short_times", "taskmanager"]

KINDS = ("cut", "reset", "slow", "give_up")
"""Faults of the connections between machines: fields of `Faults`."""

PORT = 6123
DATA = "/cluster"
SECRET = b"the secret of a simulated cluster"
JOBMANAGERS = ("jm1", "jm2")
FOLLOW_S = 30.0


def _heartbeat(slower: float) -> HeartbeatOptions:
    return HeartbeatOptions(
        interval_s=0.05 * slower, timeout_s=0.4 * slower, suspicion_s=0.05 * slower
    )


def _secured(host: SimulatedHost) -> SecuredHost:
    return SecuredHost(host, Security.of(None, allow_plaintext=True))


async def jobmanager(host: SimulatedHost, slower: float) -> None:
    """The main of a simulated JobManager.

    Its times are `slower` than those of a world that lasts a second.
    """
    lease = LeaseOptions(lease_s=0.6 * slower, renew_s=0.1 * slower, stop_s=0.15 * slower)
    options = JobManagerOptions(
        data=DATA,
        bind=host.name,
        port=PORT,
        request_timeout_s=10 * slower,
        lease=lease,
        heartbeat=_heartbeat(slower),
    )
    await JobManager(_secured(host), SECRET, options, lambda *_: None).run()


async def taskmanager(host: SimulatedHost, slower: float) -> None:
    """The main of a simulated TaskManager with two slots.

    Jobs run in its process (`isolated=False`). The process of a job sends all logs of its
    interpreter to the TaskManager, and has a thread that watches its loop. Simulated processes
    share one interpreter, so each would send the logs of all others, and real threads would decide
    what happens when. `tests/integration/test_job_isolation.py` and `test_cluster.py` run processes
    of jobs.
    """
    options = TaskManagerOptions(
        jobmanagers=remote_cluster(host).where,
        slots=2,
        bind=host.name,
        slot_timeout_s=1.0 * slower,
        reconnect_s=0.05,
        heartbeat=replace(_heartbeat(slower), own_pauses=OwnPauses.COUNTED),
    )
    await TaskManager(_secured(host), SECRET, options).run()


def remote_cluster(host: SimulatedHost) -> RemoteCluster:
    """Returns the cluster where the program on `host` runs its flow."""
    addresses = ",".join(f"{name}:{PORT}" for name in JOBMANAGERS if name in host.sim.loop.machines)
    return RemoteCluster(addresses, SECRET, bind=host.name, allow_plaintext=True)


async def follow(host: SimulatedHost, name: str) -> JobLine | None:
    """The end of the job `name` that a former life of the program submitted; None: no such job
    runs.
    """
    async with ClusterClient(_secured(host), remote_cluster(host).where, SECRET) as client:
        for line in await client.jobs():
            if line.name == name and not JobStatus(line.status).is_terminal:
                return await client.follow(line.job_id, FOLLOW_S)
    return None


@contextmanager
def short_times() -> Iterator[None]:
    """TaskManagers take their pulse from their loop, and flows travel by the names of their
    functions: all processes are one.
    """
    jm: Any = jobmanager_module
    tm: Any = taskmanager_module
    submission: Any = submission_module
    before = (
        jm.RECOVERY_S,
        tm.REGISTER_S,
        tm.Pulse,
        submission._own_modules_by_value,
        submission.ASK_S,
        submission.SILENCE_S,
    )
    jm.RECOVERY_S, tm.REGISTER_S, tm.Pulse, submission.ASK_S, submission.SILENCE_S = (
        0.3,
        3.0,
        SimulatedPulse,
        0.5,
        3.0,
    )
    submission._own_modules_by_value = nullcontext
    try:
        yield
    finally:
        (
            jm.RECOVERY_S,
            tm.REGISTER_S,
            tm.Pulse,
            submission._own_modules_by_value,
            submission.ASK_S,
            submission.SILENCE_S,
        ) = before
