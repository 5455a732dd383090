"""One job per flow and store: the second is refused, the next one starts as soon as it is safe."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aioflow.checkpoint.completed import Discard
from aioflow.checkpoint.lease import FlowLease, Holder, LeaseOptions
from aioflow.checkpoint.objects import MemoryObjects
from aioflow.checkpoint.store import FlowStore, open_store
from aioflow.core.errors import CheckpointError
from aioflow.core.host import ProcessIdentity
from aioflow.core.system_host import SystemHost
from aioflow.state.snapshot import whole
from aioflow.testing import simulate
from aioflow.testing.simulation import SimulatedHost
from tests.checkpoint_store.samples import Failing, checkpoint

OPTIONS = LeaseOptions(lease_s=4.0, renew_s=0.5, stop_s=1.0)
URL = "file:///shared/store/flow"


def nothing(error: CheckpointError) -> None:
    raise AssertionError(f"the lease was lost: {error}")


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


def holding(held: list[FlowLease], lost: list[CheckpointError]):  # type: ignore[no-untyped-def]
    async def main(host: SimulatedHost) -> None:
        held.append(await open_store(URL, host).hold(lost.append, OPTIONS))
        await asyncio.get_running_loop().create_future()

    return main


def test_a_second_job_is_refused_naming_the_first() -> None:
    """API section 5: one job per (store, flow name)."""

    async def main(host: SimulatedHost) -> None:
        held, lost = [], []
        host.sim.spawn("first", holding(held, lost), machine="a")
        await until(lambda: held)
        before = host.clock.monotonic()
        with pytest.raises(
            CheckpointError,
            match=(
                r"store/flow is running already: process \d+ on a, since 20\d\d-\d\d-\d\d "
                r"[\d:]{8} UTC"
            ),
        ):
            await open_store(URL, host).hold(nothing, OPTIONS)
        assert host.clock.monotonic() - before < OPTIONS.lease_s, (
            "a holder that renews is known to live"
        )
        held[0].check()
        # Another flow in the same store is another matter.
        other = await open_store("file:///shared/store/other", host).hold(nothing, OPTIONS)
        await other.release()
        host.sim.kill("first")
        assert lost == []

    for seed in range(5):
        assert simulate(main, seed).errors == []


def test_nothing_is_deleted_without_the_lease() -> None:
    """A write that was given up may still have succeeded, and another job may have begun with
    it.
    """

    async def main(host: SimulatedHost) -> None:
        store = open_store(URL, host)
        lease = await store.hold(nothing, OPTIONS)
        stored = await store.complete(await checkpoint(store, 1))
        await store.objects.create("state/kept", whole(b"x"))
        await lease.release()
        await store.discard(Discard((stored,), ("state/kept",)))
        assert await store.checkpoints() == [1]
        assert "state/kept" in await store.objects.names("state")
        await (await store.hold(nothing, OPTIONS)).release()

    assert simulate(main, 1).errors == []


def test_holder_that_stops_lets_the_next_one_start_at_once_with_a_larger_number() -> None:
    async def main(host: SimulatedHost) -> None:
        tokens = []
        for _ in range(3):
            lease = await open_store(URL, host).hold(nothing, OPTIONS)
            tokens.append(lease.token)
            await asyncio.sleep(3.0)
            lease.check()
            await lease.release()
            await lease.release()
            with pytest.raises(CheckpointError, match="not held any more"):
                lease.check()
            before = host.clock.monotonic()
        assert host.clock.monotonic() - before < 0.5
        assert tokens == sorted(set(tokens))

    assert simulate(main, 1).errors == []


def test_one_that_was_killed_on_this_machine_is_followed_at_once() -> None:
    async def main(host: SimulatedHost) -> None:
        held, lost, tokens = [], [], []

        async def next_one(mine: SimulatedHost) -> None:
            before = mine.clock.monotonic()
            lease = await open_store(URL, mine).hold(nothing, OPTIONS)
            assert mine.clock.monotonic() - before < 1.0
            tokens.append(lease.token)
            await lease.release()

        host.sim.spawn("first", holding(held, lost), machine="a")
        await until(lambda: held)
        host.sim.kill("first")
        host.sim.spawn("second", next_one, machine="a")
        await until(lambda: tokens)
        assert tokens[0] > held[0].token

    assert simulate(main, 2).errors == []


def test_one_that_was_killed_elsewhere_is_followed_when_its_lease_has_run_out() -> None:
    async def main(host: SimulatedHost) -> None:
        held, lost = [], []
        host.sim.spawn("first", holding(held, lost), machine="a")
        await until(lambda: held)
        host.sim.kill("first")
        before = host.clock.monotonic()
        lease = await open_store(URL, host).hold(nothing, OPTIONS)
        assert OPTIONS.lease_s < host.clock.monotonic() - before < OPTIONS.take_over_s + 2.0
        await lease.release()

    assert simulate(main, 3).errors == []


def test_leader_that_hung_learns_that_it_lost_and_completes_nothing_any_more() -> None:
    """R8: the holder has stopped before another one begins."""

    async def main(host: SimulatedHost) -> None:
        stores: list[FlowStore] = []
        lost: list[CheckpointError] = []
        refused: list[CheckpointError] = []

        async def first(mine: SimulatedHost) -> None:
            store = open_store(URL, mine)
            stores.append(store)
            await store.hold(lost.append, OPTIONS)
            await store.complete(await checkpoint(store, 1))
            await until(lambda: lost)
            try:
                await store.complete(await checkpoint(store, 2))
            except CheckpointError as error:
                refused.append(error)

        host.sim.spawn("first", first, machine="a")
        await asyncio.sleep(2.0)
        host.sim.pause("first")
        store = open_store(URL, host)
        lease = await store.hold(nothing, OPTIONS)
        host.sim.resume("first")
        await until(lambda: refused)
        assert "could not be renewed" in str(lost[0])
        assert "not held any more" in str(refused[0])
        assert await store.checkpoints() == [1]
        lease.check()
        await store.complete(await checkpoint(store, 2))
        await lease.release()

    assert simulate(main, 4).errors == []


def test_holder_that_hung_without_a_successor_goes_on() -> None:
    """API section 5: a busy machine, or one that slept, is no reason to fail a job; only who
    finds another in its place has lost.
    """

    async def main(host: SimulatedHost) -> None:
        stores: list[FlowStore] = []
        leases: list[FlowLease] = []
        go = asyncio.Event()

        async def first(mine: SimulatedHost) -> None:
            store = open_store(URL, mine)
            leases.append(await store.hold(nothing, OPTIONS))
            await store.complete(await checkpoint(store, 1))
            await go.wait()
            # The holder wakes after its time is over, while no other job has asked for the lease.
            assert not leases[0].is_valid
            await store.complete(await checkpoint(store, 2))
            leases[0].check()
            stores.append(store)
            await asyncio.get_running_loop().create_future()

        host.sim.spawn("first", first, machine="a")
        await until(lambda: leases)
        await asyncio.sleep(2.0)
        host.sim.pause("first")
        await asyncio.sleep(60.0)
        go.set()
        host.sim.resume("first")
        await until(lambda: stores)
        assert await open_store(URL, host).checkpoints() == [1, 2]
        with pytest.raises(CheckpointError, match="is running already"):
            await open_store(URL, host).hold(nothing, OPTIONS)
        host.sim.kill("first")

    for seed in range(5):
        assert simulate(main, seed).errors == []


def test_one_that_is_late_again_and_again_goes_on() -> None:
    """API section 5: each renewal takes longer than the time that is left for it."""

    async def main(host: SimulatedHost) -> None:
        lost: list[CheckpointError] = []

        async def first(mine: SimulatedHost) -> None:
            store = open_store(URL, mine)
            await store.hold(lost.append, OPTIONS)
            for number in range(1, 30):
                await store.complete(await checkpoint(store, number))
                await asyncio.sleep(1.0)

        host.sim.spawn("first", first, machine="a")
        began = host.clock.monotonic()
        while host.clock.monotonic() < began + 90.0:
            await asyncio.sleep(host.rng.uniform(0.0, 2.0))
            host.sim.pause("first")
            await asyncio.sleep(host.rng.uniform(0.0, 9.0))
            host.sim.resume("first")
        await asyncio.sleep(60.0)
        assert lost == []
        assert await open_store(URL, host).checkpoints() == list(range(1, 30))

    for seed in range(5):
        assert simulate(main, seed).errors == []


def test_one_of_many_simultaneous_starts_holds_and_the_others_are_refused() -> None:
    for seed in range(6):
        held: list[FlowLease] = []
        refused: list[CheckpointError] = []

        async def job(
            host: SimulatedHost,
            held: list[FlowLease] = held,
            refused: list[CheckpointError] = refused,
        ) -> None:
            try:
                held.append(await open_store(URL, host).hold(nothing, OPTIONS))
            except CheckpointError as error:
                refused.append(error)
                return
            await asyncio.sleep(8.0)
            held[0].check()
            await held[0].release()

        async def main(host: SimulatedHost) -> None:
            for name in "abcde":
                host.sim.spawn(name, job, machine=name)
            await asyncio.sleep(15.0)

        assert simulate(main, seed).errors == []
        assert (len(held), len(refused)) == (1, 4)


def test_a_store_that_fails_for_a_while_costs_nothing_and_for_long_the_lease() -> None:
    async def main(host: SimulatedHost) -> None:
        objects = Failing(MemoryObjects(host, f"lease-{host.ids.new('store')}"))
        lost: list[CheckpointError] = []
        store = FlowStore(host, objects)
        lease = await store.hold(lost.append, OPTIONS)
        objects.before |= {"create", "names"}
        await asyncio.sleep(1.5)
        objects.before.clear()
        await asyncio.sleep(5.0)
        lease.check()
        objects.before |= {"create", "names"}
        await until(lambda: lost)
        assert host.clock.monotonic() > 6.5
        assert "the store has failed for too long: " in str(lost[0])
        await lease.release()
        with pytest.raises(
            CheckpointError,
            match=r"checkpoint directory memory://\S+ cannot be used: .*No space left",
        ):
            await store.hold(nothing, OPTIONS)

    assert simulate(main, 5).errors == []


def test_a_deleted_store_is_named_as_the_cause_of_the_lost_lease() -> None:
    async def main(host: SimulatedHost) -> None:
        objects = MemoryObjects(host, f"lease-{host.ids.new('store')}")
        lost: list[CheckpointError] = []
        await FlowStore(host, objects).hold(lost.append, OPTIONS)
        await objects.delete(await objects.names("lease"))
        await until(lambda: lost)
        assert re.search(
            r"could not be renewed: memory://\S+/lease/0+\d+ was deleted", str(lost[0])
        )

    assert simulate(main, 5).errors == []


HOLDER = """
import asyncio, sys
from aioflow.checkpoint.store import open_store
from aioflow.core.system_host import SystemHost

