"""Running a flow in this loop, as a user sees it: results, failures, restarts, cancel, stop, and
what is left behind afterwards.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

import aioflow as af
from aioflow.task.environment import TaskOptions

pytestmark = pytest.mark.timeout(300)
"""Far above the duration of any test here: only a hang is cut off."""


def notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("aioflow: ")]


@pytest.mark.parametrize(
    "error", [af.ProducerFailed("mine"), af.MailboxClosed("mine"), af.Broken("mine")], ids=repr
)
async def test_user_code_that_raises_an_error_of_the_engine_fails_the_job_by_name(
    error: Exception,
) -> None:
    def fails(value: int) -> int:
        raise error

    flow = af.Flow("f")
    flow.source([1, 2, 3]).rebalance().map(fails).sink(print)
    with pytest.raises(type(error), match="mine") as caught:
        async with flow.run():
            pass
    assert "aioflow: in operator 'map(fails)'" in str(notes(caught.value))


class Unbounded:
    """A source that never ends: elements of `values`, then nothing for ever.

    Counts what it opened and closed.
    """

    bounded = False

    def __init__(self, values: list[Any] | None = None, splits: int = 1) -> None:
        self.values = values or []
        self.splits = splits
        self.readers: list[UnboundedReader] = []

    async def discover(self) -> list[af.Split]:
        return [af.Split(str(i)) for i in range(self.splits)]

    def reader(self, ctx: Any) -> UnboundedReader:
        self.readers.append(UnboundedReader(list(self.values)))
        return self.readers[-1]


class UnboundedReader:
    finished = False

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self.opened_with: list[str] = []
        self.closed = 0
        self.more = asyncio.Event()

    async def open(self, splits: Any) -> None:
        self.opened_with = [split.id for split in splits]

    def poll_batch(self, max_records: int) -> list[Any] | None:
        taken, self.values = self.values[:max_records], self.values[max_records:]
        return taken or None

    async def wait(self) -> None:
        await self.more.wait()
        self.more.clear()

    def give(self, *values: Any) -> None:
        self.values.extend(values)
        self.more.set()

    def position(self, split_id: str) -> int:
        return 0

    async def close(self) -> None:
        self.closed += 1


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


# Results.


async def test_keyed_counts_over_several_subtasks() -> None:
    flow = af.Flow("counts", parallelism=3)
    rows = await flow.source(range(100)).key_by(lambda x: x % 7).count().collect()

    assert max(count for key, count in rows if key == 0) == 15
    assert len(rows) == 100


async def test_side_outputs_of_two_operators_of_one_chain_are_kept_apart() -> None:
    """`stream.side(tag)` reads the operator that made `stream`, nothing upstream, also when both
    use the same tag.
    """
    tag: af.OutputTag[af.Failed[int]] = af.OutputTag("bad")
    flow = af.Flow("sides")

    def first(x: int) -> int:
        if x == 1:
            raise ValueError("first")
        return x

    def second(x: int) -> int:
        if x == 2:
            raise ValueError("second")
        return x

    one = flow.source([1, 2, 3]).map(first, on_error=tag)
    two = one.map(second, on_error=tag)
    good, bad_of_one, bad_of_two = await flow.collect(two, one.side(tag), two.side(tag))

    assert good == [3]
    assert [failed.error for failed in bad_of_one] == ["first"]
    assert [failed.error for failed in bad_of_two] == ["second"]


RECORDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2000)), max_size=60)


@given(RECORDS, st.sampled_from([1, 7, 1024]), st.sampled_from([1, 20_000, 2_000_000, 1 << 40]))
@settings(max_examples=25)
def test_output_does_not_depend_on_batch_size_or_slice_length(
    records: list[tuple[int, int]], size: int, slice_ns: int
) -> None:
    """C4.2: one source split gives the same output at every batch size and every slice length."""

    async def run(tasks: TaskOptions) -> list[Any]:
        flow = af.Flow("same")
        strategy = af.WatermarkStrategy.bounded_out_of_orderness("100ms", timestamp=lambda r: r[1])
        windows = (
            flow.source(records, watermarks=strategy)
            .flat_map(lambda r: [r, r])
            .filter(lambda r: r[0] != 3)
            .key_by(lambda r: r[0])
            .window(af.tumbling("250ms"))
            .aggregate(af.count())
        )
        return await windows.collect(tasks=tasks)

    assert asyncio.run(run(TaskOptions(batch_records_max=size, slice_ns=slice_ns))) == asyncio.run(
        run(TaskOptions())
    )


async def test_async_map_keeps_the_order_of_each_key() -> None:
    """J4.1: a user function that awaits keeps the order of its channel."""
    flow = af.Flow("ordered", parallelism=2)

    async def sometimes_slow(x: int) -> int:
        await asyncio.sleep(0.001 * (x * 7 % 4))
        return x

    calls = flow.source(range(60)).map(sometimes_slow, parallelism=1, concurrency=8)
    rows = await calls.key_by(lambda x: x % 3).reduce(lambda a, b: b).collect()

    for key in range(3):
        assert [x for x in rows if x % 3 == key] == list(range(key, 60, 3))


async def test_a_value_that_could_not_travel_is_reported_once_for_each_edge(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In-process runs encode the first value of each edge and warn once if it could not travel."""
    flow = af.Flow("travel")
    rows = (
        await flow.source(range(10))
        .map(lambda x: threading.Lock())
        .rebalance()
        .map(lambda lock: 1, parallelism=2)
        .collect()
    )

    assert len(rows) == 10
    warnings = [record.getMessage() for record in caplog.records if "lock" in record.getMessage()]
    assert len(warnings) == 1
    assert "'map'" in warnings[0]


async def test_strict_refuses_a_value_that_could_not_travel() -> None:
    flow = af.Flow("strict")
    stream = (
        flow.source(range(10))
        .map(lambda x: threading.Lock())
        .rebalance()
        .map(lambda lock: 1, parallelism=2)
    )
    with pytest.raises(af.TypeNotSupported, match="'map'"):
        await stream.collect(strict=True)


