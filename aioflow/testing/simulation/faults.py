"""The faults of a run, their rates, and the driver that injects them.

Invariant: all random choices here come from the random stream `fault` of the seed. So a change in
the code under test does not change the faults until the code takes another path.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random  # noqa: TID251  # Only its type; the streams come from the loop.
from typing import Any

from aioflow.testing.simulation.host import Simulation

__all__ = ["Faults", "inject"]

SLOW_FACTORS = (5.0, 20.0, 50.0)
DISK_TROUBLES = (
    ("slow", 40.0, 1.0),
    ("full", True, False),
    ("error_rate", 0.2, 0.0),
    ("capacity", 4096, None),
)
"""Faults of the disk: the name of a field of SimDisk, the field's value during the fault, and its
value without the fault.

During a fault of the capacity, the disk has room for a random number of further bytes, below the
number given here.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The rate of each kind of fault: the mean number per virtual second, or 0 for none."""

    kill: float = 0.0
    """A process is killed and started again after a while."""
    power: float = 0.0
    """A machine loses power, and with it its unsynced data. It comes back after a while."""
    pause: float = 0.0
    """A process stands still for a while. Its connections stay open."""
    cut: float = 0.0
    """Two machines, or one machine and all others, cannot reach each other for a while."""
    reset: float = 0.0
    """All connections between two machines break."""
    slow: float = 0.0
    """Packets between two machines take 5 to 50 times as long for a while."""
    disk: float = 0.0
    """The disk is slow, full, filling up or failing for a while."""
    give_up: float = 0.0
    """Two machines cannot reach each other for a while, and one side of each of their
    connections gives up.
    """
    outage_s: tuple[float, float] = (0.02, 1.5)
    """Range of the duration, in seconds, of the faults that last for a while."""

    def __post_init__(self) -> None:
        for kind, rate in self.rates().items():
            if not rate >= 0:
                raise ValueError(
                    f"rate of {kind} is {rate!r}, expected a number of faults per second, at "
                    "least 0"
                )

    def rates(self) -> dict[str, float]:
        """Returns the rate of each kind, in the order of the fields."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "outage_s"
        }

    @classmethod
    def swarm(cls, rng: Random, per_s: float = 5.0) -> Faults:
        """Returns the rates of a random half of the kinds of faults, about `per_s` faults a second
        in total. Some seeds leave out a kind, because a frequent kind can hide the defects that
        other kinds reveal.
        """
        chosen = [kind for kind in cls().rates() if rng.random() < 0.5]
        rates: dict[str, Any] = {
            kind: per_s / len(chosen) * rng.uniform(0.3, 2.0) for kind in chosen
        }  # Any: floats.
        return cls(**rates)


async def inject(
    sim: Simulation,
    faults: Faults,
    targets: Sequence[str],
    *,
    duration_s: float,
    check: Callable[[], object] | None = None,
    done: Counter[str] | None = None,
    ready: Callable[[], Awaitable[object]] | None = None,
) -> Counter[str]:
    """Inflicts `faults` on the processes `targets` for `duration_s` seconds, then ends all faults.

    Returns the number of faults by kind.

    `check` is called after each fault: raise in it to report that a guarantee broke. On return
    every target runs. `done` is the counter that is filled and returned; a caller that may cancel
    the call passes a counter of its own. `ready` is awaited before the pause that precedes each
    fault. So it can delay the fault until there is something to lose.
    """
    rng = sim.fault_rng
    kinds = {kind: rate for kind, rate in faults.rates().items() if rate > 0}
    done = Counter() if done is None else done
    total = sum(kinds.values())
    if total == 0:
        await asyncio.sleep(duration_s)
        return done
    loop = asyncio.get_running_loop()
    end = loop.time() + duration_s
    repairs: dict[asyncio.TimerHandle, Callable[[], None]] = {}

    def later(repair: Callable[[], None]) -> None:
        def run() -> None:
            del repairs[handle]
            repair()

        handle = loop.call_later(rng.uniform(*faults.outage_s), run)
        repairs[handle] = repair

    try:
        while True:
            if ready is not None:
                await ready()
            await asyncio.sleep(min(rng.expovariate(total), max(0.0, end - loop.time())))
            if loop.time() >= end:
                return done
            kind = rng.choices(list(kinds), list(kinds.values()))[0]
            if _strike(sim, kind, targets, later):
                done[kind] += 1
                if check is not None:
                    check()
    finally:
        for handle, repair in list(repairs.items()):
            handle.cancel()
            repair()


def _strike(
    sim: Simulation, kind: str, targets: Sequence[str], later: Callable[[Callable[[], None]], None]
) -> bool:
    """Inflicts one fault of `kind`. Returns False if the fault needs a living process, and the
    chosen target is dead. `later(repair)` ends the fault after a while by calling `repair`.
    """
    rng, network, disk = sim.fault_rng, sim.network, sim.disk
    target = rng.choice(targets)
    here = sim.loop.process(target).machine.name
    there = rng.choice([name for name in sim.loop.machines if name != here] or [here])
    sim.loop.note("FAULT", kind, target, there)
    match kind:
        case "kill" | "power" | "pause" if not sim.is_alive(target):
            return False
        case "kill":
            sim.kill(target)
            later(lambda: _bring_back(sim, [target]))
        case "power":
            machine = sim.loop.machines[here]
            running = [
                p.name for p in sim.loop.processes.values() if p.machine is machine and p.alive
            ]
            lost = [name for name in running if sim.life(name).parent is None]
            sim.power(target)
            later(lambda: _bring_back(sim, lost))
        case "pause":
            sim.pause(target)
            later(lambda: sim.resume(target))
        case "cut" if rng.random() < 0.3:
            network.isolate(here)
            later(lambda: network.rejoin(here))
        case "cut":
            network.cut(here, there)
            later(lambda: network.heal(here, there))
        case "reset":
            network.reset(here, there)
        case "give_up":
            network.cut(here, there)
            network.give_up(here, there)
            later(lambda: network.heal(here, there))
        case "slow":
            network.slow(here, there, rng.choice(SLOW_FACTORS))
            later(lambda: network.slow(here, there, 1.0))
        case "disk":
            trouble, value, healthy = rng.choice(DISK_TROUBLES)
            if trouble == "capacity":
                value = disk.used + rng.randrange(int(value))
            setattr(disk, trouble, value)
            later(lambda: setattr(disk, trouble, healthy))
        case _:
            raise ValueError(f"fault {kind!r} is unknown, expected one of {list(Faults().rates())}")
    return True


def _bring_back(sim: Simulation, names: Sequence[str]) -> None:
    for name in names:
        if not sim.is_alive(name):
            sim.restart(name)
