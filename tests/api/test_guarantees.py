"""Guarantees of a run in one loop that hold for all batches, slices, neighbours and hash seeds."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aioflow as af
from aioflow.task.environment import TaskOptions

pytestmark = pytest.mark.timeout(300)
"""Far above the duration of any test here: only a hang is cut off."""

ROOT = Path(__file__).parents[2]

# The same output at every batch size and slice length.

Record = tuple[str, int]
"""(key, event time in ms)"""

RECORDS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 900)), max_size=80)
SIZES = st.sampled_from([1, 7, 1024])
SLICES_NS = st.sampled_from([1, 20_000, 2_000_000, 1 << 40])


def strategy(delay: str = "50ms") -> Any:
    return af.WatermarkStrategy.bounded_out_of_orderness(delay, timestamp=lambda r: r[1])


class Reminder(af.KeyedProcessFunction[str, Record, Any]):
    """Sets a timer at each element; every second element of a key cancels the last one.

    Tells the watermark that each call saw.
    """

    def open(self, ctx: Any) -> None:
        self.last = ctx.get_state(af.ValueStateDescriptor("last", default=None))

    def process_element(self, value: Record, ctx: Any) -> Iterator[Any]:
        last = self.last.value()
        if last is None:
            ctx.timer_service.register_event_time_timer(value[1] + 60)
            ctx.timer_service.register_event_time_timer(value[1] + 60)
            self.last.update(value[1] + 60)
        else:
            ctx.timer_service.delete_event_time_timer(last)
            self.last.clear()
        yield "element", *value, ctx.current_watermark

    def on_timer(self, timestamp: int, ctx: Any) -> Iterator[Any]:
        self.last.clear()
        yield "timer", timestamp, ctx.current_key, ctx.current_watermark


class ListElements(af.ProcessWindowFunction[Record, Any, str]):
    def process(self, key: str, ctx: Any, elements: Any) -> Iterator[Any]:
        yield key, ctx.window.start, ctx.window.end, list(elements), ctx.current_watermark


def tumbling(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    windows = (
        source.key_by(lambda r: r[0])
        .window(af.tumbling("100ms"))
        .aggregate(af.collect(lambda r: r[1]))
    )
    return [windows, windows.late]


def tumbling_with_lateness(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    windows = (
        source.key_by(lambda r: r[0])
        .window(af.tumbling("100ms"), lateness="80ms")
        .aggregate(af.count())
    )
    return [windows, windows.late]


def sliding(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    windows = (
        source.key_by(lambda r: r[0]).window(af.sliding("120ms", "40ms")).aggregate(af.count())
    )
    return [windows, windows.late]


def window_function(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    windows = (
        source.key_by(lambda r: r[0])
        .window(af.tumbling("100ms"), lateness="50ms")
        .process(ListElements())
    )
    return [windows, windows.late]


def sessions(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    windows = (
        source.key_by(lambda r: r[0])
        .window(af.session("60ms"), lateness="40ms")
        .aggregate(af.collect(lambda r: r[1]))
    )
    return [windows, windows.late]


def cancelled_timers(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    return [source.key_by(lambda r: r[0]).process(Reminder())]


def counted(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    return [
        source.flat_map(lambda r: [r, r])
        .filter(lambda r: r[0] != "c")
        .key_by(lambda r: r[0])
        .count_window(3, 2)
        .aggregate(af.count())
    ]


def async_map(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    async def wait(record: Record) -> Record:
        await asyncio.sleep(0)
        return record

    windows = (
        source.map(wait, concurrency=5)
        .key_by(lambda r: r[0])
        .window(af.tumbling("100ms"))
        .aggregate(af.collect(lambda r: r[1]))
    )
    return [windows, windows.late]


def after_async_functions(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    async def wait(record: Record) -> Record:
        for _ in range(record[1] % 3):
            await asyncio.sleep(0)
        return record

    batched = (
        source.rebalance()
        .map(wait, concurrency=3)
        .map_batches(lambda records: list(records), max_size=3, max_wait="0ms")
    )
    keyed = batched.key_by(lambda r: r[0])
    return [keyed.process(Reminder()), keyed.window(af.tumbling("100ms")).process(ListElements())]


def window_of_windows(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    first = source.key_by(lambda r: r[0]).window(af.tumbling("50ms")).aggregate(af.count())
    return [
        first.key_by(lambda r: 0)
        .window(af.tumbling("200ms"))
        .aggregate(af.collect(lambda r: (r.key, r.start, r.value)))
    ]


ONE_PATH = [
    tumbling,
    tumbling_with_lateness,
    sliding,
    window_function,
    sessions,
    cancelled_timers,
    counted,
    async_map,
    after_async_functions,
    window_of_windows,
]
Program = Callable[[af.DataStream[Record]], list[af.DataStream[Any]]]


def outputs(program: Program, records: list[Record], tasks: TaskOptions) -> list[list[Any]]:
    flow = af.Flow("same")
    streams = program(flow.source(records, watermarks=strategy()))

    async def run() -> Any:
        return (
            await flow.collect(*streams, tasks=tasks)
            if len(streams) > 1
            else [await streams[0].collect(tasks=tasks)]
        )

    return [list(rows) for rows in asyncio.run(run())]


@pytest.mark.parametrize("program", ONE_PATH, ids=lambda p: p.__name__)
@given(records=RECORDS, size=SIZES, slice_ns=SLICES_NS)
@settings(max_examples=15)
def test_one_split_gives_the_same_output_at_every_batch_size_and_slice_length(
    program: Program, records: list[Record], size: int, slice_ns: int
) -> None:
    """C4.2: record by record: late elements, cancelled timers, the watermark that each call saw
    and the order are the same.
    """
    expected = outputs(program, records, TaskOptions(batch_records_max=1, slice_ns=1))
    assert (
        outputs(program, records, TaskOptions(batch_records_max=size, slice_ns=slice_ns))
        == expected
    )


def window_join(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    left, right = source.filter(lambda r: r[1] % 2 == 0), source.filter(lambda r: r[1] % 3 == 0)
    return [
        left.join(right)
        .where(lambda r: r[0])
        .equal_to(lambda r: r[0])
        .window(af.tumbling("100ms"))
        .apply(lambda a, b: (a, b))
    ]


def interval_join(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    left, right = source.filter(lambda r: r[1] % 2 == 0), source.filter(lambda r: r[1] % 3 == 0)
    joined = left.key_by(lambda r: r[0]).interval_join(
        right.key_by(lambda r: r[0]), "-30ms", "30ms"
    )
    return [joined.process(lambda a, b, ctx: [(a, b)])]


def connected(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    left, right = source.filter(lambda r: r[1] % 2 == 0), source.filter(lambda r: r[1] % 2 == 1)
    return [left.connect(right).map(lambda a: ("left", a), lambda b: ("right", b))]


def group(source: af.DataStream[Record]) -> list[af.DataStream[Any]]:
    left, right = source.filter(lambda r: r[1] % 2 == 0), source.filter(lambda r: r[1] % 3 == 0)
    grouped = (
        left.co_group(right)
        .where(lambda r: r[0])
        .equal_to(lambda r: r[0])
        .window(af.sliding("120ms", "60ms"))
    )
    return [grouped.apply(lambda key, lefts, rights: [(key, tuple(lefts), tuple(rights))])]


@pytest.mark.parametrize(
    "program", [window_join, interval_join, connected, group], ids=lambda p: p.__name__
)
@given(records=RECORDS, size=SIZES, slice_ns=SLICES_NS)
@settings(max_examples=15)
def test_two_branches_of_one_split_meet_in_the_same_rows_at_every_batch_size(
    program: Program, records: list[Record], size: int, slice_ns: int
) -> None:
    """Joins of one split.

    Which branch comes first is not promised, so rows are compared without their order; late ones
    are left out.
    """
    in_order = sorted(records, key=lambda r: r[1])
    expected = outputs(program, in_order, TaskOptions(batch_records_max=1, slice_ns=1))
    got = outputs(program, in_order, TaskOptions(batch_records_max=size, slice_ns=slice_ns))
    assert [Counter(rows) for rows in got] == [Counter(rows) for rows in expected]


AT_BOUNDARIES = st.builds(
    lambda n, offset: max(0, 50 * n + offset), st.integers(0, 12), st.sampled_from([-1, 0, 1])
)


@given(records=st.lists(st.tuples(st.sampled_from("ab"), AT_BOUNDARIES), max_size=40), size=SIZES)
@settings(max_examples=40)
def test_windows_and_late_elements_are_those_of_a_reference_that_knows_no_batches(
    records: list[Record], size: int
) -> None:
    """G1.3: an element with timestamp t is late for window [s, e) iff the watermark in force
    before it has reached e - 1.
    """
    highest, open_windows, late = None, {}, []
    for record in records:
        watermark = None if highest is None else highest - 50 - 1
        start = record[1] // 100 * 100
        if watermark is not None and watermark >= start + 99:
            late.append(record)
        else:
            open_windows.setdefault((record[0], start), []).append(record[1])
        highest = record[1] if highest is None else max(highest, record[1])
    windows, dropped = outputs(tumbling, records, TaskOptions(batch_records_max=size))
    assert {(r.key, r.start): r.value for r in windows} == open_windows
    assert len(windows) == len(open_windows)
    assert dropped == late


# In a loop that another owner runs.


def burn(seconds: float) -> None:
    """Uses at least this much time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class LoopGaps:
    """How long the loop's turns took, in time of this thread: what other programs take on a busy
    machine does not count.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._last = time.thread_time()
        self._handle = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        now = time.thread_time()
        self.seconds.append(now - self._last)
        self._last = now
        self._handle = self._loop.call_soon(self._turn)

    def stop(self) -> None:
        self._handle.cancel()

    def share_above(self, seconds: float) -> float:
        """Returns the share of the thread's time that was spent in longer turns."""
        return sum(gap for gap in self.seconds if gap > seconds) / sum(self.seconds)