# Errors of user code.


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), KeyError("k"), RecursionError(), StopAsyncIteration(), AssertionError()],
    ids=repr,
)
async def test_an_error_of_user_code_surfaces_as_itself_with_one_note(error: Exception) -> None:
    def fail(x: int) -> int:
        if x == 7:
            raise error
        return x

    flow = af.Flow("fails", parallelism=2)
    with pytest.raises(type(error)) as caught:
        await flow.source(range(100)).rebalance().map(fail).key_by(lambda x: x).count().collect()

    assert caught.value is error
    (note,) = notes(error)
    assert "'map(fail)'" in note
    assert "subtask" in note
    assert note.endswith("/2, at record 7")


async def fails_at_seven(x: int) -> int:
    if x == 7:
        raise ValueError("async")
    return x


def stops_at_seven(x: int) -> int:
    if x == 7:
        raise StopIteration
    return x


def cancels_at_seven(x: int) -> int:
    if x == 7:
        raise asyncio.CancelledError
    return x


@pytest.mark.parametrize("last", [7, 20])
@pytest.mark.parametrize("kind", ["map", "filter", "flat_map", "key_by", "map, then map"])
async def test_stop_iteration_of_user_code_is_an_error_and_loses_nothing_in_silence(
    kind: str, last: int
) -> None:
    """`list(map(f, ...))` would take it for the end of the batch."""
    stream: Any = af.Flow("stop").source(range(last + 1))
    if kind == "key_by":
        stream = stream.key_by(stops_at_seven).count()
    elif kind == "flat_map":
        stream = stream.flat_map(lambda x: [stops_at_seven(x)])
    elif kind == "map, then map":
        stream = stream.map(lambda x: x).map(stops_at_seven)
    else:
        stream = getattr(stream, kind)(stops_at_seven)
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await stream.collect()
    assert len(notes(caught.value)) == 1
    assert "at record 7" in notes(caught.value)[0]


@pytest.mark.parametrize("kind", ["map", "async map", "key_by", "open", "close", "process"])
async def test_cancelled_error_raised_by_user_code_fails_the_job_instead_of_hanging_it(
    kind: str,
) -> None:
    class Cancels(af.ProcessFunction[int, int]):
        async def open(self, ctx: Any) -> None:
            if kind == "open":
                raise asyncio.CancelledError

        def process_element(self, value: int, ctx: Any) -> list[int]:
            return [cancels_at_seven(value) if kind == "process" else value]

        async def close(self) -> None:
            if kind == "close":
                raise asyncio.CancelledError

    async def waits(x: int) -> int:
        return cancels_at_seven(x)

    source = af.Flow("cancelled").source(range(100))
    stream: Any
    if kind == "map":
        stream = source.map(cancels_at_seven)
    elif kind == "async map":
        stream = source.map(waits)
    elif kind == "key_by":
        stream = source.key_by(cancels_at_seven).count()
    else:
        stream = source.process(Cancels())
    with pytest.raises(RuntimeError, match=r"(?i)cancel"):
        await stream.collect()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("waits", [False, True])
def test_request_to_end_the_program_leaves_the_run_and_is_never_retried(
    kind: type[BaseException], waits: bool
) -> None:
    calls = []

    def leave(x: int) -> int:
        calls.append(x)
        raise kind

    async def leave_later(x: int) -> int:
        await asyncio.sleep(0)
        return leave(x)

    flow = af.Flow("exit")
    with pytest.raises(kind):
        stream = (
            flow.source(range(10)).map(leave_later, concurrency=1)
            if waits
            else flow.source(range(10)).map(leave)
        )
        asyncio.run(stream.collect(restart=af.fixed_delay(5, "1ms")))
    assert calls == [0]


class Lifecycle(af.ProcessFunction[int, int]):
    """Logs its life; fails where it is told to."""

    log: list[str] = []
    fail_in = ""

    def _at(self, what: str) -> None:
        Lifecycle.log.append(what)
        if Lifecycle.fail_in == what:
            raise ValueError(what)

    def open(self, ctx: Any) -> None:
        self._at("open")

    def process_element(self, value: int, ctx: Any) -> list[int]:
        self._at("element")
        return [value]

    def finish(self) -> list[int]:
        self._at("finish")
        return [99]

    def close(self) -> None:
        self._at("close")


@pytest.fixture
def lifecycle() -> type[Lifecycle]:
    Lifecycle.log, Lifecycle.fail_in = [], ""
    return Lifecycle


async def test_life_of_a_function(lifecycle: type[Lifecycle]) -> None:
    """B5.4, B5.3: open, element*, finish, close; what finish emits is delivered."""
    assert await af.Flow("life").source([1, 2]).process(lifecycle()).map(lambda x: x).collect() == [
        1,
        2,
        99,
    ]
    assert lifecycle.log == ["open", "element", "element", "finish", "close"]


@pytest.mark.parametrize("where", ["open", "element", "finish", "close"])
async def test_a_failure_anywhere_surfaces_and_close_is_called_once(
    where: str, lifecycle: type[Lifecycle]
) -> None:
    """B2.4, B5.2: also after a failure before the first element."""
    lifecycle.fail_in = where
    with pytest.raises(ValueError, match=where) as caught:
        await af.Flow("life").source([1, 2]).process(lifecycle()).collect()
    assert lifecycle.log.count("close") == 1
    assert len(notes(caught.value)) == 1
    assert "Lifecycle" in notes(caught.value)[0]


async def test_an_error_of_close_does_not_replace_the_error_that_ended_the_task(
    lifecycle: type[Lifecycle],
) -> None:
    class FailsTwice(Lifecycle):
        def close(self) -> None:
            raise KeyError("second")

    lifecycle.fail_in = "element"
    with pytest.raises(ValueError, match="element"):
        await af.Flow("life").source([1, 2]).process(FailsTwice()).collect()


