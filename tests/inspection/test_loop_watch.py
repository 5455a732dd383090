"""Code that holds the event loop: it is named wherever it runs, and a busy machine blames none."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import aioflow as af
from aioflow.core.host import ThreadTimes
from aioflow.core.system_host import SystemHost
from aioflow.inspection import loop_watch
from aioflow.inspection.loop_watch import BEAT_S, LoopWatch, _Look, _others_compute, watch_loop

pytestmark = pytest.mark.slow_callbacks


def block(watch: LoopWatch | None = None) -> None:
    """Holds the loop for half a second, and on a busy machine until enough samples were taken."""
    watch = watch or loop_watch._watches[asyncio.get_running_loop()]
    begun = time.monotonic()
    while (held_s := time.monotonic() - begun) < 0.5 or len(watch._looks) * BEAT_S < held_s / 3:
        time.sleep(0.05)


async def enrich(value: int) -> int:
    await asyncio.sleep(0)
    block()
    return value


class Keyed(af.KeyedProcessFunction[int, int, int]):
    async def process_element(self, value: int, ctx: Any) -> AsyncIterator[int]:
        await asyncio.sleep(0)
        block()
        yield value


async def feed() -> AsyncIterator[int]:
    await asyncio.sleep(0)
    block()
    yield 1


async def deliver(value: int) -> None:
    await asyncio.sleep(0)
    block()


def mapped(flow: af.Flow) -> None:
    flow.source([1]).map(enrich, name="culprit").map(abs).sink(af.io.blackhole())


def processed(flow: af.Flow) -> None:
    flow.source([1]).key_by(abs).process(Keyed(), name="culprit").sink(af.io.blackhole())


def read(flow: af.Flow) -> None:
    flow.source(feed, name="culprit").map(abs).sink(af.io.blackhole())


def delivered(flow: af.Flow) -> None:
    flow.source([1]).map(abs).sink(deliver, name="culprit")


@pytest.mark.parametrize("build", [mapped, processed, read, delivered])
async def test_coroutine_that_blocks_is_named_with_its_stack(
    build: Any, caplog: pytest.LogCaptureFixture
) -> None:
    flow = af.Flow("held")
    build(flow)
    with caplog.at_level(logging.WARNING):
        result = await flow.execute()
    (message,) = [one.getMessage() for one in caplog.records if "held the event" in one.message]
    assert "'culprit', subtask 1/1 of job 'held'" in message
    assert "of processor time" in message
    assert "It waits without await" in message
    assert message.splitlines()[-1].startswith("  at block (inspection/test_loop_watch.py:")
    named = {
        name.rpartition(".")[0].rpartition(".")[2]
        for name, value in result.metrics.items()
        if name.endswith("slowCallbacks") and ".culprit." in name and value
    }
    assert named == {"culprit"}


async def test_code_outside_of_all_flows_is_not_blamed_on_an_operator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = af.Flow("innocent")
    events = flow.source(af.io.push())
    events.map(abs, name="innocent").sink(af.io.blackhole())

    async def handler() -> None:
        block()

    with caplog.at_level(logging.WARNING):
        async with flow.run() as job:
            await job.input(events).put(1)
            await asyncio.create_task(handler(), name="handler")
    (message,) = [one.getMessage() for one in caplog.records if "held the event" in one.message]
    assert "code outside of all operators, in task 'handler'" in message
    assert not [value for name, value in job.metrics().items() if "slowC" in name and value]


@pytest.mark.parametrize("importer", ["engine", "user"])
@pytest.mark.parametrize("at", ["action", "coroutine"])
async def test_import_of_a_library_is_blamed_on_user_code_only_if_it_imports(
    at: str, importer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connectors import their clients at the first use, on the loop."""
    library = tmp_path / "site-packages" / f"library_of_{at}_{importer}.py"
    library.parent.mkdir()
    # The time is processor time, as for most imports.
    library.write_text(
        "import asyncio, time\nfrom aioflow.inspection import loop_watch\n"
        "watch = loop_watch._watches[asyncio.get_running_loop()]\nbegun = time.thread_time()\n"
        "while time.thread_time() - begun < 0.3 or len(watch._looks) < 3:\n    sum(range(1000))\n"
    )
    monkeypatch.syspath_prepend(library.parent)
    file = str(Path(af.__file__).parent / "lazy.py") if importer == "engine" else __file__
    code = compile(f"import {library.stem}", file, "exec")

    def called(value: int) -> int:
        exec(code)
        return value

    async def awaited(value: int) -> int:
        await asyncio.sleep(0)
        return called(value)

    flow = af.Flow("imports")
    flow.source([1]).map(called if at == "action" else awaited, name="culprit").sink(print)
    async with flow.run() as job:
        watch = loop_watch._watches[asyncio.get_running_loop()]
        await job.wait()
    blamed = [hold for hold in watch.holds if hold.operator == "culprit"]
    assert bool(blamed) is (importer == "user")
    assert bool(watch.unexplained) is (importer == "engine")