async def quiet_share(seconds: float) -> float:
    """The same measure over the same loop that only burns a millisecond a turn."""
    gaps = LoopGaps()
    for _ in range(200):
        burn(0.001)
        await asyncio.sleep(0)
    gaps.stop()
    return gaps.share_above(seconds)


async def test_the_loop_is_never_held_for_ten_milliseconds_by_functions_of_one() -> None:
    """J1.1: three such functions in a chain, a key function and a window; the slice bounds them
    all together.
    """

    def slow(x: Any) -> Any:
        burn(0.001)
        return x

    flow = af.Flow(
        "slow"
    )  # One subtask each: a turn of the loop holds one slice of every task that has work.
    stream = flow.source(
        range(60), watermarks=af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda x: x)
    )
    stream = stream.map(slow).flat_map(lambda x: [slow(x)]).filter(slow).map(slow)
    stream.key_by(lambda x: slow(x) % 3).window(af.tumbling("10ms")).reduce(
        lambda a, b: slow(a + b)
    ).sink(af.io.blackhole())
    gaps = LoopGaps()
    await flow.execute()
    gaps.stop()
    assert sum(gaps.seconds) > 0.2, "the functions ran"
    assert gaps.share_above(0.010) <= await quiet_share(0.010) + 0.1


@pytest.mark.parametrize(
    "kind", [pytest.param("flat_map", marks=pytest.mark.slow), "process", "keyed process"]
)
async def test_memory_is_bounded_while_each_of_a_thousand_records_becomes_ten_thousand(
    kind: str,
) -> None:
    """Overshoot is one record's own output; 80 kB of references a record, 80 MB if all of them
    were held.
    """
    count, width = (1000, 10_000) if kind == "flat_map" else (200, 10_000)
    seen = 0

    def see(x: int) -> bool:
        nonlocal seen
        seen += 1
        return False

    flow = af.Flow("explodes")
    source: Any = flow.source(range(count))
    if kind == "flat_map":
        stream = source.flat_map(lambda x: [x] * width)
    elif kind == "process":
        stream = source.process(lambda x, ctx: [x] * width)
    else:
        stream = source.key_by(lambda x: x % 3).process(lambda x, ctx: [x] * width)
    stream.rebalance().filter(see).sink(af.io.blackhole())
    gc.collect()
    tracemalloc.start()
    try:
        await flow.execute()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == count * width
    assert peak <= 6_000_000, f"{peak / 1e6:.1f} MB at the peak"


