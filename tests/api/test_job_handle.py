"""The handle of a running job: what it refuses, what it forgets, and that nothing outlives its
block.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import aioflow as af
from aioflow.core.aio import wait_first


@pytest.mark.parametrize("blocked", [False, True])
async def test_closed_subscription_is_dropped(blocked: bool) -> None:
    """A service subscribes once for each of its requests, for as long as the job runs; also
    while a sink holds the job back.
    """
    flow, gate, reached = af.Flow("kept"), asyncio.Event(), asyncio.Event()
    events = flow.source(af.io.push())

    async def write(value: int) -> None:
        reached.set()
        await gate.wait()

    events.map(lambda x: x).sink(write)
    async with flow.run() as job:
        if blocked:
            await job.input(events).put_many(range(100))
            await reached.wait()
        rows = job.subscribe(events)
        async with rows:
            await asyncio.sleep(0)
        kept = weakref.ref(rows)
        del rows
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()
        assert kept() is None
        gate.set()


async def test_a_job_that_was_entered_by_hand_goes_on_as_long_as_its_handle() -> None:
    """As in the cells of a notebook, where no name keeps what `flow.run()` returned."""
    flow, seen = af.Flow("cells"), asyncio.Event()
    numbers = flow.source(af.io.push())
    numbers.sink(lambda n: seen.set() if n == 2 else None)
    job = await flow.run().__aenter__()
    await job.input(numbers).put(1)
    gc.collect()
    for _ in range(10):
        await asyncio.sleep(0)
    assert job.status is af.JobStatus.RUNNING
    await job.input(numbers).put(2)
    await seen.wait()
    await job.stop()
    assert job.status is af.JobStatus.FINISHED


async def test_a_block_left_by_cancellation_takes_its_job_along() -> None:
    """Cancelled while it stops: it stops still, bounded by `stop_timeout`, and the cancellation
    comes out.
    """
    reached = asyncio.Event()
    jobs: list[Any] = []

    async def forever(value: int) -> None:
        reached.set()
        await asyncio.get_running_loop().create_future()

    async def service() -> None:
        flow = af.Flow("left")
        events = flow.source(af.io.push())
        events.map(forever).sink(af.io.blackhole())
        async with flow.run(stop_timeout="100ms") as job:
            jobs.append(job)
            await job.input(events).put(1)
            await reached.wait()

    task = asyncio.create_task(service())
    await reached.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done(), "it waits for its job to stop"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert jobs[0].status is af.JobStatus.CANCELED


async def test_a_stop_that_took_too_long_gives_the_savepoint_that_was_complete(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A part that does not close in time is cancelled.

    The savepoint stays, and the next run resumes from it.
    """
    gate, handles = asyncio.Event(), list[Any]()

    class Lingers(af.MapFunction):
        def map(self, value: int) -> int:
            return value

        async def close(self) -> None:
            await gate.wait()

    async def time_is_up(waited: Any, timeout_s: float | None = None) -> Any:
        if timeout_s != 3600:
            return await wait_first(waited)
        while handles[0]._cluster.job_master.stopped_with is None:
            await asyncio.sleep(0.001)
        return None

    monkeypatch.setattr("aioflow.api.job.wait_first", time_is_up)
    flow = af.Flow("lingers")
    flow.source(af.io.push(), uid="in").map(Lingers, uid="map").sink(af.io.blackhole(), uid="out")
    async with (
        asyncio.timeout(60),
        flow.run(checkpoints="memory://lingers", every="1h", stop_timeout="1h") as job,
    ):
        handles.append(job)
        stopping = asyncio.create_task(job.stop())
        while "it is cancelled" not in caplog.text:
            await asyncio.sleep(0.001)
        assert not stopping.done(), "it waits until all is closed"
        gate.set()
        path = await stopping
        assert job.status is af.JobStatus.CANCELED
        assert await job.savepoints() == [path]
    assert (
        "did not stop within 1h, though its savepoint is complete, it is cancelled" in caplog.text
    )


