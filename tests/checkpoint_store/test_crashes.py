"""A crash at any moment, of the process or of the power, leaves the newest checkpoint that was
acknowledged, or one after it.
"""

from __future__ import annotations

import asyncio

import pytest

from aioflow.checkpoint.completed import CheckpointKind, Discard, files_of
from aioflow.checkpoint.lease import LeaseOptions
from aioflow.checkpoint.store import open_store
from aioflow.checkpoint.sweeping import sweep
from aioflow.core.errors import CheckpointError
from aioflow.testing import simulate
from aioflow.testing.simulation import SimulatedHost
from tests.checkpoint_store.samples import checkpoint, contents

URL = "file:///shared/store/flow"
SEEDS = 25
RUN_S = 1.0
"""Virtual seconds of a run: about five checkpoints."""

OPTIONS = LeaseOptions(lease_s=4.0, renew_s=0.5, stop_s=1.0)


@pytest.mark.parametrize("how", ["kill", "power"])
def test_after_a_crash_the_newest_is_whole_and_not_older_than_what_was_acknowledged(
    how: str,
) -> None:
    """I6.3, R6, R16, R17: the previous one is readable, even if the disk lost or tore writes."""
    crashed_inside = 0
    for seed in range(SEEDS):
        acknowledged: list[int] = []
        begun: list[int] = []

        async def job(
            host: SimulatedHost, acknowledged: list[int] = acknowledged, begun: list[int] = begun
        ) -> None:
            store = open_store(URL, host)
            last = None
            for number in range(1, 100):
                savepoint = number % 3 == 0
                place = store.savepoint_url() if savepoint else ""
                kind = CheckpointKind.SAVEPOINT if savepoint else CheckpointKind.CHECKPOINT
                begun.append(number)
                made = await store.complete(await checkpoint(store, number, kind, place))
                acknowledged.append(number)
                if last is not None:
                    await store.discard(Discard((last,), tuple(files_of(last.subtasks.values()))))
                last = None if savepoint else made

        async def main(
            host: SimulatedHost, acknowledged: list[int] = acknowledged, begun: list[int] = begun
        ) -> None:
            nonlocal crashed_inside
            host.sim.spawn("job", job, machine="a")
            await asyncio.sleep(host.rng.uniform(0.0, RUN_S))
            getattr(host.sim, how)("job")
            crashed_inside += len(begun) > len(acknowledged)
            store = open_store(URL, host)
            newest = await store.newest()
            number = 0 if newest is None else newest.checkpoint_id
            assert number >= max(acknowledged, default=0)
            assert number <= max(begun, default=0)
            if newest is not None:
                assert len(await contents(store, newest)) == 10
            for url in await store.savepoints():
                assert url
            await sweep(store, host, retain=1, grace_ms=-60_000)
            assert await store.newest() == newest
            if newest is not None:
                assert len(await contents(store, newest)) == 10
            again = await store.complete(await checkpoint(store, await store.highest() + 1))
            assert await store.newest() == again

        assert simulate(main, seed).errors == []
    assert crashed_inside > SEEDS // 2, "the crashes hit nothing, so the test tests nothing"


def test_checkpoint_found_by_a_successor_survives_a_writer_that_died_early() -> None:
    """R16: the successor resumes from that checkpoint and commits its prepared output, so it must
    not go back behind it later.
    """
    for seed in range(10):

        async def job(host: SimulatedHost) -> None:
            store = open_store(URL, host)
            for number in range(1, 100):
                await store.complete(await checkpoint(store, number))

        async def successor(host: SimulatedHost, seen: list[int]) -> None:
            store = open_store(URL, host)
            await store.hold(lambda error: None, OPTIONS)
            newest = await store.newest()
            assert newest is not None
            seen.append(newest.checkpoint_id)
            await asyncio.get_running_loop().create_future()

        async def main(host: SimulatedHost) -> None:
            seen: list[int] = []
            host.sim.spawn("job", job, machine="a")
            while not any(
                change.target is not None and change.target.endswith("/metadata")
                for change in host.sim.disk._pending
            ):
                await asyncio.sleep(1e-5)
            host.sim.kill("job")
            host.sim.spawn("next", lambda host: successor(host, seen), machine="a")
            while not seen:
                await asyncio.sleep(1e-3)
            host.sim.power("next")
            newest = await open_store(URL, host).newest()
            assert newest is not None
            assert newest.checkpoint_id == seen[0]

        simulate(main, seed)


def test_a_disk_that_is_full_or_fails_costs_checkpoints_and_nothing_else() -> None:
    """R13: no half checkpoint is ever selected, and it goes on once there is space again."""
    failed = 0
    for seed in range(30):

        async def main(host: SimulatedHost) -> None:
            nonlocal failed
            disk = host.sim.disk
            store = open_store(URL, host)
            lost: list[CheckpointError] = []
            lease = await store.hold(lost.append, OPTIONS)
            last = 0
            for number in range(1, 12):
                disk.full = host.rng.random() < 0.3
                disk.error_rate = host.rng.choice([0.0, 0.05])
                try:
                    await store.complete(await checkpoint(store, number))
                    last = number
                except (CheckpointError, OSError):
                    failed += 1
                disk.full, disk.error_rate = False, 0.0
                await store.settle()
                newest = await store.newest()
                assert (0 if newest is None else newest.checkpoint_id) == last
                if newest is not None:
                    assert len(await contents(store, newest)) == 10
            assert lost == []
            await lease.release()

        assert simulate(main, seed).errors == []
    assert failed > 30