class Unspeakable(Exception):
    """Raises when it is converted to text."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("restart", [af.no_restart(), af.fixed_delay(1, "1ms")], ids=repr)
async def test_an_error_that_cannot_say_what_it_is_fails_the_job_all_the_same(
    workers: int, restart: Any
) -> None:
    def fails(value: int) -> int:
        raise Unspeakable("x")

    flow = af.Flow("f")
    flow.source([1]).map(fails).sink(print)
    with pytest.raises((Unspeakable, af.RemoteError)) as caught:
        await flow.execute(workers=workers, restart=restart)
    assert notes(caught.value) == ["aioflow: in operator 'map(fails)', subtask 1/1, at record 1"]


async def test_error_without_a_text_goes_to_its_side_output_and_to_errors_of_closing() -> None:
    class Fails(af.ProcessFunction[int, int]):
        def process_element(self, value: int, ctx: Any) -> None:
            raise RuntimeError("first")

        def close(self) -> None:
            raise Unspeakable("second")

    def fails(value: int) -> int:
        raise Unspeakable("x")

    tag: af.OutputTag[Any] = af.OutputTag("failed")
    flow = af.Flow("f")
    (failed,) = await flow.source([1]).map(fails, on_error=tag).side(tag).collect()
    assert (failed.error, failed.error_type) == (
        "(its message cannot be shown: ValueError)",
        "Unspeakable",
    )
    with pytest.raises(RuntimeError, match="first") as caught:
        await af.Flow("g").source([1]).process(Fails).collect()
    assert (
        "closing failed too: Unspeakable: (its message cannot be shown: ValueError)"
        in notes(caught.value)[-1]
    )


async def test_an_error_of_a_source_names_the_source() -> None:
    """A11.3: a source that raises fails the job with that cause."""

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk") as caught:
        await af.Flow("broken").source(broken, name="my-source").collect()
    (note,) = notes(caught.value)
    assert "'my-source'" in note


async def test_a_source_function_that_returns_finishes_the_job_with_the_end_of_time() -> None:
    """A11.3: FINISHED, and MAX watermark fires what waits."""

    def some() -> Iterator[tuple[str, int]]:
        yield "a", 10
        yield "a", 20

    strategy = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda r: r[1])
    windows = (
        af.Flow("ends")
        .source(some, watermarks=strategy)
        .key_by(lambda r: r[0])
        .window(af.tumbling("1h"))
        .aggregate(af.count())
    )
    assert [(r.key, r.value) for r in await windows.collect()] == [("a", 2)]


async def test_discover_that_raises_fails_the_job_and_names_the_source() -> None:
    class Broken(Unbounded):
        async def discover(self) -> list[af.Split]:
            raise OSError("no such place")

    with pytest.raises(OSError, match="no such place") as caught:
        await af.Flow("broken").source(Broken(), name="place").collect()
    assert "'place'" in notes(caught.value)[0]


async def test_all_that_fail_together_are_reported_with_the_first() -> None:
    """B6.3, J3.3: one root cause with the others attached, although the first error cancels all
    tasks.
    """
    loop = asyncio.get_running_loop()
    released: asyncio.Future[None] = loop.create_future()
    waiting = 0

    async def together(x: int) -> int:
        nonlocal waiting
        waiting += 1
        if waiting == 3:
            loop.call_soon(released.set_result, None)
        await asyncio.shield(released)
        raise ValueError(f"number {x}")

    flow = af.Flow("together", parallelism=3)
    with pytest.raises(ValueError, match="number") as caught:
        await flow.source(range(3)).rebalance().map(together).collect()
    attached = [note for note in notes(caught.value) if "another task failed" in note]
    assert len(attached) == 2
    assert all(f"number {x}" in str(caught.value) + "".join(attached) for x in range(3))
    assert len(notes(caught.value)) == 1 + len(attached)


async def test_an_error_in_a_processing_time_timer_at_the_end_surfaces_as_itself() -> None:
    class Timed(af.KeyedProcessFunction[int, int, int]):
        def process_element(self, value: int, ctx: Any) -> None:
            ctx.timer_service.register_processing_time_timer(
                ctx.timer_service.current_processing_time + 3_600_000
            )

        def on_timer(self, timestamp: int, ctx: Any) -> None:
            raise ValueError("timer")

    with pytest.raises(ValueError, match="timer") as caught:
        await af.Flow("timer").source([1]).key_by(lambda x: x).process(Timed()).collect()
    assert len(notes(caught.value)) == 1


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("waits", [False, True], ids=["def", "async def"])
async def test_results_that_the_clock_gives_at_the_end_precede_the_end_of_event_time(
    parallelism: int, waits: bool
) -> None:
    """Covers timers, windows and `finish`.

    A window behind them gives one result per key, and no element is late for it. `finish` has no
    time.
    """

    class Last(af.KeyedProcessFunction[Any, Any, tuple[str, int]]):
        def process_element(self, value: Any, ctx: Any) -> None:
            ctx.timer_service.register_processing_time_timer(2**45)

        def on_timer(self, timestamp: int, ctx: Any) -> Iterator[tuple[str, int]]:
            yield "timer", 1

        def finish(self) -> Iterator[tuple[str, int]]:
            yield "finish", 1

    class LastAsync(Last):
        async def process_element(self, value: Any, ctx: Any) -> None:
            super().process_element(value, ctx)

    flow = af.Flow("ends", parallelism=parallelism)
    rows = [(key, at) for at in (0, 100, 200) for key in "abcdef"]
    in_order = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda row: row[1])
    keyed = flow.source(rows, watermarks=in_order).key_by(lambda row: row[0])
    window = (
        keyed.window(af.tumbling("36500d", time="processing"))
        .aggregate(af.count())
        .map(lambda result: ("window", result.value))
    )
    ended = keyed.process(LastAsync if waits else Last).union(window).key_by(lambda pair: pair[0])
    at_end = ended.window(af.global_window(at_end=True)).aggregate(af.sum(lambda pair: pair[1]))
    with_time = ended.filter(lambda pair: pair[0] != "finish").key_by(lambda pair: pair[0])
    in_time = with_time.window(af.tumbling("36500d")).aggregate(af.sum(lambda pair: pair[1]))
    found, timed, late = await flow.collect(at_end, in_time, in_time.late)
    assert sorted((result.key, result.value) for result in found) == [
        ("finish", parallelism),
        ("timer", 6),
        ("window", 18),
    ]
    assert sorted(result.key for result in timed) == ["timer", "window"]
    assert late == []


async def test_processing_time_timers_that_wait_fire_when_bounded_input_ends() -> None:
    class Timed(af.KeyedProcessFunction[int, int, str]):
        def process_element(self, value: int, ctx: Any) -> None:
            ctx.timer_service.register_processing_time_timer(
                ctx.timer_service.current_processing_time + 3_600_000
            )

        def on_timer(self, timestamp: int, ctx: Any) -> list[str]:
            return [f"timer of {ctx.current_key}"]

    assert await af.Flow("timer").source([1]).key_by(lambda x: x).process(Timed()).map(
        str.upper
    ).collect() == ["TIMER OF 1"]


# Restarts.


async def test_collect_holds_one_complete_run_after_restarts() -> None:
    """Splits are read again from the beginning, what was gathered of the old attempt is dropped."""
    calls = 0

    def flaky(x: int) -> int:
        nonlocal calls
        calls += 1
        if calls in (50, 170):
            raise ValueError("again")
        return x

    flow = af.Flow("flaky", parallelism=2)
    rows = (
        await flow.source(range(100))
        .rebalance()
        .map(flaky)
        .collect(restart=af.fixed_delay(2, "1ms"))
    )
    assert sorted(rows) == list(range(100))


async def test_a_failure_is_warned_of_only_when_the_job_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The last one is raised: who handles it should not find it in the log as well."""

    def always(x: int) -> int:
        raise ValueError(x)

    flow = af.Flow("always")
    stream = flow.source([1]).map(always)
    with caplog.at_level(logging.INFO, logger="aioflow.cluster.job_master"):
        with pytest.raises(ValueError):
            await stream.collect(restart=af.fixed_delay(1, "1ms"))
    levels = [
        record.levelname
        for record in caplog.records
        if "is FAILED: ValueError" in record.getMessage()
    ]
    assert levels == ["WARNING", "INFO"]


