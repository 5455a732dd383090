"""Jobs are taken once, run, recovered, ended, remembered and cleaned up (I1)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest

from aioflow.checkpoint.lease import LeaseInfo, LeaseOptions
from aioflow.cluster.dispatcher import (
    Dispatcher,
    DispatcherOptions,
    DuplicateJobSubmission,
    JobRunner,
    UnknownJob,
)
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.job_store import EndedJob, JobStore, PersistedJob
from aioflow.cluster.leadership import DirectoryLeases, LeaderElection, Leadership
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import CheckpointError, GraphError, StaleLeader
from aioflow.testing import simulate
from aioflow.testing.simulation import Faults, SimulatedHost, inject

ROOT = "/ha"


class Scripted:
    """A JobMaster whose end the test decides."""

    def __init__(self) -> None:
        self.status = JobStatus.RUNNING
        self.error: BaseException | None = None
        self.stopped: list[bool] = []
        self.suspended = False
        self._end = asyncio.get_running_loop().create_future()

    async def run(self) -> JobStatus:
        try:
            self.status = await self._end
        except asyncio.CancelledError:
            self.suspended = True
            raise
        return self.status

    def end(self, status: JobStatus, error: BaseException | None = None) -> None:
        self.error = error
        if not self._end.done():
            self._end.set_result(status)

    def cancel(self) -> None:
        self.end(JobStatus.CANCELED)

    stopped_with: str | None = None
    stop_error: BaseException | None = None

    def stop(self, *, drain: bool, savepoint: bool, directory: str | None) -> None:
        self.stopped.append(drain)


class Cluster:
    """A leader's Dispatcher over the simulated disk, and what its factory and clean-up were
    asked for.
    """

    def __init__(self, host: SimulatedHost, token: int = 1, **options: float) -> None:
        self.host = host
        self.runners: dict[str, Scripted] = {}
        self.made: list[tuple[str, int, bool]] = []
        self.cleaned: list[str] = []
        self.clean_up_fails = False
        self.gate: asyncio.Event | None = None
        self.leadership = Leadership(
            host,
            LeaseInfo(token, token, "x", "y"),
            host.clock.monotonic(),
            host.clock.wall_ms(),
            1e9,
        )
        self.store = JobStore(host, ROOT, self.leadership)
        self.dispatcher = Dispatcher(
            host,
            self.store,
            self.leadership,
            self.make,
            self.clean_up,
            DispatcherOptions(**options),  # type: ignore[arg-type]
        )

    async def make(self, job: PersistedJob, token: int, recovered: bool) -> JobRunner:
        self.made.append((job.job_id, token, recovered))
        if self.gate is not None:
            await self.gate.wait()
        if job.graph == b"broken":
            raise GraphError("operator 'x' has parallelism 0")
        runner = self.runners[job.job_id] = Scripted()
        return runner

    async def clean_up(self, job: EndedJob) -> None:
        if self.clean_up_fails:
            raise OSError("no")
        self.cleaned.append(job.job_id)


def job(job_id: str, graph: bytes = b"graph") -> PersistedJob:
    return PersistedJob(job_id=job_id, name=f"flow {job_id}", graph=graph)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def on_host(test: Callable[[SimulatedHost], Awaitable[None]]) -> None:
    """Under a few seeds: the store's operations take different times in each."""
    for seed in range(4):
        assert simulate(test, seed).errors == []  # type: ignore[arg-type]


def test_a_job_that_is_acknowledged_is_stored_and_runs() -> None:
    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        async with cluster.dispatcher as d:
            await d.submit(job("a"))
            assert (await host.fs.list(f"{ROOT}/jobs")) == ["a"]
            await until(lambda: d.job("a").status is JobStatus.RUNNING)
            assert cluster.made == [("a", 1, False)]
            assert [(v.job_id, v.name, v.ended_ms) for v in d.jobs()] == [("a", "flow a", None)]

    on_host(main)


