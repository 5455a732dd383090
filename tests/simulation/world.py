"""One seed of the simulated world: a service runs a flow with checkpoints while everything around it fails, and an oracle looks on.

    outcome = run_world(37)

The seed chooses the shape (parallelism, pace, intervals), a random half of the kinds of faults and their rates, and then every moment. The
service is killed, loses power, stands still; its disk is slow, full, failing; functions raise; the database loses, delays and repeats
requests; the operator takes savepoints, stops the job, starts it again at another parallelism. Checked at every fault and every commit: the
oracle, and that the files which checkpoints name are there and whole. After the last fault everything must be committed within
LIVENESS_S virtual seconds.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random  # Seeded: it chooses the shape of a world.
from typing import Any

import aioflow as af
from aioflow.checkpoint import state_files
from aioflow.checkpoint import store as checkpoint_store
from aioflow.checkpoint.completed import CompletedCheckpoint
from aioflow.checkpoint.lease import LeaseOptions
from aioflow.checkpoint.metadata import decode_metadata
from aioflow.core.errors import LocalProtocolError, RemoteProtocolError
from aioflow.state.handles import StateFile
from aioflow.task import partitioners
from aioflow.task.environment import TaskOptions
from aioflow.testing.simulation import Faults, SimulatedHost, Simulation, inject, simulate
from tests.simulation import worker_world
from tests.simulation.external import Database
from tests.simulation.oracle import STEP_MS, Data, Oracle, Violation
from tests.simulation.workload import OUT, SITES, Shared, share, unshare, world_flow

__all__ = ["KINDS", "Outcome", "Settings", "run_world"]

LIVENESS_S = 60.0
STRIKE_AT_ONCE = 0.2
"""Share of the faults that do not wait until the job has got on since the last one."""

GETS_ON_S = 0.2
WORKERS_GET_ON_S = 0.5
"""They wait for so long at most: some faults are those that hold it up. Workers take longer to start."""

AT_ONCE, ANSWER_S = 64, 1e-3
"""When all is well: how many records a source reads at a time, and how long answers take."""

STORE = "/store"
KINDS = ("kill", "power", "pause", "disk", "user", "lost", "repeated", "down", "savepoint", "stop")
"""What may happen. The first four are `Faults`, the rest is inflicted here."""

INJECTED = ("kill", "power", "pause", "disk")
TROUBLES = ("user", "down", *worker_world.KINDS, worker_world.LINK_CUT)
BUGS = (TypeError, AttributeError, LookupError, ValueError, NameError, ArithmeticError, RemoteProtocolError, LocalProtocolError)
"""No fault makes anything raise these: they end the run."""

CHEAP = {"user": 3, "connection reset": 4}
"""What strikes so many times more often: little has to be done again."""

CALLBACK_S = 20.0
"""Processor time that one callback may take: a whole world takes a tenth of a second."""

CLOCK_MS = 2_000

SHORT_LEASE = LeaseOptions(lease_s=0.6, renew_s=0.1, stop_s=0.15)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a seed chose before anything runs."""

    kinds: tuple[str, ...]
    rates: dict[str, float]
    data: Data
    parallelism: tuple[int, ...]
    """The service starts with one of these."""
    workers: int
    """So many worker processes run the tasks; 0: the service does."""
    standby: bool
    """Two machines have the service, one of them runs the flow."""
    duration_s: float
    every_ms: int
    timeout_ms: int
    min_pause_ms: int
    max_concurrent: int
    unaligned: bool | str
    retain: int
    batch: int
    inline: int
    pace_s: dict[str, float]
    burst: int
    asked: str
    answer_s: float
    ordered: bool
    slow: bool
    """There is always something in flight."""
    discovers: bool
    """The splits of a source are found one after the other."""
    rules: int
    """So many rules are broadcast to where records are counted a second time; 0: there is no such part."""
    clock_s: float
    """The wall clocks of machines are set to and fro after so long each time, on average; 0: they are right."""

    @staticmethod
    def drawn(seed: int, *, workers: bool = False) -> Settings:
        """Drawn from a stream of its own. With `workers` the world has some."""
        rng = Random(f"{seed}/world of workers" if workers else f"{seed}/world")
        kinds = tuple(kind for kind in (*KINDS, *(worker_world.KINDS if workers else ())) if rng.random() < 0.5)
        standby = not workers and rng.random() < 0.05
        duration_s = rng.uniform(0.15, 0.35) * (3 if standby or workers else 1)
        share_s = rng.uniform(6, 20) / duration_s / max(1, len(kinds))
        splits = {"a": rng.choice((1, 2, 2, 3)), "b": rng.choice((1, 1, 2))}
        records = {"a": rng.randrange(10, 28)}
        records["b"] = max(4, records["a"] * STEP_MS["a"] // STEP_MS["b"])
        burst = rng.choice((2, 4, 8))
        unaligned = rng.choice((False, False, True, "3ms"))
        inline = rng.choice((0, 64, 16384, 16384, 16384))
        rates = {kind: share_s * rng.uniform(0.3, 2.0) * CHEAP.get(kind, 1) for kind in kinds}
        bounded = rng.random() < 0.5
        # A stream of its own: these came later, and change nothing where they are not chosen.
        more = Random(f"{seed}/more")
        discovers = not bounded and more.random() < 0.25
        rules = more.randrange(3, 12) if more.random() < 0.15 else 0
        clock_s = duration_s * more.uniform(0.05, 0.5) if more.random() < 0.15 else 0.0
        if workers and more.random() < 0.5:
            kinds = (*kinds, worker_world.LINK_CUT)
            rates[worker_world.LINK_CUT] = more.uniform(5.0, 20.0)
        return Settings(
            kinds=kinds,
            rates=rates,
            data=Data(splits, records, bounded, may_be_late=discovers, rules=rules),
            parallelism=rng.choice(((1, 2), (2,), (2, 3), (3,)) if workers else ((1,), (1,), (1,), (2,), (1, 2), (1, 3), (2, 3))),
            workers=rng.choice((1, 2, 3)) if workers else 0,
            standby=standby,
            duration_s=duration_s,
            every_ms=rng.choice((20, 50) if workers else (4, 12, 30)),
            # What is slow without any fault is not to fail again and again.
            timeout_ms=rng.choice((60 if inline > 64 else 200, 200, 2000)),
            min_pause_ms=rng.choice((0, 0, 10)),
            max_concurrent=1 if unaligned else rng.choice((1, 1, 2, 3)),
            unaligned=unaligned,
            retain=rng.choice((1, 1, 2)),
            batch=rng.choice((4, 1024)),
            inline=inline,
            # Each source is through with its splits after about the time in which faults strike, sooner or later.
            pace_s={name: duration_s * (burst + 1) / 2 / count / splits[name] * rng.uniform(0.4, 1.2) for name, count in records.items()},
            burst=burst,
            asked=rng.choice(("", "a", "b", "ab")),
            answer_s=rng.choice((2e-3, 6e-3, 2e-2)),
            ordered=rng.random() < 0.5,
            slow=bool(unaligned) and rng.random() < 0.7,
            discovers=discovers,
            rules=rules,
            clock_s=clock_s,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed came to, if nothing was violated."""

    trace_crc: int
    steps: int
    virtual_s: float
    faults: Counter[str]
    starts: int
    checkpoints: int
    trace: list[str] | None = None


@dataclass(slots=True)
class World:
    """The state of one run, outside of all simulated processes."""

    sim: Simulation
    settings: Settings
    oracle: Oracle
    database: Database = field(init=False)
    shared: Shared = field(init=False)
    done: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    completed: set[int] = field(default_factory=set)
    stopped_with: str | None = None
    """The savepoint that the job was stopped with, while nothing newer has been completed."""
    calm: bool = False
    _gets_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with each commit: the job that runs has something to lose."""
    _parts: dict[str, tuple[bytes, list[Any]]] = field(default_factory=dict)
    _decoded: dict[bytes, CompletedCheckpoint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = self.settings
        self.database = Database(self.sim, self._committed, struck=self.done)
        functions = self.sim.loop.stream("functions")
        self.shared = Shared(
            self.database, settings.data, settings.pace_s, settings.burst, settings.answer_s, functions, settings.discovers
        )
        self.database.before_call = self.shared.maybe_fail

    # The service.

    async def service(self, host: SimulatedHost) -> int:
        """The main of a simulated process: runs the flow to its end, or until the operator stops it."""
        settings = self.settings
        self.look()
        if self.oracle.complete:
            return 0
        self.starts += 1
        flow = world_flow(host.rng.choice(settings.parallelism), asked=settings.asked, ordered=settings.ordered, slow=settings.slow)
        options: dict[str, Any] = {
            "host": host,
            "checkpoints": f"file://{STORE}",
            "every": f"{settings.every_ms}ms",
            "timeout": f"{settings.timeout_ms}ms",
            "min_pause": f"{settings.min_pause_ms}ms",
            "max_concurrent": settings.max_concurrent,
            "unaligned": settings.unaligned,
            "retain": settings.retain,
            "restart": af.exponential_delay("5ms", "1s", reset_after="500ms", fatal=BUGS),
            "tasks": TaskOptions(batch_records_max=settings.batch),
        }
        if settings.workers:
            options |= {"workers": settings.workers, "heartbeat": worker_world.HEARTBEAT}
        if self.stopped_with is not None and host.rng.random() < 0.5:
            options["restore"] = self.stopped_with
        try:
            stopped = await self._run(flow, host, options)
        except BUGS as error:
            raise Violation(f"the job failed with what no fault explains: {error!r}") from error
        if not stopped:
            self.look()
            if not self.oracle.complete:
                raise Violation(f"the job has finished, and there is missing: {self.oracle.missing()}")
        return 0

    async def _run(self, flow: af.Flow, host: SimulatedHost, options: dict[str, Any]) -> bool:
        """True: the operator has stopped it."""
        stopped = False
        async with flow.run(**options) as job:
            operator = asyncio.get_running_loop().create_task(self._operate(host, job), name="operator")
            try:
                await job.wait()
            finally:
                operator.cancel()
                try:
                    stopped = await operator
                except asyncio.CancelledError:
                    stopped = bool(self.done["stop"])
        return stopped

    async def _operate(self, host: SimulatedHost, job: af.Job) -> bool:
        """What a person does beside it. True: the job was stopped."""
        rates = {kind: self.settings.rates[kind] for kind in ("savepoint", "stop") if kind in self.settings.kinds}
        while rates:
            await self.ready()
            await asyncio.sleep(host.rng.expovariate(sum(rates.values())))
            if self.calm:
                break
            kind = host.rng.choices(list(rates), list(rates.values()))[0]
            self.done[kind] += 1
            try:
                if kind == "savepoint":
                    await job.savepoint()
                    continue
                self.stopped_with = await job.stop(savepoint=None if host.rng.random() < 0.7 else False, drain=False)
            except af.AioflowError:
                if kind == "savepoint":
                    continue
            return True
        await asyncio.get_running_loop().create_future()
        return False

    async def supervise(self, name: str) -> None:
        """Start it again whenever it has ended, as a service manager does."""
        rng = self.sim.loop.stream(f"supervisor/{name}")
        self.sim.spawn(name, self.service)
        delay_s = 0.01
        while True:
            code = await self.sim.life(name).wait()
            # Whoever fails again and again is given longer and longer pauses.
            delay_s = min(1.0, delay_s * 2) if code > 0 else 0.01
            await asyncio.sleep(rng.uniform(0.1, 1.0) * delay_s)
            if not self.sim.is_alive(name):
                self.sim.restart(name)

    # Faults beside those of machines.

    async def trouble(self) -> None:
        """Functions that raise, a database that loses and repeats, or is down, for a while and again."""
        settings, rng, database = self.settings, self.sim.fault_rng, self.database
        if "lost" in settings.kinds:
            database.lost = rng.uniform(0.02, 0.3)
        if "repeated" in settings.kinds:
            database.repeated = rng.uniform(0.05, 0.5)
        rates = {kind: settings.rates[kind] for kind in TROUBLES if kind in settings.kinds}
        while rates:
            await self.ready()
            await asyncio.sleep(rng.expovariate(sum(rates.values())))
            kind = rng.choices(list(rates), list(rates.values()))[0]
            if kind == "user":
                self.shared.fails.add(rng.choice(SITES))
            elif kind in worker_world.KINDS or kind == worker_world.LINK_CUT:
                self.done[kind] += worker_world.strike(self.sim, kind, "alpha")
                self.look()
            else:
                database.down = True
                self.done["down"] += 1
                await asyncio.sleep(rng.uniform(0.01, 0.4))
                database.down = False

    async def set_clocks(self) -> None:
        """Somebody corrects the time of a machine, by seconds, forward or back. Right again are they only with `heal`."""
        rng = self.sim.loop.stream("clocks")
        while self.settings.clock_s:
            await asyncio.sleep(rng.expovariate(1 / self.settings.clock_s))
            rng.choice(list(self.sim.loop.machines.values())).clock_ms = rng.randrange(-CLOCK_MS, CLOCK_MS)
            self.done["clock"] += 1

    async def ready(self) -> None:
        """Hold the next fault back until something was committed since the last one, most of the time.

        A service that is struck again while it still starts has nothing to lose yet: what is of interest comes between checkpoints.
        """
        if self.sim.fault_rng.random() < STRIKE_AT_ONCE:
            return
        self._gets_on.clear()
        try:
            async with asyncio.timeout(WORKERS_GET_ON_S if self.settings.workers else GETS_ON_S):
                await self._gets_on.wait()
        except TimeoutError:
            return

    def heal(self) -> None:
        """Whatever is in trouble is well again, and what input is left comes at once."""
        self.calm = True
        self.shared.pace_s, self.shared.burst = dict.fromkeys(self.shared.pace_s, 0.0), AT_ONCE
        self.shared.answer_s = ANSWER_S
        self.shared.fails.clear()
        self.database.lost = self.database.repeated = 0.0
        self.database.down = False
        for machine in self.sim.loop.machines.values():
            machine.clock_ms = 0

    # What is looked at.

    def _committed(self, rows: Sequence[Any]) -> None:
        if self.oracle.complete:
            return  # A job that has finished leaves nothing to resume: its next run begins anew.
        self._gets_on.set()
        self.oracle.committed(rows)

    def look(self) -> None:
        """Check all that can be seen now."""
        if self.settings.workers:
            worker_world.check_credit()
        if not self.oracle.complete:
            self.oracle.visible(self._visible())
        self._check_files()

    def _visible(self) -> Iterator[Any]:
        disk = self.sim.disk
        names = [name for name in disk.list(OUT, missing_ok=True) if not name.startswith(".")]
        seen = {}
        for name in names:
            data = bytes(disk.file(f"{OUT}/{name}").data)
            known = self._parts.get(name)
            if known is None or known[0] != data:
                known = (data, [json.loads(line) for line in data.splitlines()])
            seen[name] = known
            yield from known[1]
        self._parts = seen

    def _check_files(self) -> None:
        """Every file that the metadata of a completed checkpoint names is there, and what it says."""
        disk = self.sim.disk
        root = f"{STORE}/world"
        for number in disk.list(f"{root}/checkpoints", missing_ok=True):
            path = f"{root}/checkpoints/{number}/metadata"
            if not disk.exists(path):
                continue
            data = bytes(disk.file(path).data)
            checkpoint = self._decoded.get(data)
            if checkpoint is None:
                try:
                    checkpoint = self._decoded[data] = decode_metadata(data, path)
                except af.RestoreError as error:
                    raise Violation(str(error)) from error
                self.completed.add(checkpoint.checkpoint_id)
                self.stopped_with = None
            for file in _named_files(checkpoint):
                full = f"{root}/{file.name}"
                if not disk.exists(full):
                    raise Violation(f"{path} names {file.name}, which is not there")
                content = bytes(disk.file(full).data)
                if len(content) != file.size or hashlib.blake2b(content, digest_size=state_files.DIGEST_BYTES).digest() != file.digest:
                    raise Violation(f"{path} names {file.name}, which holds something else")


def _named_files(checkpoint: CompletedCheckpoint) -> Iterator[StateFile]:
    for state in checkpoint.subtasks.values():
        for operator in state.operators:
            if operator.keyed is not None:
                yield from (file for file in operator.keyed.files if file.name)
            for file in (operator.operator, operator.source):
                if file is not None and file.name:
                    yield file


def run_world(seed: int, *, workers: bool = False, keep_trace: bool = False, settings: Settings | None = None) -> Outcome:
    """Run one seed, of the world whose tasks run in worker processes or of the other one.

    Raises Violation, SimDeadlock, SimLivelock or whatever else broke; a note names the seed."""
    chosen = settings or Settings.drawn(seed, workers=workers)
    worlds: list[World] = []

    async def main(host: SimulatedHost) -> None:
        world = World(host.sim, chosen, Oracle(chosen.data, in_order=len(chosen.parallelism) == 1))
        worlds.append(world)
        worker_world.install(host.sim)
        share(world.shared)
        await _live(world)

    with _environment(chosen), worker_world.simulated_workers(short_links=worker_world.LINK_CUT in chosen.kinds):
        result = simulate(main, seed, max_steps=100_000, max_callback_s=CALLBACK_S, keep_trace=keep_trace)
    (world,) = worlds
    strange = [error for error in result.errors if ": ended with " not in error]
    if strange:
        raise Violation(f"seed {seed}: errors that nobody awaited: {strange[:3]}")
    return Outcome(
        result.trace_crc, result.steps, result.virtual_s, world.done, world.starts, len(world.completed), result.trace
    )


async def _live(world: World) -> None:
    settings, sim = world.settings, world.sim
    loop = asyncio.get_running_loop()
    names = ["alpha", "beta"] if settings.standby else ["alpha"]
    beside = [loop.create_task(world.supervise(name), name=f"supervise {name}") for name in names]
    trouble = loop.create_task(world.trouble(), name="trouble")
    clocks = loop.create_task(world.set_clocks(), name="clocks")
    await asyncio.sleep(0)
    rates: dict[str, Any] = {kind: settings.rates[kind] for kind in INJECTED if kind in settings.kinds}
    faults = Faults(**rates, outage_s=(0.002, 1.2 if settings.standby else 0.05))
    await inject(sim, faults, names, duration_s=settings.duration_s, check=world.look, done=world.done, ready=world.ready)
    trouble.cancel()
    clocks.cancel()
    world.heal()
    deadline = loop.time() + LIVENESS_S
    while True:
        world.look()
        if world.oracle.complete:
            break
        if loop.time() >= deadline:
            raise Violation(f"{LIVENESS_S:g} s after the last fault there is missing: {world.oracle.missing()}")
        await asyncio.sleep(0.01)
    for task in beside:
        task.cancel()
    for process in list(sim.loop.processes.values()):
        if process is not sim.loop.root:
            sim.kill(process.name)
    await asyncio.gather(*beside, trouble, clocks, return_exceptions=True)


@contextmanager
def _environment(settings: Settings) -> Iterator[None]:
    """Small files and a short lease, and no log: expected troubles would fill it."""
    inline, lease, generate = state_files.INLINE_BYTES, checkpoint_store.LeaseOptions, partitioners._generate_loop
    partitioners._generate_loop = _generate_loop  # Compiled anew at each start they would take a tenth of the time.
    disabled = logging.root.manager.disable
    state_files.INLINE_BYTES = settings.inline
    checkpoint_store.LeaseOptions = lambda: SHORT_LEASE  # type: ignore[assignment,misc]  # The times of a cluster are too long here.
    if disabled < logging.CRITICAL and not _LOG:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        state_files.INLINE_BYTES = inline
        checkpoint_store.LeaseOptions = lease  # type: ignore[misc]
        partitioners._generate_loop = generate
        logging.disable(disabled)
        unshare()


_generate_loop = functools.cache(partitioners._generate_loop)

_LOG: list[bool] = []