async def test_a_result_is_shown_in_one_line_without_its_metrics() -> None:
    flow = af.Flow("short")
    flow.source([1]).sink(lambda x: None)
    result = await flow.execute()
    assert repr(result) == (
        f"JobResult(job_id='{result.job_id}', name='short', status='FINISHED', "
        f"duration_ms={result.duration_ms}, restarts=0)"
    )
    assert result.metrics


async def test_a_result_tells_the_start_from_the_flow() -> None:
    class Slow(af.MapFunction[int, int]):
        async def open(self, ctx: af.RuntimeContext) -> None:
            await asyncio.sleep(0.05)

        def map(self, value: int) -> int:
            return value

    flow = af.Flow("slow to open")
    flow.source([1]).map(Slow()).sink(lambda x: None)
    result = await flow.execute()
    assert 50 <= result.startup_ms <= result.duration_ms


async def test_a_read_of_a_key_without_state_gives_the_default_that_it_names() -> None:
    class Limits(af.KeyedProcessFunction[str, str, str]):
        def open(self, ctx: af.RuntimeContext) -> None:
            self.limit = ctx.get_state(af.ValueStateDescriptor("limit", default=100))
            self.note = ctx.get_state(af.ValueStateDescriptor[str]("note"))

        def process_element(self, value: str, ctx: af.ProcessContext) -> list[str]:
            self.limit.update(7)
            return [value]

    flow = af.Flow("limits")
    pushed = flow.source(af.io.push())
    limits = pushed.key_by(str).process(Limits)
    async with flow.run() as job, job.subscribe(limits) as rows:
        await job.input(pushed).put("known")
        await anext(aiter(rows))
        state = job.state(limits)
        assert [await state.get(key, default=0, name="limit") for key in ("known", "other")] == [
            7,
            0,
        ]
        assert await state.get("other", default=None, name="limit") is None
        assert await state.get("other", name="limit") == 100
        assert await state.get("other", name="note") is None


async def test_restarts_are_counted_and_used_up() -> None:
    tries = 0

    def always(x: int) -> int:
        nonlocal tries
        tries += 1
        raise ValueError(tries)

    with pytest.raises(ValueError, match="4"):
        await af.Flow("always").source([1]).map(always).collect(restart=af.fixed_delay(3, "1ms"))
    assert tries == 4


async def test_fatal_errors_are_not_retried() -> None:
    tries = 0

    def always(x: int) -> int:
        nonlocal tries
        tries += 1
        raise ValueError(tries)

    with pytest.raises(ValueError):
        await (
            af.Flow("fatal")
            .source([1])
            .map(always)
            .collect(restart=af.fixed_delay(3, "1ms", fatal=(ValueError,)))
        )
    assert tries == 1