def test_the_same_id_twice_is_an_error_also_while_the_first_is_being_stored() -> None:
    """I1.1."""

    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        async with cluster.dispatcher as d:
            results = await asyncio.gather(
                *(d.submit(job("a")) for _ in range(3)), return_exceptions=True
            )
            assert [type(r) for r in results] == [
                type(None),
                DuplicateJobSubmission,
                DuplicateJobSubmission,
            ]
            with pytest.raises(DuplicateJobSubmission, match="submitted while it is"):
                await d.submit(job("a"))
            await until(lambda: cluster.runners)
            assert len(cluster.made) == 1

    on_host(main)


def test_submitter_that_comes_back_to_a_job_that_is_being_stored_learns_how_that_ends() -> None:
    """I1.1: its first connection has ended, and the same leader still accepts it."""

    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        stored = asyncio.Event()
        put = cluster.store.put

        async def slow_put(stored_job: PersistedJob) -> None:
            await stored.wait()
            if stored_job.job_id == "refused":
                raise OSError("the disk is full")
            await put(stored_job)

        cluster.store.put = slow_put  # type: ignore[method-assign]
        async with cluster.dispatcher as d:
            asked = [
                asyncio.ensure_future(one)
                for name in ("a", "refused")
                for one in (d.submit(job(name)), d.until_stored(name), d.submit(job(name)))
            ]
            await asyncio.sleep(1)
            assert not any(one.done() for one in asked)
            stored.set()
            answers = await asyncio.gather(*asked, return_exceptions=True)
            expected = [type(None), type(None), DuplicateJobSubmission, *[OSError] * 3]
            assert [type(answer) for answer in answers] == expected
            assert [view.job_id for view in d.jobs()] == ["a"]
            with pytest.raises(UnknownJob):
                await d.until_stored("refused")
        async with Cluster(host, 2).dispatcher as d:
            await d.until_stored("a")

    on_host(main)


@pytest.mark.parametrize("status", [JobStatus.FINISHED, JobStatus.FAILED, JobStatus.CANCELED])
def test_an_id_that_has_ended_for_good_is_refused_by_this_leader_and_the_next(
    status: JobStatus,
) -> None:
    """I1.2."""

    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host, archive_max=1)
        async with cluster.dispatcher as d:
            for name in ("a", "b"):
                await d.submit(job(name))
                await until(lambda name=name: name in cluster.runners)
                cluster.runners[name].end(status)
                await d.wait(name)
                with pytest.raises(DuplicateJobSubmission, match=f"has ended as {status.value}"):
                    await d.submit(job(name))
        async with Cluster(host, 2, archive_max=1).dispatcher as d:
            for name in ("a", "b"):
                with pytest.raises(DuplicateJobSubmission, match=f"has ended as {status.value}"):
                    await d.submit(job(name))

    on_host(main)


def test_a_graph_that_cannot_be_built_is_a_failed_job_with_its_cause_and_harms_no_other() -> None:
    """I1.3."""

    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        async with cluster.dispatcher as d:
            await d.submit(job("good"))
            await d.submit(job("bad", b"broken"))
            view = await d.wait("bad")
            assert view.status is JobStatus.FAILED
            assert view.error == "GraphError: operator 'x' has parallelism 0"
            assert isinstance(view.cause, GraphError)
            assert d.job("bad") == view
            await until(lambda: d.job("good").status is JobStatus.RUNNING)
            await until(lambda: cluster.cleaned == ["bad"])

    on_host(main)


def test_the_error_of_a_failed_job_is_kept_also_for_the_next_leader() -> None:
    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        async with cluster.dispatcher as d:
            await d.submit(job("a"))
            await until(lambda: cluster.runners)
            error = ValueError("boom")
            error.add_note("aioflow: in operator 'map', at record 3")
            cluster.runners["a"].end(JobStatus.FAILED, error)
            view = await d.wait("a")
            assert (view.status, view.error) == (
                JobStatus.FAILED,
                "ValueError: boom\nin operator 'map', at record 3",
            )
            assert view.ended_ms is not None
            assert view.ended_ms >= view.submitted_ms > 0
        async with Cluster(host, 2).dispatcher as d:
            assert d.job("a") == dataclasses.replace(view, cause=None)

    on_host(main)


