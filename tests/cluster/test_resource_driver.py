"""What the ResourceManager of a cluster says of its TaskManagers while answers and heartbeats are still on their way."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aioflow.cluster.heartbeat import HeartbeatOptions
from aioflow.cluster.resource_driver import ResourceManager
from aioflow.cluster.resource_manager import SlotManagerOptions
from aioflow.cluster.rpc import RpcConnection
from aioflow.cluster.slots import SlotStatus
from aioflow.core.host import SystemHost

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


async def test_a_slot_that_was_given_out_is_not_shown_as_free_before_the_next_heartbeat() -> None:
    """I2: what is shown are the ResourceManager's own books, which each event changes, not the last report of a TaskManager."""
    taskmanager = SlowTaskManager()
    async with ResourceManager(SystemHost(), 1, STANDALONE, HeartbeatOptions(), {}, "here") as resources:
        before = [SlotStatus(0), SlotStatus(1)]
        registration = resources.register(cast(RpcConnection, taskmanager), "w", before)
        assert resources.overview() == [("w", 2, 2)]
        resources.declare("job", 1)
        assert resources.overview() == [("w", 2, 1)], "it is taken as soon as it is asked for"
        allocation = await taskmanager.asked
        resources.heartbeat("w", registration, before)
        assert resources.overview() == [("w", 2, 1)], "a report from before the request changes nothing"
        taskmanager.answer.set_result(None)
        await asyncio.sleep(0)
        resources.slot_freed("w", registration, "another")
        assert resources.overview() == [("w", 2, 1)]
        resources.declare("job", 0)
        resources.slot_freed("w", registration, allocation)
        assert resources.overview() == [("w", 2, 2)], "and free as soon as it is given back"