async def test_cancel_while_the_job_waits_for_its_restart() -> None:
    def always(x: int) -> int:
        raise ValueError(x)

    flow = af.Flow("waits")
    source = Unbounded([1, 2])
    flow.source(source).map(always).sink(af.io.blackhole())
    runner = asyncio.ensure_future(flow.execute(restart=af.fixed_delay(3, "1h")))
    await until(lambda: bool(source.readers) and source.readers[0].closed == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner
    assert len(source.readers) == 1


async def test_nothing_grows_over_many_restarts() -> None:
    calls = 0

    def flaky(x: int) -> int:
        nonlocal calls
        calls += 1
        if x == 1 and calls < 300:
            raise ValueError("again")
        return x

    source = Unbounded([1, 2])
    flow = af.Flow("many", parallelism=2)
    flow.source(source, parallelism=1).rebalance().map(flaky).sink(af.io.blackhole())
    async with flow.run(restart=af.fixed_delay(1000, "0ms")) as job:
        executor = job._cluster.task_executor
        await until(lambda: calls > 20)
        pool = executor._environment.pool

        def kept() -> tuple[int, ...]:
            children = len(job._cluster._group._children) + len(executor._group._children)
            return len(executor._partitions), len(executor._executions), len(pool._pools), children

        await until(
            lambda: (
                calls >= 300
                and job.status is af.JobStatus.RUNNING
                and all(task.life.is_running for task in executor.tasks)
            )
        )
        assert kept() == (1, 3, 1, 3)
        await job.cancel()


# Cancel and stop.


class Waits(af.ProcessFunction[int, int]):
    """Awaits for ever where it is told to; tells when it is there."""

    where = ""
    reached: asyncio.Event
    closed = 0

    async def _maybe(self, what: str) -> None:
        if Waits.where == what:
            Waits.reached.set()
            await asyncio.Event().wait()

    async def open(self, ctx: Any) -> None:
        await self._maybe("open")

    async def process_element(self, value: int, ctx: Any) -> list[int]:
        await self._maybe("element")
        return [value]

    async def close(self) -> None:
        Waits.closed += 1


async def waits_in_map(x: int) -> int:
    Waits.reached.set()
    await asyncio.Event().wait()
    return x


def wait_where(where: str) -> tuple[af.Flow, Any]:
    Waits.where, Waits.reached, Waits.closed = where, asyncio.Event(), 0
    flow = af.Flow("waits")
    source: Any = Unbounded([1, 2, 3] * 100)
    if where == "discover":

        async def discover() -> list[af.Split]:
            Waits.reached.set()
            await asyncio.Event().wait()
            return []

        source.discover = discover
    stream = flow.source(source)
    if where == "mailbox":
        source.values = []
        Waits.reached.set()
        stream.map(lambda x: x).sink(af.io.blackhole())
    elif where == "async map":
        stream.map(waits_in_map, concurrency=2).sink(af.io.blackhole())
    elif where == "resource":

        @af.resource
        async def never() -> AsyncIterator[int]:
            Waits.reached.set()
            await asyncio.Event().wait()
            yield 1

        def uses(x: int, value: int = af.use(never)) -> int:
            return value

        stream.map(uses).sink(af.io.blackhole())
    else:
        stream.process(Waits()).sink(af.io.blackhole())
    return flow, source


@pytest.mark.parametrize(
    "where", ["open", "element", "mailbox", "async map", "resource", "discover"]
)
async def test_cancel_ends_the_job_wherever_it_waits(where: str) -> None:
    """B3.1: user code, the mailbox, an opening resource, the search for splits; everything is
    closed.
    """
    flow, source = wait_where(where)
    runner = asyncio.ensure_future(flow.execute())
    await Waits.reached.wait()
    if where == "mailbox":
        await until(lambda: bool(source.readers) and bool(source.readers[0].opened_with))
    for _ in range(10):
        await asyncio.sleep(0)
    runner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner
    assert [reader.closed for reader in source.readers] == [1] * len(source.readers)
    if where in ("open", "element"):
        assert Waits.closed == 1


async def test_cancel_while_the_output_has_no_room() -> None:
    """B3.1: a task that waits for permits ends, and the permits go back."""
    gate = asyncio.Event()

    async def stuck(x: int) -> int:
        await gate.wait()
        return x

    flow = af.Flow("full")
    source = Unbounded(list(range(200_000)))
    flow.source(source).rebalance().map(stuck, concurrency=1, parallelism=2).sink(af.io.blackhole())
    async with flow.run() as job:
        tasks = job._cluster.task_executor.tasks
        await until(lambda: tasks[0]._runtime.parking.reason in ("output", "overdraft"))
        assert len(source.readers[0].values) > 100_000, "back pressure must have stopped the source"
        pool = job._cluster.task_executor._environment.pool
        await job.cancel()
        assert job.status is af.JobStatus.CANCELED
        assert not pool._pools
    assert source.readers[0].closed == 1


async def test_closing_is_not_interrupted_by_a_second_cancellation() -> None:
    """Clean-up is shielded: files and connections of users are closed to their end."""
    closing, closed = asyncio.Event(), []

    class Slow(af.ProcessFunction[int, int]):
        def process_element(self, value: int, ctx: Any) -> list[int]:
            return [value]

        async def close(self) -> None:
            closing.set()
            for _ in range(20):
                await asyncio.sleep(0)
            closed.append(True)

    flow = af.Flow("slow close")
    source = Unbounded([1])
    flow.source(source).process(Slow()).sink(af.io.blackhole())
    runner = asyncio.ensure_future(flow.execute())
    await until(lambda: bool(source.readers) and bool(source.readers[0].opened_with))
    await asyncio.sleep(0)
    runner.cancel()
    await closing.wait()
    for task in asyncio.all_tasks():
        if task.get_name().startswith(("Unbounded", "job")):
            task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner
    await until(lambda: bool(closed))


async def test_a_cancellation_while_the_source_closes_leaves_no_operator_open() -> None:
    gate, closing, closed = asyncio.Event(), asyncio.Event(), []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.get_running_loop().create_future()
        finally:
            closing.set()
            await gate.wait()

    class Closes(af.MapFunction[int, int]):
        def map(self, value: int) -> int:
            return value

        def close(self) -> None:
            closed.append(True)

    flow = af.Flow("f")
    flow.source(numbers).map(Closes).sink(af.io.blackhole())
    async with flow.run() as job:
        stopping = asyncio.ensure_future(job.stop())
        await closing.wait()
        cancelling = asyncio.ensure_future(job.cancel())
        for _ in range(5):
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(stopping, cancelling)
    assert closed == [True]


async def test_a_task_cancelled_by_a_stranger_fails_the_job() -> None:
    """Without a failure, the other tasks would wait for ever."""
    flow = af.Flow("stranger")
    flow.source(Unbounded([1, 2, 3])).map(lambda x: x).sink(af.io.blackhole())
    with pytest.raises(af.Broken, match="cancelled from outside"):
        async with flow.run() as job:
            (task,) = [
                task for task in asyncio.all_tasks() if task.get_name().startswith("Unbounded")
            ]
            task.cancel()
            await job.wait()


async def test_stop_without_drain_leaves_windows_open_and_with_drain_fires_them() -> None:
    """B4.4: NO_DRAIN neither finishes functions nor sends the MAX watermark."""

    async def run(drain: bool) -> list[Any]:
        source = Unbounded([("a", 10), ("a", 20)])
        flow = af.Flow("stop")
        strategy = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda r: r[1])
        seen: list[Any] = []
        flow.source(source, watermarks=strategy).key_by(lambda r: r[0]).window(
            af.tumbling("1h")
        ).aggregate(af.count()).sink(seen.append)
        async with flow.run() as job:
            await until(lambda: not source.readers[0].values)
            await job.stop(drain=drain)
            assert job.status is af.JobStatus.FINISHED
        return [row.value for row in seen]

    assert await run(drain=False) == []
    assert await run(drain=True) == [2]


