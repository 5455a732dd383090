"""The handle of a job on a cluster ends, even if the cluster says nothing: a JobManager here
answers as each test wants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

import pytest

import aioflow as af
from aioflow.cluster import leadership, remote, submission
from aioflow.cluster.dispatcher import DuplicateJobSubmission, UnknownJob
from aioflow.cluster.rpc import RpcConnection, RpcServer
from aioflow.core.errors import StaleLeader
from aioflow.core.system_host import SystemHost
from aioflow.core.wire.serializers import Codec
from aioflow.protocol.handshake import PeerRole

SECRET = b"s" * 32


class Scripted:
    """A JobManager that takes a job, says that it runs, and is silent about the rest unless
    `answers` has something to say.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Callable[..., Any]] = {}
        self.asked: list[str] = []
        self.connection: RpcConnection | None = None
        self.port = 0

    def handlers(self, connection: RpcConnection) -> dict[str, Callable[..., Any]]:
        def answering(method: str, usual: Callable[..., Any]) -> Callable[..., Any]:
            def answer(*args: Any) -> Any:
                self.asked.append(method)
                return self.answers.get(method, usual)(*args)

            return answer

        def runs(*args: Any) -> int:
            self.connection = connection
            connection.notify("status", "RUNNING", True, 0, b"", [])
            return 1

        usual = {
            "submit": runs,
            "attach": runs,
            "stop": lambda *_: None,
            "cancel": lambda *_: None,
            "wait": lambda *_: None,
        }
        return {
            "leader": lambda: self.answers.get("leader", lambda: "here")(),
            **{m: answering(m, usual[m]) for m in usual},
        }

    def ended(self, status: str) -> None:
        assert self.connection is not None
        self.connection.notify("ended", status, b"", "")


@asynccontextmanager
async def jobmanagers(count: int = 1) -> AsyncIterator[list[Scripted]]:
    made = [Scripted() for _ in range(count)]
    async with AsyncExitStack() as stack:
        for one in made:
            server = RpcServer(
                SystemHost(),
                SECRET,
                Codec(),
                frozenset([PeerRole.SUBMITTER]),
                one.handlers,
                lambda _: None,
            )
            one.port = await server.listen()
            stack.push_async_callback(server.close)
        yield made


async def numbers() -> AsyncIterator[int]:
    while True:
        yield 1


def flow() -> af.Flow:
    made = af.Flow("remote")
    made.source(numbers).map(abs).sink(af.io.blackhole())
    return made


def cluster(managers: list[Scripted]) -> af.RemoteCluster:
    return af.RemoteCluster(",".join(f"127.0.0.1:{one.port}" for one in managers), secret=SECRET)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_cancelled_job_without_news_of_its_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I3: the handle is not lost with the message; leaving says that the job may go on."""
    monkeypatch.setattr(remote, "END_TIMEOUT_S", 0.05)
    async with jobmanagers() as managers:
        with pytest.raises(
            af.Broken,
            match=r"has not said for 0\.05 s that it has ended; it may go on: aioflow list",
        ):
            async with asyncio.timeout(60), flow().run(on=cluster(managers)) as job:
                await job.cancel()
        assert managers[0].asked == ["submit", "cancel"]


async def test_a_stop_that_is_not_carried_out_ends_with_the_cancellation_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I3: neither the stop nor the cancellation that follows it waits forever for a job that has
    lost its way.
    """
    monkeypatch.setattr(remote, "END_TIMEOUT_S", 0.05)
    async with jobmanagers() as managers:
        with pytest.raises(af.Broken, match="it may go on"):
            async with (
                asyncio.timeout(60),
                flow().run(on=cluster(managers), stop_timeout="50ms") as job,
            ):
                await job.stop()
        assert managers[0].asked == ["submit", "stop", "cancel"]


async def test_a_job_that_the_cluster_does_not_know_is_not_waited_for() -> None:
    async with jobmanagers() as managers:

        def unknown(job_id: str, *_: Any) -> None:
            raise UnknownJob(f"job {job_id} is not known here; list the jobs, or submit it")

        managers[0].answers["stop"] = unknown
        with pytest.raises(af.Broken, match="is not known to the cluster"):
            async with asyncio.timeout(60), flow().run(on=cluster(managers)) as job:
                await job.stop()


async def test_a_stop_that_the_cluster_refuses_raises_at_once_and_the_job_goes_on() -> None:
    async with jobmanagers() as managers:

        def refuse(*_: Any) -> None:
            raise af.CheckpointError("no process here can write to s3")

        managers[0].answers["stop"] = refuse
        managers[0].answers["cancel"] = lambda *_: managers[0].ended("CANCELED")
        async with asyncio.timeout(60), flow().run(on=cluster(managers)) as job:
            for _ in range(2):
                with pytest.raises(af.CheckpointError, match="no process here can write"):
                    await job.stop()
                assert job.status is af.JobStatus.RUNNING
            await job.cancel()
            assert job.status is af.JobStatus.CANCELED


