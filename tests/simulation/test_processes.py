"""Simulated processes die, stall and start as real ones do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioflow.core.host import Host
from aioflow.testing import simulate
from aioflow.testing.simulation import SimulatedHost


async def forever(host: SimulatedHost) -> None:
    await asyncio.get_running_loop().create_future()


def test_killed_process_runs_no_finally_block_and_no_timer() -> None:
    async def main(host: SimulatedHost) -> list[str]:
        log: list[str] = []

        async def victim(child: SimulatedHost) -> None:
            asyncio.get_running_loop().call_later(1, log.append, "timer")
            try:
                await asyncio.sleep(10)
            finally:
                log.append("finally")

        process = host.sim.spawn("victim", victim)
        await asyncio.sleep(0.5)
        host.sim.kill("victim")
        assert not host.sim.is_alive("victim")
        assert await process.wait() == -9
        await asyncio.sleep(60)
        return list(log)

    assert simulate(main, 1).value == []


def test_process_killed_at_the_moment_of_its_failure_leaves_no_unretrieved_error() -> None:
    async def main(host: SimulatedHost) -> Any:
        async def victim(child: SimulatedHost) -> None:
            asyncio.get_running_loop().call_soon(host.sim.kill, "victim")
            raise ValueError("no listener is left")

        process = host.sim.spawn("victim", victim)
        assert await process.wait() == -9
        return process._task

    assert not simulate(main, 1).value._log_traceback, "asyncio would complain when it goes"


def test_restarted_process_is_a_new_life_of_the_same_main() -> None:
    async def main(host: SimulatedHost) -> list[str]:
        log: list[str] = []

        async def work(child: SimulatedHost) -> None:
            log.append(child.ids.new("life"))
            await asyncio.sleep(1)
            log.append("survived")

        host.sim.spawn("worker", work)
        await asyncio.sleep(0.1)
        host.sim.kill("worker")
        again = host.sim.restart("worker")
        assert await again.wait() == 0
        return log

    first, second, ended = simulate(main, 1).value
    assert ended == "survived"
    assert first != second


def test_paused_process_stands_still_and_goes_on_where_it_was() -> None:
    async def main(host: SimulatedHost) -> tuple[int, int, int]:
        ticks = 0

        async def tick(child: SimulatedHost) -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.1)
                ticks += 1

        host.sim.spawn("ticker", tick)
        await asyncio.sleep(1.05)
        host.sim.pause("ticker")
        at_pause = ticks
        await asyncio.sleep(10)
        paused = ticks
        host.sim.resume("ticker")
        await asyncio.sleep(0.55)
        return at_pause, paused, ticks

    at_pause, paused, end = simulate(main, 1).value
    assert at_pause in (9, 10)
    assert paused == at_pause
    assert at_pause + 5 <= end <= at_pause + 7


def test_process_ends_with_the_code_of_its_main_and_its_connections_close() -> None:
    async def main(host: SimulatedHost) -> bytes:
        async def serve_one(child: SimulatedHost) -> None:
            served = asyncio.Event()

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                served.set()

            await asyncio.start_server(serve, port=7)
            await served.wait()
            raise LookupError("lost")

        process = host.sim.spawn("server", serve_one)
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("server", 7)
        assert await process.wait() == 1
        assert isinstance(process.error, LookupError)
        try:
            return await reader.read()
        except ConnectionResetError:
            return b"reset"
        finally:
            writer.close()

    assert {simulate(main, seed).value for seed in range(10)} == {b"", b"reset"}


def test_executed_program_gets_arguments_secret_and_the_machine_of_its_parent() -> None:
    async def main(host: SimulatedHost) -> tuple[int, bytes]:
        listening: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            listening.set_result(await reader.read())
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def worker(child: SimulatedHost, argv: list[str]) -> int:
            secret = child.procs.take_secret()
            assert child.procs.take_secret() is None
            assert secret is not None
            _, writer = await asyncio.open_connection("127.0.0.1", int(argv[-1]))
            writer.write(secret + child.env["MARK"].encode())
            writer.close()
            await writer.wait_closed()
            return 5

        host.sim.programs["worker"] = worker
        seam: Host = host
        process = await seam.procs.exec(
            ["python", "worker", str(port)], env={"MARK": "1"}, secret=b"key"
        )
        code = await process.wait()
        data = await listening
        server.close()
        with pytest.raises(FileNotFoundError, match="no program of the simulation"):
            await seam.procs.exec(["unknown"])
        return code, data

    assert simulate(main, 1).value == (5, b"key1")


def test_terminate_cancels_the_main_and_kill_does_not_ask() -> None:
    async def main(host: SimulatedHost) -> list[object]:
        log: list[object] = []

        async def worker(child: SimulatedHost, argv: list[str]) -> int:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                log.append(argv[1])
            return 0

        host.sim.programs["worker"] = worker
        asked = await host.procs.exec(["worker", "asked"])
        forced = await host.procs.exec(["worker", "forced"])
        await asyncio.sleep(0.1)
        asked.terminate()
        forced.kill()
        log.append(await asked.wait())
        log.append(await forced.wait())
        return list(log)

    assert simulate(main, 1).value == ["asked", -15, -9]


def test_chance_of_one_process_does_not_depend_on_the_others() -> None:
    async def draws(host: SimulatedHost, others: int) -> list[object]:
        drawn: list[object] = []

        async def watched(child: SimulatedHost) -> None:
            drawn.extend([child.rng.random(), child.ids.new("job")])

        async def noise(child: SimulatedHost) -> None:
            child.rng.random()
            child.ids.new("noise")

        for number in range(others):
            host.sim.spawn(f"noise-{number}", noise)
        await host.sim.spawn("watched", watched).wait()
        return drawn

    alone = simulate(lambda host: draws(host, 0), 5).value
    crowded = simulate(lambda host: draws(host, 4), 5).value
    assert alone == crowded
    assert simulate(lambda host: draws(host, 0), 6).value != alone


def test_rare_branches_are_taken_in_some_seeds_only() -> None:
    async def main(host: SimulatedHost) -> int:
        return sum(host.buggify("slow ack", 0.5) for _ in range(100))

    taken = [simulate(main, seed).value for seed in range(40)]
    assert 3 <= sum(count > 0 for count in taken) <= 20
    assert all(count == 0 or 20 < count < 80 for count in taken)
    assert simulate(main, next(seed for seed in range(40) if taken[seed]), perturb=False).value == 0


def test_future_that_another_process_completes_wakes_its_waiter_in_the_process_that_waits() -> None:
    async def main(host: SimulatedHost) -> list[str]:
        log: list[str] = []
        ready, never = asyncio.Event(), asyncio.Event()

        async def worker(child: SimulatedHost) -> None:
            ready.set()
            try:
                await never.wait()
                log.append("a dead process woke up")
            finally:
                log.append("finally")

        host.sim.spawn("worker", worker)
        await ready.wait()
        host.sim.kill("worker")
        await asyncio.sleep(1)
        log.append(host.sim.loop.current.name)
        host.sim.restart("worker")
        await asyncio.sleep(1)
        host.sim.kill("worker")
        never.set()
        await asyncio.sleep(1)
        return list(log)

    for seed in range(10):
        assert simulate(main, seed).value == ["main"]


def test_callbacks_of_a_connection_run_in_the_process_that_owns_its_end() -> None:
    async def main(host: SimulatedHost) -> list[str]:
        log: list[str] = []

        async def serve(child: SimulatedHost) -> None:
            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.read()
                log.append(child.sim.loop.current.name)
                await asyncio.sleep(1)
                log.append(child.sim.loop.current.name)
                writer.close()

            await (await asyncio.start_server(answer, port=7)).serve_forever()

        host.sim.spawn("server", serve)
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection("server", 7)
        writer.write_eof()
        assert await reader.read() == b""
        log.append(host.sim.loop.current.name)
        writer.close()
        return log

    for seed in range(10):
        assert simulate(main, seed).value == ["server", "server", "main"]


def test_an_error_that_a_killed_process_had_not_looked_at_yet_belongs_to_no_task() -> None:
    """Killed at any moment: between the end of a task and the callbacks that tell of it, too."""

    async def fails() -> None:
        raise OSError("planted")

    async def victim(host: SimulatedHost) -> int:
        for _ in range(50):
            _ = asyncio.get_running_loop().create_task(fails())
            await asyncio.sleep(0)
        return 0

    def killed_after(steps: int) -> list[str]:
        async def main(host: SimulatedHost) -> None:
            host.sim.spawn("victim", victim)
            for _ in range(steps):
                await asyncio.sleep(0)
            host.sim.kill("victim")
            await asyncio.sleep(0.01)

        return simulate(main, steps).errors

    assert [steps for steps in range(60) if killed_after(steps)] == []