async def test_a_second_cancellation_does_not_leave_the_job_behind() -> None:
    """A caller that is cancelled twice, as by two nested timeouts, still ends its job."""
    closing, gate, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    reached = asyncio.Event()

    class Slow(af.FilterFunction[int]):
        def filter(self, value: int) -> bool:
            reached.set()
            return True

        async def close(self) -> None:
            closing.set()
            await gate.wait()
            closed.set()

    async def endless() -> AsyncIterator[int]:
        while True:
            yield 1

    flow = af.Flow("twice")
    flow.source(endless).filter(Slow()).sink(af.io.blackhole())
    task = asyncio.create_task(flow.execute())
    await reached.wait()
    task.cancel()
    await closing.wait()
    for _ in range(3):
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done(), "its job is still closing"
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set()


@pytest.mark.parametrize(
    "ask",
    [lambda job, s: job.subscribe(s), lambda job, s: job.state(s), lambda job, s: job.input(s)],
)
async def test_a_stream_that_the_job_does_not_run_is_refused(
    ask: Callable[[Any, Any], Any],
) -> None:
    """The stream belongs to another flow, whose ids have another meaning, or was added after the
    start.
    """
    flow, other = af.Flow("mine"), af.Flow("other")
    mine, foreign = (
        flow.source(af.io.push(), name="mine"),
        other.source(af.io.push(), name="foreign"),
    )
    async with flow.run() as job:
        for stream in (foreign, mine.key_by(lambda x: x).count()):
            with pytest.raises(
                af.GraphError, match="is no part of job 'mine': take a stream that was in its flow"
            ):
                ask(job, stream)


async def test_a_side_output_can_be_subscribed_to_and_is_not_mistaken_for_the_main_one() -> None:
    flow, tag = af.Flow("side"), af.OutputTag[Any]("bad")
    numbers = flow.source(["1", "x", "2", "y"]).map(int, on_error=tag)
    side, both = numbers.side(tag), numbers.union(numbers.side(tag))
    async with flow.run(
        subscribe=[numbers, side, both, numbers.side(af.OutputTag("other"))]
    ) as job:
        async with job.subscribe(side) as rows:
            assert [row.value async for row in rows] == ["x", "y"]
        async with job.subscribe(numbers) as rows:
            assert [row async for row in rows] == [1, 2]
        async with job.subscribe(both) as rows:
            assert len([row async for row in rows]) == 4
        async with job.subscribe(numbers.side(af.OutputTag("other"))) as rows:
            assert [row async for row in rows] == []


async def test_late_elements_and_malformed_lines_can_be_subscribed_to(tmp_path: Path) -> None:
    """Side outputs of a window and of a source, whether or not the flow reads them too."""
    path = tmp_path / "numbers"
    path.write_bytes(b"1\n\xff\n30\n2\n")
    bad = af.OutputTag[Any]("bad")
    flow = af.Flow("late")
    strategy: Any = af.WatermarkStrategy.monotonous_timestamps(timestamp=int)
    lines = flow.source(af.io.lines(path, on_error=bad), watermarks=strategy)
    windows = lines.key_by(lambda _: 0).window(af.tumbling("10ms")).aggregate(af.count())
    read: list[Any] = []
    windows.late.sink(read.append)
    async with flow.run(subscribe=[windows.late, lines.side(bad)]) as job:
        async with job.subscribe(windows.late) as rows:
            assert [row async for row in rows] == ["2"]
        async with job.subscribe(lines.side(bad)) as rows:
            assert [row.value async for row in rows] == [b"\xff"]
    assert read == ["2"]


@pytest.mark.parametrize(
    "aggregate",
    [af.count(), af.sum(lambda row: row["n"]), af.max_by(lambda row: row["n"])],
    ids=["a count", "a sum", "the best"],
)
async def test_late_elements_of_which_a_part_was_sent_are_whole_or_refused(aggregate: Any) -> None:
    """Holds where late elements are partitioned among several subtasks."""
    rows = [{"user": 1, "ts": ts, "n": 1} for ts in (1_000, 9_000, 2_000)]
    flow = af.Flow("late", parallelism=2)
    strategy: Any = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda row: row["ts"])
    read = flow.source(rows, watermarks=strategy, parallelism=1)
    windows = read.key_by(lambda row: row["user"]).window(af.tumbling("1s")).aggregate(aggregate)
    async with flow.run(subscribe=[windows.late]) as job, job.subscribe(windows.late) as late:
        assert [row async for row in late] == [rows[2]]
    async with flow.run() as job:
        with pytest.raises(
            af.GraphError, match="only what the window needs of them was sent to it"
        ):
            job.subscribe(windows.late)
        job.subscribe(windows).close()
        await job.cancel()


