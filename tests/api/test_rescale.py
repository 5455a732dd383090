"""A running job goes on at another parallelism: exact results, clear refusals, one handle."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import aioflow as af

pytestmark = pytest.mark.timeout(60)

_NAMES = itertools.count()


@pytest.fixture
def store() -> str:
    """A store for this test alone."""
    return f"memory://test-rescale-{next(_NAMES)}"


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


class Numbers:
    """A replayable source: 0, 1, 2 ... up to `end`, as fast as it is read."""

    def __init__(self) -> None:
        self.end: int | None = None
        self.read_until = 0

    async def read(self, position: Any) -> AsyncIterator[tuple[int, int]]:
        i = position or 0
        while self.end is None or i < self.end:
            if not i % 50:
                await asyncio.sleep(0.001)
            yield i, i + 1
            i += 1
            self.read_until = max(self.read_until, i)


def counting(
    read: Callable[..., Any],
    rows: list[Any],
    fn: Callable[[int], int] = lambda n: n,
    **options: Any,
) -> tuple[af.Flow, Any]:
    flow = af.Flow("rescaled", **options)
    numbers = flow.source(read, uid="numbers").rebalance().map(fn, uid="checked")
    counts = numbers.key_by(lambda n: n % 50).count(uid="count")
    counts.sink(rows.append)
    return flow, counts


def exact(rows: list[tuple[int, int]], n: int) -> bool:
    """Whether the counts of `n` numbers are there, each once and in order."""
    reached: dict[int, int] = {}
    for key, count in rows:
        if reached.get(key, 0) + 1 != count:
            return False
        reached[key] = count
    return sum(reached.values()) == n == len(rows)


def parallelism(job: af.Job) -> list[int]:
    return [vertex.parallelism for vertex in job.graph.vertices]


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("state", ["heap", "rocksdb"])
async def test_rescaling_under_load_loses_and_doubles_nothing(
    store: str, state: str, unaligned: bool
) -> None:
    """The sink is a plain function, which would see each repetition."""
    numbers, rows = Numbers(), list[Any]()
    flow, counts = counting(numbers.read, rows)
    options: dict[str, Any] = {"state": state, "unaligned": unaligned}
    async with flow.run(checkpoints=store, every="50ms", **options) as job:
        handle, name = job.id, repr(job)
        for wanted in (4, 2, 3, 1):
            seen = len(rows)
            await eventually(lambda seen=seen: len(rows) > seen + 100)  # type: ignore[misc]
            await job.rescale(parallelism=wanted)
            assert parallelism(job)[1:] == [wanted, wanted]
            assert (job.id, repr(job)) == (handle, name)
            assert await job.state(counts).get(7) is not None
        numbers.end = numbers.read_until + 500
        result = await job.wait()
    assert result.restarts == 0, "a rescaling is no failure"
    assert exact(rows, numbers.end)


async def test_rescaling_with_failures_in_between_is_exact(store: str) -> None:
    """A failure at any moment restarts the job from a checkpoint, and the rescaling ends well."""
    numbers, rows = Numbers(), list[Any]()
    failing: list[bool] = []

    def fragile(n: int) -> int:
        if failing:
            failing.clear()
            raise OSError("away")
        return n

    flow, _ = counting(numbers.read, rows, fragile)
    restart = af.fixed_delay(1000, "1ms")
    async with flow.run(checkpoints=store, every="20ms", restart=restart) as job:
        for round_, wanted in enumerate([4, 2, 3, 1] * 3):
            rescaling = asyncio.create_task(job.rescale(parallelism=wanted))
            for _ in range(round_ % 5):  # At another moment of the rescaling each time.
                await asyncio.sleep(0.002)
            failing.append(True)
            await rescaling
            assert parallelism(job)[1:] == [wanted, wanted]
        failing.clear()
        numbers.end = -(-numbers.read_until // 50) * 50 + 500
        result = await job.wait()
    assert result.restarts >= 1
    for key in range(50):
        of_key = [count for k, count in rows if k == key]
        assert set(of_key) == set(range(1, numbers.end // 50 + 1))
        assert of_key[-1] == numbers.end // 50


async def test_pushed_elements_are_neither_lost_nor_doubled(store: str) -> None:
    flow, rows = af.Flow("pushed"), list[Any]()
    events = flow.source(af.io.push(), uid="events")
    events.key_by(lambda n: n % 5).count(uid="count").sink(rows.append)
    async with flow.run(checkpoints=store, every="20ms") as job:
        inlet = job.input(events)

        async def push() -> None:
            for n in range(2000):
                await inlet.put(n)
                if not n % 20:
                    await asyncio.sleep(0.001)

        pushing = asyncio.create_task(push())
        for wanted in (3, 1, 2):
            await job.rescale("count", wanted)
        await pushing
        await eventually(lambda: len(rows) >= 2000)
        await job.rescale("count", 4)
        await inlet.put(2000)
        await eventually(lambda: len(rows) > 2000)
    assert len(rows) == 2001
    assert max(count for key, count in rows if key == 0) == 401


async def test_a_source_function_that_would_begin_again_is_named(store: str) -> None:
    """After its end it may: it is not called again."""
    gate = asyncio.Event()

    async def read() -> AsyncIterator[int]:
        for n in range(10):
            yield n
        await gate.wait()

    flow, rows = af.Flow("once"), list[Any]()
    flow.source(read, uid="read").key_by(lambda n: n % 5).count(uid="count").sink(rows.append)
    endless = af.io.datagen(lambda n: n, rate=100)
    flow.source(endless).rebalance().map(str, uid="more").sink(af.io.blackhole())
    async with flow.run(checkpoints=store, every="10ms") as job:
        await eventually(lambda: len(rows) == 10)
        with pytest.raises(af.RescaleError, match=r"'read' would be called again"):
            await job.rescale("count", 3)
        gate.set()
        tasks = job._cluster.job_master.executions.executions
        (source,) = [vertex.id for vertex in job.graph.vertices if vertex.head.name == "read"]
        await eventually(lambda: tasks[source, 0].state.is_terminal)
        await job.rescale("more", 2)
        await job.cancel()
    assert len(rows) == 10


async def test_operators_with_a_parallelism_of_their_own_keep_it(store: str) -> None:
    flow, rows = af.Flow("own", parallelism=2), list[Any]()
    numbers = flow.source(Numbers().read, uid="numbers").rebalance()
    doubled = numbers.map(lambda n: 2 * n, uid="doubled", parallelism=3).rebalance()
    doubled.map(str, uid="text").sink(rows.append)
    async with flow.run(checkpoints=store, every="1h") as job:
        assert parallelism(job) == [1, 3, 2]
        await job.rescale(parallelism=4)
        assert parallelism(job) == [1, 3, 4]
        await job.rescale("doubled", 1)
        assert parallelism(job) == [1, 1, 4]
        await job.cancel()


async def test_a_rescaling_that_cannot_be_done_says_why(store: str) -> None:
    numbers, rows = Numbers(), list[Any]()
    flow, counts = counting(numbers.read, rows, max_parallelism=8)
    async with flow.run(checkpoints=store, every="1h") as job:
        with pytest.raises(af.GraphError, match="did you mean 'count'"):
            await job.rescale("cuont", 2)
        with pytest.raises(af.GraphError, match=r"'count'.*parallelism 9: expected 1"):
            await job.rescale("count", 9)
        with pytest.raises(af.GraphError, match="expected 1 to max_parallelism=8"):
            await job.rescale(parallelism=0)
        with pytest.raises(af.GraphError, match="cannot be split"):
            await job.rescale("numbers", 2)
        with pytest.raises(af.RescaleError, match="no workers"):
            await job.rescale(workers=2)
        with pytest.raises(TypeError, match="needs parallelism="):
            await job.rescale()
        with pytest.raises(TypeError, match=r"write rescale\(parallelism=4\)"):
            await job.rescale(4)  # type: ignore[arg-type]
        first = asyncio.create_task(job.rescale(counts, 2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(af.RescaleError, match="already"):
            await job.rescale(counts, 3)
        await first
        assert parallelism(job)[-1] == 2
        numbers.end = numbers.read_until + 100
        await job.wait()
        with pytest.raises(af.JobNotRunning, match="is FINISHED"):
            await job.rescale(counts, 3)
    assert exact(rows, numbers.end)


async def test_a_job_without_checkpoints_says_what_it_needs() -> None:
    flow, _ = counting(Numbers().read, [])
    async with flow.run() as job:
        with pytest.raises(af.RescaleError, match="checkpoints=URL"):
            await job.rescale(parallelism=2)
        await job.cancel()


async def test_a_cancelled_call_does_not_stop_the_rescaling(store: str) -> None:
    numbers, rows = Numbers(), list[Any]()
    flow, _ = counting(numbers.read, rows)
    async with flow.run(checkpoints=store, every="1h") as job:
        rescaling = asyncio.create_task(job.rescale(parallelism=3))
        await asyncio.sleep(0.002)
        rescaling.cancel()
        await eventually(lambda: parallelism(job)[1:] == [3, 3])
        numbers.end = numbers.read_until + 100
        await job.wait()
    assert exact(rows, numbers.end)


async def test_a_rescaling_during_a_restart_is_that_restart(store: str) -> None:
    """It does not wait for the delay: the job was asked to go on."""
    numbers, rows = Numbers(), list[Any]()
    failures = iter([True])

    def fragile(n: int) -> int:
        if n == 1000 and next(failures, False):
            raise OSError("away")
        return n

    flow, _ = counting(numbers.read, rows, fragile)
    restart = af.fixed_delay(1, "1h")
    async with flow.run(checkpoints=store, every="1h", restart=restart) as job:
        await eventually(lambda: job.status == "RESTARTING")
        await job.rescale(parallelism=2)
        assert job.status == "RUNNING"
        assert parallelism(job)[1:] == [2, 2]
        await job.cancel()


async def test_a_job_that_is_being_stopped_is_not_rescaled(store: str) -> None:
    flow, rows = af.Flow("stopping"), list[Any]()
    gate = asyncio.Event()

    async def slow(n: int) -> int:
        await gate.wait()
        return n

    flow.source(Numbers().read).map(slow, concurrency=1).sink(rows.append)
    async with flow.run(checkpoints=store, every="1h") as job:
        stopping = asyncio.create_task(job.stop())
        await asyncio.sleep(0)
        with pytest.raises(af.RescaleError, match="stopped"):
            await job.rescale(parallelism=1)
        gate.set()
        assert await stopping is not None


async def test_tasks_go_on_if_the_checkpoint_that_holds_them_fails(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, rows = Numbers(), list[Any]()
    flow, _ = counting(numbers.read, rows)
    async with flow.run(checkpoints=store, every="1h", tolerable_failures=10) as job:
        kept = job._cluster.job_master._checkpoints.store  # type: ignore[attr-defined]
        complete, calls = kept.complete, itertools.count(1)

        async def fail_the_second(checkpoint: Any) -> Any:
            if next(calls) == 2:
                raise OSError("full")
            return await complete(checkpoint)

        monkeypatch.setattr(kept, "complete", fail_the_second)
        with pytest.raises(af.RescaleError, match="goes on as it was: checkpoint 2 failed"):
            await job.rescale(parallelism=2)
        assert parallelism(job)[1:] == [1, 1]
        seen = len(rows)
        await eventually(lambda: len(rows) > seen + 100)
        await job.rescale(parallelism=2)
        numbers.end = numbers.read_until + 100
        await job.wait()
    assert exact(rows, numbers.end)


async def test_a_job_whose_memory_does_not_suffice_goes_on_as_it_was(store: str) -> None:
    numbers = Numbers()
    rows: list[Any] = []
    flow, _ = counting(numbers.read, rows, parallelism=2, max_parallelism=64)
    memory: dict[str, Any] = {"network_memory": "900KiB", "restart": af.no_restart()}
    async with flow.run(checkpoints=store, every="50ms", **memory) as job:
        await eventually(lambda: len(rows) > 500)
        with pytest.raises(af.RescaleError, match="goes on as it was: Insufficient network memory"):
            await job.rescale(parallelism=64)
        assert max(parallelism(job)) == 2
        seen = len(rows)
        await eventually(lambda: len(rows) > seen + 500)
        await job.rescale(parallelism=1)
        assert max(parallelism(job)) == 1
        numbers.end = numbers.read_until + 100
        await job.wait()
    assert exact(rows, numbers.end)


@pytest.mark.parametrize("turns", range(12))
async def test_a_savepoint_amid_a_rescaling_waits_for_it(store: str, turns: int) -> None:
    numbers, rows = Numbers(), list[Any]()
    flow, _ = counting(numbers.read, rows)
    async with flow.run(checkpoints=store, every="5ms", max_concurrent=2) as job:
        await eventually(lambda: len(rows) > 100)
        rescaling = asyncio.create_task(job.rescale(parallelism=3))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        savepoint, number = await asyncio.gather(job.savepoint(), job.checkpoint())
        assert savepoint
        assert number
        await rescaling
        numbers.end = numbers.read_until + 100
        await job.wait()
    assert exact(rows, numbers.end)


@pytest.mark.parametrize("turns", range(0, 40, 4))
async def test_a_rescaling_near_the_end_says_that_the_job_ends(store: str, turns: int) -> None:
    numbers, rows = Numbers(), list[Any]()
    flow, counts = counting(numbers.read, rows)
    async with flow.run(checkpoints=store, every="1h") as job:
        await eventually(lambda: len(rows) > 100)
        numbers.end = numbers.read_until + 1
        for _ in range(turns):
            await asyncio.sleep(0)
        with contextlib.suppress(af.JobNotRunning):
            await job.rescale(counts, 2)
        await job.wait()
    assert exact(rows, numbers.end)


async def test_a_rescaling_whose_checkpoint_comes_after_the_final_one_says_that_the_job_ends(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, rows = Numbers(), list[Any]()
    flow, counts = counting(numbers.read, rows)
    async with flow.run(checkpoints=store, every="1h") as job:
        kept = job._cluster.job_master._checkpoints.store  # type: ignore[attr-defined]
        complete, stored = kept.complete, list[asyncio.Event]()

        async def slow(checkpoint: Any) -> Any:
            stored.append(asyncio.Event())
            if len(stored) <= 2:
                await stored[-1].wait()
            return await complete(checkpoint)

        monkeypatch.setattr(kept, "complete", slow)
        await eventually(lambda: len(rows) > 100)
        rescaling = asyncio.create_task(job.rescale(counts, 2))
        await eventually(lambda: len(stored) == 1)
        savepoint = asyncio.create_task(job.savepoint())
        await asyncio.sleep(0.01)
        stored[0].set()  # The savepoint follows, and then the checkpoint that holds the tasks.
        await eventually(lambda: len(stored) == 2)
        numbers.end = numbers.read_until + 100
        tasks = job._cluster.job_master.executions.executions.values()
        await eventually(lambda: exact(rows, numbers.end or 0))
        assert all(task.state.value == "RUNNING" for task in tasks)
        await asyncio.sleep(0.01)
        stored[1].set()
        with pytest.raises(af.JobNotRunning, match="only a job that runs can be rescaled"):
            await rescaling
        assert await savepoint
        await job.wait()
    assert exact(rows, numbers.end)


async def test_a_call_in_a_thread_that_does_not_end_lets_the_job_go_on_as_it_was(
    store: str,
) -> None:
    numbers, rows = Numbers(), list[Any]()
    hangs, let_go = threading.Event(), threading.Event()

    def call(n: int) -> int:
        if n == 300:
            hangs.set()
            assert let_go.wait(60)
        return n

    flow, read = af.Flow("calls"), numbers.read
    called = flow.source(read, uid="numbers").map(call, blocking=True, concurrency=4, uid="call")
    called.key_by(lambda n: n % 50).count(uid="count").sink(rows.append)
    options: dict[str, Any] = {"cancellation_timeout": "20ms", "restart": af.no_restart()}
    async with flow.run(checkpoints=store, every="1h", **options) as job:
        await asyncio.to_thread(hangs.wait, 30)
        with pytest.raises(
            af.RescaleError,
            match=r"goes on as it was: .*operator .map.call.., .* did not end its calls",
        ):
            await job.rescale("count", 2)
        let_go.set()
        numbers.end = numbers.read_until + 100
        seen = len(rows)
        await eventually(lambda: len(rows) > seen)
        await job.wait()
    assert exact(rows, numbers.end)


async def test_a_rescaling_waits_for_calls_in_threads(store: str) -> None:
    numbers, rows = Numbers(), list[Any]()
    running = overlaps = 0
    lock = threading.Lock()
    may_run = threading.Event()
    may_run.set()

    def call(n: int) -> int:
        nonlocal running, overlaps
        with lock:
            running += 1
            overlaps = max(overlaps, running)
        assert may_run.wait(60)
        with lock:
            running -= 1
        return n

    flow, read = af.Flow("calls"), numbers.read
    called = flow.source(read, uid="numbers").map(call, blocking=True, concurrency=4, uid="call")
    called.key_by(lambda n: n % 50).count(uid="count").sink(rows.append)
    async with flow.run(checkpoints=store, every="1h", cancellation_timeout="1h") as job:
        for wanted in (3, 1, 2):
            seen = len(rows)
            await eventually(lambda seen=seen: len(rows) > seen + 100)  # type: ignore[misc]
            may_run.clear()
            await eventually(lambda: running == 4)
            rescaling = asyncio.create_task(job.rescale("count", wanted))
            await asyncio.sleep(0.01)
            may_run.set()
            await rescaling
        numbers.end = numbers.read_until + 100
        await job.wait()
    assert overlaps == 4
    assert exact(rows, numbers.end)