async def test_starts_and_stops_with_threads_files_and_resources_leave_nothing_behind(
    tmp_path: Path,
) -> None:
    """J3.1: functions in threads, an open resource, a file that is written; half of the runs are
    cancelled.
    """
    opened = closed = 0

    @af.resource
    async def connection() -> AsyncIterator[int]:
        nonlocal opened, closed
        opened += 1
        try:
            yield 1
        finally:
            closed += 1

    def use(x: int, one: int = af.use(connection)) -> int:
        return x + one

    def forever() -> Iterator[int]:
        yield from range(1 << 60)

    async def once(i: int) -> None:
        flow = af.Flow("again")
        started = asyncio.Event()
        numbers = flow.source(forever).map(use).map(lambda x: x + 1, blocking=True, concurrency=2)
        numbers.map(lambda x: (started.set(), x)[1]).sink(af.io.jsonl(str(tmp_path / str(i))))
        async with flow.run() as job:
            await started.wait()
            await (job.cancel() if i % 2 else job.stop())

    def measure() -> tuple[int, int, int]:
        gc.collect()
        return len(asyncio.all_tasks()), threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = measure()
    for i in range(3):
        await once(i)
    warm = measure()
    for i in range(3, 23):
        await once(i)
    assert measure() == warm
    assert warm[0] == before[0]
    assert opened == closed == 23