def test_jobs_that_ran_are_recovered_by_the_next_leader_and_nothing_was_cleaned_up() -> None:
    """I1.4, I5.3: leaving is no end."""

    async def main(host: SimulatedHost) -> None:
        first = Cluster(host)
        async with first.dispatcher as d:
            for name in ("a", "b", "c"):
                await d.submit(job(name))
            await until(lambda: len(first.runners) == 3)
            first.runners["b"].end(JobStatus.FINISHED)
            await d.wait("b")
            await until(lambda: first.cleaned)
            waiting = asyncio.get_running_loop().create_task(d.wait("a"))
            await asyncio.sleep(0)
        assert first.runners["a"].suspended
        assert first.cleaned == ["b"]
        with pytest.raises(StaleLeader, match="ask the next one"):
            await waiting
        second = Cluster(host, 2)
        async with second.dispatcher as d:
            await until(lambda: len(second.runners) == 2)
            assert second.made == [("a", 2, True), ("c", 2, True)]
            assert d.job("b").status is JobStatus.FINISHED
            second.runners["a"].end(JobStatus.FINISHED)
            assert (await d.wait("a")).status is JobStatus.FINISHED

    on_host(main)


def test_clean_up_comes_after_the_end_is_remembered_and_is_done_again_if_it_failed() -> None:
    """I1: artifacts are removed only on a globally terminal state."""

    async def main(host: SimulatedHost) -> None:
        first = Cluster(host)
        first.clean_up_fails = True
        async with first.dispatcher as d:
            await d.submit(job("a"))
            await until(lambda: first.runners)
            first.runners["a"].end(JobStatus.FINISHED)
            await d.wait("a")
            assert await host.fs.exists(f"{ROOT}/ended/a.{1:016d}")
            await asyncio.sleep(1.0)
            assert await host.fs.exists(f"{ROOT}/jobs/a")
        second = Cluster(host, 2)
        async with second.dispatcher:
            await until(lambda: second.cleaned == ["a"])
            await asyncio.sleep(1.0)
            assert second.made == []
            assert not await host.fs.exists(f"{ROOT}/jobs/a")

    on_host(main)


def test_cancel_and_stop_reach_the_job_they_name() -> None:
    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        async with cluster.dispatcher as d:
            await d.submit(job("a"))
            await d.submit(job("b"))
            await until(lambda: len(cluster.runners) == 2)
            d.stop("a", drain=True)
            assert (cluster.runners["a"].stopped, cluster.runners["b"].stopped) == ([True], [])
            await d.cancel("b")
            assert (await d.wait("b")).status is JobStatus.CANCELED
            await d.cancel("b")
            d.stop("b")
            assert d.job("a").status is JobStatus.RUNNING
            for call in (lambda: d.stop("z"), lambda: d.job("z")):
                with pytest.raises(UnknownJob, match="job z is not known here"):
                    call()
            with pytest.raises(UnknownJob):
                await d.cancel("z")
            with pytest.raises(UnknownJob):
                await d.wait("z")

    on_host(main)


def test_cancel_or_stop_of_a_job_before_its_job_master_exists_is_remembered() -> None:
    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        cluster.gate = asyncio.Event()
        async with cluster.dispatcher as d:
            await d.submit(job("a"))
            await d.submit(job("b"))
            await until(lambda: len(cluster.made) == 2)
            assert d.job("a").status is JobStatus.INITIALIZING
            await d.cancel("a")
            assert d.job("a").status is JobStatus.CANCELLING
            d.stop("b", drain=False)
            cluster.gate.set()
            assert (await d.wait("a")).status is JobStatus.CANCELED
            await until(lambda: cluster.runners["b"].stopped == [False])

    on_host(main)


