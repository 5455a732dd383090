"""State stored by a leader is complete for the next one, after any crash in between (I6.3)."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from aioflow.checkpoint.lease import LeaseInfo
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.job_store import EndedJob, JobStore, PersistedJob, Recovered
from aioflow.cluster.leadership import Leadership
from aioflow.core.errors import RestoreError, StaleLeader
from aioflow.core.host import Host
from aioflow.core.system_host import SystemHost
from aioflow.testing import simulate
from aioflow.testing.simulation import SimulatedHost

ROOT = "/ha"
JOB = PersistedJob(
    job_id="job-1",
    name="wordcount",
    graph=b"\x00graph" * 50,
    config={"every_s": 1.5, "tags": ["a", "b"]},
    submitted_ms=12,
)
OTHER = PersistedJob(job_id="job-2", name="sessions", graph=b"", status=JobStatus.RUNNING)
ENDED = EndedJob(
    job_id="job-1",
    name="wordcount",
    status=JobStatus.FAILED,
    submitted_ms=12,
    ended_ms=99,
    error="ValueError: boom",
)


def leader(host: Host, token: int) -> Leadership:
    return Leadership(
        host,
        LeaseInfo(token, token, f"leader {token}", "there"),
        host.clock.monotonic(),
        host.clock.wall_ms(),
        1e9,
    )


async def opened(host: Host, token: int, root: str = ROOT) -> tuple[JobStore, Recovered]:
    store = JobStore(host, root, leader(host, token))
    return store, await store.recover()


async def life_of_a_job(host: Host, root: str) -> None:
    store, found = await opened(host, 1, root)
    assert found == Recovered([], [], [])
    await store.put(JOB)
    await store.put(OTHER)
    await store.put(dataclasses.replace(JOB, status=JobStatus.RUNNING))
    store, found = await opened(host, 2, root)
    assert found == Recovered([dataclasses.replace(JOB, status=JobStatus.RUNNING), OTHER], [], [])
    await store.end(ENDED)
    store, found = await opened(host, 3, root)
    assert found == Recovered([OTHER], [ENDED], [ENDED])
    await store.forget("job-1")
    await store.forget("job-1")
    store, found = await opened(host, 4, root)
    assert found == Recovered([OTHER], [], [ENDED])
    assert await host.fs.list(f"{root}/jobs/job-2") == ["0000000000000004"], (
        "older versions and leftovers are removed"
    )


async def test_the_next_leader_finds_what_was_stored_on_the_machine(tmp_path: Path) -> None:
    """I1.4, I6."""
    host = SystemHost()
    try:
        await life_of_a_job(host, str(tmp_path))
    finally:
        await host.close()


def test_the_next_leader_finds_what_was_stored_in_the_simulation() -> None:
    """I1.4, I6."""
    for seed in range(5):
        simulate(lambda host: life_of_a_job(host, ROOT), seed)


@pytest.mark.parametrize("how", ["kill", "power"])
def test_a_crash_at_any_moment_of_a_write_leaves_the_previous_or_the_new_one(how: str) -> None:
    """I6.3; acknowledged state is never the previous one."""
    outcomes = {"old": 0, "new": 0}
    for seed in range(150):

        async def main(host: SimulatedHost) -> str:
            acknowledged = []
            newer = dataclasses.replace(JOB, status=JobStatus.RUNNING, graph=b"newer" * 100)

            async def writer(mine: SimulatedHost) -> None:
                store, _ = await opened(mine, 1)
                await store.put(JOB)
                acknowledged.append("old")
                await store.put(newer)
                acknowledged.append("new")
                await asyncio.sleep(100.0)

            host.sim.spawn("writer", writer, machine="writer")
            while not acknowledged:
                await asyncio.sleep(0.0002)
            await asyncio.sleep(host.rng.uniform(0.0, 0.03))
            acknowledged = list(acknowledged)
            getattr(host.sim, how)("writer")
            _, found = await opened(host, 2)
            assert found.jobs in ([JOB], [newer])
            assert acknowledged == ["old"] or found.jobs == [newer]
            _, again = await opened(host, 3)
            assert again == found
            return "old" if found.jobs == [JOB] else "new"

        outcomes[simulate(main, seed).value] += 1
    assert min(outcomes.values()) > 10, outcomes


@pytest.mark.parametrize("how", ["kill", "power"])
def test_an_ended_job_never_comes_back_however_its_end_was_interrupted(how: str) -> None:
    """I1.2, I6.3."""
    cleaned = set()
    for seed in range(100):

        async def main(host: SimulatedHost) -> bool:
            acknowledged = []

            async def writer(mine: SimulatedHost) -> None:
                store, _ = await opened(mine, 1)
                await store.put(JOB)
                acknowledged.append("put")
                await store.end(ENDED)
                acknowledged.append("ended")
                await store.forget("job-1")
                await asyncio.sleep(100.0)

            host.sim.spawn("writer", writer, machine="writer")
            while not acknowledged:
                await asyncio.sleep(0.0002)
            await asyncio.sleep(host.rng.uniform(0.0, 0.02))
            acknowledged = list(acknowledged)
            getattr(host.sim, how)("writer")
            _, found = await opened(host, 2)
            if "ended" in acknowledged:
                assert found.ended == [ENDED]
            assert len(found.jobs) + len(found.ended) == 1, "lost, or both alive and ended"
            return bool(found.to_clean_up)

        cleaned.add(simulate(main, seed).value)
    assert cleaned == {True, False}


def test_a_submission_that_crashed_before_it_was_stored_leaves_nothing() -> None:
    async def main(host: SimulatedHost) -> None:
        await host.fs.mkdirs(f"{ROOT}/jobs/half")
        await host.fs.write(f"{ROOT}/jobs/half/.aside", b"ha")
        _, found = await opened(host, 1)
        assert found == Recovered([], [], [])
        assert await host.fs.list(f"{ROOT}/jobs") == []

    simulate(main, 1)


def test_an_entry_with_any_byte_changed_or_cut_off_stops_the_recovery_and_names_the_file() -> None:
    """I6: loudly; a job is never forgotten in silence."""

    async def main(host: SimulatedHost) -> None:
        store, _ = await opened(host, 1)
        small = PersistedJob(job_id="j", name="n", graph=b"g")
        await store.put(small)
        path = f"{ROOT}/jobs/j/0000000000000001"
        good = await host.fs.read(path)
        damaged = [good[:n] for n in range(len(good))] + [good + b"\0"]
        damaged += [good[:n] + bytes([good[n] ^ 1]) + good[n + 1 :] for n in range(len(good))]
        for data in damaged:
            await host.fs.write(path, data)
            with pytest.raises(RestoreError, match=rf"{path} cannot be read.*no job was recovered"):
                await opened(host, 1)
        await host.fs.write(path, good)
        _, found = await opened(host, 1)
        assert found.jobs == [small]
        await store.end(dataclasses.replace(ENDED, job_id="j"))
        await host.fs.write(f"{ROOT}/ended/j.{1:016d}", b"")
        with pytest.raises(RestoreError, match=r"ended/j\.0000000000000001 cannot be read"):
            await opened(host, 1)

    simulate(main, 1)


def test_an_entry_of_another_format_with_a_right_digest_is_refused_too() -> None:
    from aioflow.cluster.job_store import _seal

    async def main(host: SimulatedHost) -> None:
        await opened(host, 1)
        await host.fs.mkdirs(f"{ROOT}/jobs/j")
        for content in (
            [],
            [1, 2],
            ["j", "n", b"", {}, "NO_SUCH_STATUS", 0],
            ["j", "n", b"", {}, "RUNNING", 0, 0],
        ):
            await host.fs.write(f"{ROOT}/jobs/j/0000000000000001", _seal(content))
            with pytest.raises(RestoreError, match="another format"):
                await opened(host, 1)

    simulate(main, 1)


def test_a_replaced_leader_cannot_write_and_does_not_acknowledge() -> None:
    """I6: fencing."""

    async def main(host: SimulatedHost) -> None:
        leadership = leader(host, 1)
        store = JobStore(host, ROOT, leadership)
        await store.recover()
        await store.put(JOB)
        leadership.revoke()
        for call in (store.put(OTHER), store.end(ENDED), store.forget("job-1")):
            with pytest.raises(StaleLeader):
                await call
        _, found = await opened(host, 2)
        assert found.jobs == [JOB]

    simulate(main, 1)


def test_a_leader_that_is_replaced_during_a_write_does_not_acknowledge_it() -> None:
    """I6: the write may have happened or not, so the submitter has to ask the new leader."""
    for seed in range(60):

        async def main(host: SimulatedHost) -> None:
            leadership = leader(host, 1)
            store = JobStore(host, ROOT, leadership)
            await store.recover()
            put = asyncio.get_running_loop().create_task(store.put(JOB))
            await asyncio.sleep(host.rng.uniform(0.0, 0.012))
            if put.done():
                return
            leadership.revoke()
            with pytest.raises(StaleLeader):
                await put

        simulate(main, seed)


def test_a_late_write_of_an_older_leader_neither_replaces_nor_hides_a_newer_one() -> None:
    """I6: the write was on its way when its leader was replaced."""

    async def main(host: SimulatedHost) -> None:
        old, _ = await opened(host, 1)
        await old.put(JOB)
        new, _ = await opened(host, 2)
        await new.put(dataclasses.replace(JOB, status=JobStatus.RUNNING))
        await old.put(
            dataclasses.replace(JOB, status=JobStatus.CANCELED)
        )  # Its leadership object does not know yet.
        _, found = await opened(host, 3)
        assert found.jobs == [dataclasses.replace(JOB, status=JobStatus.RUNNING)]
        with pytest.raises(StaleLeader, match=r"fencing token 3, this one has 1"):
            await old.recover()

    simulate(main, 1)


def test_a_late_end_of_an_older_leader_ends_nothing_that_a_newer_one_took_over() -> None:
    """I6, I1.4: the newer leader runs the job from its checkpoint, and only that leader can tell
    how it ends.
    """

    async def main(host: SimulatedHost) -> None:
        old, _ = await opened(host, 1)
        await old.put(JOB)
        new, _ = await opened(host, 2)
        await old.end(ENDED)  # Its leadership object does not know yet.
        _, found = await opened(host, 3)
        assert found == Recovered([JOB], [], [])
        newest, _ = await opened(host, 4)
        finished = dataclasses.replace(ENDED, status=JobStatus.FINISHED)
        await newest.end(finished)
        await new.end(ENDED)
        _, found = await opened(host, 5)
        assert found == Recovered([], [finished], [finished])

    simulate(main, 1)


@pytest.mark.parametrize("job_id", ["", "../x", "a/b", "a.1", ".hidden", "x" * 65, "a b", "a\n"])
def test_an_id_that_is_no_file_name_is_refused(job_id: str) -> None:
    async def main(host: SimulatedHost) -> None:
        store, _ = await opened(host, 1)
        with pytest.raises(ValueError, match="cannot be stored"):
            await store.put(dataclasses.replace(JOB, job_id=job_id))

    simulate(main, 1)
