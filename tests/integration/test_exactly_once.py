"""Exactly-once on real processes: after any kill at any moment, the committed files hold each count
exactly once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import aioflow as af
from aioflow.cluster.heartbeat import HeartbeatOptions
from tests.integration.clusters import Cluster, aioflow, until
from tests.integration.exactly_once_flows import committed, counted, mistakes
from tests.integration.processes import eventually, open_workers

ROOT = Path(__file__).parents[2]
FLOW = f"{Path(__file__).parent / 'exactly_once_flows.py'}:from_environment"
QUICK = HeartbeatOptions(interval_s=0.1, timeout_s=5.0, suspicion_s=0.5)

pytestmark = pytest.mark.timeout(300)


async def next_checkpoint(job: af.Job) -> int:
    """The number of a checkpoint that begins and completes from now on, however many are given
    up before.
    """
    async with asyncio.timeout(120):
        while True:
            try:
                return await job.checkpoint()
            except af.CheckpointError:
                await asyncio.sleep(0.02)


def pids(job: af.Job) -> list[int]:
    return [worker.pid for worker in open_workers(job)]


@pytest.fixture
def programs() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that a test starts. Remaining ones are killed."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def start(
    programs: list[subprocess.Popen[bytes]], tmp_path: Path
) -> Callable[..., subprocess.Popen[bytes]]:
    def start(*argv: str) -> subprocess.Popen[bytes]:
        options = ["--checkpoints", str(tmp_path / "store"), "--every", "50ms", "-q", *argv]
        environment = {**os.environ, "EXACTLY_ONCE_FOLDER": str(tmp_path)}
        with (tmp_path / "log").open("ab") as log:
            command = [sys.executable, "-m", "aioflow", "run", FLOW, *options]
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)
        programs.append(process)
        return process

    return start


async def grown(folder: Path, process: subprocess.Popen[bytes] | None = None) -> None:
    """Returns once more is committed than now."""
    before = len(committed(folder))
    await eventually(
        lambda: (
            len(committed(folder)) > before or (process is not None and process.poll() is not None)
        )
    )
    assert process is None or process.poll() is None, (folder / "log").read_text()


async def test_workers_that_are_killed_under_load_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """I5.1: the job restarts on the other worker and the replacement, from the last checkpoint."""
    store = f"file://{tmp_path}/store"
    async with counted(tmp_path).run(
        workers=2,
        checkpoints=store,
        every="50ms",
        restart=af.fixed_delay(50, "10ms"),
        heartbeat=QUICK,
    ) as job:
        for kill in range(5):
            await next_checkpoint(job)
            os.kill(pids(job)[kill % 2], signal.SIGKILL)
            # Awaited here.
            await eventually(
                lambda: job._cluster.job_master.executions.restarts > kill  # noqa: B023
            )
        await next_checkpoint(job)
        (tmp_path / "stop").touch()
        result = await job.wait()
    assert result.restarts >= 5
    assert mistakes(tmp_path) == []


async def test_a_job_over_workers_goes_on_where_it_was_stopped_at_another_parallelism(
    tmp_path: Path,
) -> None:
    """H3: state that was written by one number of processes is read by another; R39."""
    for workers, parallelism in ((2, 3), (0, 1), (1, 5)):
        async with counted(tmp_path, parallelism=parallelism).run(
            workers=workers, checkpoints=tmp_path / "store", every="50ms"
        ) as job:
            await grown(tmp_path)
            path = await job.stop()
            assert path is not None
    (tmp_path / "stop").touch()
    result = await counted(tmp_path, parallelism=2).execute(
        workers=2, checkpoints=tmp_path / "store", every="50ms"
    )
    assert result.status == "FINISHED"
    assert mistakes(tmp_path) == []


async def test_a_store_in_memory_outlives_the_workers(tmp_path: Path) -> None:
    """State travels whole in acknowledgements and deployments: the workers see no store."""
    async with counted(tmp_path).run(
        workers=2,
        checkpoints="memory://workers",
        every="50ms",
        restart=af.fixed_delay(50, "10ms"),
        heartbeat=QUICK,
    ) as job:
        await next_checkpoint(job)
        os.kill(pids(job)[0], signal.SIGKILL)
        await eventually(lambda: job._cluster.job_master.executions.restarts > 0)
        await next_checkpoint(job)
        (tmp_path / "stop").touch()
        await job.wait()
    assert mistakes(tmp_path) == []


async def test_a_program_that_is_killed_goes_on_when_it_is_started_again(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """R6: all at once, with -9; the next start takes the lease of a holder that is
    known to be dead.
    """
    for _ in range(3):
        process = start()
        await grown(tmp_path, process)
        process.kill()
        process.wait()
    (tmp_path / "stop").touch()
    process = start()
    await eventually(lambda: process.poll() is not None)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert mistakes(tmp_path) == []


@pytest.mark.parametrize("workers", ["0", "2"])
async def test_a_program_that_has_finished_and_is_started_again_writes_nothing_twice(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]], workers: str
) -> None:
    """A supervisor starts what has ended, also what was killed behind its end: each later run
    ends at once, with 0.
    """
    process = start("--workers", workers)
    await grown(tmp_path, process)
    (tmp_path / "stop").touch()
    await eventually(
        lambda: any((tmp_path / "store").glob("*/ended/*")) or process.poll() is not None
    )
    process.kill()
    process.wait()
    for _ in range(2):
        process = start("--workers", workers)
        await eventually(lambda: process.poll() is not None)  # noqa: B023  # Awaited here.
        assert process.returncode == 0, (tmp_path / "log").read_text()
        assert mistakes(tmp_path) == []
    assert "flow 'counted' finished already at " in (tmp_path / "log").read_text()


@pytest.mark.parametrize("workers", ["0", "2"])
async def test_sigterm_stops_with_a_savepoint_and_loses_nothing(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]], workers: str
) -> None:
    """R37: sources stop, the savepoint is made and committed, the program ends with 0; its next
    run goes on.
    """
    for _ in range(2):
        process = start("--workers", workers)
        await grown(tmp_path, process)
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: process.poll() is not None)  # noqa: B023  # Awaited here.
        assert process.returncode == 0, (tmp_path / "log").read_text()
    (tmp_path / "stop").touch()
    process = start("--workers", workers)
    await eventually(lambda: process.poll() is not None)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert mistakes(tmp_path) == []


async def test_a_second_program_on_the_same_store_is_refused_naming_the_first(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    first = start()
    await grown(tmp_path, first)
    second = start()
    await eventually(lambda: second.poll() is not None)
    assert second.returncode == 1
    assert str(first.pid) in (tmp_path / "log").read_text()
    assert first.poll() is None


@pytest.fixture
def submitted(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job that counts on two TaskManagers."""
    monkeypatch.setenv("EXACTLY_ONCE_FOLDER", str(tmp_path))
    cluster.start(workers=2, slots=2)
    options = ["--checkpoints", str(tmp_path / "store"), "--every", "50ms"]
    done = cluster.ask("submit", FLOW, "--detach", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def grows(folder: Path) -> None:
    """Waits like `grown`, where no loop runs."""
    before = len(committed(folder))
    until(lambda: len(committed(folder)) > before, "more is committed")


def ends(cluster: Cluster, job: str, folder: Path) -> None:
    """Let the numbers end, and wait for the job."""
    (folder / "stop").touch()
    until(lambda: cluster.job(job) in ("FINISHED", "FAILED", "CANCELED"), "the job ends")
    assert cluster.job(job) == "FINISHED"


def test_a_new_job_manager_resumes_from_the_latest_completed_checkpoint(
    cluster: Cluster, submitted: str, tmp_path: Path
) -> None:
    """I5.3: the job does not restart from the beginning, and the tasks of the old JobMaster write
    nothing that counts.
    """
    grows(tmp_path)
    os.kill(cluster.pids()[0], signal.SIGKILL)
    cluster.spawn(
        "jobmanager", "--data", str(cluster.data), "--port", cluster.address.rpartition(":")[2]
    )
    until(lambda: cluster.job(submitted) == "RUNNING", "it runs again")
    for _ in range(2):
        grows(tmp_path)
    ends(cluster, submitted, tmp_path)
    assert mistakes(tmp_path) == []


def test_a_task_manager_that_is_killed_loses_and_repeats_nothing(
    cluster: Cluster, submitted: str, tmp_path: Path
) -> None:
    """I5.1 on a standalone cluster: the other TaskManager has room for all of it."""
    grows(tmp_path)
    os.kill(cluster.pids()[1], signal.SIGKILL)
    for _ in range(3):
        grows(tmp_path)
    ends(cluster, submitted, tmp_path)
    assert mistakes(tmp_path) == []


def test_savepoint_and_stop_from_the_command_line(
    cluster: Cluster, submitted: str, tmp_path: Path
) -> None:
    """`--restore` accepts the output of `aioflow savepoint` and `aioflow stop --savepoint`."""
    grows(tmp_path)
    made = cluster.ask("savepoint", submitted, str(tmp_path / "mine"))
    assert made.returncode == 0, made.stderr
    assert Path(made.stdout.strip()).is_relative_to(tmp_path / "mine")
    assert Path(made.stdout.strip()).is_dir()
    stopped = cluster.ask("stop", submitted, "--savepoint", str(tmp_path / "mine"))
    assert stopped.returncode == 0, stopped.stderr
    path = stopped.stdout.strip()
    assert Path(path).is_relative_to(tmp_path / "mine")
    assert cluster.job(submitted) == "FINISHED"
    options = ["--checkpoints", str(tmp_path / "another"), "--every", "50ms", "--restore", path]
    done = cluster.ask("submit", FLOW, "--detach", *options)
    assert done.returncode == 0, done.stderr
    grows(tmp_path)
    ends(cluster, done.stdout.strip(), tmp_path)
    assert mistakes(tmp_path) == []


def test_a_checkpoint_is_taken_and_a_savepoint_deleted_from_the_command_line(
    cluster: Cluster, submitted: str, tmp_path: Path
) -> None:
    """What else is in the directory of a savepoint stays; a checkpoint is not deleted."""
    grows(tmp_path)
    before, after = (cluster.ask("checkpoint", submitted[:8]) for _ in range(2))
    assert before.returncode == after.returncode == 0, after.stderr
    assert int(after.stdout) > int(before.stdout) > 0
    made = cluster.ask("savepoint", submitted, str(tmp_path / "mine"))
    savepoint = Path(made.stdout.strip())
    (savepoint / "notes").write_text("mine")
    (savepoint / "state").mkdir()  # Small state is inside of the metadata.
    (savepoint / "state" / "0a").write_text("mine, too")
    deleted = aioflow("savepoint", "dispose", savepoint)
    assert (deleted.returncode, deleted.stdout) == (0, f"deleted {savepoint}\n"), deleted.stderr
    left = sorted(path.name for path in savepoint.rglob("*") if path.is_file())
    assert left == ["0a", "notes"]
    again = aioflow("savepoint", "dispose", savepoint)
    assert again.returncode == 1 and "is no checkpoint or savepoint" in again.stderr
    assert cluster.ask("cancel", submitted).returncode == 0
    gone = cluster.ask("checkpoint", submitted)
    assert gone.returncode == 1 and "had ended already" in gone.stderr
    (checkpoint, *_) = (tmp_path / "store").rglob("metadata")
    refused = aioflow("savepoint", "dispose", checkpoint.parent)
    assert refused.returncode == 1 and "expected a savepoint" in refused.stderr
    assert checkpoint.exists()


def test_a_stop_whose_savepoint_cannot_be_made_says_so(
    cluster: Cluster, submitted: str, tmp_path: Path
) -> None:
    """The job ends all the same, as its sources are stopped; what it was asked for is not there."""
    (tmp_path / "file").write_text("mine")
    grows(tmp_path)
    stopped = cluster.ask("stop", submitted, "--savepoint", str(tmp_path / "file"))
    assert stopped.returncode == 1
    assert "is a file, expected a directory" in stopped.stderr


async def test_a_stop_whose_savepoint_cannot_be_made_raises_where_the_handle_is(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Leaving the block by that error cancels nothing, because the job has ended already."""
    await asyncio.to_thread(cluster.start)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(af.CheckpointError, match="is a file, expected a directory"):
        async with counted(tmp_path, parallelism=1).run(
            on=af.RemoteCluster(cluster.data, secret=cluster.secret),
            checkpoints=tmp_path / "store",
            every="50ms",
            stop_timeout="100s",
        ) as job:
            await grown(tmp_path)
            await job.stop(savepoint=tmp_path / "file")
    await asyncio.sleep(0)  # A request would fail here, because no process is left to answer.
    assert "did not cancel" not in caplog.text


def test_a_store_in_memory_is_refused_by_a_cluster(cluster: Cluster) -> None:
    cluster.start(workers=1, slots=1)
    done = cluster.ask(
        "submit",
        f"{Path(__file__).parent / 'cluster_flows.py'}:endless",
        "--detach",
        "--checkpoints",
        "memory://a",
    )
    assert done.returncode == 2
    assert "memory of one process" in done.stderr


def test_the_command_line_says_what_is_wrong_with_checkpoints() -> None:
    done = aioflow("run", FLOW, "--every", "1s")
    assert done.returncode == 2
    assert "give --checkpoints URL too" in done.stderr
