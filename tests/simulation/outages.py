"""Outages between two workers: for 1 to 120 s of virtual time they cannot reach each other.

    python -m tests.simulation.outages --seeds 0:1000 --jobs 2

Links, heartbeats and restarts keep the times that users get. The service reaches both workers all
the time, so only the tasks can tell it of the outage. Each seed chooses when outages begin, how
long they last, and whether they are of one way. Checked is that the job goes on or restarts: while
it is RUNNING, it makes progress at least once a minute, and no element is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aioflow as af
from aioflow.cluster import taskmanager
from aioflow.cluster.deployer import TaskDeployer
from aioflow.testing.simulation import SimulatedHost, Simulation, simulate
from tests.simulation.oracle import Violation
from tests.simulation.worker_world import SimulatedPulse, install, workers_of

__all__ = ["Outages", "run_late_deployment", "run_outages"]

ELEMENTS = 300
PAUSE_S = 0.25
KEYS = 8
PROGRESS_S = 60.0
"""Time without progress after which a job may not be RUNNING."""


@dataclass(frozen=True, slots=True)
class Outages:
    """What one seed has seen."""

    seed: int
    lengths_s: list[float]
    restarts: int
    longest_s: float
    """Longest time that the job was RUNNING without progress."""
    virtual_s: float


async def numbers(position: int | None) -> AsyncIterator[tuple[int, int]]:
    for n in range(position or 0, ELEMENTS):
        await asyncio.sleep(PAUSE_S)
        yield n, n + 1


def key_of(n: int) -> int:
    return n % KEYS


async def _cut_links(sim: Simulation, lengths_s: list[float]) -> None:
    rng = sim.fault_rng
    while True:
        await asyncio.sleep(rng.uniform(0.0, 40.0))
        workers = workers_of(sim)
        if len(workers) < 2:
            continue
        here, there = rng.sample(workers, 2)
        length_s = rng.uniform(1.0, 120.0)
        sim.network.part(here, there, one_way=rng.random() < 0.3)
        lengths_s.append(length_s)
        await asyncio.sleep(length_s)
        sim.network.join(here, there)


async def _watched(job: af.Job, rows: list[Any]) -> float:
    """Waits for the end of the job, and returns the longest time without progress."""
    loop = asyncio.get_running_loop()
    longest_s, since, seen = 0.0, loop.time(), 0
    while job.status not in ("FINISHED", "FAILED", "CANCELED"):
        await asyncio.sleep(0.5)
        if len(rows) != seen or job.status != "RUNNING":
            seen, since = len(rows), loop.time()
        longest_s = max(longest_s, loop.time() - since)
        if longest_s > PROGRESS_S:
            raise Violation(
                f"the job is RUNNING without progress for {longest_s:.0f} s, at {loop.time():.0f}"
            )
    return longest_s


def counting(rows: list[Any]) -> af.Flow:
    flow = af.Flow("outages", parallelism=2)
    flow.source(numbers, uid="numbers").rebalance().key_by(key_of).count(uid="count").sink(
        rows.append
    )
    return flow


async def _main(host: SimulatedHost, seed: int) -> Outages:
    sim = host.sim
    install(sim)
    rows: list[Any] = []
    lengths_s: list[float] = []
    flow = counting(rows)
    outcome: list[Any] = []

    async def service(alpha: SimulatedHost) -> int:
        every = {"checkpoints": "file:///store", "every": "2s"}
        async with flow.run(host=alpha, workers=2, **every) as job:  # type: ignore[call-overload]
            cutting = asyncio.get_running_loop().create_task(_cut_links(sim, lengths_s))
            try:
                longest_s = await _watched(job, rows)
            finally:
                cutting.cancel()
            result = await job.wait()
            outcome.append((longest_s, result.restarts))
        return 0

    sim.spawn("alpha", service)
    code = await sim.life("alpha").wait()
    if code:
        raise Violation(f"the service has ended with {code}")
    expected = Counter(key_of(n) for n in range(ELEMENTS))
    counted: dict[int, set[int]] = {}
    for key, count in rows:
        counted.setdefault(key, set()).add(count)
    for key, total in expected.items():
        if counted.get(key) != set(range(1, total + 1)):
            raise Violation(f"counts of key {key} are missing or too many")
    ((longest_s, restarts),) = outcome
    return Outages(seed, lengths_s, restarts, longest_s, asyncio.get_running_loop().time())


@contextmanager
def _without_threads_and_log() -> Iterator[None]:
    made: Any = taskmanager
    before = made.Pulse
    made.Pulse = SimulatedPulse
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # Expected troubles would fill the log.
    try:
        yield
    finally:
        made.Pulse = before
        logging.disable(disabled)


def run_outages(seed: int) -> Outages:
    """Runs one seed. Raises Violation, or any other error of the run."""
    with _without_threads_and_log():
        result = simulate(lambda host: _main(host, seed), seed, max_steps=3_000_000)
    return result.value


def run_late_deployment(delay_s: float) -> tuple[int, int]:
    """Runs a job whose source is deployed `delay_s` after its consumers.

    Returns its restarts, and the number of its results.
    """
    made: Any = TaskDeployer
    submit, rows = made._submit, list[Any]()

    def late(deployer: Any, attempt: Any, *args: Any) -> None:
        is_source = deployer._job_master.executions.graph.vertex(attempt.vertex_id).head.source
        delay = delay_s if is_source is not None else 0.0
        asyncio.get_running_loop().call_later(delay, submit, deployer, attempt, *args)

    async def main(host: SimulatedHost) -> int:
        install(host.sim)
        async with counting(rows).run(host=host, workers=2) as job:  # type: ignore[call-overload]
            return (await job.wait()).restarts

    made._submit = late
    try:
        with _without_threads_and_log():
            restarts = simulate(main, 1, max_steps=3_000_000).value
    finally:
        made._submit = submit
    return restarts, len(rows)


def _one(seed: int) -> tuple[int, Outages | None, str]:
    try:
        return seed, run_outages(seed), ""
    except Exception as error:  # Any end of a run is of interest here.
        return seed, None, f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.outages")
    parser.add_argument("--seeds", default="0:100", help="FIRST:END")
    parser.add_argument("--jobs", type=int, default=1)
    chosen = parser.parse_args()
    first, end = map(int, chosen.seeds.split(":"))
    outages = restarts = failed = 0
    longest_s = 0.0
    with multiprocessing.get_context("spawn").Pool(chosen.jobs) as pool:
        for done, (seed, seen, error) in enumerate(pool.imap_unordered(_one, range(first, end)), 1):
            if seen is None:
                failed += 1
                print(f"seed {seed}: {error}", flush=True)
                continue
            outages += len(seen.lengths_s)
            restarts += seen.restarts
            longest_s = max(longest_s, seen.longest_s)
            if done % 50 == 0:
                print(f"{done} seeds, {failed} failed, {outages} outages", flush=True)
    print(
        f"{end - first} seeds, {failed} failed; {outages} outages, {restarts} restarts, RUNNING "
        f"without progress for at most {longest_s:.1f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
