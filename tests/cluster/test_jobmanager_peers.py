"""The submitters of jobs hear how their jobs end, and return to the next leader: without a
connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioflow.cluster import jobmanager_peers as module
from aioflow.cluster.dispatcher import JobView
from aioflow.cluster.execution_graph import JobStatus
from aioflow.cluster.jobmanager_peers import Submitters
from aioflow.cluster.placed_tasks import Submitter
from aioflow.core.errors import Closed
from tests.task.running import until


class Connection:
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def notify(self, method: str, *args: Any) -> None:
        self.told.append((method, *args))


class Jobs:
    """A dispatcher whose jobs end when the test says so, or that loses its leadership."""

    def __init__(self) -> None:
        self.end: asyncio.Future[JobView] = asyncio.get_running_loop().create_future()

    async def wait(self, job_id: str) -> JobView:
        return await asyncio.shield(self.end)


def submitter(connection: Connection) -> Submitter:
    return Submitter(connection)  # type: ignore[arg-type]  # All of a connection that is needed.


async def test_waiting_submitter_learns_how_the_job_ended_and_is_forgotten() -> None:
    submitters, jobs, connection = Submitters(), Jobs(), Connection()
    submitters.add("a", submitter(connection))
    submitters.follow(jobs, "a", connection)  # type: ignore[arg-type]
    submitters.follow(jobs, "a", None)  # type: ignore[arg-type]  # From a submitter that left.
    jobs.end.set_result(
        JobView(
            job_id="a",
            name="counts",
            status=JobStatus.FINISHED,
            submitted_ms=1,
            savepoint="file:///s",
        )
    )
    await until(lambda: submitters.get("a") is None)
    await until(lambda: bool(connection.told))
    ((method, status, _, savepoint),) = connection.told
    assert (method, status, savepoint) == ("ended", "FINISHED", "file:///s")


async def test_end_of_a_leader_is_not_reported_as_the_end_of_a_job() -> None:
    submitters, jobs, connection = Submitters(), Jobs(), Connection()
    submitters.add("a", submitter(connection))
    submitters.follow(jobs, "a", connection)  # type: ignore[arg-type]
    (following,) = [task for task in asyncio.all_tasks() if task.get_name() == "follow a"]
    jobs.end.set_exception(Closed("this jobmanager leads no more"))
    await following
    assert connection.told == []
    assert submitters.get("a") is not None


async def test_a_connection_that_ends_takes_its_jobs_along_and_no_others() -> None:
    submitters, one, other = Submitters(), Connection(), Connection()
    for job_id, connection in (("a", one), ("b", other), ("c", one)):
        submitters.add(job_id, submitter(connection))
    assert submitters.lost(one) == ["a", "c"]  # type: ignore[arg-type]
    assert [job_id for job_id in "abc" if submitters.get(job_id) is not None] == ["b"]


async def test_returning_submitter_gets_its_waiting_job_or_learns_its_end_later() -> None:
    submitters, back = Submitters(), submitter(Connection())
    waiting = asyncio.create_task(submitters.wait_for("a"))
    await until(lambda: bool(submitters._awaited))
    assert submitters.returned("a", back)
    assert not submitters.returned("a", back), "it has it already"
    assert await waiting is back
    assert not submitters.returned("b", back)
    assert submitters.get("b") is back


async def test_submitter_that_does_not_return_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SUBMITTER_RETURNS_S", 0.0)
    submitters = Submitters()
    assert await submitters.wait_for("a") is None
    assert not submitters.returned("a", submitter(Connection()))