async def test_a_flow_that_fails_leaves_the_one_beside_it_alone() -> None:
    """Two flows in one loop share nothing: neither errors, nor resources, nor back pressure."""
    gate = asyncio.Event()

    async def stuck(x: int) -> int:
        await gate.wait()
        return x

    def fail(x: int) -> int:
        if x == 500:
            raise ValueError(x)
        return x

    full, failing, well = af.Flow("full"), af.Flow("failing"), af.Flow("well")
    waiting = asyncio.ensure_future(
        full.source(range(5_000)).map(stuck, concurrency=1).map(lambda x: x).collect()
    )
    results = await asyncio.gather(
        failing.source(range(1000)).map(fail).collect(),
        well.source(range(20_000)).key_by(lambda x: x % 7).count().collect(),
        return_exceptions=True,
    )
    assert isinstance(results[0], ValueError)
    assert len(results[1]) == 20_000
    assert not waiting.done()
    gate.set()
    assert await waiting == list(range(5_000))


async def test_a_run_installs_neither_handlers_nor_policies_nor_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """J6.1: not even for a moment; an attempt raises."""
    import signal

    touched: list[str] = []
    loop = asyncio.get_running_loop()

    def trap(what: str) -> Callable[..., None]:
        return lambda *args, **kwargs: touched.append(what)

    monkeypatch.setattr(signal, "signal", trap("signal.signal"))
    monkeypatch.setattr(signal, "set_wakeup_fd", trap("signal.set_wakeup_fd"))
    monkeypatch.setattr(loop, "add_signal_handler", trap("add_signal_handler"), raising=False)
    monkeypatch.setattr(loop, "set_exception_handler", trap("set_exception_handler"), raising=False)
    monkeypatch.setattr(loop, "set_task_factory", trap("set_task_factory"), raising=False)
    monkeypatch.setattr(loop, "set_debug", trap("set_debug"), raising=False)
    monkeypatch.setattr(loop, "set_default_executor", trap("set_default_executor"), raising=False)
    monkeypatch.setattr(asyncio, "set_event_loop_policy", trap("set_event_loop_policy"))
    monkeypatch.setattr(asyncio, "set_event_loop", trap("set_event_loop"))
    monkeypatch.setattr(asyncio, "new_event_loop", trap("new_event_loop"))
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook

    async def wait(x: int) -> int:
        await asyncio.sleep(0)
        return x

    flow = af.Flow("polite", parallelism=2)
    flow.source(range(50)).map(wait).map(lambda x: x, blocking=True).key_by(
        lambda x: x % 3
    ).count().sink(af.io.blackhole())
    await flow.execute()
    with pytest.raises(ZeroDivisionError):
        await af.Flow("fails").source([0]).map(lambda x: 1 // x).collect()

    assert touched == []
    assert (sys.excepthook, threading.excepthook, sys.unraisablehook) == hooks


async def test_the_engine_runs_inside_a_running_aiohttp_application() -> None:
    """J6.1: no second loop; the shutdown of the application stops the engine."""
    import aiohttp
    from aiohttp import web

    loops: set[Any] = set()
    before = threading.active_count()

    def see(x: int) -> int:
        loops.add(asyncio.get_running_loop())
        return x

    flow = af.Flow("inside")
    pushed = flow.source(af.io.push(), name="pushed")
    counts = pushed.map(see).key_by(lambda x: x).count()
    key = web.AppKey("job", af.Job)

    async def job(app: web.Application) -> AsyncIterator[None]:
        async with flow.run() as running:
            app[key] = running
            yield

    async def put(request: web.Request) -> web.Response:
        await request.app[key].input(pushed).put(int(await request.text()))
        return web.json_response(await request.app[key].state(counts).get(7, default=0))

    app = web.Application()
    app.add_routes([web.put("/", put)])
    app.cleanup_ctx.append(job)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with (
        aiohttp.ClientSession() as session,
        session.put(f"http://127.0.0.1:{runner.addresses[0][1]}/", data="7") as response,
    ):
        assert response.status == 200
    running = app[key]
    assert running.status is af.JobStatus.RUNNING
    await runner.cleanup()
    assert running.status.is_terminal
    assert loops == {asyncio.get_running_loop()}
    assert threading.active_count() == before


# Errors.


def notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("aioflow: ")]


