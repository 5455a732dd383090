"""Runs a program under one seed and returns the result."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aioflow.core.aio import cancel_and_wait
from aioflow.testing.simulation.fence import fence as stand_fence
from aioflow.testing.simulation.host import SimulatedHost, Simulation
from aioflow.testing.simulation.loop import START_S, SimLoop
from aioflow.testing.simulation.transport import NetworkOptions
from aioflow.testing.simulation.watchdog import watchdog

__all__ = ["SimResult", "simulate"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult(Generic[T]):
    """The result of a simulated run."""

    value: T
    """What `main` returned."""
    trace_crc: int
    """Digest of all that happened: two runs with the same digest took the same way."""
    steps: int
    """Callbacks that ran."""
    virtual_s: float
    """Virtual seconds that passed."""
    errors: list[str]
    """Errors that were never awaited, and tasks that `main` left behind, with their processes."""
    trace: list[str] | None
    """The events behind the digest, if `keep_trace` was asked for."""


def simulate(
    main: Callable[[SimulatedHost], Coroutine[Any, Any, T]],
    seed: int | str,
    *,
    max_steps: int = 1_000_000,
    max_virtual_s: float = float("inf"),
    perturb: bool = True,
    network: NetworkOptions | None = None,
    fence: bool = True,
    keep_trace: bool = False,
    max_callback_s: float = 20.0,
) -> SimResult[T]:
    """Run `main(host)` in virtual time under `seed`, and return its result.

    `main` is the process that cannot be killed; it starts others with `host.sim.spawn`, which die
    with it. `perturb` lets the seed stall processes and vary slices; `fence` fails the run when
    simulated code reaches for the machine. `max_callback_s`: processor time that one callback may
    take. Raises what `main` raised, `SimDeadlock`, `SimLivelock`, `SimFenceBroken`, or the first
    AssertionError of any task; a note names the seed.
    """
    collecting = gc.isenabled()
    gc.disable()  # Finalizers would run at moments that no seed decides.
    loop = SimLoop(
        seed,
        max_steps=max_steps,
        max_virtual_s=max_virtual_s,
        perturb=perturb,
        keep_trace=keep_trace,
    )
    try:
        sim = Simulation(loop, network)
        with (
            watchdog(loop, max_callback_s),
            stand_fence(loop) if fence else contextlib.nullcontext(),
        ):
            value = loop.run_until_complete(main(sim.root))
            loop.run_until_complete(_clean_up(loop))
        loop.note("END", loop.steps)
        return SimResult(
            value=value,
            trace_crc=loop.crc,
            steps=loop.steps,
            virtual_s=loop.time() - START_S,
            errors=loop.errors,
            trace=loop.trace,
        )
    except BaseException as error:
        error.add_note(
            f"simulation: seed {seed!r} failed at step {loop.steps}, virtual "
            f"{loop.time() - START_S:.6f} s, "
            f"trace {loop.crc:08x}; the same seed repeats it"
        )
        raise
    finally:
        loop.finish()
        if collecting:
            gc.enable()


async def _clean_up(loop: SimLoop) -> None:
    """Do for `main` what `asyncio.run` does, and report what it had left behind."""
    me = asyncio.current_task()
    left = [task for task in loop.root.tasks if task is not me]
    loop.errors.extend(
        f"{loop.root.name}: task {task.get_name()} was left pending" for task in left
    )
    for error in await cancel_and_wait(left):
        loop.errors.append(f"{loop.root.name}: task left pending ended with {error!r}")
    await loop.close_own_generators()