@pytest.mark.parametrize("config", [{}, {"checkpoints": None}, {"checkpoints": {"store": None}}])
def test_a_stop_with_a_savepoint_of_a_job_without_checkpoints_is_refused(
    config: dict[str, object],
) -> None:
    """Holds before it has a JobMaster as well as later; the job goes on."""

    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        cluster.gate = asyncio.Event()
        async with cluster.dispatcher as d:
            await d.submit(dataclasses.replace(job("a"), config=config))
            await until(lambda: cluster.made)
            for status in (JobStatus.INITIALIZING, JobStatus.RUNNING):
                await until(lambda status=status: d.job("a").status is status)  # type: ignore[misc]
                with pytest.raises(
                    CheckpointError,
                    match="job 'flow a' has no checkpoints, so no savepoint can be made of it",
                ):
                    d.stop("a", directory="file:///savepoints")
                cluster.gate.set()
            assert cluster.runners["a"].stopped == []

    on_host(main)


def test_a_cancelled_job_is_not_run_again_by_the_next_leader() -> None:
    """I1.4: a cancellation that was asked for outlives the leader."""

    async def main(host: SimulatedHost) -> None:
        first = Cluster(host)
        first.gate = asyncio.Event()
        async with first.dispatcher as d:
            await d.submit(job("a"))
            await until(lambda: first.made)
            await d.cancel("a")
        second = Cluster(host, 2)
        async with second.dispatcher as d:
            assert (await d.wait("a")).status is JobStatus.CANCELED
            assert second.made == []

    on_host(main)


def test_cancellation_continues_when_its_caller_leaves() -> None:
    """I3: a cancellation that is remembered and never completed would block all later callers."""

    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        async with cluster.dispatcher as d:
            await d.submit(job("a"))
            await until(lambda: cluster.runners)
            asking = asyncio.get_running_loop().create_task(d.cancel("a"))
            await asyncio.sleep(0)
            await cancel_and_wait([asking])
            await d.cancel("a")
            assert (await d.wait("a")).status is JobStatus.CANCELED

    on_host(main)


def test_the_archive_is_bounded_and_the_ids_are_not_forgotten() -> None:
    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host, archive_max=2)
        async with cluster.dispatcher as d:
            for number in range(4):
                await d.submit(job(f"j{number}"))
                await until(lambda n=number: f"j{n}" in cluster.runners)
                cluster.runners[f"j{number}"].end(JobStatus.FINISHED)
                await d.wait(f"j{number}")
            assert [v.job_id for v in d.jobs()] == ["j2", "j3"]
            with pytest.raises(UnknownJob, match="j0 has ended as FINISHED, more is not kept"):
                d.job("j0")
        async with Cluster(host, 2, archive_max=2).dispatcher as d:
            assert [v.job_id for v in d.jobs()] == ["j2", "j3"]

    on_host(main)


def test_a_store_that_is_full_refuses_the_job_and_takes_it_later() -> None:
    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        async with cluster.dispatcher as d:
            await d.submit(job("a"))
            host.sim.disk.full = True
            with pytest.raises(OSError, match="No space"):
                await d.submit(job("b"))
            with pytest.raises(UnknownJob):
                d.job("b")
            host.sim.disk.full = False
            await d.submit(job("b"))
            await until(lambda: set(cluster.runners) == {"a", "b"})

    on_host(main)


def test_an_end_that_cannot_be_stored_is_not_shown_until_it_is() -> None:
    """I1.2: otherwise the next leader would run a job again after its end was visible."""

    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        async with cluster.dispatcher as d:
            await d.submit(job("a"))
            await until(lambda: cluster.runners)
            host.sim.disk.full = True
            cluster.runners["a"].end(JobStatus.FINISHED)
            waiting = asyncio.get_running_loop().create_task(d.wait("a"))
            await asyncio.sleep(5.0)
            assert not waiting.done()
            assert cluster.cleaned == []
            host.sim.disk.full = False
            assert (await waiting).status is JobStatus.FINISHED

    on_host(main)


def test_a_submission_goes_on_when_its_submitter_is_gone() -> None:
    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        async with cluster.dispatcher as d:
            task = asyncio.get_running_loop().create_task(d.submit(job("a")))
            await asyncio.sleep(0.0005)
            await cancel_and_wait([task])
            await until(lambda: cluster.runners)
            assert d.job("a").status is JobStatus.RUNNING

    on_host(main)