def fails_at_five(x: int) -> int:
    if x == 5:
        raise LookupError("five")
    return x


async def fails_at_five_later(x: int) -> int:
    await asyncio.sleep(0)
    return fails_at_five(x)


class FailsInProcess(af.ProcessFunction[int, int]):
    def process_element(self, value: int, ctx: Any) -> Iterator[int]:
        yield fails_at_five(value)


class FailsInAsyncProcess(af.ProcessFunction[int, int]):
    async def process_element(self, value: int, ctx: Any) -> list[int]:
        await asyncio.sleep(0)
        return [fails_at_five(value)]


WAYS_TO_FAIL: dict[str, Callable[[Any], Any]] = {
    "map": lambda s: s.map(fails_at_five, name="culprit"),
    "fused": lambda s: s.map(lambda x: x).map(fails_at_five, name="culprit").filter(lambda x: True),
    "filter": lambda s: s.filter(fails_at_five, name="culprit"),
    "flat_map": lambda s: s.flat_map(lambda x: [fails_at_five(x)], name="culprit"),
    "async": lambda s: s.map(fails_at_five_later, name="culprit"),
    "async, unordered": lambda s: s.map(fails_at_five_later, name="culprit", ordered=False),
    "blocking": lambda s: s.map(fails_at_five, name="culprit", blocking=True),
    "process": lambda s: s.process(FailsInProcess(), name="culprit"),
    "async process": lambda s: s.process(FailsInAsyncProcess(), name="culprit"),
    "key_by": lambda s: s.map(lambda x: x, name="culprit").key_by(fails_at_five).count(),
    "partition_custom": lambda s: (
        s.map(lambda x: x, name="culprit")
        .partition_custom(lambda x, n: fails_at_five(x) % n)
        .map(lambda x: x)
    ),
    "reduce": lambda s: s.key_by(lambda x: 0).reduce(lambda a, b: fails_at_five(b), name="culprit"),
    "aggregate": lambda s: s.key_by(lambda x: 0).aggregate(af.sum(fails_at_five), name="culprit"),
    "window": lambda s: (
        s.key_by(lambda x: 0).count_window(3).aggregate(af.sum(fails_at_five), name="culprit")
    ),
}


