"""Worker processes in the simulated world: each a simulated process that the service starts, and
the faults that strike them.

A worker is killed, or stands still and goes on when it was replaced long ago; connections between
the processes break, are cut for a while or slow. Checked at every fault: no channel holds more
frames than it has given credit for.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from aioflow.cluster.heartbeat import HeartbeatOptions
from aioflow.cluster.pulse import Pulse
from aioflow.cluster.worker import FINISHED, UNREACHABLE, taskmanager_of
from aioflow.core.aio import cancel_and_wait
from aioflow.core.errors import Broken
from aioflow.network import data_plane, link
from aioflow.network.channels import EXCLUSIVE_BUFFERS
from aioflow.protocol import exchange as exchange_module
from aioflow.protocol.consumer import ConsumerExchange
from aioflow.protocol.credit import BufferKind
from aioflow.testing.simulation import SimulatedHost, Simulation
from tests.simulation.oracle import Violation

__all__ = [
    "KINDS",
    "LINK_CUT",
    "SimulatedPulse",
    "check_credit",
    "heartbeat",
    "install",
    "loss_in",
    "simulated_workers",
    "strike",
    "workers_of",
]

LINK_CUT = "link cut"
KINDS = (
    "worker killed",
    "worker paused",
    "connection reset",
    "all cut",
    "all slow",
    "given up",
    LINK_CUT,
)
"""Faults of workers and between them.