async def main():
    host = SystemHost()
    lease = await open_store(sys.argv[1], host).hold(print)
    print("held", flush=True)
    await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


async def test_a_process_of_this_machine_that_was_killed_is_known_to_be_dead(
    tmp_path: Path,
) -> None:
    """Real processes: refused while the other one lives, taken over without waiting once it was
    killed with -9.
    """
    url = f"file://{tmp_path}/flow"
    # A lease too long to wait for: the next job must know.
    options = LeaseOptions(lease_s=3600.0, renew_s=0.2)
    host = SystemHost()
    with subprocess.Popen([sys.executable, "-c", HOLDER, url], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert await host.blocking(process.stdout.readline) == b"held\n"
            with pytest.raises(
                CheckpointError, match=f"running already: process {process.pid} on "
            ):
                await open_store(url, host).hold(nothing, options)
        finally:
            process.kill()
        # Not waited for yet, so that it is a zombie.
        lease = await open_store(url, host).hold(nothing, options)
        assert lease.token > 1
        assert lease.holder.process == host.procs.identity()
        assert not host.procs.has_ended(lease.holder.process)
        await lease.release()
    await host.close()


def test_identity_of_a_process_is_invalid_on_another_machine_and_after_a_reboot() -> None:
    procs = SystemHost().procs
    me = procs.identity()
    assert not procs.has_ended(me)
    assert procs.has_ended(ProcessIdentity(me.host, me.pid, me.machine, "1"))
    assert not procs.has_ended(ProcessIdentity(me.host, me.pid, "another boot", "1"))
    assert not procs.has_ended(ProcessIdentity(me.host, 1 << 22, "", "1"))


@pytest.mark.parametrize(
    "text", ["", "host:6123", "a\nb\nc\nd\ne", "a\n1\nc\nd", "a\n1\nc\nd\n1\n2"]
)
def test_invalid_process_identity_is_no_holder(text: str) -> None:
    assert Holder.decode(text) is None


def test_a_holder_reads_as_it_was_written() -> None:
    holder = Holder(ProcessIdentity("node-1", 4711, "boot pid:[1]", "123"), 1_795_300_000_000)
    assert Holder.decode(holder.encode()) == holder
    assert str(holder) == "process 4711 on node-1, since 2026-11-21 22:26:40 UTC"
