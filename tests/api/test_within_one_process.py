"""Exchange between subtasks of one process: by reference, without a socket, bounded by the room of
the consumer.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import aioflow as af

pytestmark = pytest.mark.timeout(120)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


class Indexed(af.MapFunction[Any, Any]):
    """Pairs each element with the subtask that saw it."""

    def open(self, ctx: af.RuntimeContext) -> None:
        self.index = ctx.subtask_index

    def map(self, value: Any) -> Any:
        return value, self.index


def sockets() -> int:
    """How many sockets this process has."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except FileNotFoundError:
            continue  # That of the listing.
    return found


@pytest.mark.parametrize(
    "ship", ["rebalance", "rescale", "shuffle", "broadcast", "global_", "key_by"]
)
async def test_an_edge_within_the_process_hands_on_the_object_and_opens_no_socket(
    ship: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12.1: whichever way it is dealt out; the very objects come out, so nothing was encoded."""
    loop = asyncio.get_running_loop()

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a flow in one process asked for the network")

    for name in (
        "create_connection",
        "create_server",
        "create_unix_connection",
        "create_unix_server",
        "sock_connect",
    ):
        monkeypatch.setattr(loop, name, refused)
    monkeypatch.setattr(socket, "create_connection", refused)
    before = sockets()
    made = [[n] for n in range(100)]
    got: list[Any] = []
    during: list[int] = []
    flow = af.Flow("local", parallelism=3)
    rows = flow.source(made)
    dealt: Any = rows.key_by(lambda row: row[0]) if ship == "key_by" else getattr(rows, ship)()
    dealt.filter(lambda row: bool(during.append(sockets()) or True)).sink(got.append)
    await flow.execute()
    copies = 3 if ship == "broadcast" else 1
    assert Counter(map(id, got)) == Counter({id(row): copies for row in made})
    assert set(during) == {before}


@pytest.mark.parametrize(
    ("producers", "consumers", "feeds"),
    [
        (2, 4, {0: {0, 1}, 1: {2, 3}}),
        (4, 2, {0: {0}, 1: {0}, 2: {1}, 3: {1}}),
        (2, 3, {0: {0, 1}, 1: {2}}),
    ],
)
async def test_rescale_of_a_running_flow_feeds_the_local_group_alone(
    producers: int, consumers: int, feeds: dict[int, set[int]]
) -> None:
    """C6.7: 2 to 4: subtask 0 feeds only 0 and 1, each its share."""
    flow = af.Flow("rescaled", parallelism=consumers)
    numbers = flow.source(
        af.io.datagen(lambda n: n, count=400, splits=producers), parallelism=producers
    )
    sent = numbers.map(Indexed(), parallelism=producers)
    seen = Counter(
        [
            (sender, receiver)
            for (_, sender), receiver in await sent.rescale().map(Indexed()).collect()
        ]
    )
    reached: dict[int, set[int]] = {}
    for sender, receiver in seen:
        reached.setdefault(sender, set()).add(receiver)
    assert reached == feeds
    for sender, receivers in feeds.items():
        shares = [seen[sender, receiver] for receiver in receivers]
        assert max(shares) - min(shares) <= 1


async def test_a_source_makes_no_more_than_there_is_room_for_and_keeps_pace_with_its_sink() -> None:
    """E4.1, E4.2: the data in flight between the two stays constant however long the sink takes;
    once released, everything arrives.
    """
    made = 0
    sunk: list[int] = []
    allowed = asyncio.Semaphore(0)
    is_free = False

    def make(n: int) -> int:
        nonlocal made
        made = n + 1
        return n

    async def sink(n: int) -> None:
        if not is_free:
            await allowed.acquire()
        sunk.append(n)

    total = 400_000
    flow = af.Flow("held back")
    flow.source(af.io.datagen(make, count=total)).rebalance().sink(sink)

    async def standing() -> int:
        """Elements made, once none is made any more."""
        while True:
            before = made
            for _ in range(2_000):
                await asyncio.sleep(0)
            if made == before:
                return made

    async with flow.run() as job:
        await eventually(lambda: made > 0)
        assert await standing() < total // 4
        in_flight = (
            0  # Once the sink has shown how fast it can be: exchanges begin with small batches.
        )
        for _ in range(5):
            for _ in range(20_000):
                allowed.release()
            await eventually(lambda: allowed.locked())
            in_flight = in_flight or await standing() - len(sunk)
            assert in_flight < total // 4
            assert await standing() - len(sunk) <= 2 * in_flight, (
                "what waits does not grow with the time that it waits"
            )
        is_free = True
        allowed.release()
        result = await job.wait()
    assert result.restarts == 0
    assert sunk == list(range(total))