async def test_a_jobmanager_that_falls_silent_is_left_for_the_next_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I5.3: its connection stays open, like that of a stopped process. The request is repeated."""
    monkeypatch.setattr(submission, "ASK_S", 0.01)
    monkeypatch.setattr(submission, "SILENCE_S", 0.5)
    monkeypatch.setattr(leadership, "ANSWER_S", 2.0)
    silent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with jobmanagers(2) as (first, second):
        second.answers["leader"] = lambda: f"127.0.0.1:{first.port}"
        second.answers["stop"] = lambda *_: second.ended("FINISHED")

        def falls_silent(*_: Any) -> None:
            first.answers["leader"] = lambda: silent
            second.answers["leader"] = lambda: "here"

        first.answers["stop"] = falls_silent
        async with asyncio.timeout(60), flow().run(on=cluster([first, second])) as job:
            await job.stop()
            assert job.status is af.JobStatus.FINISHED
        assert (first.asked, second.asked) == (["submit", "stop"], ["attach", "stop"])
        silent.cancel()


async def test_a_job_is_followed_under_the_next_leader_if_its_jobmanager_falls_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I5.3: as after a loss of power, which a silent connection does not notice."""
    monkeypatch.setattr(submission, "ASK_S", 0.01)
    monkeypatch.setattr(submission, "SILENCE_S", 0.5)
    silent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with jobmanagers(2) as (first, second):
        second.answers["leader"] = lambda: f"127.0.0.1:{first.port}"

        def falls_silent(*_: Any) -> asyncio.Future[str]:
            first.answers["leader"] = lambda: silent
            second.answers["leader"] = lambda: "here"
            return silent

        def refuses(*_: Any) -> None:
            raise af.CheckpointError("said by the next leader")

        first.answers["wait"], second.answers["wait"] = falls_silent, refuses
        async with (
            asyncio.timeout(20),
            submission.ClusterClient(
                SystemHost(), cluster([first, second]).where, SECRET
            ) as client,
        ):
            with pytest.raises(af.CheckpointError, match="said by the next leader"):
                await client.follow("job", 30.0)
        silent.cancel()


async def test_a_jobmanager_that_leads_no_more_is_left_although_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I5.3: its lease is lost, but its connections are open."""
    monkeypatch.setattr(submission, "ASK_S", 0.01)
    async with jobmanagers(2) as (first, second):
        second.answers["leader"] = lambda: f"127.0.0.1:{first.port}"
        async with asyncio.timeout(60), flow().run(on=cluster([first, second])) as job:
            second.answers["leader"] = lambda: "here"
            first.answers["leader"] = lambda: f"127.0.0.1:{second.port}"
            await until(lambda: second.asked == ["attach"])
            second.ended("FINISHED")
            await job.wait()


async def test_a_leader_that_is_none_any_more_when_a_job_returns_is_looked_for_again() -> None:
    """I5.3: leadership may be lost between the question who leads and the next."""
    async with jobmanagers() as (manager,):

        def leads_no_more(*_: Any) -> None:
            del manager.answers["attach"]
            raise StaleLeader("it led with fencing token 1 and could not renew its lease")

        manager.answers["attach"] = leads_no_more
        async with asyncio.timeout(60), flow().run(on=cluster([manager])) as job:
            assert manager.connection is not None
            manager.connection.abort(af.Closed("this leader goes away"))
            await until(lambda: manager.asked == ["submit", "attach", "attach"])
            manager.ended("FINISHED")
            await job.wait()


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_job_whose_leader_goes_away_at_its_submission_runs_once_under_the_next(
    is_stored: bool,
) -> None:
    """The caller cannot know whether the leader stored the job before it went away."""
    async with jobmanagers(2) as (first, second):
        second.answers["leader"] = lambda: f"127.0.0.1:{first.port}"

        def goes_away(*_: Any) -> None:
            first.answers["leader"] = lambda: f"127.0.0.1:{second.port}"
            del second.answers["leader"]
            raise StaleLeader("this leader goes away while the job is INITIALIZING")

        def unknown(job_id: str, *_: Any) -> None:
            raise UnknownJob(f"job {job_id} is not known")

        first.answers["submit"] = goes_away
        if not is_stored:
            second.answers["attach"] = unknown
        async with asyncio.timeout(60), flow().run(on=cluster([first, second])) as job:
            second.ended("FINISHED")
            await job.wait()
        assert first.asked == ["submit"]
        assert second.asked == ["attach"] if is_stored else ["attach", "submit"]


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_job_submitted_from_the_shell_runs_once_under_the_next_leader(
    is_stored: bool,
) -> None:
    async with jobmanagers() as (manager,):

        def stored(*_: Any) -> int:
            if is_stored:
                raise DuplicateJobSubmission("job job was submitted while it is RUNNING here")
            return 1

        def goes_away(*_: Any) -> None:
            manager.answers["submit"] = stored
            raise StaleLeader("this leader goes away while the job is INITIALIZING")

        manager.answers["submit"] = goes_away
        async with (
            asyncio.timeout(60),
            submission.ClusterClient(SystemHost(), cluster([manager]).where, SECRET) as client,
        ):
            await client.submit("job", submission.Submission("remote", b"", {}), timeout_s=30.0)
            with pytest.raises(DuplicateJobSubmission) if is_stored else nullcontext():
                await client.submit("job", submission.Submission("remote", b"", {}), timeout_s=30.0)
        assert manager.asked == ["submit"] * 3