async def test_leaving_the_block_by_an_exception_cancels_and_the_exception_wins() -> None:
    flow = af.Flow("left")
    flow.source(Unbounded([1])).sink(af.io.blackhole())
    with pytest.raises(KeyError):
        async with flow.run() as job:
            raise KeyError("mine")
    assert job.status is af.JobStatus.CANCELED


# Resources.


async def test_a_resource_that_failed_to_open_is_tried_again_after_a_restart() -> None:
    tries = 0

    @af.resource
    async def flaky() -> AsyncIterator[int]:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError("connection refused")
        yield 42

    def use(x: int, value: int = af.use(flaky)) -> int:
        return x + value

    assert await af.Flow("resource").source([1]).map(use).collect(
        restart=af.fixed_delay(5, "1ms")
    ) == [43]


async def test_a_resource_whose_closing_fails_tells_it_as_it_is() -> None:
    @af.resource
    async def sticky() -> AsyncIterator[int]:
        yield 1
        raise OSError("will not close")

    def use(x: int, value: int = af.use(sticky)) -> int:
        return x + value

    with pytest.raises(OSError, match="will not close"):
        await af.Flow("resource").source([1]).map(use).collect()


# In a loop that another owner runs.


def burn(seconds: float) -> None:
    """Uses at least this much time of this thread."""
    import time

    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize(
    "place", ["map", "key_by", "key_by of a source", "timestamps", "flat_map", "sink"]
)
async def test_a_function_of_a_millisecond_never_holds_the_loop_for_long(place: str) -> None:
    """J1: the slice bounds it wherever the function stands.

    Counted in records between two turns, which no busy machine disturbs.
    """
    count = 60
    in_a_turn, longest = 0, 0

    def slow(x: int) -> int:
        nonlocal in_a_turn, longest
        in_a_turn += 1
        longest = max(longest, in_a_turn)
        burn(0.001)
        return x

    def turn() -> None:
        nonlocal in_a_turn, handle
        in_a_turn = 0
        handle = asyncio.get_running_loop().call_soon(turn)

    flow = af.Flow("slow")
    source = flow.source(range(count))
    handle = asyncio.get_running_loop().call_soon(turn)
    if place == "map":
        rows = await source.map(slow).collect()
    elif place == "flat_map":
        rows = await source.flat_map(lambda x: [slow(x)]).collect()
    elif place == "key_by":
        rows = await source.map(lambda x: x).key_by(slow).count().collect()
    elif place == "key_by of a source":
        rows = await source.key_by(slow).count().collect()
    elif place == "timestamps":
        strategy = af.WatermarkStrategy.monotonous_timestamps(timestamp=slow)
        rows = await flow.source(range(count), watermarks=strategy).map(lambda x: x).collect()
    else:
        rows = []

        def sink(x: int) -> None:
            rows.append(slow(x))

        source.sink(sink)
        await flow.execute()
    handle.cancel()
    assert len(rows) == count
    assert longest <= 8, f"{longest} calls of a millisecond between two turns of the loop"


async def test_an_echo_server_in_the_same_loop_answers_while_a_job_is_busy() -> None:
    """J1.1: the loop's other users get their turns, counted in records that went by for each
    answer.
    """
    done = 0

    def busy(x: int) -> int:
        nonlocal done
        burn(0.0002)
        done += 1
        return x

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    flow = af.Flow("busy")
    flow.source(range(3000)).map(busy).sink(af.io.blackhole())
    runner = asyncio.ensure_future(flow.execute())
    await until(lambda: done > 0)
    answers = 0
    while not runner.done() and answers < 20:
        before = done
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        answers += 1
        # Some turns of the loop an answer, each of them at most one slice of 2 ms.
        assert done - before <= 400
    assert answers >= 5
    await runner
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()
    await asyncio.sleep(0)


async def test_a_flat_map_of_ten_thousand_outputs_keeps_memory_bounded() -> None:
    """Overshoot is one record's own output."""
    alive = 0
    most = 0

    class Tracked:
        __slots__ = ("__weakref__",)

        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    flow = af.Flow("explodes")
    stream = (
        flow.source(range(60)).flat_map(lambda x: [Tracked() for _ in range(10_000)]).rebalance()
    )
    stream.map(lambda t: 1, parallelism=2).sink(af.io.blackhole())
    await flow.execute()
    assert most <= 50_000, f"{most} of 600,000 were alive at a time"


async def test_two_flows_run_side_by_side_in_one_loop() -> None:
    first, second = af.Flow("first"), af.Flow("second")
    a, b = await asyncio.gather(
        first.source(range(500)).map(str).collect(),
        second.source(range(500)).map(lambda x: -x).collect(),
    )
    assert a == [str(x) for x in range(500)]
    assert b == [-x for x in range(500)]


async def test_the_same_flow_runs_twice_at_the_same_time() -> None:
    stream = af.Flow("twice").source(range(300)).key_by(lambda x: x % 2).count()
    a, b = await asyncio.gather(stream.collect(), stream.collect())
    assert a == b
    assert len(a) == 300


