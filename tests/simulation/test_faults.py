"""Faults strike at their rates, are undone at the end, and repeat with the seed."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from aioflow.testing import Faults, simulate
from aioflow.testing.simulation import SimulatedHost, inject

ALL = Faults(kill=1, power=1, pause=1, cut=1, reset=1, slow=1, disk=1, give_up=1)


async def forever(host: SimulatedHost) -> None:
    await asyncio.get_running_loop().create_future()


async def suffer(host: SimulatedHost, faults: Faults, duration_s: float = 30) -> Counter[str]:
    names = ["a", "b", "c"]
    for name in names:
        host.sim.spawn(name, forever)
    await asyncio.sleep(0.01)
    done = await inject(host.sim, faults, names, duration_s=duration_s)
    assert all(host.sim.is_alive(name) for name in names)
    assert not any(host.sim.network.is_cut(a, b) for a in [*names, "main"] for b in names)
    disk = host.sim.disk
    assert (disk.slow, disk.full, disk.error_rate, disk.capacity) == (1.0, False, 0.0, None)
    return done


def test_every_kind_strikes_and_all_are_undone_at_the_end() -> None:
    for seed in range(10):
        done = simulate(lambda host: suffer(host, ALL), seed).value
        assert set(done) == set(ALL.rates())
        assert 120 < sum(done.values()) < 340


def test_same_seed_inflicts_the_same_faults() -> None:
    def histories() -> list[int]:
        return [simulate(lambda host: suffer(host, ALL), seed).trace_crc for seed in range(5)]

    first = histories()
    assert histories() == first
    assert len(set(first)) == 5


def test_kind_without_a_rate_never_strikes() -> None:
    assert set(simulate(lambda host: suffer(host, Faults(cut=2)), 1).value) == {"cut"}
    result = simulate(lambda host: suffer(host, Faults()), 1)
    assert result.value == Counter()
    assert 30 <= result.virtual_s < 31


def test_broken_guarantee_that_the_check_reports_ends_the_run() -> None:
    async def main(host: SimulatedHost) -> None:
        host.sim.spawn("a", forever)

        def check() -> None:
            raise LookupError("record 7 is missing")

        await inject(host.sim, Faults(kill=5), ["a"], duration_s=30, check=check)

    with pytest.raises(LookupError, match="record 7 is missing"):
        simulate(main, 1)


def test_swarm_leaves_out_about_half_of_the_kinds() -> None:
    counts = Counter(
        kind
        for seed in range(200)
        for kind, rate in Faults.swarm(Random(seed)).rates().items()
        if rate
    )
    assert set(counts) == set(ALL.rates())
    assert all(60 < count < 140 for count in counts.values())


def test_negative_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="rate of kill is -1"):
        Faults(kill=-1)