def test_a_leader_that_was_replaced_takes_no_job_and_ends_none() -> None:
    """I6: fencing of the Dispatcher."""

    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        async with cluster.dispatcher as d:
            await d.submit(job("a"))
            await until(lambda: cluster.runners)
            cluster.leadership.revoke()
            for name in ("a", "b"):
                with pytest.raises(StaleLeader):
                    await d.submit(job(name))
            with pytest.raises(StaleLeader):
                await d.cancel("a")
            cluster.runners["a"].end(JobStatus.FINISHED)
            await asyncio.sleep(1.0)
            assert cluster.cleaned == []
        async with Cluster(host, 2).dispatcher as d:
            assert [v.job_id for v in d.jobs()] == ["a"]

    on_host(main)


def test_error_raised_inside_leaves_unchanged() -> None:
    async def main(host: SimulatedHost) -> None:
        cluster = Cluster(host)
        with pytest.raises(OSError, match="mine"):
            async with cluster.dispatcher as d:
                await d.submit(job("a"))
                await until(lambda: cluster.runners)
                raise OSError("mine")
        assert cluster.runners["a"].suspended

    on_host(main)


@pytest.mark.parametrize("seed", range(6))
def test_under_kills_pauses_and_a_failing_disk_every_acknowledged_job_ends_once(seed: int) -> None:
    """I1.4, I5.3, I6.1: three contenders; what was acknowledged ends, and what ended never runs
    again.
    """
    acknowledged: list[str] = []
    ended: dict[str, JobStatus] = {}
    inbox: list[str] = []

    class Short:
        """Runs for a while, then finishes."""

        def __init__(self, host: SimulatedHost, job_id: str) -> None:
            self.status, self.error, self._host, self._id = JobStatus.RUNNING, None, host, job_id

        async def run(self) -> JobStatus:
            assert self._id not in ended, "a job runs again that was seen to end"
            await asyncio.sleep(self._host.rng.uniform(0.5, 6.0))
            return JobStatus.FINISHED

        def cancel(self) -> None: ...

        stopped_with = stop_error = None

        def stop(self, *, drain: bool, savepoint: bool, directory: str | None) -> None: ...

    async def contender(host: SimulatedHost) -> None:
        async def make(persisted: PersistedJob, token: int, recovered: bool) -> JobRunner:
            return Short(host, persisted.job_id)

        async def lead(leadership: Leadership) -> None:
            while True:
                try:
                    async with Dispatcher(
                        host, JobStore(host, ROOT, leadership), leadership, make
                    ) as d:
                        while True:
                            if inbox:
                                name = inbox.pop()
                                await d.submit(job(name))
                                acknowledged.append(name)
                            for view in d.jobs():
                                if view.ended_ms is not None:
                                    ended.setdefault(view.job_id, view.status)
                            await asyncio.sleep(0.2)
                except OSError:
                    await asyncio.sleep(
                        0.2
                    )  # The store failed; it is tried again as long as the lease lasts.

        options = LeaseOptions(lease_s=3.0, renew_s=0.5, stop_s=1.0)
        await LeaderElection(host, DirectoryLeases(host, "/ha-leases"), host.name, options).run(
            lead
        )

    async def submitter(host: SimulatedHost) -> None:
        for number in range(1_000):
            await asyncio.sleep(host.rng.uniform(0.5, 2.0))
            inbox.append(f"job-{number}")

    async def main(host: SimulatedHost) -> None:
        names = ["x", "y", "z"]
        for name in names:
            host.sim.spawn(name, contender, machine=name)
        task = asyncio.get_running_loop().create_task(submitter(host))
        await inject(
            host.sim,
            Faults(kill=0.06, pause=0.06, disk=0.06, outage_s=(0.3, 6.0)),
            names,
            duration_s=60.0,
        )
        await cancel_and_wait([task])
        await asyncio.sleep(30.0)
        assert len(acknowledged) > 10
        assert [name for name in acknowledged if name not in ended] == []
        assert set(ended.values()) == {JobStatus.FINISHED}
        for name in names:
            host.sim.kill(name)

    assert simulate(main, seed).errors == []
