"""One candidate leads at a time, through kills, pauses, power loss and hangs (I6.1)."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from pathlib import Path

import pytest

from aioflow.checkpoint.lease import KEPT, LeaseInfo, LeaseOptions, current_holder
from aioflow.cluster.jobmanager import JobManagerOptions
from aioflow.cluster.leadership import DirectoryLeases, LeaderElection, Leadership
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import RestoreError, StaleLeader
from aioflow.core.host import Host, ProcessIdentity
from aioflow.core.system_host import SystemHost
from aioflow.testing import simulate
from aioflow.testing.simulation import Faults, SimulatedHost, inject

OPTIONS = LeaseOptions(lease_s=4.0, renew_s=0.5, stop_s=1.0)
LEASES = "/shared/leases"


class MemoryLeases:
    """An object store with conditional puts; `late` creations are applied on demand."""

    def __init__(self) -> None:
        self.objects: dict[int, bytes] = {}
        self.broken = False

    def check(self) -> None:
        if self.broken:
            raise OSError(errno.EIO, "the store cannot be reached")

    async def numbers(self) -> list[int]:
        self.check()
        return sorted(self.objects)

    async def read(self, number: int) -> bytes | None:
        self.check()
        return self.objects.get(number)

    async def create(self, number: int, data: bytes) -> bool:
        self.check()
        return self.objects.setdefault(number, data) is data

    async def delete(self, number: int) -> None:
        self.objects.pop(number, None)

    def where(self, number: int) -> str:
        return f"{LEASES}/{number}"


async def forever(leadership: Leadership) -> None:
    await asyncio.get_running_loop().create_future()


class Acts:
    """The acts of leaders, in order of time: all processes of a simulation share this list."""

    def __init__(self) -> None:
        self.done: list[tuple[float, int, str]] = []
        self.terms: dict[int, str] = {}
        self.leaderships: list[tuple[Leadership, SimulatedHost, ProcessIdentity]] = []

    async def lead(self, host: SimulatedHost, leadership: Leadership) -> None:
        assert leadership.token not in self.terms, "two leaders with one token"
        self.terms[leadership.token] = host.name
        led = leadership, host, host.procs.identity()
        self.leaderships.append(led)
        try:
            while True:
                if leadership.is_valid:
                    assert not self.done or self.done[-1][1] <= leadership.token, (
                        "an older leader acted after a newer one"
                    )
                    # A killed leader had no chance to leave, and acts no more.
                    alive = [
                        one
                        for one, its, process in self.leaderships
                        if not its.procs.has_ended(process)
                    ]
                    assert [one.token for one in alive if one.is_valid] == [leadership.token], (
                        "two may act"
                    )
                    self.done.append((host.clock.monotonic(), leadership.token, host.name))
                await asyncio.sleep(host.rng.uniform(0.01, 0.2))
        finally:
            self.leaderships.remove(led)


def contend(acts: Acts, options: LeaseOptions = OPTIONS):  # type: ignore[no-untyped-def]
    async def main(host: SimulatedHost) -> None:
        election = LeaderElection(host, DirectoryLeases(host, LEASES), host.name, options)
        await election.run(lambda leadership: acts.lead(host, leadership))

    return main


@pytest.mark.parametrize("seed", range(12))
def test_never_two_act_at_once_under_kills_pauses_power_loss_and_a_failing_disk(seed: int) -> None:
    """I6.1: two coordinators, one leads; and after the faults one of them does."""
    acts = Acts()

    async def main(host: SimulatedHost) -> None:
        names = ["a", "b", "c"]
        for name in names:
            host.sim.spawn(name, contend(acts), machine=name)
        faults = Faults(kill=0.05, power=0.05, pause=0.1, disk=0.1, outage_s=(0.5, 12.0))
        await inject(host.sim, faults, names, duration_s=90.0)
        quiet = host.clock.monotonic()
        await asyncio.sleep(15.0)
        after = [t for t, _, _ in acts.done if t > quiet + 12.0]
        assert after, "no candidate leads although all is well"
        for name in names:
            host.sim.kill(name)

    assert simulate(main, seed).errors == []
    assert len(acts.terms) >= 2, "the faults changed nothing, so the test tests nothing"


def test_all_candidates_at_the_same_moment_make_one_leader() -> None:
    """I6.1."""
    for seed in range(8):
        acts = Acts()

        async def main(host: SimulatedHost, acts: Acts = acts) -> None:
            for name in "abcde":
                host.sim.spawn(name, contend(acts), machine=name)
            await asyncio.sleep(10.0)
            for name in "abcde":
                host.sim.kill(name)

        assert simulate(main, seed).errors == []
        assert len(acts.terms) == 1
        assert len(acts.done) > 50


def leaderless_s(first_machine: str, second_machine: str) -> float:
    """Seconds between the last act of a leader that is killed and the first one of its standby,
    in virtual time.
    """
    acts = Acts()

    async def main(host: SimulatedHost) -> None:
        host.sim.spawn("a", contend(acts), machine=first_machine)
        await asyncio.sleep(5.0)
        host.sim.spawn("b", contend(acts), machine=second_machine)
        await asyncio.sleep(5.0)
        host.sim.kill("a")
        await asyncio.sleep(10.0)
        host.sim.kill("b")

    assert simulate(main, 1).errors == []
    assert list(acts.terms) == sorted(acts.terms)
    last_of_a = max(t for t, _, name in acts.done if name == "a")
    first_of_b = min(t for t, _, name in acts.done if name == "b")
    return first_of_b - last_of_a


def test_a_killed_leader_is_followed_after_its_lease_and_not_before() -> None:
    """I6.1, I5.3."""
    assert 3.0 < leaderless_s("a", "b") < 6.0


def test_a_killed_leader_is_followed_at_once_where_it_is_known_to_be_dead() -> None:
    """I5.3: a standby on its machine need not wait for the end of a lease that cannot be
    renewed.
    """
    assert 0.0 < leaderless_s("m", "m") < OPTIONS.renew_s * 2


def test_a_stopped_leader_that_wakes_finds_its_time_over() -> None:
    """I6.1: SIGSTOP for longer than the lease; not one act between waking and hearing of it."""
    acts = Acts()

    async def main(host: SimulatedHost) -> None:
        host.sim.spawn("a", contend(acts), machine="a")
        await asyncio.sleep(3.0)
        host.sim.spawn("b", contend(acts), machine="b")
        await asyncio.sleep(3.0)
        host.sim.pause("a")
        await asyncio.sleep(10.0)
        host.sim.resume("a")
        await asyncio.sleep(10.0)
        for name in "ab":
            host.sim.kill(name)

    assert simulate(main, 2).errors == []
    assert list(acts.terms.values()) == ["a", "b"]


async def until(condition, seconds: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


def test_a_leader_that_cannot_renew_is_cancelled_before_its_lease_ends_and_leads_again() -> None:
    """I6.1: `stop_s` is there to end in order."""

    async def main(host: SimulatedHost) -> None:
        leases, led, ended = MemoryLeases(), [], []

        async def lead(leadership: Leadership) -> None:
            led.append(leadership)
            try:
                await forever(leadership)
            finally:
                ended.append(leadership.valid_until - host.clock.monotonic())
                assert leadership.is_valid

        task = asyncio.get_running_loop().create_task(
            LeaderElection(host, leases, "me", OPTIONS).run(lead)
        )
        await until(lambda: led)
        await asyncio.sleep(10.0)
        assert led[0].is_valid
        leases.broken = True
        await until(lambda: ended)
        assert ended[0] == pytest.approx(1.0, abs=0.1)
        with pytest.raises(StaleLeader, match=f"fencing token {led[0].token} and could not renew"):
            led[0].check()
        await asyncio.sleep(10.0)
        assert len(led) == 1
        leases.broken = False
        await until(lambda: len(led) == 2)
        assert led[1].token > led[0].token
        await cancel_and_wait([task])

    assert simulate(main, 3).errors == []


def test_leader_that_heard_of_its_loss_stops_leading_for_good() -> None:
    """I6.1: a renewal that was under way comes true too late: what was left undone meanwhile
    would be left undone forever.
    """

    async def main(host: SimulatedHost) -> None:
        led: list[Leadership] = []

        async def lead(leadership: Leadership) -> None:
            led.append(leadership)
            if len(led) == 1:
                leadership.valid_until -= OPTIONS.lease_s
                with pytest.raises(StaleLeader):
                    leadership.check()
                leadership.valid_until += OPTIONS.lease_s
            await forever(leadership)

        task = asyncio.get_running_loop().create_task(
            LeaderElection(host, MemoryLeases(), "me", OPTIONS).run(lead)
        )
        await until(lambda: len(led) == 2)
        led[1].check()
        assert led[1].token > led[0].token
        await cancel_and_wait([task])

    assert simulate(main, 10).errors == []


def test_a_leader_that_finds_another_stops_and_does_not_renew_on_top_of_it() -> None:
    """I6.1: a machine whose clocks stood still has no other way to know."""

    async def main(host: SimulatedHost) -> None:
        leases, led = MemoryLeases(), []

        async def lead(leadership: Leadership) -> None:
            led.append(leadership)
            await forever(leadership)

        task = asyncio.get_running_loop().create_task(
            LeaderElection(host, leases, "me", OPTIONS).run(lead)
        )
        await until(lambda: led)
        other = max(leases.objects) + 1
        leases.objects[other] = LeaseInfo(other, other, "other", "there").encode()
        await asyncio.sleep(3.0)
        assert not led[0].is_valid
        assert max(leases.objects) == other
        await cancel_and_wait([task])

    assert simulate(main, 9).errors == []


@pytest.mark.parametrize(
    ("options", "stall_s"),
    [(OPTIONS, 1.5), (JobManagerOptions(data="").lease, 9.5)],
    ids=["short", "JobManager"],
)
def test_failed_renewals_are_made_up_for(options: LeaseOptions, stall_s: float) -> None:
    """A leader keeps its lease while the disk stalls for less than the lease lasts."""

    async def main(host: SimulatedHost) -> None:
        leases, led = MemoryLeases(), []

        async def lead(leadership: Leadership) -> None:
            led.append(leadership)
            await forever(leadership)

        task = asyncio.get_running_loop().create_task(
            LeaderElection(host, leases, "me", options).run(lead)
        )
        await until(lambda: led)
        for _ in range(5):
            leases.broken = True
            await asyncio.sleep(stall_s)
            leases.broken = False
            await asyncio.sleep(stall_s)
        assert len(led) == 1
        assert led[0].is_valid
        await cancel_and_wait([task])

    assert simulate(main, 4).errors == []


def test_leader_that_ends_or_is_cancelled_lets_the_next_one_lead_at_once() -> None:
    async def main(host: SimulatedHost) -> None:
        leases = MemoryLeases()

        async def once(leadership: Leadership) -> None:
            leadership.check()

        await LeaderElection(host, leases, "first", OPTIONS).run(once)
        info = await current_holder(leases)
        assert info is not None
        assert info.address is None
        before = host.clock.monotonic()
        await LeaderElection(host, leases, "second", OPTIONS).run(once)
        assert host.clock.monotonic() - before < 0.5
        task = asyncio.get_running_loop().create_task(
            LeaderElection(host, leases, "third", OPTIONS).run(forever)
        )
        await asyncio.sleep(2.0)
        await cancel_and_wait([task])
        before = host.clock.monotonic()
        await LeaderElection(host, leases, "fourth", OPTIONS).run(once)
        assert host.clock.monotonic() - before < 0.5

    assert simulate(main, 5).errors == []


def test_a_standby_that_is_told_to_end_does_so_and_never_leads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(host: SimulatedHost) -> None:
        leases, given_up = MemoryLeases(), asyncio.Event()
        leader = asyncio.get_running_loop().create_task(
            LeaderElection(host, leases, "first", OPTIONS).run(forever)
        )
        await asyncio.sleep(2.0)
        led: list[Leadership] = []

        async def lead(leadership: Leadership) -> None:
            led.append(leadership)

        with caplog.at_level("INFO"):
            standby = asyncio.get_running_loop().create_task(
                LeaderElection(host, leases, "second", OPTIONS).run(lead, given_up)
            )
            await asyncio.sleep(10.0)
            assert not standby.done()
        assert [
            record.getMessage() for record in caplog.records if "stands by" in record.getMessage()
        ] == ["second stands by: first leads"]
        given_up.set()
        await asyncio.wait_for(standby, 1.0)
        await cancel_and_wait([leader])
        await asyncio.sleep(10.0)
        assert led == []

    assert simulate(main, 7).errors == []


def test_error_of_the_leader_comes_out() -> None:
    async def main(host: SimulatedHost) -> None:
        async def fails(leadership: Leadership) -> None:
            raise ValueError("boom")

        with pytest.raises(ValueError, match="boom"):
            await LeaderElection(host, MemoryLeases(), "me", OPTIONS).run(fails)

    assert simulate(main, 6).errors == []


def test_a_candidate_that_slept_and_creates_a_deleted_number_does_not_lead() -> None:
    """I6.1: without another look it would lead beside the holder."""

    async def main(host: SimulatedHost) -> None:
        leases = MemoryLeases()
        leases.objects = {n: LeaseInfo(n, 1, "holder", "there").encode() for n in range(20, 36)}

        class Asleep(MemoryLeases):
            """The first look shows what was there long ago."""

            async def numbers(self) -> list[int]:
                self.numbers = super().numbers  # type: ignore[method-assign]
                return [3]

            async def read(self, number: int) -> bytes | None:
                return (
                    LeaseInfo(3, 1, "holder", None).encode()
                    if number == 3
                    else await super().read(number)
                )

        sleeper = Asleep()
        sleeper.objects = leases.objects
        led = []

        async def lead(leadership: Leadership) -> None:
            led.append(leadership.token)

        task = asyncio.get_running_loop().create_task(
            LeaderElection(host, sleeper, "sleeper", OPTIONS).run(lead)
        )
        await asyncio.sleep(1.0)
        assert 4 in leases.objects, "the trap was not sprung"
        assert led == []
        await cancel_and_wait([task])

    assert simulate(main, 7).errors == []


def test_old_numbers_are_deleted_and_the_newest_are_kept() -> None:
    async def main(host: SimulatedHost) -> None:
        leases = MemoryLeases()
        task = asyncio.get_running_loop().create_task(
            LeaderElection(host, leases, "me", OPTIONS).run(forever)
        )
        await asyncio.sleep(30.0)
        numbers = await leases.numbers()
        assert numbers[-1] > 40
        assert len(numbers) == KEPT
        await cancel_and_wait([task])

    assert simulate(main, 8).errors == []


def test_a_suspended_machine_does_not_trust_its_monotonic_clock() -> None:
    """The clock stood still while others waited for the lease to end; the wall clock went on."""

    class Clock:
        now, wall = 100.0, 1_000_000

        def monotonic(self) -> float:
            return self.now

        def wall_ms(self) -> int:
            return self.wall

    class Suspended:
        clock = Clock()

    host = Suspended()
    lease = LeaseInfo(1, 1, "x", "y")
    leadership = Leadership(host, lease, 100.0, 1_000_000, 4.0)  # type: ignore[arg-type]
    leadership.check()
    host.clock.wall += 4_000
    assert not leadership.is_valid
    leadership.extend(LeaseInfo(2, 1, "x", "y"), 100.0, host.clock.wall)
    assert leadership.is_valid
    host.clock.now += 4.0
    assert not leadership.is_valid


async def lease_contract(host: Host, root: str) -> None:
    leases = DirectoryLeases(host, f"{root}/leases")
    assert await leases.numbers() == []
    assert await leases.read(1) is None
    await host.fs.mkdirs(f"{root}/leases")
    assert await leases.create(1, b"one")
    assert not await leases.create(1, b"other")
    assert await leases.read(1) == b"one"
    made = await asyncio.gather(*(leases.create(2, b"%d" % n) for n in range(8)))
    assert Counter(made) == {True: 1, False: 7}
    assert await leases.read(2) == b"%d" % made.index(True)
    assert await leases.create(10, b"ten")
    assert await leases.numbers() == [1, 2, 10]
    await leases.delete(2)
    await leases.delete(2)
    assert await leases.numbers() == [1, 10]
    assert len(await host.fs.list(f"{root}/leases")) == 2, "staging is left behind"


async def test_a_directory_creates_each_number_once_on_the_machine(tmp_path: Path) -> None:
    host = SystemHost()
    try:
        await lease_contract(host, str(tmp_path))
    finally:
        await host.close()


async def test_leaders_follow_each_other_in_a_directory_of_the_machine(tmp_path: Path) -> None:
    host, tokens = SystemHost(), []

    async def once(leadership: Leadership) -> None:
        leadership.check()
        tokens.append(leadership.token)

    try:
        for name in ("first", "second"):
            await LeaderElection(host, DirectoryLeases(host, f"{tmp_path}/leases"), name).run(once)
    finally:
        await host.close()
    assert tokens == [1, 3], "the number between is the resignation"


def test_a_directory_creates_each_number_once_in_the_simulation() -> None:
    async def main(host: SimulatedHost) -> None:
        await host.fs.mkdirs("/x")
        await lease_contract(host, "/x")

    for seed in range(10):
        simulate(main, seed)


def test_a_created_number_survives_loss_of_power() -> None:
    """Otherwise a restarted store would issue the same fencing token twice."""
    for seed in range(40):

        async def main(host: SimulatedHost) -> None:
            done = []

            async def create(mine: SimulatedHost) -> None:
                await mine.fs.mkdirs(LEASES)
                assert await DirectoryLeases(mine, LEASES).create(1, b"one")
                done.append(True)
                await asyncio.sleep(100.0)

            host.sim.spawn("a", create, machine="a")
            await until(lambda: done)
            host.sim.power("a")
            assert await DirectoryLeases(host, LEASES).read(1) == b"one"

        simulate(main, seed)


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        b"\x01",
        LeaseInfo(1, 1, "a", "b").encode()[:-1],
        b"\x94\x02\x01\xa1a\xa1b",
        b"\x94\x01\x02\x03\x04",
    ],
)
async def test_a_lease_that_cannot_be_read_stops_the_election_loudly(garbage: bytes) -> None:
    leases = MemoryLeases()
    leases.objects[7] = garbage
    with pytest.raises(RestoreError, match="lease /shared/leases/7 cannot be read"):
        await current_holder(leases)


@pytest.mark.parametrize(
    "wrong", [{"renew_s": 8.0}, {"stop_s": -1.0}, {"renew_s": 0.0}, {"clock_drift": 0.6}]
)
def test_options_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        LeaseOptions(**wrong)


def test_a_candidate_waits_longer_than_any_clock_that_drifts_may_let_the_leader_act() -> None:
    """The slowest leader's lease, in true time, is shorter than the fastest candidate's wait."""
    options = LeaseOptions(clock_drift=0.05)
    assert options.take_over_s / (1 + 0.05) >= options.lease_s / (1 - 0.05) - 1e-9
