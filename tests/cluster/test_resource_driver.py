"""The ResourceManager's view of its TaskManagers while answers and heartbeats are still on their
way.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from aioflow.cluster.heartbeat import HeartbeatOptions
from aioflow.cluster.resource_driver import ResourceManager
from aioflow.cluster.resource_manager import SlotManagerOptions
from aioflow.cluster.rpc import RpcConnection
from aioflow.cluster.slots import SlotStatus
from aioflow.core.system_host import SystemHost

STANDALONE = SlotManagerOptions(workers_max=0, idle_timeout_s=None)


class SlowTaskManager:
    """The connection of a TaskManager that answers when the test says so."""

    def __init__(self) -> None:
        self.asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def call(self, method: str, *args: Any) -> object:
        assert method == "request_slot"
        self.asked.set_result(args[2])
        return await self.answer

    def notify(self, method: str, *args: Any) -> None: ...

    def abort(self, error: Exception) -> None: ...


async def test_a_slot_that_was_given_out_is_not_shown_as_free_before_the_next_heartbeat() -> None:
    """I2: the view shows the ResourceManager's own books, which each event changes, not the last
    report of a TaskManager.
    """
    taskmanager = SlowTaskManager()
    async with ResourceManager(
        SystemHost(), 1, STANDALONE, HeartbeatOptions(), {}, "here"
    ) as resources:
        before = [SlotStatus(0), SlotStatus(1)]
        registration = resources.register(cast(RpcConnection, taskmanager), "w", before)
        assert resources.overview() == [("w", 2, 2)]
        resources.declare("job", 1)
        assert resources.overview() == [("w", 2, 1)], "it is taken as soon as it is asked for"
        allocation = await taskmanager.asked
        resources.heartbeat("w", registration, before)
        assert resources.overview() == [("w", 2, 1)], (
            "a report from before the request changes nothing"
        )
        taskmanager.answer.set_result(None)
        await asyncio.sleep(0)
        resources.slot_freed("w", registration, "another")
        assert resources.overview() == [("w", 2, 1)]
        resources.declare("job", 0)
        resources.slot_freed("w", registration, allocation)
        assert resources.overview() == [("w", 2, 2)], "and free as soon as it is given back"


class Provider:
    """Starts no worker, and records the requests."""

    workers, slots = 2, 1

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
        self.failed: Callable[[], object] | None = None

    def start_workers(self, count: int, failed: Callable[[], object]) -> None:
        self.failed = failed
        self.told.put_nowait(("start", count))

    def registered(self, worker_id: str) -> None:
        self.told.put_nowait(("registered", worker_id))

    def lost(self, worker_id: str, reason: str) -> None:
        self.told.put_nowait(("lost", worker_id))


async def test_a_provider_is_asked_for_all_workers_and_for_each_that_fails_or_is_lost() -> None:
    """I2: how many there are is decided here alone; who starts them only says what became of it."""
    provider = Provider()
    options = SlotManagerOptions(
        workers_min=2, workers_max=2, idle_timeout_s=None, retry_s=0.01, start_timeout_s=math.inf
    )
    beating = HeartbeatOptions(interval_s=0.05, timeout_s=60.0)
    async with (
        ResourceManager(SystemHost(), 1, options, beating, {}, "here", provider) as resources,
        asyncio.timeout(60),
    ):
        assert await provider.told.get() == ("start", 2)
        assert provider.failed is not None
        await asyncio.to_thread(provider.failed)  # On whichever thread.
        assert await provider.told.get() == ("start", 1)
        first, second = (cast(RpcConnection, SlowTaskManager()) for _ in range(2))
        resources.register(first, "a", [SlotStatus(0)])
        resources.register(second, "b", [SlotStatus(0)])
        assert [await provider.told.get() for _ in range(2)] == [
            ("registered", "a"),
            ("registered", "b"),
        ]
        resources.connection_ended(first)
        assert [await provider.told.get() for _ in range(2)] == [("lost", "a"), ("start", 1)]
        resources.register(cast(RpcConnection, SlowTaskManager()), "c", [SlotStatus(0)])
        assert await provider.told.get() == ("registered", "c")
        assert provider.told.empty()


async def test_process_of_a_job_is_lost_without_its_taskmanager() -> None:
    """A TaskManager that is the process of its job is lost with it."""
    async with ResourceManager(
        SystemHost(), 1, STANDALONE, HeartbeatOptions(), {}, "here"
    ) as resources:
        told: list[tuple[Any, ...]] = []
        apart, alone = SlowTaskManager(), SlowTaskManager()
        apart.notify = lambda *what: told.append(what)  # type: ignore[method-assign]
        resources.register(cast(RpcConnection, apart), "a", [SlotStatus(0)], isolated=True)
        resources.register(cast(RpcConnection, alone), "b", [SlotStatus(0)])
        resources.lose_job("job", "a", "its function holds the loop")
        resources.lose_job("job", "b", "its function holds the loop")
        assert told == [("end_job", "job", "its function holds the loop")]
        assert resources.overview() == [("a", 1, 1)]


def _put(told: asyncio.Queue[tuple[Any, ...]], *what: Any) -> None:
    told.put_nowait(what)


async def test_process_that_still_opens_a_job_is_ended_with_the_job() -> None:
    """An import may hang: the slot must not wait for that. An opened job is closed as ever."""
    async with (
        ResourceManager(SystemHost(), 1, STANDALONE, HeartbeatOptions(), {}, "here") as resources,
        asyncio.timeout(60),
    ):
        told: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        for worker_id in "ab":
            worker = SlowTaskManager()
            notify = partial(_put, told, worker_id)
            worker.notify = notify  # type: ignore[method-assign]
            resources.register(
                cast(RpcConnection, worker), worker_id, [SlotStatus(0)], isolated=True
            )
        resources.declare("job", 2)
        for worker_id, _, allocation_id in resources._slots.slots_of("job"):
            if worker_id == "a":
                resources.slots_accepted(worker_id, [allocation_id])
        resources.job_over("job")
        assert told.get_nowait() == ("b", "end_job", "job", "its job ended before it was opened")
        assert told.empty()
