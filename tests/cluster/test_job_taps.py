"""An observer of a job on a cluster knows when all TaskManagers have been told."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aioflow.cluster.placed_tasks import SUBMITTER, JobPeers, JobTaps
from aioflow.cluster.rpc import RpcConnection
from aioflow.core.aio import wait_all
from aioflow.core.wire.serializers import Codec


class Peer:
    """Answers when it is let."""

    is_open = True

    def __init__(self) -> None:
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, *what: Any) -> asyncio.Future[None]:
        self.asked.append(what)
        return self.answer


async def test_a_tap_is_there_once_every_taskmanager_has_it_or_is_gone() -> None:
    peers, names = JobPeers(), ("tm-1", "tm-2", SUBMITTER)
    made = {name: Peer() for name in names}
    for name, peer in made.items():
        peers.joined(name, cast(RpcConnection, peer), name)
    waiting = asyncio.create_task(wait_all(JobTaps("job", peers, Codec(), None).add(3, 1, False)))
    for over in ("tm-1", "tm-2"):
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        made[over].answer.set_result(None)
    await waiting
    assert [made[name].asked for name in names] == [[("add_tap", "job", 3, 1, False)]] * 2 + [[]]