@pytest.mark.parametrize("way", WAYS_TO_FAIL)
async def test_an_error_of_user_code_names_operator_subtask_and_record_in_exactly_one_note(
    way: str,
) -> None:
    """B6.1: the error itself arrives, from any function and place."""
    stream = WAYS_TO_FAIL[way](af.Flow("fails", parallelism=2).source(range(20)))
    with pytest.raises(LookupError, match="five") as caught:
        await stream.collect()
    assert type(caught.value) is LookupError
    (note,) = notes(caught.value)
    assert "'culprit'" in note
    assert re.search(r"operator 'culprit', subtask [12]/[12], at record 5", note)


async def test_an_error_of_a_sink_function_names_the_sink_and_the_record() -> None:
    for sink in (fails_at_five, fails_at_five_later):
        flow = af.Flow("fails")
        flow.source(range(20)).sink(sink, name="culprit")
        with pytest.raises(LookupError) as caught:
            await flow.execute()
        (note,) = notes(caught.value)
        assert note == "aioflow: in operator 'culprit', subtask 1/1, at record 5"


TIMES: dict[str, af.WatermarkStrategy[int]] = {
    "timestamp": af.WatermarkStrategy.monotonous_timestamps(timestamp=fails_at_five),
    "no timestamp": af.WatermarkStrategy.bounded_out_of_orderness(
        "1s", timestamp=lambda x: x if x < 5 else None
    ),  # type: ignore[arg-type,return-value]
    "too large": af.WatermarkStrategy.monotonous_timestamps(
        timestamp=lambda x: x << (62 * (x == 5))
    ),
    "no watermarks": af.WatermarkStrategy.no_watermarks(timestamp=fails_at_five),
    "watermark": af.WatermarkStrategy.punctuated(fails_at_five, timestamp=lambda x: x),
    "generator": af.WatermarkStrategy.custom(
        type("Each", (), {"on_event": lambda self, x, t: fails_at_five(x)}), timestamp=lambda x: x
    ),
}


@pytest.mark.parametrize("way", TIMES)
async def test_an_error_of_event_time_names_the_place_and_the_record(way: str) -> None:
    source = af.Flow("fails").source(range(20), name="culprit", watermarks=TIMES[way])
    operator = (
        af.Flow("fails")
        .source(range(20))
        .assign_timestamps_and_watermarks(TIMES[way], name="culprit")
    )
    for stream, kind in ((source, "source"), (operator, "operator")):
        with pytest.raises((LookupError, TypeError, ValueError)) as caught:
            await stream.collect()
        assert notes(caught.value) == [f"aioflow: in {kind} 'culprit', subtask 1/1, at record 5"]


class KeyedPair(af.KeyedCoProcessFunction[str, Record, Record, Any]):
    pass


def source_of(flow: af.Flow) -> Any:
    return flow.source(range(3), name="numbers")


BAD_FLOWS: dict[str, tuple[Callable[[af.Flow], Any], list[str]]] = {
    "a generator object": (lambda f: f.source((x for x in range(3)), name="numbers"), ["function"]),
    "a window without event time": (
        lambda f: source_of(f).key_by(lambda x: x).window(af.tumbling("1s")).aggregate(af.count()),
        ["numbers", "watermarks"],
    ),
    "keyed, then rebalanced": (
        lambda f: source_of(f).key_by(lambda x: x).rebalance(),
        ["numbers", "key_by"],
    ),
    "map of no function": (lambda f: source_of(f).map(3, name="three"), ["map", "3"]),
    "no such parallelism": (
        lambda f: source_of(f).map(lambda x: x, name="many", parallelism=500).collect,
        ["many", "500", "128"],
    ),
    "parallelism 0": (
        lambda f: source_of(f).map(lambda x: x, name="none", parallelism=0),
        ["none", "0"],
    ),
    "forward to others": (
        lambda f: source_of(f).forward().map(lambda x: x, name="wide", parallelism=3),
        ["numbers", "wide", "3"],
    ),
    "a uid twice": (
        lambda f: (
            source_of(f)
            .map(lambda x: x, name="first", uid="u")
            .map(lambda x: x, name="second", uid="u")
        ),
        ["first", "second", "'u'"],
    ),
    "two flows": (lambda f: source_of(f).union(source_of(af.Flow("other"))), ["'bad'", "'other'"]),
    "keyed function without a key": (
        lambda f: source_of(f).connect(source_of(f)).process(KeyedPair()),
        ["KeyedPair", "key_by"],
    ),
}


