"""Drawn programs on simulated machines: in one process, with worker processes, or on a cluster.

A service runs the program and is started again when it ends, until its job has finished. Meanwhile
processes are killed, lose power and stand still, connections break, the store of the checkpoints
is slow, fails and fills, and the job is rescaled, by hand or by an autoscaler with a drawn load. A
world costs no process and no waiting, so it is far cheaper than the ways with real processes.

The checkpoints are on a simulated disk, or in a store of objects outside of all machines, whose
calls fail before or after they have taken effect.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import aioflow as af
from aioflow.checkpoint.objects import MemoryObjects
from aioflow.cluster.autoscaler import Load
from aioflow.core.aio import cancel_and_wait
from aioflow.task.chain import SLICE_NS
from aioflow.task.environment import TaskOptions
from aioflow.testing.simulation import Faults, SimulatedHost, Simulation, inject, simulate
from aioflow.testing.simulation.host import ProcessMain
from tests.programs.sources import Pace
from tests.simulation import cluster_world, worker_world
from tests.simulation.watch import Watch
from tests.simulation.world import BUGS, INJECTED, SHORT_LEASE

if TYPE_CHECKING:
    from tests.programs.run import Run

__all__ = ["PLACES", "run_world"]

PLACES = {"one": 1.0, "workers": 3.0, "cluster": 6.0}
"""Places for the tasks, and how much longer faults strike there: processes take time to start."""

SERVICE = "alpha"
DISK = "file:///store"
LIVENESS_S = 120.0
"""Maximum virtual seconds from the last fault to the end of the job."""

TICK_S = 0.05


def run_world(run: Run, place: str, gathering: Callable[[int, Pace], af.Flow]) -> None:
    """Runs the program until its job has finished. `gathering` makes its flow."""
    world = World(run, place, gathering)
    with ExitStack() as stack:
        inline = run.draw("inline", 0, 64, 16384)
        stack.enter_context(patch("aioflow.checkpoint.state_files.INLINE_BYTES", inline))
        stack.enter_context(patch("aioflow.checkpoint.store.LeaseOptions", lambda: SHORT_LEASE))
        stack.enter_context(patch("aioflow.api.job.load_of", world.load))
        for name in ("create", "read", "delete", "names"):
            called = world.through_troubles(getattr(MemoryObjects, name))
            stack.enter_context(patch.object(MemoryObjects, name, called))
        stack.enter_context(worker_world.simulated_workers(3.0 if place == "cluster" else 1.0))
        stack.enter_context(cluster_world.short_times())
        result = simulate(world.main, f"{run.program.seed} {place}", max_steps=2_000_000)
    run.log.append(f"faults={dict(world.done)}")
    run.kills += sum(world.done[kind] for kind in ("kill", "power", "worker killed"))
    strange = [error for error in result.errors if ": ended with " not in error]
    if strange:
        raise AssertionError(f"unretrieved errors: {strange[:3]}")


@dataclass
class World:
    """One run of a program in one place."""

    run: Run
    place: str
    gathering: Callable[[int, Pace], af.Flow]
    done: Counter[str] = field(default_factory=Counter)
    """Number of faults by kind."""
    calm: bool = False
    """Whether no fault comes any more."""
    ended: bool = False
    """Whether the job has finished."""
    fails: float = 0.0
    """Share of the calls of the store of objects that fail."""
    slow_s: float = 0.0
    """Maximum seconds that each of them takes longer."""
    _sim: Simulation = field(init=False)

    def __post_init__(self) -> None:
        run, spread = self.run, self.run.program.spread
        draw, rng = run.draw, run.rng
        elsewhere = self.place != "one"
        self.duration_s = rng.uniform(0.15, 0.35) * PLACES[self.place]
        lengths = [len(step.args["rows"]) for step in run.program.steps if step.kind == "source"]
        burst = draw("burst", 1, 3, 10)
        pause_s = self.duration_s * burst / max(1, *lengths) * rng.uniform(0.3, 1.2)
        self.pace = Pace(burst, pause_s)
        unaligned = draw("unaligned", False, True, "3ms")
        self.parallelisms = (1, 2, 3) if spread else (1,)
        if unaligned:  # Data in flight needs the same chains at each start.
            self.parallelisms = (draw("parallelism", *self.parallelisms),)
        self.workers: Any = draw("workers", 1, 2, 3)
        self.rescales = spread and draw("rescales", False, True)
        if self.place == "workers" and spread and draw("autoscaled", False, False, True):
            self.workers, self.rescales = af.Autoscaler(1, 3, window="100ms"), False
        kinds = [*INJECTED]
        kinds += {
            "one": (),
            "workers": worker_world.KINDS,
            "cluster": cluster_world.KINDS,
        }[self.place]
        kinds = [kind for kind in kinds if rng.random() < 0.5]
        share = rng.uniform(3, 12) / self.duration_s / max(1, len(kinds))
        self.rates = {kind: share * rng.uniform(0.3, 2.0) for kind in kinds}
        self.options: dict[str, Any] = {
            # Only a job in one process may have a store that other processes do not see.
            "checkpoints": DISK if elsewhere or draw("disk", False, True) else self.objects,
            "every": draw("every", *(("20ms", "50ms") if elsewhere else ("4ms", "12ms", "30ms"))),
            "timeout": draw("timeout", "500ms", "2s"),
            "unaligned": unaligned,
            "retain": draw("retain", 1, 1, 2),
            "restart": af.exponential_delay("5ms", "1s", reset_after="500ms", fatal=BUGS),
            "tasks": TaskOptions(
                batch_records_max=draw("batch", 1, 3, 2048), slice_ns=self.slice_ns
            ),
        }

    @property
    def slice_ns(self) -> int:
        """Time after which a task gives the loop a turn. 1: after each action, as on a busy
        machine.
        """
        # Leaves the other draws of a seed as they are.
        rng = Random(f"{self.run.program.seed} slices of {self.place}")
        return rng.choice((1, SLICE_NS))

    @property
    def objects(self) -> str:
        return f"memory://{self.run.program.name}"

    async def main(self, host: SimulatedHost) -> None:
        """The process that outlives all others."""
        self._sim = sim = host.sim
        worker_world.install(sim)
        self._loads, self._calls = sim.loop.stream("loads"), sim.loop.stream("calls")
        self._watch = Watch(sim.loop)
        mains: dict[str, ProcessMain] = {SERVICE: self.service}
        if self.place == "cluster":
            managers = cluster_world.JOBMANAGERS[: self.run.draw("managers", 1, 2)]
            jobmanager = functools.partial(cluster_world.jobmanager, slower=1.0)
            taskmanager = functools.partial(cluster_world.taskmanager, slower=1.0)
            mains |= dict.fromkeys(managers, jobmanager)
            mains |= {f"tm{number}": taskmanager for number in (1, 2, 3)}
        create_task = asyncio.get_running_loop().create_task
        with self._watch.installed():
            beside = [
                create_task(self.supervise(*one), name=f"supervise {one[0]}")
                for one in mains.items()
            ]
            await asyncio.sleep(0)
            faults = [
                create_task(self.strike_machines(list(mains)), name="faults"),
                create_task(self.strike_workers(), name="faults of workers"),
                create_task(self.strike_store(), name="faults of the store"),
            ]
            try:
                await self.until_ended(self.duration_s)
                for error in await cancel_and_wait(faults):
                    raise error
                self.calm, self.fails, self.slow_s = True, 0.0, 0.0
                await self.until_ended(LIVENESS_S)
            finally:
                await cancel_and_wait([*faults, *beside])
                for process in list(sim.loop.processes.values()):
                    if process is not sim.loop.root:
                        sim.kill(process.name)
        if not self.ended:
            error = sim.life(SERVICE).error
            raise AssertionError(
                f"{LIVENESS_S:g} s after the last fault the job has not finished; its program "
                f"last ended with {error!r}"
            )

    async def until_ended(self, within_s: float) -> None:
        """Looks on until the job has finished, for `within_s` at most."""
        end = self._sim.loop.time() + within_s
        while not self.ended and self._sim.loop.time() < end:
            self.look()
            await asyncio.sleep(TICK_S)

    def look(self) -> None:
        """Checks what must hold at any time."""
        if self.place != "one":
            worker_world.check_credit()
        self._watch.look()

    async def supervise(self, name: str, main: ProcessMain) -> None:
        """Starts a process, and again when it ends; the service, until its job has finished."""
        sim = self._sim
        rng = sim.loop.stream(f"supervisor/{name}")
        sim.spawn(name, main)
        delay_s = 0.01
        while True:
            code = await sim.life(name).wait()
            if name == SERVICE and code == 0:
                self.ended = True
                return
            delay_s = min(1.0, delay_s * 2) if code > 0 else 0.01
            await asyncio.sleep(rng.uniform(0.1, 1.0) * delay_s)
            if not sim.is_alive(name):
                sim.restart(name)

    async def strike_machines(self, names: list[str]) -> None:
        rates: dict[str, Any] = {
            kind: self.rates[kind]
            for kind in (*INJECTED, *cluster_world.KINDS)
            if kind in self.rates
        }
        outage_s = 1.2 if self.place == "cluster" else 0.05
        faults = Faults(**rates, outage_s=(0.002, outage_s))
        await inject(
            self._sim, faults, names, duration_s=self.duration_s, check=self.look, done=self.done
        )

    async def strike_workers(self) -> None:
        rng = self._sim.loop.stream("workers")
        rates = {kind: self.rates[kind] for kind in worker_world.KINDS if kind in self.rates}
        while rates:
            await asyncio.sleep(rng.expovariate(sum(rates.values())))
            kind = rng.choices(list(rates), list(rates.values()))[0]
            self.done[kind] += worker_world.strike(self._sim, kind, SERVICE)
            self.look()

    async def strike_store(self) -> None:
        rng = self._sim.loop.stream("store")
        while self.options["checkpoints"] == self.objects:
            await asyncio.sleep(rng.expovariate(4 / self.duration_s))
            self.fails = rng.choice((0.1, 0.5, 1.0))
            self.slow_s = rng.choice((0.0, 0.01, 0.3))
            self.done["store"] += 1
            await asyncio.sleep(rng.uniform(0.0, 0.05))
            self.fails = self.slow_s = 0.0

    def through_troubles(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method of the store of objects that may be slow, and may fail before it has
        taken effect, or after.
        """

        async def called(*args: Any) -> Any:
            rng = self._calls
            if self.slow_s:
                await asyncio.sleep(rng.uniform(0.0, self.slow_s))
            if rng.random() < self.fails / 2:
                raise OSError(f"the store does not answer: {method.__name__}")
            result = await method(*args)
            if rng.random() < self.fails / 2:
                raise OSError(f"the answer of the store is lost: {method.__name__}")
            return result

        return called

    # The service.

    async def service(self, host: SimulatedHost) -> int:
        """Runs the program to its end, or follows its job if a former life has submitted it."""
        flow = self.gathering(host.rng.choice(self.parallelisms), self.pace)
        options = {**self.options, "host": host}
        if self.place == "workers":
            options |= {"workers": self.workers, "heartbeat": worker_world.heartbeat(1.0)}
        elif self.place == "cluster":
            options["on"] = cluster_world.remote_cluster(host)
            line = await cluster_world.follow(host, flow.name)
            if line is not None:
                if line.status is not af.JobStatus.FINISHED:
                    raise ConnectionError(f"the job has ended as {line.status}: {line.error}")
                return 0
        async with flow.run(**options) as job:
            operator = asyncio.get_running_loop().create_task(
                self.operate(host, job), name="operator"
            )
            try:
                await job.wait()
            finally:
                await cancel_and_wait([operator])
        return 0

    async def operate(self, host: SimulatedHost, job: af.Job) -> None:
        """Rescales the job now and then, as long as faults strike."""
        while self.rescales and not self.calm:
            await asyncio.sleep(host.rng.expovariate(4 / self.duration_s))
            wanted: dict[str, int] = {"parallelism": host.rng.choice((1, 2, 3))}
            if self.place == "workers" and host.rng.random() < 0.5:
                wanted = {"workers": host.rng.choice((1, 2, 3))}
            try:
                await job.rescale(**wanted)
                self.done["rescaled"] += 1
            except af.AioflowError:
                self.done["not rescaled"] += 1

    def load(self, *_: Any) -> Load:
        """A load of the job, as it falls, for the autoscaler."""
        rng = self._loads
        return Load(rng.choice((0.05, 0.6, 1.0)), rng.random() < 0.3)
