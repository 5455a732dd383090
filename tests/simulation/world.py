"""One seed of the simulated world: a service runs a flow with checkpoints while everything around
it fails, and an oracle checks it.

    outcome = run_world(37)

The seed chooses where tasks run (in the service, in its worker processes, on a cluster), the shape
(parallelism, pace, intervals), a random half of the kinds of faults and their rates, and then every
moment. Processes are killed, lose power, stand still; the disk is slow, fills, fails; functions
raise, are cancelled, cancel, are slow; connections break, one side of them gives up; clocks are
set; the database loses, delays and repeats requests; the operator takes savepoints, stops or
cancels the job, starts it again at another parallelism.

Safety is checked at every fault and every commit: the oracle, and that the files which checkpoints
name are there and whole. Liveness is checked once the faults are over: everything is committed
within LIVENESS_S virtual seconds, a job that goes on completes checkpoints, what the operator asks
for ends, and the service leaves nothing behind. One seed of LONG_EVERY is a world of ten minutes,
in which faults and calm take turns: in each calm the job gets on, and what it holds does not grow.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random  # Seeded: it chooses the shape of a world.
from typing import Any, TypeVar

import aioflow as af
from aioflow.checkpoint import state_files
from aioflow.checkpoint import store as checkpoint_store
from aioflow.checkpoint.completed import CompletedCheckpoint
from aioflow.checkpoint.lease import LeaseOptions
from aioflow.checkpoint.metadata import decode_metadata
from aioflow.core.errors import LocalProtocolError, RemoteProtocolError
from aioflow.mailbox import timers
from aioflow.state.snapshot import StateFile
from aioflow.task import partitioners
from aioflow.task.chain import SLICE_NS
from aioflow.task.environment import TaskOptions
from aioflow.testing.simulation import Faults, SimulatedHost, Simulation, inject, simulate
from aioflow.testing.simulation.host import ProcessMain
from tests.simulation import cluster_world, worker_world
from tests.simulation.external import Database
from tests.simulation.oracle import STEP_MS, Data, Oracle, Violation
from tests.simulation.watch import Watch
from tests.simulation.workload import (
    ASYNC_SITES,
    ENDLESS,
    ENDLESS_SITES,
    MISDEEDS,
    OUT,
    SITES,
    Shared,
    share,
    unshare,
    world_flow,
)

__all__ = ["KINDS", "PLACES", "RESCALE", "Outcome", "Settings", "rescaling", "run_world"]

PLACES = {"one": 13, "workers": 2, "cluster": 1}
"""Places for the tasks of a world, and the number of seeds of 16 that choose each: a world of
workers costs four times as much as one of one process, a cluster six times.
"""

LONG_EVERY = 400
LONG_S, LONG_ROUNDS, CALM_S = 600.0, 8, 20.0
"""Virtual seconds of a long world; how often faults and calm take turns in it, and how long each
calm is.
"""

T = TypeVar("T")

LIVENESS_S = 60.0
CHECKPOINT_S = 5.0
"""Maximum seconds in which a running job completes a checkpoint without faults."""

ASKED_S = 35.0
"""Maximum seconds of a savepoint, a stop or a cancellation without faults."""

MORE_CHECKPOINTS = 2
"""Number of further checkpoints for which a job that has committed everything is watched."""

TICK_S = 0.01
RETRY_S = 0.1
STRIKE_AT_ONCE = 0.2
"""Share of the faults that do not wait until the job has got on since the last one."""

GETS_ON_S = 0.2
WORKERS_GET_ON_S = 0.5
"""Maximum seconds to wait for progress: some faults block it.

Workers take longer to start.
"""

AT_ONCE, ANSWER_S = 64, 1e-3
"""Number of records that a source reads at a time, and seconds of an answer, without faults."""

STORE = "/store"
INJECTED = ("kill", "power", "pause", "disk")
KINDS = (
    *INJECTED,
    *(kind for kind in MISDEEDS if kind != ENDLESS),
    "lost",
    "repeated",
    "down",
    "savepoint",
    "stop",
    "cancel",
    "term",
)
"""Kinds of faults.