async def test_a_hundred_starts_and_stops_leave_nothing_behind() -> None:
    """J3.1: tasks, threads and descriptors are back to where they were."""

    def measure() -> tuple[int, int, int]:
        return len(asyncio.all_tasks()), threading.active_count(), len(os.listdir("/proc/self/fd"))

    async def once(i: int) -> None:
        flow = af.Flow("again", parallelism=2)
        flow.source(Unbounded([1, 2, 3])).rebalance().map(lambda x: x).sink(af.io.blackhole())
        async with flow.run() as job:
            if i % 2:
                await job.cancel()

    for i in range(3):
        await once(i)
    before = measure()
    for i in range(100):
        await once(i)
    gc.collect()
    assert measure() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_job_starts_stops_it_as_soon_as_it_has_started(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback, and a result, as later."""
    monkeypatch.setattr(
        "aioflow.api.runner.new_event_loop", asyncio.new_event_loop
    )  # uvloop keeps a pipe for the process.

    @af.resource
    async def client() -> AsyncIterator[int]:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)
        yield 1

    async def endless() -> AsyncIterator[int]:
        while True:
            yield 1
            await asyncio.sleep(0)

    def function(value: int, client: int = af.use(client)) -> int:
        return value

    flow = af.Flow("f")
    flow.source(endless).map(function).sink(af.io.blackhole())
    assert af.run(flow).status == "FINISHED"


def test_a_second_signal_ends_a_job_that_does_not_come_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioflow.api.runner.new_event_loop", asyncio.new_event_loop)

    @af.resource
    async def client() -> AsyncIterator[int]:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.get_running_loop().create_future()
        yield 1

    def function(value: int, client: int = af.use(client)) -> int:
        return value

    flow = af.Flow("f")
    flow.source([1]).map(function).sink(af.io.blackhole())
    with pytest.raises(KeyboardInterrupt) as caught:
        af.run(flow)
    assert caught.value.__suppress_context__, "one traceback, not two"


def test_a_signal_ends_a_job_that_does_not_come_to_start_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aioflow.api.runner.new_event_loop", asyncio.new_event_loop)
    monkeypatch.setattr("aioflow.api.runner.START_S", 0.01)

    @af.resource
    async def client() -> AsyncIterator[int]:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.get_running_loop().create_future()
        yield 1

    def function(value: int, client: int = af.use(client)) -> int:
        return value

    flow = af.Flow("f")
    flow.source([1]).map(function).sink(af.io.blackhole())
    with pytest.raises(KeyboardInterrupt):
        af.run(flow)
    assert "the job has not started" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
async def test_system_exit_of_user_code_names_the_operator(workers: int) -> None:
    def leaves(value: int) -> int:
        raise SystemExit(3)

    flow = af.Flow("f")
    flow.source([1]).map(leaves).sink(print)
    with pytest.raises(SystemExit) as caught:
        await flow.execute(workers=workers)
    assert caught.value.code == 3
    assert notes(caught.value) == ["aioflow: in operator 'map(leaves)', subtask 1/1, at record 1"]


@pytest.mark.filterwarnings("ignore:'asyncio.get_event_loop_policy' is deprecated")
async def test_a_run_leaves_signals_policy_and_the_exception_handler_alone() -> None:
    """J6: nothing of the host program's is touched."""
    loop = asyncio.get_running_loop()

    def state() -> tuple[Any, ...]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return *handlers, asyncio.get_event_loop_policy(), loop.get_exception_handler()

    before = state()
    flow = af.Flow("polite")
    flow.source(Unbounded([1])).sink(af.io.blackhole())
    async with flow.run():
        assert state() == before
    assert state() == before


async def test_a_start_that_failed_leaves_nothing_and_can_be_tried_again(
    lifecycle: type[Lifecycle],
) -> None:
    """J6.3."""
    lifecycle.fail_in = "open"
    flow = af.Flow("retry")
    flow.source([1, 2]).process(lifecycle()).sink(af.io.blackhole())
    before = len(asyncio.all_tasks())
    with pytest.raises(ValueError, match="open"):
        async with flow.run():
            pytest.fail("it must not be entered")
    assert len(asyncio.all_tasks()) == before
    lifecycle.fail_in = ""
    assert (await flow.execute()).status == "FINISHED"


async def test_an_engine_inside_an_aiohttp_app_starts_and_stops_with_it_in_its_loop() -> None:
    """J6.1: no second loop; the shutdown of the app stops the job."""
    flow = af.Flow("inside")
    source = Unbounded([1, 2, 3])
    counted = flow.source(source).map(lambda x: x + 1)
    counted.sink(af.io.blackhole())
    jobs: list[af.Job] = []

    async def engine(app: web.Application) -> AsyncIterator[None]:
        async with flow.run() as job:
            jobs.append(job)
            yield

    async def status(request: web.Request) -> web.Response:
        return web.json_response(
            {"status": jobs[0].status.value, "same_loop": asyncio.get_running_loop() is loop}
        )

    loop = asyncio.get_running_loop()
    app = web.Application()
    app.cleanup_ctx.append(engine)
    app.router.add_get("/", status)
    async with TestClient(TestServer(app)) as client:
        assert await (await client.get("/")).json() == {"status": "RUNNING", "same_loop": True}
    assert jobs[0].status is af.JobStatus.FINISHED
    assert source.readers[0].closed == 1


REQUEST: ContextVar[str] = ContextVar("request", default="none")


async def test_context_variables_are_those_of_the_caller_of_run() -> None:
    async def seen(x: int) -> str:
        return REQUEST.get()

    REQUEST.set("mine")
    assert await af.Flow("context").source([1, 2]).map(seen).collect() == ["mine", "mine"]
    assert await af.Flow("context").source([1, 2]).map(lambda x: REQUEST.get()).collect() == [
        "mine",
        "mine",
    ]


async def test_context_variables_of_the_caller_reach_the_threads_of_functions_and_sources() -> None:
    def seen(x: Any = None) -> str:
        return REQUEST.get()

    async def seen_by_async() -> AsyncIterator[str]:
        yield REQUEST.get()

    REQUEST.set("mine")
    flow = af.Flow("context")
    assert await flow.source([1]).map(seen, blocking=True).collect() == ["mine"]
    assert await flow.source([1]).map_batches(
        lambda rows: [seen() for _ in rows], blocking=True
    ).collect() == ["mine"]
    assert await flow.source(lambda: iter([seen()])).collect() == ["mine"]
    assert await flow.source(seen_by_async).collect() == ["mine"]


async def test_task_started_by_a_source_keeps_the_scope_of_the_source() -> None:
    seen: dict[str, set[str]] = {"async": set(), "thread": set(), "blocking": set()}

    async def in_a_task() -> AsyncIterator[int]:
        for n in range(200):
            seen["async"].add(repr(af.current_scope()))
            yield n
            await asyncio.sleep(0)

    def in_a_thread() -> Iterator[int]:
        for n in range(200):
            seen["thread"].add(repr(af.current_scope()))
            yield n

    def look(n: int) -> int:
        seen["blocking"].add(repr(af.current_scope()))
        return n

    flow = af.Flow("scoped")
    numbers = flow.source(in_a_task, name="tasks").union(flow.source(in_a_thread, name="threads"))
    await numbers.map(lambda n: n, name="plain").map(look, blocking=True, name="blocks").collect()
    await flow.source(in_a_task, name="tasks").map(lambda n: n, name="chained").collect()
    assert seen == {
        "async": {"scoped/tasks[1/1]"},
        "thread": {"scoped/threads[1/1]"},
        "blocking": {"scoped/blocks[1/1]"},
    }


async def test_a_thread_of_a_source_is_in_its_scope_while_an_operator_holds_the_loop() -> None:
    held, looked = threading.Event(), threading.Event()
    seen: list[str] = []

    def in_a_thread() -> Iterator[int]:
        yield 1
        assert held.wait(60)
        seen.append(repr(af.current_scope()))
        looked.set()

    def hold(n: int) -> int:
        held.set()
        assert looked.wait(60)
        return n

    flow = af.Flow("scoped")
    assert await flow.source(in_a_thread, name="threads").map(hold, name="holds").collect() == [1]
    assert seen == ["scoped/threads[1/1]"]


async def test_the_scope_names_job_operator_subtask_and_key_while_user_code_runs() -> None:
    seen: list[str] = []

    def look(x: int) -> int:
        seen.append(repr(af.current_scope()))
        return x

    class Keyed(af.KeyedProcessFunction[int, int, int]):
        def open(self, ctx: Any) -> None:
            seen.append(repr(af.current_scope()))

        def process_element(self, value: int, ctx: Any) -> None:
            seen.append(repr(af.current_scope()))
            ctx.timer_service.register_processing_time_timer(0)

        def on_timer(self, timestamp: int, ctx: Any) -> None:
            seen.append(repr(af.current_scope()))

    await (
        af.Flow("scoped")
        .source([5])
        .map(look, name="look")
        .key_by(lambda x: x)
        .process(Keyed(), name="keyed")
        .collect()
    )
    assert sorted(set(seen)) == ["scoped/keyed[1/1]", "scoped/keyed[1/1] key=5", "scoped/look[1/1]"]
    assert af.current_scope() is None


@pytest.mark.slow_callbacks
async def test_a_slow_operator_is_named_in_the_log_and_in_its_metric(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def slow(x: int) -> int:
        burn(0.12)
        return x

    flow = af.Flow("slow")
    flow.source([1]).map(lambda x: x, name="quick").disable_chaining().map(
        slow, name="sluggish"
    ).sink(af.io.blackhole())
    with caplog.at_level(logging.WARNING):
        result = await flow.execute()
    assert any("'sluggish'" in record.getMessage() for record in caplog.records)
    (named,) = [value for name, value in result.metrics.items() if "sluggish.slowCallbacks" in name]
    assert named >= 1


def spin(value: Any) -> Any:
    burn(0.12)
    return value


@pytest.mark.slow_callbacks
@pytest.mark.parametrize(
    ("slow", "remedy"),
    [
        (
            lambda numbers: numbers.map(spin, name="sluggish"),
            "make it cheaper, async, or blocking=True",
        ),
        (
            lambda numbers: numbers.map_batches(spin, name="sluggish"),
            "make it cheaper, async, or blocking=True",
        ),
        (
            lambda numbers: numbers.process(lambda value, ctx: [spin(value)], name="sluggish"),
            "make it cheaper, or async",
        ),
        (lambda numbers: numbers.sink(spin, name="sluggish"), "make it cheaper, or async"),
        (
            lambda numbers: numbers.key_by(abs).aggregate(af.sum(spin), name="sluggish"),
            "keep what it calls cheap, or",
        ),
        (
            lambda numbers: (
                numbers.key_by(abs).count_window(1).aggregate(af.sum(spin), name="sluggish")
            ),
            "keep what it calls cheap, or",
        ),
    ],
)
async def test_remedy_for_a_slow_operator_fits_the_operator(
    slow: Any, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    flow = af.Flow("slow")
    slow(flow.source([1]).disable_chaining())
    with caplog.at_level(logging.WARNING):
        await flow.execute()
    told = [
        message for message in caplog.messages if message.startswith("operator 'sluggish', subtask")
    ]
    assert told and all(
        f"everything on this loop waited: {remedy}" in message for message in told
    ), caplog.text


async def test_metrics_count_records_of_tasks_and_operators() -> None:
    flow = af.Flow("counted")
    even = flow.source(range(100)).filter(lambda x: x % 2 == 0, name="even")
    even.rebalance().map(lambda x: x, name="same", parallelism=2).sink(af.io.blackhole())
    metrics = (await flow.execute()).metrics

    def total(end: str) -> float:
        return sum(value for name, value in metrics.items() if name.endswith(end))

    assert total("even.numRecordsIn") == 100
    assert total("even.numRecordsOut") == 50
    assert total("same.numRecordsIn") == 50
    assert total("(1/1).numRecordsOut") == 50
    shares = ("idleTimeMsPerSecond", "busyTimeMsPerSecond", "backPressuredTimeMsPerSecond")
    tasks = {name.rsplit(".", 1)[0] for name in metrics if name.endswith("busyTimeMsPerSecond")}
    for task in tasks:
        assert sum(metrics[f"{task}.{share}"] for share in shares) == pytest.approx(1000, abs=50)


async def test_two_tasks_of_one_name_have_metrics_of_their_own() -> None:
    flow = af.Flow("twins")
    left = (
        flow.source(range(10), name="numbers")
        .map(lambda x: x, name="twin")
        .map(lambda x: x, name="twin")
    )
    right = (
        flow.source(range(30), name="numbers")
        .map(lambda x: x, name="twin")
        .map(lambda x: x, name="twin")
    )
    left.union(right).sink(af.io.blackhole())
    metrics = (await flow.execute()).metrics
    assert sorted(
        value for name, value in metrics.items() if name.endswith("twin.numRecordsIn")
    ) == [10, 30]


@pytest.mark.parametrize("count", [4, 2_000])
async def test_elements_accepted_before_a_stop_reach_the_sinks(count: int) -> None:
    """`put` returned, so the element counts, also when the block is left at once."""
    flow = af.Flow("pushed")
    events = flow.source(af.io.push())
    out: list[int] = []
    events.map(lambda x: x).sink(out.append)
    async with flow.run() as job:
        await job.input(events).put_many(range(count))
    assert out == list(range(count))