@pytest.mark.parametrize(("ready_s", "blamed"), [(0.0, True), (10.0, False)])
async def test_code_is_not_blamed_for_the_time_without_a_processor(
    ready_s: float, blamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    host = SystemHost()
    clocks, waited_s = host.procs.thread_times(), 0.0

    def times() -> ThreadTimes:
        return replace(clocks(), waited_s=waited_s, process_cpu_s=0.0)

    watch = LoopWatch(host, times)
    watch.start()
    waited_s = ready_s
    block(watch)
    noted = watch.note(None, 0.3) if ready_s else None
    await watch.close()
    await host.close()
    assert noted is None
    assert bool(watch.holds) is blamed
    assert bool(watch.unexplained) is not blamed


async def test_action_that_only_waits_unseen_blames_no_operator() -> None:
    """As when other threads have the interpreter, or the machine reads a page from the disk."""
    host = SystemHost()
    clocks, process_cpu_s = host.procs.thread_times(), 0.0

    def times() -> ThreadTimes:
        return replace(clocks(), waited_s=0.0, process_cpu_s=process_cpu_s)

    watch = LoopWatch(host, times)
    watch.start()
    assert watch.note(None, 0.3) is None
    assert watch.unexplained == 1
    await watch.close()
    await host.close()


async def test_pause_of_the_process_blames_no_code() -> None:
    """A suspended process finds itself in its select, with a beat that is long overdue."""
    host = SystemHost()
    watch = LoopWatch(host, host.procs.thread_times())
    watch.start()
    clock = host.clock.monotonic
    watch._now = lambda: clock() + 5.0
    await asyncio.sleep(0)
    await watch.close()
    await host.close()
    assert not watch.holds
    assert watch.unexplained == 1


async def test_pause_of_the_process_blames_no_code_that_was_met_before() -> None:
    """A process that is stopped in a computation goes on in the same one."""
    host = SystemHost()
    watch = LoopWatch(host, host.procs.thread_times())
    watch.start()
    clock = host.clock.monotonic
    time.sleep(0.2)
    watch._now = lambda: clock() + 5.0
    noted = watch.note(None, 5.2)
    await watch.close()
    await host.close()
    assert noted is None
    assert not watch.holds


@pytest.mark.parametrize(("cpu_s", "others"), [(0.06, True), (0.001, False)])
def test_loop_of_one_line_does_not_stand_still(cpu_s: float, others: bool) -> None:
    look = _Look("job", None, "task", ("at",), ("orders.py", 1, "total"))
    times = ThreadTimes(cpu_s=cpu_s, process_cpu_s=0.2, waited_s=0.0)
    assert _others_compute(times, 0.21, [look, look]) is others


async def test_job_that_began_the_watch_ends_while_another_one_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its host waits for all its threads when it is closed."""
    both, over = asyncio.Event(), asyncio.Event()

    async def first() -> AsyncIterator[int]:
        await both.wait()
        yield 1

    async def second() -> AsyncIterator[int]:
        both.set()
        await over.wait()
        block()
        yield 2

    one, other = af.Flow("one"), af.Flow("other")
    ends = other.source(second, name="culprit").collect()
    async with asyncio.TaskGroup() as group:
        ended = group.create_task(one.source(first).collect())
        goes_on = group.create_task(ends)
        assert await ended == [1]
        over.set()
        assert await goes_on == [2]
    assert "still running" not in caplog.text
    assert "held the event loop for" in caplog.text


async def test_monitored_job_ends_although_its_endpoint_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The endpoint watches the loop too, and stays until the context is left."""
    flow = af.Flow("monitored")
    flow.source([1, 2, 3]).sink(af.io.blackhole())
    async with flow.run(monitor="127.0.0.1:0") as job:
        await job.wait()
    assert "blocking calls still running" not in caplog.text


def test_thread_ends_with_a_loop_that_is_closed_without_its_jobs() -> None:
    async def begin() -> None:
        watch_loop(SystemHost())

    before = set(threading.enumerate())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    left = [one for one in set(threading.enumerate()) - before if "loop-watch" in one.name]
    loop.close()
    assert left
    for thread in left:
        thread.join(10)
        assert not thread.is_alive()