`INJECTED` are `Faults`, the rest is inflicted here. Workers and clusters have more of their own.
"""

RESCALE = "rescale"
"""The operator changes the parallelism of the running job, in one seed of `RESCALED_EVERY`."""

RESCALED_EVERY = 12

ENDLESS_EVERY = 16
"""One seed in `ENDLESS_EVERY` has functions that go on for ever."""

CANCELLATION_S = 0.05
"""How long they may take to end there."""

OF_PLACE = {"one": (), "workers": worker_world.KINDS, "cluster": cluster_world.KINDS}
BUGS = (
    TypeError,
    AttributeError,
    LookupError,
    ValueError,
    NameError,
    ArithmeticError,
    RemoteProtocolError,
    LocalProtocolError,
)
"""No fault makes anything raise these: they end the run."""

CHEAP = {
    "link cut": 2,
    "user": 3,
    "odd user": 2,
    "slow user": 2,
    "connection reset": 4,
    "cancel": 0.3,
    "term": 0.5,
}
"""Factor of the frequency of some kinds: little work has to be repeated after them."""

CALLBACK_S = 20.0
"""Processor time that one callback may take: a whole world takes a tenth of a second."""

CLOCK_MS = (2_000, 2_000, 3_600_000, 315_576_000_000)
"""Amounts by which a clock may be set, forward or back: up to two seconds, an hour, ten years."""

CLOCK_S = 0.2
"""How long a step of a clock must last before processing time follows, and how often idle tasks
look at the clock.
"""

GROWTH = {"tasks": 30, "timers": 60, "connections": 20, "files": 60, "bytes of state": 60_000}
"""Allowed growth beyond three times the content of a long world at the end of its first calm."""

SHORT_LEASE = LeaseOptions(lease_s=0.6, renew_s=0.1, stop_s=0.15)


@dataclass(frozen=True, slots=True)
class Settings:
    """The choices of a seed before anything runs."""

    kinds: tuple[str, ...]
    rates: dict[str, float]
    data: Data
    parallelism: tuple[int, ...]
    """The service starts with one of these."""
    place: str
    """One of `PLACES`."""
    workers: int
    """How many worker processes or TaskManagers there are; 0: the service runs the tasks."""
    jobmanagers: int
    long: bool
    """Ten minutes of faults and calm."""
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
    slice_ns: int
    """Time after which a task gives the loop a turn. 1: after each action, as on a busy machine."""
    inline: int
    pace_s: dict[str, float]
    burst: int
    asked: str
    answer_s: float
    ordered: bool
    slow: bool
    """Whether there is always data in flight."""
    discovers: bool
    """The splits of a source are found one after the other."""
    rules: int
    """Number of rules that are broadcast to where records are counted a second time; 0: the part is
    absent.
    """
    clock_s: float
    """The wall clocks of machines are set to and fro after so long each time, on average; 0:
    they are right.
    """

    @property
    def slower(self) -> float:
        """Factor by which the times of heartbeats and leases between processes are longer than in a
        world that lasts a second.
        """
        return 10.0 if self.long else 1.0

    @staticmethod
    def drawn(seed: int, place: str | None = None) -> Settings:
        """Drawn from a stream of its own. `place`: not chosen by the seed."""
        chooser = Random(f"{seed}/place")
        chosen = chooser.choices(list(PLACES), list(PLACES.values()))[0]
        place = place or chosen
        long = chooser.randrange(LONG_EVERY) == 0
        rng = Random(f"{seed}/world of {place}")
        elsewhere, cluster = place != "one", place == "cluster"
        kinds = tuple(kind for kind in (*KINDS, *OF_PLACE[place]) if rng.random() < 0.5)
        rescaled = not long and chooser.randrange(RESCALED_EVERY) == 0
        slice_ns = chooser.choice((1, SLICE_NS, SLICE_NS, SLICE_NS))
        standby = not elsewhere and rng.random() < 0.05
        duration_s = rng.uniform(0.15, 0.35) * (3 if standby or elsewhere else 1)
        duration_s = LONG_S if long else duration_s * (2 if cluster else 1)
        share_s = (
            (rng.uniform(30, 60) if long else rng.uniform(6, 20)) / duration_s / max(1, len(kinds))
        )
        splits = {"a": rng.choice((1, 2, 2, 3)), "b": rng.choice((1, 1, 2))}
        records = {"a": rng.randrange(10, 28) * (10 if long else 1)}
        records["b"] = max(4, records["a"] * STEP_MS["a"] // STEP_MS["b"])
        burst = rng.choice((2, 4, 8))
        unaligned = rng.choice((False, False, True, "3ms"))
        inline = rng.choice((0, 64, 16384, 16384, 16384))
        rates = {kind: share_s * rng.uniform(0.3, 2.0) * CHEAP.get(kind, 1) for kind in kinds}
        if not long and chooser.randrange(ENDLESS_EVERY) == 0:
            kinds, rates[ENDLESS] = (*kinds, ENDLESS), 8.0 / duration_s
        if rescaled:
            kinds, rates[RESCALE] = (*kinds, RESCALE), 4.0 / duration_s
        bounded = rng.random() < 0.5
        discovers = not bounded and rng.random() < 0.25
        rules = rng.randrange(3, 12) if rng.random() < 0.15 else 0
        clock_s = duration_s * rng.uniform(0.05, 0.5) if rng.random() < 0.15 else 0.0
        churns = not discovers and (long or rng.random() < 0.25)
        alone = ((1,), (1,), (1,), (2,), (1, 2), (1, 3), (2, 3))
        workers = rng.choice((1, 2, 3)) if elsewhere else 0
        timeouts = (60 if inline > 64 else 200, 200, 2000)
        return Settings(
            kinds=kinds,
            rates=rates,
            data=Data(splits, records, bounded, discovers, rules, churns),
            parallelism=rng.choice(((1, 2), (2,), (2, 3), (3,)) if elsewhere else alone),
            place=place,
            workers=max(2, workers) if cluster else workers,
            jobmanagers=rng.choice((1, 2)) if cluster else 0,
            long=long,
            standby=standby,
            duration_s=duration_s,
            every_ms=1000 if long else rng.choice((20, 50) if elsewhere else (4, 12, 30)),
            # An action that is slow without any fault must not fail again and again.
            timeout_ms=rng.choice((500, 2000) if cluster or long else timeouts),
            min_pause_ms=rng.choice((0, 0, 10)),
            max_concurrent=1 if unaligned else rng.choice((1, 1, 2, 3)),
            unaligned=unaligned,
            retain=rng.choice((1, 1, 2)),
            batch=rng.choice((4, 1024)),
            slice_ns=slice_ns,
            inline=inline,
            # Each source is through with its splits after about the time in which faults strike.
            pace_s={
                name: duration_s * (burst + 1) / 2 / count / splits[name] * rng.uniform(0.4, 1.2)
                for name, count in records.items()
            },
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
    """The outcome of a seed, if nothing was violated."""

    trace_crc: int
    steps: int
    virtual_s: float
    faults: Counter[str]
    starts: int
    checkpoints: int
    place: str
    trace: list[str] | None = None


@dataclass(slots=True)
class World:
    """The state of one run, outside of all simulated processes."""

    sim: Simulation
    settings: Settings
    oracle: Oracle
    watch: Watch
    database: Database = field(init=False)
    shared: Shared = field(init=False)
    done: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    completed: set[int] = field(default_factory=set)
    stopped_with: str | None = None
    """The savepoint that the job was stopped with, while nothing newer has been completed."""
    calm: bool = False
    """No fault is active, and none comes."""
    asked: dict[str, float] = field(default_factory=dict)
    """The operator's pending request, and its start."""
    job: af.Job | None = None
    """The job that runs in the service."""
    ended: int = 0
    """How often the service has ended by itself."""
    ahead_ms: int = 0
    """How far ahead any clock has been so far."""
    runs_again: bool = False
    """Whether the flow is run although everything is committed: a job that has finished is
    started again, and commits nothing twice.
    """
    sizes: list[dict[str, int]] = field(default_factory=list)
    """The content at the end of each calm of a long world."""
    _gets_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with each commit: the job that runs has something to lose."""
    _parts: dict[str, tuple[bytes, list[Any]]] = field(default_factory=dict)
    _decoded: dict[bytes, CompletedCheckpoint] = field(default_factory=dict)
    _belated: set[bytes] = field(default_factory=set)
    """Metadata that appeared behind a higher number."""

    def __post_init__(self) -> None:
        settings = self.settings
        self.database = Database(self.sim, self._committed, struck=self.done)
        functions = self.sim.loop.stream("functions")
        self.shared = shared = Shared(
            self.database,
            settings.data,
            settings.pace_s,
            settings.burst,
            settings.answer_s,
            functions,
            settings.discovers,
        )
        shared.churns, shared.is_over = settings.data.churns, lambda: self.oracle.complete
        shared.is_calm = lambda: self.calm
        self.database.before_call, self.database.before_write = shared.misbehave, shared.maybe_fail

    # The service.

    async def service(self, host: SimulatedHost) -> int:
        """The main of a simulated process: runs the flow to its end, or until the operator stops
        it.
        """
        settings = self.settings
        self.look()
        # A life that was killed has cleared nothing.
        self.asked.clear()
        self.job = None
        if self.oracle.complete and not self.runs_again:
            self.ended += 1
            return 0
        self.starts += 1
        flow = world_flow(
            host.rng.choice(settings.parallelism),
            asked=settings.asked,
            ordered=settings.ordered,
            slow=settings.slow,
        )
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
            "tasks": TaskOptions(batch_records_max=settings.batch, slice_ns=settings.slice_ns),
        }
        if ENDLESS in settings.kinds:
            options["cancellation_timeout"] = f"{CANCELLATION_S * 1000:g}ms"
        if settings.place == "workers":
            options |= {
                "workers": settings.workers,
                "heartbeat": worker_world.heartbeat(settings.slower),
            }
        elif settings.place == "cluster":
            options["on"] = cluster_world.remote_cluster(host)
        if self.stopped_with is not None and host.rng.random() < 0.5:
            options["restore"] = self.stopped_with
        try:
            stopped = await self._run(flow, host, options)
        except BUGS as error:
            raise Violation(f"the job failed with what no fault explains: {error!r}") from error
        if not stopped:
            self.look()
            if not self.oracle.complete:
                raise Violation(
                    f"the job has finished, and there is missing: {self.oracle.missing()}"
                )
        left = [
            task.get_name()
            for task in self.sim.loop.current.tasks
            if task is not asyncio.current_task()
        ]
        if left:
            raise Violation(f"the service has ended and leaves these tasks: {left}")
        self.ended += 1
        return 0

    async def _run(self, flow: af.Flow, host: SimulatedHost, options: dict[str, Any]) -> bool:
        """True: the operator has stopped it."""
        if (
            self.settings.place == "cluster"
            and (line := await cluster_world.follow(host, flow.name)) is not None
        ):
            if line.status is not af.JobStatus.FINISHED:
                raise ConnectionError(f"the job has ended as {line.status}: {line.error}")
            return bool(self.done["stop"])
        stopped, closed = False, self.shared.closed_by_force
        try:
            async with flow.run(**options) as job:
                operator = asyncio.get_running_loop().create_task(
                    self._operate(host, job), name="operator"
                )
                self.job = job
                try:
                    await job.wait()
                except af.JobCanceled:
                    if not self.done["cancel"]:
                        raise
                except af.JobFailed as error:
                    if (loss := worker_world.loss_in(error)) is not None:
                        raise Violation(
                            f"the job restarts for ever, and has ended with a worker: {loss}"
                        ) from error
                    raise
                finally:
                    operator.cancel()
                    try:
                        stopped = await operator
                    except asyncio.CancelledError:
                        stopped = bool(self.done["stop"] or self.done["cancel"])
        finally:
            self.job = None
        is_forced = self.shared.closed_by_force > closed and self.settings.place == "one"
        if is_forced and job.status is af.JobStatus.CANCELED:
            raise Violation("the job counts as cancelled, and a function was closed by force")
        return stopped

    async def ask(self, what: str, answer: Coroutine[Any, Any, T]) -> T:
        """Wait for what the job was asked for. It is looked at how long that takes."""
        self.asked[what] = self.sim.loop.time()
        try:
            return await answer
        finally:
            self.asked.pop(what, None)

    async def _operate(self, host: SimulatedHost, job: af.Job) -> bool:
        """Does what a person does beside the job. True: the job was stopped."""
        operations = ("savepoint", "stop", "cancel", "term", RESCALE)
        rates = {
            kind: self.settings.rates[kind] for kind in operations if kind in self.settings.kinds
        }
        while rates:
            await self.ready()
            await asyncio.sleep(host.rng.expovariate(sum(rates.values())))
            if self.calm:
                break
            kind = host.rng.choices(list(rates), list(rates.values()))[0]
            self.done[kind] += 1
            try:
                if kind == "savepoint":
                    await self.ask(kind, job.savepoint())
                    continue
                if kind == RESCALE:
                    wanted = host.rng.choice((1, 2, 3, 4))
                    await self.ask(kind, job.rescale(parallelism=wanted))
                    continue
                if kind == "term":
                    self.sim.life(host.name).terminate()
                    continue
                if kind == "cancel":
                    await self.ask(kind, job.cancel())
                    return True
                stop = job.stop(savepoint=None if host.rng.random() < 0.7 else False, drain=False)
                self.stopped_with = await self.ask(kind, stop)
            except af.AioflowError:
                if kind in ("savepoint", RESCALE):
                    continue
            return True
        await asyncio.get_running_loop().create_future()
        return False

    async def supervise(self, name: str, main: ProcessMain) -> None:
        """Start it again whenever it has ended, as a service manager does."""
        rng = self.sim.loop.stream(f"supervisor/{name}")
        self.sim.spawn(name, main)
        delay_s = 0.01
        while True:
            code = await self.sim.life(name).wait()
            # Repeated failures get longer and longer pauses.
            delay_s = min(1.0, delay_s * 2) if code > 0 else 0.01
            await asyncio.sleep(rng.uniform(0.1, 1.0) * delay_s)
            if not self.sim.is_alive(name):
                self.sim.restart(name)

    # Faults beside those of machines.

    async def trouble(self) -> None:
        """Functions that raise, a database that loses and repeats, or is down, for a while and
        again.
        """
        settings, rng, database = self.settings, self.sim.fault_rng, self.database
        if "lost" in settings.kinds:
            database.lost = rng.uniform(0.02, 0.3)
        if "repeated" in settings.kinds:
            database.repeated = rng.uniform(0.05, 0.5)
        known = (*MISDEEDS, "down", *worker_world.KINDS)
        rates = {kind: settings.rates[kind] for kind in known if kind in settings.kinds}
        while rates:
            await self.ready()
            await asyncio.sleep(rng.expovariate(sum(rates.values())))
            kind = rng.choices(list(rates), list(rates.values()))[0]
            if self.calm:
                continue
            if kind in MISDEEDS:
                misdeed = rng.choice(MISDEEDS[kind])
                site = rng.choice(
                    ENDLESS_SITES
                    if kind == ENDLESS
                    else ASYNC_SITES
                    if misdeed in ("cancelled", "slow", "swallows")
                    else SITES
                )
                self.shared.fails[site] = kind, misdeed
            elif kind in worker_world.KINDS:
                self.done[kind] += worker_world.strike(self.sim, kind, "alpha")
                self.look()
            else:
                database.down = True
                self.done["down"] += 1
                await asyncio.sleep(rng.uniform(0.01, 0.4))
                database.down = False

    async def set_clocks(self) -> None:
        """The time of a machine is set, by seconds or more, forward or back.

        Only `heal` ends that.
        """
        rng = self.sim.loop.stream("clocks")
        while self.settings.clock_s:
            await asyncio.sleep(rng.expovariate(1 / self.settings.clock_s))
            if self.calm:
                continue
            step_ms = rng.choice(CLOCK_MS)
            rng.choice(list(self.sim.loop.machines.values())).clock_ms = step_ms = rng.randrange(
                -step_ms, step_ms
            )
            self.ahead_ms = max(self.ahead_ms, step_ms)
            self.done["clock"] += 1

    async def ready(self) -> None:
        """Hold the next fault back until something was committed since the last one, most of the
        time.

        A service that is struck again while it still starts has nothing to lose yet: what is of
        interest comes between checkpoints.
        """
        if self.sim.fault_rng.random() < STRIKE_AT_ONCE:
            return
        self._gets_on.clear()
        try:
            async with asyncio.timeout(WORKERS_GET_ON_S if self.settings.workers else GETS_ON_S):
                await self._gets_on.wait()
        except TimeoutError:
            return

    def heal(self, *, at_once: bool = True) -> None:
        """Repairs everything. With `at_once` the rest of the input comes at once.

        No clock is behind where one has been: a restored timer waits for its instant, and all of
        them are to come.
        """
        self.calm = True
        if at_once:
            self.shared.pace_s, self.shared.burst = dict.fromkeys(self.shared.pace_s, 0.0), AT_ONCE
            self.shared.answer_s = ANSWER_S
        self.shared.fails.clear()
        self.database.lost = self.database.repeated = 0.0
        self.database.down = False
        for machine in self.sim.loop.machines.values():
            machine.clock_ms = self.ahead_ms

    # Liveness, when all is well.

    async def until(
        self, done: Callable[[], bool], within_s: float, what: Callable[[], str]
    ) -> None:
        """Look on until `done`.

        Raises Violation after `within_s`, or when what the operator asked for does not end.
        """
        loop = self.sim.loop
        since = loop.time()
        while True:
            self.look()
            if done():
                return
            now = loop.time()
            if now >= since + within_s:
                raise Violation(f"{within_s:g} s after all is well: {what()}")
            for asked, at in self.asked.items():
                if self.job is not None and now >= max(at, since) + ASKED_S:
                    raise Violation(
                        f"{asked} was asked for at {at:g} and has not ended at {now:g}, all is "
                        f"well since {since:g}"
                    )
            await asyncio.sleep(TICK_S)

    async def calm_down(self) -> None:
        """Runs a calm of a long world: the job makes progress, and holds no more than before."""
        await asyncio.sleep(CALM_S / 2)
        begun = len(self.completed), len(self.oracle.records)

        def gets_on() -> bool:
            return len(self.completed) > begun[0] or self.oracle.complete

        await self.until(
            gets_on, CALM_S / 2, lambda: f"{begun[0]} checkpoints are completed, and no more"
        )
        self.sizes.append(self._sizes())
        first = self.sizes[0]
        for name, size in self.sizes[-1].items():
            if size > 3 * first[name] + GROWTH[name]:
                raise Violation(f"{name} have grown: {[sizes[name] for sizes in self.sizes]}")

    def _sizes(self) -> dict[str, int]:
        loop, disk = self.sim.loop, self.sim.disk
        return {
            "tasks": sum(
                len(process.tasks) for process in loop.processes.values() if process.alive
            ),
            "timers": sum(not loop._is_stale(handle) for _, _, handle in loop._timers),
            "connections": len(self.sim.network._live),
            "files": sum(name.startswith(STORE) for name in disk._names),
            "bytes of state": sum(
                len(file.data)
                for name, file in disk._names.items()
                if name.startswith(f"{STORE}/world/")
            ),
        }

    async def finish(self, services: Sequence[str]) -> None:
        """Everything is committed; a job that goes on completes checkpoints, answers and ends
        when it is asked to.
        """
        await self.until(
            lambda: self.oracle.complete,
            LIVENESS_S,
            lambda: f"there is missing {self.oracle.missing()}",
        )
        if self.settings.standby:
            return
        begun = self.ended
        if self.settings.data.bounded and self.settings.place != "cluster":
            self.runs_again = True
            # One run may be under way.
            await self.until(
                lambda: self.ended > begun + 1,
                ASKED_S,
                lambda: "the service does not end when its job is started again",
            )
            self.look()
            return
        job = None if self.settings.data.bounded else await self._goes_on()
        if not self.settings.data.bounded and self.ended == begun:
            rng = self.sim.loop.stream("end")
            if job is not None and rng.random() < 0.3:
                await self._asked("savepoint", job, job.savepoint, services[0])
            how = rng.choice(("stop", "cancel", "term"))
            begun = self.ended
            if job is None or how == "term":
                life = self.sim.life(services[0])
                life.terminate()
                await self.until(
                    lambda: life.returncode is not None,
                    ASKED_S,
                    lambda: "SIGTERM has not ended the service",
                )
                return
            self.done[how] += 1
            await self._asked(how, job, job.cancel if how == "cancel" else job.stop, services[0])
        await self.until(
            lambda: self.ended > begun,
            ASKED_S,
            lambda: "the service has not ended, and everything is committed",
        )

    async def _goes_on(self) -> af.Job | None:
        """The job of the service once it has completed MORE_CHECKPOINTS.

        None: it follows a job of a former life, or was stopped.
        """
        completed, ended = len(self.completed), self.ended

        def more() -> bool:
            return len(self.completed) >= completed + MORE_CHECKPOINTS or self.ended > ended

        within_s = CHECKPOINT_S * MORE_CHECKPOINTS + LIVENESS_S * (not self.watch.is_running())
        await self.until(
            more,
            within_s,
            lambda: f"{len(self.completed) - completed} more checkpoints are completed",
        )
        # Requests made while faults were active end as well.
        await self.until(
            lambda: self.job is None or not self.asked,
            2 * ASKED_S,
            lambda: f"{list(self.asked)} has not ended",
        )
        return self.job

    async def _asked(
        self, what: str, job: af.Job, ask: Callable[[], Coroutine[Any, Any, object]], service: str
    ) -> None:
        """Ask the job for something, in its process, until it answers or is over: connections
        may still find out that they broke.
        """
        life = self.sim.life(service)
        answers: list[bool] = []

        async def asked() -> None:
            while not job.status.is_terminal:
                try:
                    await ask()
                except af.AioflowError:
                    await asyncio.sleep(RETRY_S)
                else:
                    break
            answers.append(True)

        self.sim.loop.post_io(life.process, lambda: self.sim.loop.create_task(asked(), name=what))
        # The service may be gone before the one who asked hears the answer.
        await self.until(
            lambda: bool(answers) or life.returncode is not None,
            ASKED_S,
            lambda: f"{what} has not ended",
        )

    # Checked quantities.

    def _committed(self, rows: Sequence[Any]) -> None:
        self._gets_on.set()
        self.oracle.committed(rows)

    def look(self) -> None:
        """Check all that can be seen now."""
        if self.settings.workers:
            worker_world.check_credit()
        self.watch.look()
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
        """Every file that the metadata of a completed checkpoint names is there, and what it
        says.

        Exempt is metadata that appears behind a higher number: a paused process creates it after it
        has lost the lease, where the next holder has completed and removed that number. Nothing
        resumes it, and the next sweep removes it.
        """
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
                if checkpoint.checkpoint_id < max(self.completed, default=0):
                    self._belated.add(data)
                self.completed.add(checkpoint.checkpoint_id)
                self.stopped_with = None
            if data in self._belated:
                continue
            for file in _named_files(checkpoint):
                full = f"{root}/{file.name}"
                if not disk.exists(full):
                    raise Violation(f"{path} names {file.name}, which is not there")
                content = bytes(disk.file(full).data)
                if (
                    len(content) != file.size
                    or hashlib.blake2b(content, digest_size=state_files.DIGEST_BYTES).digest()
                    != file.digest
                ):
                    raise Violation(f"{path} names {file.name}, which holds something else")


def _named_files(checkpoint: CompletedCheckpoint) -> Iterator[StateFile]:
    for state in checkpoint.subtasks.values():
        for operator in state.operators:
            if operator.keyed is not None:
                yield from (file for file in operator.keyed.files if file.name)
            for file in (operator.operator, operator.source):
                if file is not None and file.name:
                    yield file


def rescaling(seed: int, place: str | None = None) -> Settings:
    """Returns the choices of a seed for a world whose job is rescaled again and again."""
    drawn = Settings.drawn(seed, place)
    rates = {**drawn.rates, RESCALE: 20.0 / drawn.duration_s}
    return replace(drawn, kinds=(*drawn.kinds, RESCALE), rates=rates)


def run_world(
    seed: int,
    place: str | None = None,
    *,
    keep_trace: bool = False,
    settings: Settings | None = None,
) -> Outcome:
    """Runs one seed. `place` is one of `PLACES`; None: as the seed chooses.

    Raises Violation, SimDeadlock, SimLivelock or any other error of the run; a note names the seed.
    """
    chosen = settings or Settings.drawn(seed, place)
    worlds: list[World] = []

    async def main(host: SimulatedHost) -> None:
        watch = Watch(host.sim.loop)
        in_order = len(chosen.parallelism) == 1 and RESCALE not in chosen.kinds
        world = World(host.sim, chosen, Oracle(chosen.data, in_order=in_order), watch)
        worlds.append(world)
        worker_world.install(host.sim)
        share(world.shared)
        with watch.installed():
            await _live(world)

    steps = 3_000_000 if chosen.long else 200_000
    shorter = (
        3.0 if chosen.place == "cluster" else 1.0 if worker_world.LINK_CUT in chosen.kinds else None
    )
    shorter = None if shorter is None else shorter * chosen.slower
    with _environment(chosen), worker_world.simulated_workers(shorter), cluster_world.short_times():
        result = simulate(
            main, seed, max_steps=steps, max_callback_s=CALLBACK_S, keep_trace=keep_trace
        )
    (world,) = worlds
    strange = [error for error in result.errors if ": ended with " not in error]
    if strange:
        raise Violation(f"seed {seed}: unretrieved errors: {strange[:3]}")
    return Outcome(
        result.trace_crc,
        result.steps,
        result.virtual_s,
        world.done,
        world.starts,
        len(world.completed),
        chosen.place,
        result.trace,
    )


async def _live(world: World) -> None:
    settings, sim = world.settings, world.sim
    loop = asyncio.get_running_loop()
    services = ["alpha", "beta"] if settings.standby else ["alpha"]
    mains: dict[str, ProcessMain] = {}
    if settings.place == "cluster":
        jobmanager = functools.partial(cluster_world.jobmanager, slower=settings.slower)
        mains |= dict.fromkeys(cluster_world.JOBMANAGERS[: settings.jobmanagers], jobmanager)
        taskmanager = functools.partial(cluster_world.taskmanager, slower=settings.slower)
        mains |= {f"tm{number}": taskmanager for number in range(1, settings.workers + 1)}
    mains |= dict.fromkeys(services, world.service)
    beside = [
        loop.create_task(world.supervise(*named), name=f"supervise {named[0]}")
        for named in mains.items()
    ]
    trouble = loop.create_task(world.trouble(), name="trouble")
    clocks = loop.create_task(world.set_clocks(), name="clocks")
    await asyncio.sleep(0)
    rates: dict[str, Any] = {
        kind: settings.rates[kind]
        for kind in (*INJECTED, *cluster_world.KINDS)
        if kind in settings.kinds
    }
    outage_s = (
        5.0 if settings.long else 1.2 if settings.standby or settings.place == "cluster" else 0.05
    )
    faults = Faults(**rates, outage_s=(0.002, outage_s))
    rounds = LONG_ROUNDS if settings.long else 1
    for number in range(rounds):
        duration_s = settings.duration_s / rounds - (CALM_S if settings.long else 0.0)
        await inject(
            sim,
            faults,
            list(mains),
            duration_s=duration_s,
            check=world.look,
            done=world.done,
            ready=world.ready,
        )
        if number < rounds - 1:
            world.heal(at_once=False)
            await world.calm_down()
            world.calm = False
    trouble.cancel()
    clocks.cancel()
    world.heal()
    await world.finish(services)
    for task in beside:
        task.cancel()
    for process in list(sim.loop.processes.values()):
        if process is not sim.loop.root:
            sim.kill(process.name)
    await asyncio.gather(*beside, trouble, clocks, return_exceptions=True)


@contextmanager
def _environment(settings: Settings) -> Iterator[None]:
    """Small files and short times, and no log: expected troubles would fill it."""
    changes: dict[tuple[Any, str], Any] = {
        (state_files, "INLINE_BYTES"): settings.inline,
        (checkpoint_store, "LeaseOptions"): lambda: SHORT_LEASE,
        (timers, "SETTLE_S"): CLOCK_S,
        (timers, "LOOK_S"): CLOCK_S,
        (timers, "LOOK_MAX_S"): CLOCK_S,
        (
            partitioners,
            "_generate_loop",
        ): _generate_loop,  # Compiled at each start they would take a tenth of the time.
    }
    before = {(module, name): getattr(module, name) for module, name in changes}
    for (module, name), value in changes.items():
        setattr(module, name, value)
    disabled = logging.root.manager.disable
    if disabled < logging.CRITICAL and not _LOG:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)
        logging.disable(disabled)
        unshare()


_generate_loop = functools.cache(partitioners._generate_loop)

_LOG: list[bool] = []
