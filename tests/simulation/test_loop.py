"""The simulated loop: one seed one history, virtual time, asyncio's order inside a process, and
every run ends.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from aioflow.core.aio import OrderedTaskGroup, wait_first
from aioflow.testing import SimDeadlock, SimLivelock, simulate
from aioflow.testing.simulation import SimulatedHost


async def busy_world(host: SimulatedHost) -> list[object]:
    """Two servers, traffic, files, blocking calls, randomness and a kill: everything that could
    differ between two runs.
    """
    seen: list[object] = []

    async def echo(server: SimulatedHost) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1000):
                writer.write(data)
                await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "0.0.0.0", 7) as listener:
            await listener.serve_forever()

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection(f"server-{number % 2}", 7)
        try:
            writer.write(bytes(5000 + number))
            writer.write_eof()
            seen.append((number, len(await reader.read())))
        except ConnectionError as error:
            seen.append((number, type(error).__name__))
        finally:
            writer.close()

    for number in range(2):
        host.sim.spawn(f"server-{number}", echo)
    await asyncio.sleep(0.01)
    async with OrderedTaskGroup() as group:
        for number in range(6):
            group.create_task(client(number))
        await asyncio.sleep(host.rng.uniform(0.001, 0.006))
        host.sim.kill("server-1")
        seen.append(await host.blocking(lambda: "called"))
        await host.fs.write("/file", host.ids.new("content").encode())
        seen.append(await host.fs.read("/file"))
    seen.append(host.clock.perf_ns())
    seen.append(host.clock.wall_ms())
    return seen


def fingerprint(seed: int) -> tuple[int, int, float, str]:
    result = simulate(busy_world, seed)
    return result.trace_crc, result.steps, result.virtual_s, repr(result.value)


def test_same_seed_gives_the_same_history_and_another_seed_another_one() -> None:
    prints = [fingerprint(seed) for seed in range(8)]
    assert [fingerprint(seed) for seed in range(8)] == prints
    assert len({crc for crc, *_ in prints}) == 8


def test_same_seed_gives_the_same_history_in_another_process_with_another_hash_seed() -> None:
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import test_loop as t; "
        "print(json.dumps([t.fingerprint(seed) for seed in range(4)]))"
    )
    outputs = []
    for hash_seed in ("1", "4242"):
        run = subprocess.run(
            [sys.executable, "-c", program, os.path.dirname(__file__)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(json.loads(run.stdout))
    assert outputs[0] == outputs[1] == [list(fingerprint(seed)) for seed in range(4)]


def test_an_hour_of_sleep_takes_no_time() -> None:
    async def main(host: SimulatedHost) -> float:
        before = host.clock.monotonic()
        await asyncio.sleep(3600)
        return host.clock.monotonic() - before

    started = time.perf_counter()
    result = simulate(main, 1)
    assert time.perf_counter() - started < 600
    assert 3600 <= result.value < 3600.01
    assert 3600 <= result.virtual_s < 3600.01


def test_timeouts_run_on_virtual_time() -> None:
    async def main(host: SimulatedHost) -> tuple[float, list[int]]:
        loop = asyncio.get_running_loop()
        before = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(90):
                await loop.create_future()
        waited = loop.time() - before
        return waited, await wait_first([loop.create_future()], timeout_s=500)

    waited, done = simulate(main, 1).value
    assert 90 <= waited < 90.1
    assert done == []


def test_waiting_for_ever_is_a_deadlock_that_names_the_tasks_and_the_seed() -> None:
    async def main(host: SimulatedHost) -> None:
        async with OrderedTaskGroup() as group:
            group.create_task(asyncio.Event().wait(), name="waits for nothing")

    with pytest.raises(SimDeadlock, match="waits for nothing") as caught:
        simulate(main, 77)
    assert "seed 77" in caught.value.__notes__[0]


def test_spinning_without_end_is_a_livelock() -> None:
    async def spin(host: SimulatedHost) -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(SimLivelock, match="not over after 5001 steps"):
        simulate(spin, 1, max_steps=5000)

    async def heartbeat(host: SimulatedHost) -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(SimLivelock, match="limits 1000000 and 60\\)"):
        simulate(heartbeat, 1, max_virtual_s=60)


@pytest.mark.parametrize("how", ["in a task", "in a callback", "catching every error"])
def test_a_callback_that_never_comes_back_ends_the_run_with_its_seed_and_stack(how: str) -> None:
    """Nothing else would: the limits of steps and of virtual time count only between callbacks."""

    def lost_in_here() -> None:
        while True:
            try:
                sum(range(100))
            except Exception:
                if how != "catching every error":
                    raise

    async def main(host: SimulatedHost) -> None:
        if how == "in a callback":
            asyncio.get_running_loop().call_soon(lost_in_here)
        else:
            host.sim.spawn("victim", victim)
        await asyncio.sleep(1)

    async def victim(host: SimulatedHost) -> int:
        lost_in_here()
        return 0

    told = r"(?s)seed 41: step \d+, of process \w+, is not over after 0\.2 s of .*in lost_in_here"
    with pytest.raises(SimLivelock, match=told) as caught:
        simulate(main, 41, max_callback_s=0.2)
    assert "seed 41 failed at step" in caught.value.__notes__[0]


def test_a_long_run_of_short_callbacks_is_not_given_up() -> None:
    async def main(host: SimulatedHost) -> int:
        for _ in range(20):
            until = time.process_time() + 0.02
            while time.process_time() < until:
                sum(range(100))
            await asyncio.sleep(0)
        return 7

    assert simulate(main, 1, max_callback_s=0.1).value == 7


def test_busy_loop_reaches_its_timer_because_callbacks_take_time() -> None:
    async def main(host: SimulatedHost) -> int:
        loop, turns, due = asyncio.get_running_loop(), 0, False

        def ring() -> None:
            nonlocal due
            due = True

        loop.call_later(0.01, ring)
        while not due:
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert simulate(main, 1, perturb=False).value == pytest.approx(0.01 / 2e-6, rel=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_order_inside_a_process_is_the_order_of_asyncio(seed: int) -> None:
    """Callbacks run first in first out; timers that fall due together by (deadline, creation),
    after what is queued.
    """

    async def main(host: SimulatedHost) -> list[str]:
        loop, log, done = asyncio.get_running_loop(), [], asyncio.Event()
        now = loop.time()
        for number in range(20):
            loop.call_at(now + 1, log.append, f"timer {number}")
        loop.call_at(now + 0.5, log.append, "early")
        loop.call_at(now + 1, done.set)

        def chain(left: int) -> None:
            log.append(f"chain {left}")
            if left:
                loop.call_soon(chain, left - 1)

        for number in range(20):
            loop.call_soon(log.append, f"soon {number}")
        loop.call_soon(chain, 1)
        loop.call_soon(log.append, "last of the first turn")
        await done.wait()
        return log

    log = simulate(main, seed).value
    assert log == [
        *[f"soon {number}" for number in range(20)],
        "chain 1",
        "last of the first turn",
        "chain 0",
        "early",
        *[f"timer {number}" for number in range(20)],
    ]


def test_order_between_processes_differs_from_seed_to_seed() -> None:
    async def main(host: SimulatedHost) -> str:
        log: list[str] = []

        async def run(child: SimulatedHost) -> None:
            for _ in range(10):
                log.append(child.name)
                await asyncio.sleep(0)

        started = [host.sim.spawn(name, run) for name in "abc"]
        for process in started:
            assert await process.wait() == 0
        return "".join(log)

    orders = {simulate(main, seed).value for seed in range(20)}
    assert len(orders) > 15
    assert all(sorted(order) == sorted("abc" * 10) for order in orders)


def test_measured_time_passes_with_every_reading_and_varies_by_seed() -> None:
    async def main(host: SimulatedHost) -> list[int]:
        readings = [host.clock.perf_ns() for _ in range(200)]
        return [after - before for before, after in itertools.pairwise(readings)]

    steady = simulate(main, 1, perturb=False).value
    assert all(900 <= step <= 1100 for step in steady)
    jumpy = simulate(main, 1).value
    assert all(step >= 900 for step in jumpy)
    assert max(jumpy) > 100_000
    assert jumpy != simulate(main, 2).value


def test_blocking_calls_take_a_seeded_time_and_pass_results_and_errors() -> None:
    async def main(host: SimulatedHost) -> float:
        before = host.clock.monotonic()
        assert await host.blocking(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await host.blocking(divmod, 7, 0, dedicated=True)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await host.blocking(next, iter(()))
        await host.close()
        with pytest.raises(RuntimeError, match="host is closed"):
            host.blocking(divmod, 7, 2)
        return host.clock.monotonic() - before

    assert len({simulate(main, seed).value for seed in range(5)}) == 5


def test_error_of_main_comes_out_with_the_seed() -> None:
    async def main(host: SimulatedHost) -> None:
        await asyncio.sleep(1)
        raise LookupError("lost")

    with pytest.raises(LookupError, match="lost") as caught:
        simulate(main, 9)
    assert "seed 9" in caught.value.__notes__[0]


def test_failed_assertion_in_an_unawaited_task_fails_the_run() -> None:
    async def broken(child: SimulatedHost) -> None:
        async def careless() -> None:
            raise AssertionError("invariant broken")

        kept = asyncio.create_task(careless())
        await asyncio.sleep(10)
        del kept

    async def main(host: SimulatedHost) -> None:
        host.sim.spawn("broken", broken)
        await asyncio.sleep(60)

    with pytest.raises(AssertionError, match="invariant broken"):
        simulate(main, 1)


def test_unretrieved_errors_and_tasks_left_behind_are_reported() -> None:
    ended: list[str] = []

    async def main(host: SimulatedHost) -> None:
        async def leak() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append("leak")

        host.sim.spawn("failing", fail)
        asyncio.get_running_loop().call_soon(int, "no number")
        kept = asyncio.create_task(leak(), name="leak")
        await asyncio.sleep(1)
        del kept

    async def fail(child: SimulatedHost) -> None:
        raise LookupError("lost")

    errors = simulate(main, 1).errors
    assert any("no number" in error for error in errors)
    assert "failing: ended with LookupError('lost')" in errors
    assert "main: task leak was left pending" in errors
    assert ended == ["leak"]


def test_cleanup_at_the_end_that_begins_new_work_leaves_nothing_unawaited() -> None:
    inner: list[Any] = []

    async def supervised(work: Coroutine[Any, Any, None]) -> None:
        await work

    async def last(host: SimulatedHost) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            inner.append(asyncio.sleep(1))
            kept.append(asyncio.create_task(supervised(inner[0])))

    async def main(host: SimulatedHost) -> None:
        host.sim.spawn("last", last)
        await asyncio.sleep(1)
        host.sim.kill("last")

    kept: list[asyncio.Task[None]] = []
    simulate(main, 1)
    assert inspect.getcoroutinestate(inner[0]) == inspect.CORO_CLOSED


def test_trace_is_kept_on_demand() -> None:
    result = simulate(busy_world, 3, keep_trace=True)
    assert result.trace is not None
    assert any("KILL server-1" in line for line in result.trace)
    assert result.trace_crc == simulate(busy_world, 3).trace_crc