`LINK_CUT`: two workers cannot reach each other, one way or both, for about as long as a link lives;
the service reaches all.
"""

LINK_TIMES = {
    "HEARTBEAT_S": 0.01,
    "HANDSHAKE_TIMEOUT_S": 0.05,
    "GIVE_UP_S": 0.15,
    "FORGET_S": 0.225,
}
"""Times of links, in the proportions of the real ones, and short beside the length of a world."""

AGAIN_RATE = 0.3
"""Share of the kills after which the worker that replaces the killed one is killed as it starts."""

PROGRAM = "aioflow.cluster.worker_program"
DATA_RATE = 0.8
"""Share of the resets that leave the connections to the service whole: without those a worker is
lost.
"""


START_S = 0.03
"""Maximum seconds that a worker imports before it registers, so that faults strike meanwhile."""


async def _worker(host: SimulatedHost, argv: list[str]) -> int:
    """Does the work of `aioflow.cluster.worker.main`, without signals and threads."""
    secret = host.procs.take_secret()
    assert secret is not None
    await asyncio.sleep(host.rng.uniform(0.0, START_S))
    try:
        await taskmanager_of(host, secret, argv[-5:]).run()
    except (OSError, Broken):
        return UNREACHABLE
    return FINISHED


def heartbeat(slower: float) -> HeartbeatOptions:
    """How workers are watched; `slower` than in a world that lasts a second."""
    return HeartbeatOptions(
        interval_s=0.02 * slower, timeout_s=0.15 * slower, suspicion_s=0.01 * slower
    )


def install(sim: Simulation) -> None:
    sim.programs[PROGRAM] = _worker


class SimulatedPulse(Pulse):
    """The sign of life of a worker from its loop: there are no threads here."""

    _beating: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._beating = asyncio.get_running_loop().create_task(self._beat(), name="pulse")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await cancel_and_wait([self._beating])


_exchanges: list[ConsumerExchange] = []
"""All that were made in the run that is under way."""


class _SeenExchange(ConsumerExchange):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _exchanges.append(self)


@contextmanager
def simulated_workers(links_shorter: float | None = None) -> Iterator[None]:
    """Examines the exchanges of workers.

    `links_shorter` multiplies the `LINK_TIMES` after which a link is given up.
    """
    made: Any = exchange_module
    before = made.ConsumerExchange
    times = [
        (module, name)
        for module in (link, data_plane)
        for name in LINK_TIMES
        if links_shorter and hasattr(module, name)
    ]
    usual = [getattr(module, name) for module, name in times]
    for module, name in times:
        setattr(module, name, LINK_TIMES[name] * (links_shorter or 1.0))
    made.ConsumerExchange = _SeenExchange
    try:
        yield
    finally:
        made.ConsumerExchange = before
        for (module, name), value in zip(times, usual, strict=True):
            setattr(module, name, value)
        _exchanges.clear()


def _break_and_heal(sim: Simulation, machine: str, among: list[str] | None) -> None:
    sim.network.reset(machine, machine, among)
    sim.network.heal(machine, machine)


def check_credit() -> None:
    """Checks that data that a channel has received and its task has not taken fills buffers with
    granted credit, and that no buffer is lost.
    """
    lent: Counter[Any] = Counter()
    for exchange in _exchanges:
        for inlet in exchange._inlets.values():
            credit = inlet.credit
            held = Counter(kind for kind, _ in inlet.pending if kind is not None)
            own = held[BufferKind.EXCLUSIVE]
            if not credit.is_released and own + credit._exclusive_ready != credit.exclusive:
                raise Violation(
                    f"{inlet}: {own} frames wait in own buffers and {credit._exclusive_ready} of "
                    f"these are free, of {credit.exclusive} in all"
                )
            lent[credit._pool] += (
                credit.exclusive + credit.floating + held[BufferKind.FLOATING] + credit._set_aside
            )
    for pool, count in lent.items():
        # An ended channel keeps its own segments until its task releases it.
        if pool.batches < count or (pool.batches - count) % EXCLUSIVE_BUFFERS:
            raise Violation(f"a gate has {pool.batches} segments, and its channels use {count}")


def workers_of(sim: Simulation) -> list[str]:
    """Returns workers that have not ended; their names begin with that of the service that started
    them.
    """
    return [
        process.name
        for process in sim.loop.processes.values()
        if "." in process.name and process.alive
    ]


def _kill_newest(sim: Simulation) -> None:
    if workers := workers_of(sim):
        sim.kill(workers[-1])


def loss_in(error: BaseException) -> BaseException | None:
    """Returns the loss of a worker among an error and its causes."""
    cause: BaseException | None = error
    while cause is not None and not re.match(r"worker-\d+ \(.*\) is gone", str(cause)):
        cause = cause.__cause__
    return cause


def strike(sim: Simulation, kind: str, service: str) -> bool:
    """Inflict one fault on what the service has started.

    False if there is nothing that could suffer it.
    """
    rng, network = sim.fault_rng, sim.network
    machine = sim.loop.process(service).machine.name
    workers = workers_of(sim)
    if not workers:
        return False
    later = sim.loop.call_later
    match kind:
        case "worker killed":
            sim.kill(rng.choice(workers))
            if rng.random() < AGAIN_RATE:
                later(rng.uniform(0.0, 2 * START_S), _kill_newest, sim)
        case "worker paused":
            paused = rng.choice(workers)
            sim.pause(paused)
            later(rng.uniform(0.005, 0.5), sim.resume, paused)
        case "connection reset":
            # Data sent meanwhile is in transit when the connection breaks.
            network.cut(machine, machine)
            among = workers if rng.random() < DATA_RATE else None
            later(rng.uniform(0.0, 0.02), _break_and_heal, sim, machine, among)
        case "link cut":
            if len(workers) < 2:
                return False
            here, there = rng.sample(workers, 2)
            network.part(here, there, one_way=rng.random() < 0.5)
            later(LINK_TIMES["GIVE_UP_S"] * rng.uniform(0.8, 1.8), network.join, here, there)
        case "all cut":
            network.cut(machine, machine)
            later(rng.uniform(0.005, 0.3), network.heal, machine, machine)
        case "given up":
            network.cut(machine, machine)
            network.give_up(machine, machine, workers if rng.random() < DATA_RATE else None)
            later(rng.uniform(0.0, 0.3), network.heal, machine, machine)
        case "all slow":
            network.slow(machine, machine, rng.choice((5.0, 50.0)))
            later(rng.uniform(0.02, 0.3), network.slow, machine, machine, 1.0)
        case _:
            raise ValueError(f"fault {kind!r} is unknown, expected one of {KINDS}")
    return True
