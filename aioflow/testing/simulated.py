"""Runs a whole flow in virtual time. A seed chooses one of the many histories that a real machine
could have made.

    run = run_simulated(flow, seed=7, collect=[counts])
    assert sorted(run.outputs[0]) == expected

The flow runs as it would in this process, with the same JobMaster, tasks, mailboxes and exchanges.
The seed chooses what a real machine leaves to chance: how long time slices and blocking calls take,
when the process is stalled, and what the disk does. The same seed gives the same run, callback by
callback, with the same `trace_crc`. An hour of sleeping costs nothing. A flow that waits for
something that can never happen fails with SimDeadlock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from aioflow.api.build import OperatorOptions, add_operator
from aioflow.api.gather import Collected, CollectOperator
from aioflow.core.aio import cancel_and_wait
from aioflow.graph.stream_graph import ShipStrategy
from aioflow.testing.simulation.faults import Faults, inject
from aioflow.testing.simulation.host import SimulatedHost
from aioflow.testing.simulation.run import simulate
from aioflow.testing.virtual_loop import outside_of_loops

if TYPE_CHECKING:
    from aioflow.api.flow import Flow
    from aioflow.api.job import Job, JobResult
    from aioflow.api.streams import DataStream, FlowOfStreams
    from aioflow.graph.stream_graph import StreamGraph

__all__ = ["SimulatedRun", "run_simulated"]

PROCESS = "flow"
"""Name of the simulated process that the flow runs in."""

FAULTS_S = 60.0
"""Virtual seconds from the start during which faults happen. Without faults the flow can then
finish, or turns out to be stuck.
"""

REFUSED = {
    "kill": "the flow's one process would be gone, and would not be started again",
    "power": "the flow's one process would be gone, and would not be started again",
    "cut": "a flow in one process uses no network",
    "reset": "a flow in one process uses no network",
    "slow": "a flow in one process uses no network (it slows packets down; disk= slows the disk)",
}
"""Faults that are refused because they test nothing in a flow of one process, with the reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The result of a simulated run."""

    outputs: tuple[list[Any], ...]
    """The elements of each stream of `collect`, in order of arrival."""
    job: JobResult | None
    """How the job ended. None if the job was ended by the return of `drive`."""
    value: Any
    """Return value of `drive`; None without `drive`."""
    trace_crc: int
    """Checksum of all events. Two runs with the same checksum had the same events."""
    steps: int
    """Number of callbacks that ran."""
    virtual_s: float
    """Virtual seconds that passed."""
    faults: Counter[str]
    """Number of faults that happened, by kind."""
    errors: list[str]
    """Errors that were never awaited, and tasks that were left behind."""


@dataclass(slots=True)
class _Outcome:
    outputs: tuple[list[Any], ...]
    job: JobResult | None = None
    value: Any = None
    error: BaseException | None = None
    faults: Counter[str] = field(default_factory=Counter)


def run_simulated(
    flow: Flow | FlowOfStreams,
    *,
    seed: int | str = 0,
    faults: Faults | None = None,
    clock: int | None = None,
    clock_steps: Sequence[tuple[float, int]] = (),
    collect: Sequence[DataStream[Any]] = (),
    drive: Callable[[Job], Awaitable[Any]] | None = None,
    perturb: bool = True,
    fence: bool = True,
    max_steps: int = 1_000_000,
    max_virtual_s: float = float("inf"),
    **options: Any,
) -> SimulatedRun:
    """Runs `flow`, all its sinks included, to its end under `seed`.

    It is synchronous, and may be called while a loop runs.

    `collect` are the streams whose elements the result contains. `drive(job)` is a coroutine
    function that uses the running job. When it returns, the run ends as at the end of an `async
    with flow.run()` block. Without `drive` the run waits for the end of the job. `faults` may have
    `pause`, which stalls the process, and `disk`, which makes the simulated disk slow, full or
    failing. Other kinds of faults raise ValueError. `clock` is the wall clock at the start, in ms.
    `clock_steps` are pairs: the seconds until the wall clock jumps, and the size of the jump in ms,
    negative for a jump back. `options` are the options of `flow.run`; paths are on the simulated
    disk. With `perturb=False` the seed varies nothing. `fence=False` lets user code use the real
    machine.

    Raises the error of the job, SimDeadlock, SimLivelock or SimFenceBroken. A note on the error
    names the seed.
    """
    if faults is not None:
        _check(faults)
    whole: Any = flow  # The flow of a stream is an `af.Flow` too.
    graph = flow.graph.copy()
    outcome = _Outcome(tuple([] for _ in collect))
    for stream, rows in zip(collect, outcome.outputs, strict=True):
        if stream.flow is not flow:
            raise ValueError(
                f"collect has {stream!r} of flow {stream.flow.name!r}, expected a stream of "
                f"{flow.name!r}"
            )
        _collect(graph, stream, rows)

    async def run_flow(host: SimulatedHost) -> None:
        if clock is not None:
            _set_clock(host, clock)
        for after_s, by_ms in clock_steps:
            asyncio.get_running_loop().call_later(after_s, _step_clock, host, by_ms)
        try:
            # The method of a flow that runs only a part of its graph; collect() uses it too.
            async with whole._run(graph, {**options, "host": host}) as job:
                if drive is None:
                    outcome.job = await job.wait()
                else:
                    outcome.value = await drive(job)
        except Exception as error:  # noqa: BLE001  # Raised by the process that waits for this one.
            outcome.error = error

    async def main(host: SimulatedHost) -> None:
        process = host.sim.spawn(PROCESS, run_flow)
        if faults is None:
            await process.wait()
        else:
            await _wait_under_faults(host, process.wait, faults, outcome)
        if outcome.error is not None:
            raise outcome.error

    with outside_of_loops():
        result = simulate(
            main,
            seed,
            perturb=perturb,
            fence=fence,
            max_steps=max_steps,
            max_virtual_s=max_virtual_s,
        )
    return SimulatedRun(
        outputs=outcome.outputs,
        job=outcome.job,
        value=outcome.value,
        trace_crc=result.trace_crc,
        steps=result.steps,
        virtual_s=result.virtual_s,
        faults=outcome.faults,
        errors=result.errors,
    )


def _collect(graph: StreamGraph, stream: DataStream[Any], rows: list[Any]) -> None:
    """Adds a sink to `graph` that appends the elements of `stream` to `rows`."""
    everything = [upstream.partitioned(ShipStrategy.GLOBAL) for upstream in stream.upstreams]
    add_operator(
        graph,
        "collect",
        [everything],
        partial(CollectOperator, Collected(rows)),
        OperatorOptions(name="collect", parallelism=1),
        sink=True,
    )


async def _wait_under_faults(
    host: SimulatedHost, wait: Callable[[], Awaitable[int]], faults: Faults, outcome: _Outcome
) -> None:
    strikes = inject(host.sim, faults, [PROCESS], duration_s=FAULTS_S, done=outcome.faults)
    injector = host.sim.loop.create_task(strikes, name="faults")
    try:
        await wait()
    finally:
        await cancel_and_wait([injector])


def _check(faults: Faults) -> None:
    for kind, rate in faults.rates().items():
        if rate and kind in REFUSED:
            raise ValueError(
                f"run_simulated cannot inflict {kind}=: {REFUSED[kind]}; pause= and disk= make "
                "sense here"
            )


def _step_clock(host: SimulatedHost, by_ms: int) -> None:
    _set_clock(host, host.clock.wall_ms() + by_ms)


def _set_clock(host: SimulatedHost, start_ms: int) -> None:
    """Sets the wall clock of `host` to `start_ms`."""
    wall_ms = host.clock.wall_ms
    shift = start_ms - wall_ms()
    host.clock.wall_ms = lambda: wall_ms() + shift