async def test_a_late_record_of_which_nothing_can_be_taken_is_dropped_as_others_are() -> None:
    rows = [
        {"user": 1, "ts": 1_000, "n": 1},
        {"user": 1, "ts": 9_000, "n": 2},
        {"user": 1, "ts": 2_000},
        {"user": 1, "ts": 9_500, "n": 3},
    ]
    flow = af.Flow("late", parallelism=2)
    strategy: Any = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda row: row["ts"])
    read = flow.source(rows, watermarks=strategy, parallelism=1)
    windows = (
        read.key_by(lambda row: row["user"])
        .window(af.tumbling("1s"))
        .aggregate(af.sum(lambda row: row["n"]))
    )
    assert [row.value for row in await windows.collect()] == [1, 5]


async def test_a_subscription_to_a_side_output_begins_and_ends_while_the_job_runs() -> None:
    flow, tag = af.Flow("side"), af.OutputTag[Any]("bad")
    events = flow.source(af.io.push())
    side = events.map(int, on_error=tag).side(tag)
    async with flow.run() as job:
        inlet = job.input(events)
        for word in ("x", "y"):
            async with job.subscribe(side) as rows:
                await inlet.put(word)
                assert (await anext(rows)).value == word
        inlet.close()
        await job.wait()


async def test_a_stream_of_another_flow_is_not_collected() -> None:
    flow, other = af.Flow("mine"), af.Flow("other")
    flow.source([1])
    with pytest.raises(
        af.GraphError, match="belongs to flow 'other', it cannot be collected by a run of 'mine'"
    ):
        await flow.collect(other.source([2]))


class Remember(af.KeyedProcessFunction[int, int, int]):
    """Keeps the last value of each key, and awaits `gate` behind it."""

    begun: asyncio.Event
    gate: asyncio.Event

    def open(self, ctx: Any) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor("last"))

    async def process_element(self, value: int, ctx: Any) -> list[int]:
        self.last.update(value)
        Remember.begun.set()
        await Remember.gate.wait()
        return [value]


async def test_reading_state_waits_no_longer_than_it_was_told() -> None:
    """A function that awaits holds its state back from readers; the only state that it declared
    needs no name.
    """
    Remember.begun, Remember.gate = asyncio.Event(), asyncio.Event()
    flow = af.Flow("held")
    numbers = flow.source(af.io.push())
    remembered = numbers.key_by(lambda x: x).process(Remember)
    async with flow.run(subscribe=[remembered]) as job, job.subscribe(remembered) as rows:
        await job.input(numbers).put(7)
        await Remember.begun.wait()
        state = job.state(remembered)
        for timeout in ("10ms", "20ms"):
            with pytest.raises(
                TimeoutError,
                match=f"was not read within {timeout}: its subtask 1 is busy with one element",
            ):
                await state.get(7, timeout=timeout)
        Remember.gate.set()
        assert await anext(aiter(rows)) == 7
        assert await state.get(7) == 7


async def test_readers_of_one_subscription_share_its_rows_and_all_see_the_end() -> None:
    flow = af.Flow("shared")
    events = flow.source(af.io.push())
    async with flow.run(subscribe=[events]) as job, job.subscribe(events) as rows:

        async def read() -> list[int]:
            return [row async for row in rows]

        readers = [asyncio.create_task(read()) for _ in range(3)]
        await asyncio.sleep(0)
        await job.input(events).put_many(range(100))
        readers[1].cancel()
        await job.stop()
        seen = [await reader for reader in (readers[0], readers[2])]
        assert sorted(seen[0] + seen[1]) == list(range(100))
        with pytest.raises(asyncio.CancelledError):
            await readers[1]


async def test_rows_gathered_before_a_subscription_count_beside_its_buffer() -> None:
    """`subscribe=` misses nothing, and leaves the buffer that the reader asked for as it is."""
    flow, gate, written = af.Flow("gathered"), asyncio.Event(), list[int]()

    async def numbers() -> Any:
        for n in range(10):
            yield n
        await gate.wait()
        for n in range(10, 20):
            yield n

    stream = flow.source(numbers)
    stream.sink(written.append)
    async with flow.run(subscribe=[stream]) as job:
        while len(written) < 10:
            await asyncio.sleep(0)
        async with job.subscribe(stream, buffer=2) as rows:
            first = aiter(rows)
            seen = [await anext(first) for _ in range(10)]
            gate.set()
            await job.wait()
            assert seen + [row async for row in first] == [*range(10), 18, 19]
            assert rows.dropped == 8


