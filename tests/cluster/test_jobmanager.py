"""Every call to a JobManager gets an answer, also when leadership comes and goes meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from aioflow.checkpoint.lease import LeaseInfo
from aioflow.cluster.dispatcher import Dispatcher
from aioflow.cluster.job_store import JobStore, Recovered
from aioflow.cluster.jobmanager import JobManager, JobManagerOptions
from aioflow.cluster.leadership import LEASE_DIRECTORY, DirectoryLeases, Leadership, NoLeader
from aioflow.cluster.rpc import RpcConnection
from aioflow.cluster.slots import SlotStatus
from aioflow.core.aio import cancel_and_wait
from aioflow.core.system_host import SystemHost
from aioflow.monitoring.view import NETTY, monitored


def leadership(host: SystemHost, token: int) -> Leadership:
    return Leadership(
        host, LeaseInfo(token, token, "x", "y"), host.clock.monotonic(), host.clock.wall_ms(), 1e6
    )


async def test_waiter_for_a_leader_that_never_led_learns_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I6: the lease is lost while jobs are recovered; a submitter or TaskManager that waited for
    that would hang on an open connection.
    """
    host = SystemHost()
    manager = JobManager(host, b"s" * 32, JobManagerOptions(data=str(tmp_path)), lambda *_: None)
    recovering, usual = asyncio.Event(), JobStore.recover

    async def endless(self: JobStore) -> Recovered:
        recovering.set()
        await asyncio.get_running_loop().create_future()
        return await usual(self)

    waiting = asyncio.ensure_future(manager._leader())
    monkeypatch.setattr(JobStore, "recover", endless)
    first = asyncio.ensure_future(manager._lead(leadership(host, 1)))
    await recovering.wait()
    await cancel_and_wait([first])
    monkeypatch.setattr(JobStore, "recover", usual)
    second = asyncio.ensure_future(manager._lead(leadership(host, 2)))
    async with asyncio.timeout(60):
        assert (await waiting).token == 2
    await cancel_and_wait([second])
    await host.close()


async def test_waiter_learns_that_another_candidate_leads(tmp_path: Path) -> None:
    """I6: requests to a JobManager that lost its lease belong to the present leader."""
    host = SystemHost()
    manager = JobManager(host, b"s" * 32, JobManagerOptions(data=str(tmp_path)), lambda *_: None)
    waiting = asyncio.ensure_future(manager._leader())
    await DirectoryLeases(host, f"{tmp_path}/{LEASE_DIRECTORY}").create(
        1, LeaseInfo(1, 1, "other", "127.0.0.1:7").encode()
    )
    async with asyncio.timeout(60):
        with pytest.raises(NoLeader, match=r"the one at 127\.0\.0\.1:7 does: ask there"):
            await waiting
    await host.close()


async def test_a_leader_that_goes_away_is_asked_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I6: the next leader would not know of a stop that this one accepted while leaving its
    jobs.
    """
    host = SystemHost()
    manager = JobManager(host, b"s" * 32, JobManagerOptions(data=str(tmp_path)), lambda *_: None)
    led: list[bool] = []
    leave = Dispatcher.__aexit__

    async def leaves(*args: Any) -> None:
        led.append(manager._now_leading() is not None)
        await leave(*args)

    monkeypatch.setattr(Dispatcher, "__aexit__", leaves)
    leading = asyncio.ensure_future(manager._lead(leadership(host, 1)))
    await manager._leader()
    await cancel_and_wait([leading])
    assert led == [False]
    await host.close()


class SilentTaskManager:
    def notify(self, method: str, *args: Any) -> None: ...

    def abort(self, error: Exception) -> None: ...


async def test_network_memory_of_a_taskmanager_is_shown_before_its_first_job(
    tmp_path: Path,
) -> None:
    host = SystemHost()
    manager = JobManager(host, b"s" * 32, JobManagerOptions(data=str(tmp_path)), lambda *_: None)
    leading = asyncio.ensure_future(manager._lead(leadership(host, 1)))
    resources = await manager._registers(cast(RpcConnection, SilentTaskManager()))
    resources.register(
        cast(RpcConnection, SilentTaskManager()),
        "w",
        [SlotStatus(0)],
        isolated=True,
        network_bytes=64 << 20,
    )
    shown = monitored(manager).worker_metrics("w")
    kinds = {kind: shown[f"{NETTY}{kind}Memory"] for kind in ("Total", "Available", "Used")}
    assert kinds == {"Total": 64 << 20, "Available": 64 << 20, "Used": 0}
    assert shown[f"{NETTY}TotalMemorySegments"] == 2048
    assert monitored(manager).worker_metrics("gone") == {}
    await cancel_and_wait([leading])
    await host.close()