@pytest.mark.parametrize("kind", BAD_FLOWS)
def test_an_error_of_the_graph_says_which_operator_is_wrong(kind: str) -> None:
    build, named = BAD_FLOWS[kind]
    flow = af.Flow("bad")
    with pytest.raises(af.GraphError) as caught:
        build(flow)
        flow.job_graph()
    for name in named:
        assert name in str(caught.value), f"{name!r} is not in {str(caught.value)!r}"


@given(
    st.lists(
        st.one_of(st.integers(0, 99), st.sampled_from(["{", "nonsense", "[1", ""])), max_size=40
    ),
    SIZES,
)
@settings(max_examples=20)
def test_malformed_lines_follow_on_error_and_no_other_line_is_lost(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Any], size: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "some.jsonl"
    path.write_text(
        "".join(
            (line if isinstance(line, str) else json.dumps({"n": line})) + "\n" for line in lines
        )
    )
    good = [{"n": line} for line in lines if isinstance(line, int)]
    bad = [(number, line) for number, line in enumerate(lines, 1) if isinstance(line, str) and line]
    tasks = TaskOptions(batch_records_max=size)
    aside: af.OutputTag[af.Failed[bytes]] = af.OutputTag("malformed")

    async def run() -> None:
        skipping = af.Flow("skip").source(af.io.jsonl(str(path), on_error="skip"))
        assert await skipping.collect(tasks=tasks) == good
        flow = af.Flow("aside")
        source = flow.source(af.io.jsonl(str(path), on_error=aside))
        rows, failed = await flow.collect(source, source.side(aside), tasks=tasks)
        assert rows == good
        assert [one.value.decode().strip() for one in failed] == [line for _, line in bad]
        for one, (number, _) in zip(failed, bad, strict=True):
            assert "some.jsonl" in one.error
            assert str(number) in one.error
        if bad:
            with pytest.raises(Exception, match=r"some\.jsonl"):
                await (
                    af.Flow("fail")
                    .source(af.io.jsonl(str(path), on_error="fail"))
                    .collect(tasks=tasks)
                )

    asyncio.run(run())


# Keys.

ROUTES = """
import asyncio, json, datetime, decimal, uuid
import aioflow as af
from aioflow.core.keygroups import key_group

keys = ["a", "b", "word", "", "é", b"x", 0, 1, -7, 2**70, 1.5, True, (1, "a"),
        frozenset({"x", "y", "z", "w"}), decimal.Decimal("2.50"),
        datetime.date(2024, 2, 29), uuid.UUID(int=5), frozenset({("a", 1), ("b", 2), ("c", 3)})]

class Where(af.KeyedProcessFunction):
    def open(self, ctx):
        self.index = ctx.subtask_index
    def process_element(self, value, ctx):
        yield value, self.index

async def main():
    flow = af.Flow("routes", parallelism=3)
    numbered = flow.source(range(len(keys)))
    rows = await numbered.key_by(lambda i: keys[i]).process(Where()).collect()
    words = await flow.source(["x", "y", "z", "x", "q"] * 20).key_by(lambda w: w).count().collect()
    return rows, words

rows, words = asyncio.run(main())
print(json.dumps([[key_group(key, 128) for key in keys], sorted(rows), sorted(words)]))
"""


def test_routes_are_the_same_under_every_hash_seed() -> None:
    """C6.5: key groups, the subtask that sees a key, and what it counts; the order between
    subtasks follows their measured slices.
    """
    answers = []
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", ROUTES],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert answers[0] == answers[1] == answers[2]
    groups, rows, _ = answers[0]
    assert [index for _, index in rows] == [group * 3 // 128 for group in groups], (
        "subtask(key) is that of its key group"
    )
