"""Advice about running tasks: silent inputs, too few calls, forgotten defaults, restarts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import time
import traceback
from pathlib import Path
from typing import Any

import numpy
import pytest

import aioflow as af
from aioflow.advice import runtime
from aioflow.advice.runtime import CallsSeen, InputSeen, TaskAdvice
from aioflow.core.elements import MAX_WATERMARK, MIN_WATERMARK
from aioflow.core.errors import note_once
from aioflow.core.user_code import fold_traceback, format_folded, user_frames, whole_traceback
from aioflow.inspection import loop_watch


def advice(told: set[str] | None = None) -> TaskAdvice:
    return TaskAdvice("orders", "window (1/1)", set() if told is None else told)


def test_silent_input_is_named_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    one, told = advice(told := set()), told
    for now in range(0, 120, 5):
        one.look(
            [InputSeen("input 'a'", 7, False), InputSeen("input 'b'", MIN_WATERMARK, False)],
            [],
            float(now),
        )
    (message,) = [record.getMessage() for record in caplog.records]
    assert "job 'orders': input 'b' has given no new watermark for 30 s" in message
    assert "idle_after=" in message
    assert told == {"input 'b'"}


@pytest.mark.parametrize(
    "inputs",
    [
        [InputSeen("a", MIN_WATERMARK, False), InputSeen("b", MIN_WATERMARK, False)],
        [InputSeen("a", 7, False), InputSeen("b", MIN_WATERMARK, True)],
        [InputSeen("a", 7, False), InputSeen("b", 1, False)],
        [InputSeen("a", 7, False), InputSeen("b", 7, False)],
        [InputSeen("ended", MAX_WATERMARK, False), InputSeen("b", MIN_WATERMARK, False)],
        [InputSeen("ended", MAX_WATERMARK, False), InputSeen("b", 7, False)],
    ],
)
def test_inputs_that_hold_nothing_back_are_not_named(
    inputs: list[InputSeen], caplog: pytest.LogCaptureFixture
) -> None:
    one = advice()
    for now in range(0, 120, 5):
        one.look(inputs, [], float(now))
    assert not caplog.records


def test_input_that_falls_silent_is_named_once_others_moved_on_for_30_s(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = advice()
    for now in range(0, 60, 5):
        one.look([InputSeen("a", now, False), InputSeen("b", now - 1, False)], [], float(now))
    assert not caplog.records
    for now in range(60, 120, 5):
        one.look([InputSeen("a", now, False), InputSeen("b", 58, False)], [], float(now))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "job 'orders': b has given no new watermark for 30 s" in message


def test_input_that_is_behind_and_moves_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    one = advice()
    for now in range(0, 600, 5):
        behind = now // 20 * 20 - 100
        one.look([InputSeen("a", now, False), InputSeen("b", behind, False)], [], float(now))
    assert not caplog.records


def test_calls_that_are_all_in_flight_for_long_are_a_bottleneck(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, full = advice(), CallsSeen("operator 'enrich', subtask 1/1", 8, 8, True)
    for now in range(0, 30, 5):
        one.look([], [full], float(now))
    one.look([], [full._replace(waiting=False)], 30.0)  # A pause starts the time again.
    assert not caplog.records
    for now in range(35, 120, 5):
        one.look([], [full], float(now))
    (message,) = [record.getMessage() for record in caplog.records]
    assert (
        "operator 'enrich', subtask 1/1 is the bottleneck: 8 of 8 calls are in flight for 30 s"
        in (message)
    )
    assert "concurrency=" in message


class Forgets(af.KeyedProcessFunction[str, int, int]):
    def open(self, ctx: Any) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", default=[]))

    def process_element(self, value: int, ctx: Any) -> Any:
        seen = self.seen.value()
        seen.append(value)
        yield len(seen)


class Remembers(Forgets):
    def process_element(self, value: int, ctx: Any) -> Any:
        seen = self.seen.value()
        seen.append(value)
        self.seen.update(seen)
        yield len(self.seen.value())


class Clears(Forgets):
    """Uses the list for one element only."""

    def process_element(self, value: int, ctx: Any) -> Any:
        yield from super().process_element(value, ctx)
        self.seen.clear()


class ComparesNothing(Forgets):
    """Holds arrays, which compare by element."""

    def open(self, ctx: Any) -> None:
        default = [numpy.array([1, 2])]
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", default=default))

    def process_element(self, value: int, ctx: Any) -> Any:
        arrays = self.seen.value()
        arrays[0] = arrays[0] + 1
        yield value


class Reads(Forgets):
    def process_element(self, value: int, ctx: Any) -> Any:
        yield len(self.seen.value())


@pytest.mark.parametrize(
    ("function", "warns"),
    [(Forgets, 1), (Remembers, 0), (Reads, 0), (Clears, 0), (ComparesNothing, 0)],
)
async def test_default_that_is_changed_in_place_is_named_once(
    function: Any, warns: int, caplog: pytest.LogCaptureFixture
) -> None:
    flow = af.Flow("lists")
    await (
        flow.source([1, 2, 3, 4]).key_by(lambda _: "k").process(function(), name="gather").collect()
    )
    found = [one.getMessage() for one in caplog.records if "in place" in one.getMessage()]
    assert len(found) == warns
    assert all("job 'lists', operator 'gather'" in one and "'seen'" in one for one in found)


async def test_restart_says_job_cause_next_try_and_checkpoint(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    failed = False

    def fail_once(value: int) -> int:
        nonlocal failed
        if value == 2 and not failed:
            failed = True
            raise OSError("no route")
        return value

    flow = af.Flow("orders")
    source = flow.source([1, 2, 3]).map(fail_once)
    with caplog.at_level(logging.WARNING):
        await source.collect(checkpoints=str(tmp_path), restart=af.fixed_delay(1, "10ms"))
    (message,) = [one.getMessage() for one in caplog.records if "restarts" in one.getMessage()]
    assert message.startswith("job 'orders' (")
    assert "restarts in 0.0 s from the beginning, because no checkpoint has completed" in message
    assert message.endswith("restart 1, after OSError: no route")


@pytest.mark.parametrize("workers", [0, 1])
async def test_failure_at_the_same_record_each_time_is_advised_on_once(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(value: int) -> int:
        if value == 2:
            raise OSError(f"no route at {time.monotonic_ns()}")
        return value

    source = af.Flow("orders").source([1, 2, 3]).map(fail, name="ratio")
    with caplog.at_level(logging.WARNING), pytest.raises(OSError, match="no route"):
        await source.collect(restart=af.fixed_delay(5, "10ms"), workers=workers)
    (message,) = [one.getMessage() for one in caplog.records if "same way" in one.getMessage()]
    assert message.startswith("job 'orders' failed 3 times in the same way: OSError: no route")
    assert "operator 'ratio', subtask 1/1, at record 2" in message
    assert "on_error=" in message
    assert "restart=af.no_restart()" in message


async def test_failures_at_different_records_are_not_advised_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed: list[int] = []

    def fail_once_each(value: int) -> int:
        if value not in failed:
            failed.append(value)
            raise OSError("no route")
        return value

    source = af.Flow("orders").source(range(5)).map(fail_once_each)
    with caplog.at_level(logging.WARNING):
        await source.collect(restart=af.fixed_delay(5, "10ms"))
    assert len(failed) == 5
    assert not any("same way" in one.getMessage() for one in caplog.records)


async def until_logged(text: str, caplog: pytest.LogCaptureFixture) -> str:
    async with asyncio.timeout(30):
        while True:
            for record in caplog.records:
                if text in record.getMessage():
                    return record.getMessage()
            await asyncio.sleep(0.01)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "CHECK_BEATS", 1)
    monkeypatch.setattr(runtime, "LASTS_S", 0.2)


@pytest.mark.usefixtures("soon")
async def test_silent_source_of_a_running_job_is_named(caplog: pytest.LogCaptureFixture) -> None:
    flow = af.Flow("orders")
    timed = af.WatermarkStrategy[int].monotonous_timestamps(timestamp=lambda value: value)
    sources = [
        flow.source(af.io.push(), name=name, watermarks=timed) for name in ("busy", "silent")
    ]
    windows = (
        sources[0]
        .union(sources[1])
        .key_by(lambda _: 0)
        .window(af.tumbling("1s"))
        .aggregate(af.count())
    )
    windows.sink(af.io.blackhole())
    async with flow.run() as job:
        await job.input(sources[0]).put_many([1, 2_000, 4_000])
        message = await until_logged("no new watermark", caplog)
    assert message.startswith("job 'orders': input 'silent' has given no new watermark")


@pytest.mark.usefixtures("soon")
async def test_source_that_falls_silent_in_a_running_job_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = af.Flow("orders")
    timed = af.WatermarkStrategy[int].monotonous_timestamps(timestamp=lambda value: value)
    busy, silent = (
        flow.source(af.io.push(), name=name, watermarks=timed) for name in ("busy", "silent")
    )
    windows = busy.union(silent).key_by(lambda _: 0).window(af.tumbling("1s")).aggregate(af.count())
    windows.sink(af.io.blackhole())
    async with flow.run() as job:
        await job.input(silent).put(5_000)

        async def go_on() -> None:
            for value in itertools.count(10_000):
                await job.input(busy).put(value)
                await asyncio.sleep(0.01)

        going_on = asyncio.create_task(go_on())
        message = await until_logged("no new watermark", caplog)
        going_on.cancel()
    assert message.startswith("job 'orders': input 'silent' has given no new watermark")


@pytest.mark.usefixtures("soon")
async def test_full_calls_of_a_running_job_are_named(caplog: pytest.LogCaptureFixture) -> None:
    go = asyncio.Event()

    async def enrich(value: int) -> int:
        await go.wait()
        return value

    flow = af.Flow("orders")
    flow.source(range(9)).map(enrich, name="enrich", concurrency=2).sink(af.io.blackhole())
    async with flow.run():
        message = await until_logged("bottleneck", caplog)
        go.set()
    assert "operator 'enrich', subtask 1/1 is the bottleneck: 2 of 2 calls" in message


def divide(value: int) -> float:
    return 1 / (value - 2)


async def test_traceback_of_user_code_has_no_frames_of_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    flow = af.Flow("orders")
    with caplog.at_level(logging.DEBUG, "aioflow"), pytest.raises(ZeroDivisionError) as raised:
        await flow.source([1, 2]).map(divide).map(str).collect()
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert names[-1] == "divide"
    assert "_run_chain" not in names
    (whole,) = [one for one in caplog.records if "whole traceback" in one.getMessage()]
    assert whole.levelno == logging.DEBUG


async def test_traceback_of_the_engine_alone_stays(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(af.AioflowError) as raised:
        await af.Flow("orders").source([1, 2]).key_by(lambda _: None).count().collect()
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "_run_chain" in names


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Closed(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("read only")


@pytest.mark.parametrize("error", [ValueError("n"), Silent()], ids=["plain", "without a text"])
async def test_error_of_user_code_arrives_as_itself_and_can_be_pickled(error: Exception) -> None:
    def fail(_: int) -> int:
        raise error

    with pytest.raises(type(error)) as raised:
        await af.Flow("orders").source([1, 2]).map(fail).collect()
    assert raised.value is error
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert copied.__notes__ == error.__notes__


def test_error_that_refuses_attributes_has_its_note_and_its_whole_traceback() -> None:
    error = Closed("n")
    try:
        note_once(error, "at record 1")
        raise error
    except Closed:
        whole = error.__traceback__
        fold_traceback(error)
    assert error.__notes__ == ["aioflow: at record 1"]
    assert whole_traceback(error) is whole


def test_package_whose_name_begins_with_ours_belongs_to_the_user() -> None:
    neighbour = f"{Path(af.__file__).parent}_extra/orders.py"
    space: dict[str, Any] = {}
    exec(compile("def fail(): raise ValueError", neighbour, "exec"), space)
    with pytest.raises(ValueError) as raised:
        space["fail"]()
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert "in fail" in format_folded(raised.value)
    fold_traceback(raised.value)
    assert [f.name for f in traceback.extract_tb(raised.value.__traceback__)] == names
    assert user_frames([(neighbour, 1, "fail")]) == (("fail (aioflow_extra/orders.py:1)",), True)


class Nests(af.KeyedProcessFunction[int, int, list[int]]):
    def open(self, ctx: Any) -> None:
        self.seen = ctx.get_state(af.ValueStateDescriptor("seen", default={"values": []}))

    def process_element(self, value: int, ctx: Any) -> Any:
        seen = self.seen.value()
        seen["values"].append(value)
        self.seen.update(seen)
        yield list(seen["values"])


async def test_content_of_a_default_is_not_shared_by_keys() -> None:
    flow = af.Flow("nested").source([1, 2, 3, 4]).key_by(lambda value: value % 2)
    assert await flow.process(Nests()).collect() == [[1], [2], [1, 3], [2, 4]]