@pytest.mark.parametrize("awaited", [False, True])
async def test_closing_acts_at_once_and_may_be_awaited(awaited: bool) -> None:
    """`put` is awaited and `close` need not be: who writes the await all the same is right, too."""
    flow = af.Flow("closing")
    events = flow.source(af.io.push())
    numbers = events.map(lambda x: x)
    async with flow.run() as job:
        rows, others = job.subscribe(numbers), job.subscribe(numbers)
        inlet = job.input(events)
        await inlet.put(1)
        closings = [others.close(), inlet.close()]
        with pytest.raises(af.Closed):
            await inlet.put(2)
        if awaited:
            for closing in closings:
                await closing
        assert [row async for row in rows] == [1]
        assert [row async for row in others] == []


async def test_rows_are_read_one_by_one_and_readers_share_them() -> None:
    flow = af.Flow("shared")
    events = flow.source(af.io.push())
    async with flow.run() as job:
        async with job.subscribe(events) as rows:
            await job.input(events).put_many([1, 2, 3, 4])
            assert await anext(rows) == 1
            async for row in rows:
                assert row == 2
                break
            assert await anext(aiter(rows)) == 3
            assert [await anext(rows) for _ in range(1)] == [4]
        with pytest.raises(StopAsyncIteration):
            await anext(rows)


@pytest.mark.parametrize("ended", ["stopped", "failed"])
async def test_put_after_the_end_raises_how_the_job_ended(ended: str) -> None:
    flow = af.Flow("gone")
    numbers = flow.source(af.io.push(), name="numbers")
    numbers.map(lambda x: 1 // x).sink(af.io.blackhole())
    with nullcontext() if ended == "stopped" else pytest.raises(ZeroDivisionError):
        async with flow.run(restart=af.no_restart()) as job:
            inlet = job.input(numbers)
            if ended == "stopped":
                await job.stop()
            else:
                await inlet.put(0)
                with pytest.raises(ZeroDivisionError):
                    await job.wait()
            how = (
                "FINISHED: nothing"
                if ended == "stopped"
                else r"FAILED with ZeroDivisionError\(.*\): nothing"
            )
            with pytest.raises(
                af.JobNotRunning,
                match=rf"^job 'gone' \(\w+\) is {how} can be put into 'numbers' any more",
            ):
                await inlet.put(1)


async def test_put_into_a_failed_job_is_refused_while_its_workers_close() -> None:
    flow = af.Flow("closing")
    numbers = flow.source(af.io.push())
    numbers.map(lambda x: 1 // x).sink(af.io.blackhole())
    with pytest.raises(ZeroDivisionError):
        async with flow.run(workers=1, restart=af.no_restart()) as job:
            inlet = job.input(numbers)
            await inlet.put(0)
            while not job.status.is_terminal:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            with pytest.raises(af.JobNotRunning, match="is FAILED with ZeroDivisionError"):
                await inlet.put(1)


async def waits(job: Any, numbers: Any) -> None:
    await job.wait()


async def subscribes(job: Any, numbers: Any) -> None:
    async with job.subscribe(numbers) as rows:
        async for _ in rows:
            pass


@pytest.mark.parametrize("look", [waits, subscribes])
@pytest.mark.parametrize("workers", [0, 1])
async def test_an_error_that_one_caller_handles_comes_out_of_the_block_all_the_same(
    look: Callable[[Any, Any], Awaitable[None]], workers: int
) -> None:
    flow = af.Flow("handled")
    numbers = flow.source(af.io.push())
    numbers.map(lambda x: 1 // x).sink(af.io.blackhole())
    handled = []

    async def service() -> None:
        async with flow.run(workers=workers) as job:

            async def client() -> None:
                try:
                    await look(job, numbers)
                except ZeroDivisionError as error:
                    handled.append(error)

            async with asyncio.TaskGroup() as clients:
                for _ in range(2):
                    _ = clients.create_task(client())
                await asyncio.sleep(0)
                await job.input(numbers).put(0)

    with pytest.raises(ZeroDivisionError):
        await service()
    assert len(handled) == 2


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_block_of_a_failed_job_raises_its_error_and_not_that_of_a_late_put(
    workers: int,
) -> None:
    """The natural block of a service puts until it is stopped. It need not call `wait()` too."""
    flow = af.Flow("putting")
    numbers = flow.source(af.io.push())
    numbers.map(lambda x: 1 // x, name="divide").sink(af.io.blackhole())
    with pytest.raises(ZeroDivisionError) as raised:
        async with flow.run(workers=workers) as job:
            while True:
                await job.input(numbers).put(0)
    assert "divide" in raised.value.__notes__[0]


async def test_a_late_put_into_another_job_comes_out_of_a_block_as_it_is() -> None:
    flow = af.Flow("other")
    numbers = flow.source(af.io.push())
    async with flow.run() as stopped:
        await stopped.stop()
    with pytest.raises(af.JobNotRunning, match="is FINISHED"):
        async with flow.run() as job:
            await stopped.input(numbers).put(1)
    assert job.status is af.JobStatus.CANCELED


async def endless() -> AsyncIterator[int]:
    n = 0
    while True:
        yield n
        n += 1
        await asyncio.sleep(0)


async def with_position(position: int | None) -> AsyncIterator[tuple[int, int]]:
    async for n in endless():
        yield n, n + 1


def in_a_thread() -> Iterator[int]:
    yield from count()


LEFT = "was left before source function 'numbers' had ended: it was stopped after {} elements"


@pytest.mark.parametrize("function", [endless, with_position, in_a_thread])
@pytest.mark.parametrize("workers", [0, 1])
async def test_a_source_function_that_is_cut_off_by_leaving_the_block_is_warned_of(
    function: Callable[..., Any], workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[int] = []
    reached = asyncio.Event()

    def keep(value: int) -> None:
        rows.append(value)
        reached.set()

    flow = af.Flow("cut off")
    flow.source(function, name="numbers").sink(keep)
    async with flow.run(workers=workers):
        await reached.wait()
    (warning,) = [
        record.getMessage() for record in caplog.records if "was left before" in record.getMessage()
    ]
    assert LEFT.format(len(rows)) in warning


@pytest.mark.parametrize("how", ["stopped", "read to its end", "read on by the next run"])
async def test_nothing_is_said_of_a_source_function_that_nothing_cuts_off(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1

    flow = af.Flow("not cut off")
    function = {
        "stopped": endless,
        "read to its end": numbers,
        "read on by the next run": with_position,
    }[how]
    flow.source(function).sink(af.io.blackhole())
    async with flow.run(
        checkpoints="memory://not-cut-off" if how == "read on by the next run" else None
    ) as job:
        if how == "stopped":
            await job.stop()
        elif how == "read to its end":
            await job.wait()
    assert "was left before" not in caplog.text


@pytest.mark.parametrize(
    ("option", "given", "told"),
    [
        ("stop_timeout", "soon", "stop_timeout is 'soon'"),
        ("stop_timeout", None, "stop_timeout is None"),
        ("subscribe", af.Flow("options").source([1]), r"write subscribe=\[stream\]"),
    ],
)
async def test_an_option_that_cannot_be_understood_is_named(
    option: str, given: object, told: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        await af.Flow("options").source([1]).collect(**{option: given})


@pytest.mark.parametrize("waits", [False, True])
async def test_a_failure_within_the_block_is_logged_unless_a_call_raises_it(
    waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The block of a service ends with the service, long after its job."""
    flow = af.Flow("pushed")
    pushed = flow.source(af.io.push())
    pushed.map(lambda value: 1 / value, name="divide").sink(lambda value: None)
    with pytest.raises(ZeroDivisionError):
        async with flow.run() as job:
            waiting = [asyncio.create_task(job.wait())] if waits else []
            await job.input(pushed).put(0)
            over = asyncio.Event()
            job.on_end(over.set)
            await over.wait()
            await asyncio.gather(*waiting, return_exceptions=True)
            logged = [record for record in caplog.records if record.levelname == "ERROR"]
            assert len(logged) == (0 if waits else 1)
    if not waits:
        assert "job 'pushed' (" in caplog.text
        assert "is FAILED with ZeroDivisionError" in caplog.text
        assert "aioflow: in operator 'divide', subtask 1/1, at record 0" in caplog.text
