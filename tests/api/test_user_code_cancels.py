"""User code and cancellation: an unasked CancelledError fails the job by name, and asyncio's own
tools go on working inside user code.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import aioflow as af
from aioflow.cluster.placed_tasks import GRACE_S
from aioflow.core.aio import CANCEL_GRACE_S
from aioflow.task.closing import CLEANUP_TIMEOUT_S
from aioflow.task.ending import EndWatch
from aioflow.testing.simulation import simulate

pytestmark = pytest.mark.timeout(60)
"""Far above the duration of any test here: only a hang is cut off."""

VALUES = range(6)
BAD = 3


async def awaits_a_cancelled_future() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.cancel)
    await future


async def cancels_its_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def cancels_its_own_task_last() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def has_a_child_that_is_cancelled() -> None:
    child = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(child.cancel)
    await asyncio.gather(child)


Misdeed = Callable[[], Awaitable[None]]
MISDEEDS = [
    awaits_a_cancelled_future,
    cancels_its_own_task,
    cancels_its_own_task_last,
    has_a_child_that_is_cancelled,
]


def of_async_generator(misdeed: Misdeed, out: list[Any]) -> af.Flow:
    async def numbers() -> AsyncIterator[int]:
        for value in VALUES:
            if value == BAD:
                await misdeed()
            yield value

    flow = af.Flow("f")
    flow.source(numbers).sink(out.append)
    return flow


def of_positions(misdeed: Misdeed, out: list[Any]) -> af.Flow:
    async def numbers(position: int | None) -> AsyncIterator[tuple[int, int]]:
        for value in range(position or 0, len(VALUES)):
            if value == BAD:
                await misdeed()
            yield value, value + 1

    flow = af.Flow("f")
    flow.source(numbers).sink(out.append)
    return flow


def on_elements(
    misdeed: Misdeed, out: list[Any], apply: Callable[[Any, Any], Any], *, ends: bool = False
) -> af.Flow:
    async def function(value: Any) -> Any:
        if value == BAD:
            await misdeed()
        return value

    flow = af.Flow("f")
    stream = apply(flow.source(VALUES), function)
    if not ends:
        stream.sink(out.append)
    return flow


def on_batches(misdeed: Misdeed, out: list[Any]) -> af.Flow:
    async def function(values: list[int]) -> list[int]:
        if BAD in values:
            await misdeed()
        return values

    flow = af.Flow("f")
    flow.source(VALUES).map_batches(function, max_size=2).sink(out.append)
    return flow


def on_lists(misdeed: Misdeed, out: list[Any]) -> af.Flow:
    async def function(value: int) -> list[int]:
        if value == BAD:
            await misdeed()
        return [value]

    flow = af.Flow("f")
    flow.source(VALUES).flat_map(function).sink(out.append)
    return flow


def in_process(misdeed: Misdeed, out: list[Any]) -> af.Flow:
    async def function(value: int, ctx: Any) -> list[int]:
        if value == BAD:
            await misdeed()
        return [value]

    flow = af.Flow("f")
    flow.source(VALUES).process(function).sink(out.append)
    return flow


class Writer:
    """A sink whose `flush`, `prepare` or `close` misbehaves."""

    full = True

    def __init__(self, misdeed: Misdeed, where: str, out: list[Any]) -> None:
        self.misdeed, self.where, self.out = misdeed, where, out
        self.waiting: list[Any] = []

    def writer(self, ctx: Any) -> Writer:
        return self

    def committer(self) -> None:
        return None

    def write_batch(self, values: Any, timestamps: Any) -> None:
        self.waiting += values

    async def at(self, where: str) -> None:
        if where == self.where:
            await self.misdeed()

    async def open(self) -> None:
        await self.at("open")

    async def flush(self) -> None:
        if BAD in self.waiting:
            await self.at("flush")
        self.out += self.waiting
        self.waiting.clear()

    async def prepare(self, checkpoint_id: int) -> list[Any]:
        await self.at("prepare")
        return []

    async def close(self) -> None:
        await self.at("close")


def to_a_writer(where: str) -> Callable[[Misdeed, list[Any]], af.Flow]:
    def build(misdeed: Misdeed, out: list[Any]) -> af.Flow:
        flow = af.Flow("f")
        flow.source(VALUES).sink(Writer(misdeed, where, out))
        return flow

    return build


def with_a_resource(misdeed: Misdeed, out: list[Any]) -> af.Flow:
    @af.resource
    async def client() -> AsyncIterator[int]:
        await misdeed()
        yield 1

    async def function(value: int, client: int = af.use(client)) -> int:
        return value

    flow = af.Flow("f")
    flow.source(VALUES).map(function).sink(out.append)
    return flow


RETRY = af.Retry(3, backoff="1ms")
BUILDERS: dict[str, Callable[[Misdeed, list[Any]], af.Flow]] = {
    "async source": of_async_generator,
    "source with positions": of_positions,
    "map": lambda m, out: on_elements(m, out, lambda s, f: s.map(f)),
    "map, unordered": lambda m, out: on_elements(m, out, lambda s, f: s.map(f, ordered=False)),
    "map, timeout": lambda m, out: on_elements(m, out, lambda s, f: s.map(f, timeout="10s")),
    "map, retry": lambda m, out: on_elements(m, out, lambda s, f: s.map(f, retry=RETRY)),
    "map, timeout and retry": lambda m, out: on_elements(
        m, out, lambda s, f: s.map(f, timeout="10s", retry=RETRY)
    ),
    "filter": lambda m, out: on_elements(m, out, lambda s, f: s.filter(f)),
    "flat_map": on_lists,
    "map_batches": on_batches,
    "process": in_process,
    "sink function": lambda m, out: on_elements(m, out, lambda s, f: s.sink(f), ends=True),
    "open of a writer": to_a_writer("open"),
    "flush of a writer": to_a_writer("flush"),
    "prepare of a writer": to_a_writer("prepare"),
    "close of a writer": to_a_writer("close"),
    "resource": with_a_resource,
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
@pytest.mark.parametrize("place", BUILDERS)
async def test_an_unasked_cancellation_out_of_user_code_fails_the_job_by_name(
    place: str, misdeed: Misdeed
) -> None:
    out: list[Any] = []
    with pytest.raises(
        RuntimeError,
        match="user code raised CancelledError: it awaited something that had been cancelled",
    ) as caught:
        await BUILDERS[place](misdeed, out).execute()
    (note,) = [note for note in caught.value.__notes__ if note.startswith("aioflow: ")]
    assert any(word in note for word in ("operator '", "source '", "resource 'client'")), note
    if place.startswith(("map", "filter", "flat_map", "process", "sink function")):
        assert "3" in note.partition("at ")[2], "the record is named"


@pytest.mark.parametrize("misdeed", MISDEEDS)
async def test_an_element_whose_call_is_cancelled_from_within_goes_to_its_side_output(
    misdeed: Misdeed,
) -> None:
    async def function(value: int) -> int:
        if value == BAD:
            await misdeed()
        return value

    tag: af.OutputTag[Any] = af.OutputTag("failed")
    out: list[Any] = []
    failed: list[Any] = []
    flow = af.Flow("f")
    stream = flow.source(VALUES).map(function, on_error=tag)
    stream.sink(out.append)
    stream.side(tag).sink(failed.append)
    await flow.execute()
    assert sorted(out) == [0, 1, 2, 4, 5]
    assert [(one.value, one.error_type) for one in failed] == [(BAD, "RuntimeError")]


async def test_a_restart_reads_again_what_an_unasked_cancellation_cut_off(tmp_path: Any) -> None:
    """With checkpoints and without them, FINISHED means that every element has arrived."""
    out: list[int] = []
    tries = 0

    async def numbers(position: int | None) -> AsyncIterator[tuple[int, int]]:
        nonlocal tries
        tries += 1
        for value in range(position or 0, len(VALUES)):
            if value == BAD and tries == 1:
                await awaits_a_cancelled_future()
            yield value, value + 1

    flow = af.Flow("f")
    flow.source(numbers).sink(out.append)
    await flow.execute(restart=af.fixed_delay(2, "1ms"), checkpoints=tmp_path)
    assert tries == 2
    assert set(out) == set(VALUES)


def in_sync_code(
    deed: Callable[[], None], out: list[Any], apply: Callable[[Any, Any], Any]
) -> af.Flow:
    def function(value: Any, *rest: Any) -> Any:
        if value == BAD:
            deed()
        return value

    flow = af.Flow("f")
    stream = apply(flow.source(VALUES), function)
    if stream is not None:
        stream.sink(out.append)
    return flow


def cancel_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def take_the_result_of_a_cancelled_future() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    future.result()


@pytest.mark.parametrize("deed", [cancel_own_task, take_the_result_of_a_cancelled_future])
@pytest.mark.parametrize(
    "apply",
    [
        lambda s, f: s.map(f),
        lambda s, f: s.filter(f),
        lambda s, f: s.flat_map(lambda v: [f(v)]),
        lambda s, f: s.map_batches(lambda values: [f(v) for v in values]),
        lambda s, f: s.process(lambda v, ctx: [f(v)]),
        lambda s, f: s.key_by(f).reduce(lambda a, b: b),
        lambda s, f: s.sink(f),
    ],
    ids=["map", "filter", "flat_map", "map_batches", "process", "key_by", "sink"],
)
async def test_plain_functions_that_cancel_fail_the_job_by_name(
    deed: Callable[[], None], apply: Callable[[Any, Any], Any]
) -> None:
    with pytest.raises(RuntimeError, match="user code raised CancelledError") as caught:
        await in_sync_code(deed, [], apply).execute()
    assert "aioflow: in " in caught.value.__notes__[0]


async def test_a_plain_source_that_asks_a_cancelled_future_fails_the_job_by_name() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise asyncio.CancelledError

    flow = af.Flow("f")
    flow.source(numbers).sink(print)
    with pytest.raises(RuntimeError, match="user code raised CancelledError") as caught:
        await flow.execute()
    assert caught.value.__notes__[0].startswith("aioflow: in source 'numbers")


# asyncio's own tools for user code still work.


async def a_timeout_of_its_own() -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            await asyncio.sleep(60)


async def wait_for() -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.sleep(60), 0.001)


async def a_group_whose_child_is_cancelled() -> None:
    async with asyncio.TaskGroup() as group:
        child = group.create_task(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(child.cancel)


async def a_group_whose_child_fails() -> None:
    async def fails() -> None:
        raise ValueError

    with suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            _ = group.create_task(fails())
            await asyncio.sleep(60)


async def gather_of_a_cancelled_child() -> None:
    child = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(child.cancel)
    await asyncio.gather(child, return_exceptions=True)


async def a_cancel_scope() -> None:
    """Cancels the host task, and withdraws the cancellation, like anyio's cancel scope."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    task.uncancel()


async def an_old_timeout() -> None:
    """A timeout as in libraries before Python 3.11: without `uncancel`."""
    task = asyncio.current_task()
    assert task is not None
    handle = asyncio.get_running_loop().call_later(0.001, task.cancel)
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    handle.cancel()


LEGAL = [
    a_timeout_of_its_own,
    wait_for,
    a_group_whose_child_is_cancelled,
    a_group_whose_child_fails,
    gather_of_a_cancelled_child,
    a_cancel_scope,
    an_old_timeout,
]


@pytest.mark.parametrize("deed", LEGAL)
@pytest.mark.parametrize("place", BUILDERS)
async def test_asyncio_cancellation_works_inside_user_code(place: str, deed: Misdeed) -> None:
    out: list[Any] = []
    builder = BUILDERS[place]
    if place == "sink function":

        async def write(value: int) -> None:
            await deed()
            out.append(value)

        flow = af.Flow("f")
        flow.source(VALUES).sink(write)
    elif place == "filter":

        async def keep(value: int) -> bool:
            await deed()
            return True

        flow = af.Flow("f")
        flow.source(VALUES).filter(keep).sink(out.append)
    else:
        flow = builder(deed, out)
    await flow.execute()
    assert sorted(out) == list(VALUES)


# Errors of the end.


class ClosesBadly(af.MapFunction[int, int]):
    def __init__(self, name: str, *, fails: bool = False) -> None:
        self.name, self.fails = name, fails

    def map(self, value: int) -> int:
        if self.fails and value == BAD:
            raise ValueError("first")
        return value

    async def close(self) -> None:
        raise KeyError(self.name)


async def test_errors_of_closing_are_attached_to_the_first_error() -> None:
    flow = af.Flow("f")
    flow.source(VALUES).map(ClosesBadly("head")).map(ClosesBadly("tail", fails=True)).sink(print)
    with pytest.raises(ValueError, match="first") as caught:
        await flow.execute()
    notes = [note for note in caught.value.__notes__ if "closing failed too" in note]
    assert len(notes) == 2
    assert "KeyError: 'tail'" in notes[0]
    assert "KeyError: 'head'" in notes[1]
    assert "in close() of operator" in notes[1]


async def test_the_first_error_of_closing_has_the_others_attached() -> None:
    flow = af.Flow("f")
    flow.source(VALUES).map(ClosesBadly("head")).map(ClosesBadly("tail")).sink(print)
    with pytest.raises(KeyError, match="tail") as caught:
        await flow.execute()
    assert "KeyError: 'head'" in "".join(caught.value.__notes__[1:])


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(
    "error", [KeyError("resource"), SystemExit(1), asyncio.CancelledError()], ids=repr
)
async def test_an_error_of_a_resource_that_is_closed_comes_out_of_the_run(
    error: BaseException, fails: bool
) -> None:
    @af.resource
    async def client() -> AsyncIterator[int]:
        yield 1
        raise error

    def function(value: int, client: int = af.use(client)) -> int:
        if fails and value == BAD:
            raise ValueError("first")
        return value

    flow = af.Flow("f")
    flow.source(VALUES).map(function).sink(print)
    expected = ValueError if fails else (KeyError, RuntimeError)
    with pytest.raises(expected) as caught:  # type: ignore[arg-type]
        await flow.execute()
    told = "".join([*map(str, caught.value.args), *caught.value.__notes__])
    assert type(error).__name__ in told or "resource" in told
    assert "while closing resource '" in told


# Code that does not end on its cancellation.


class Swallows:
    """Catches CancelledError and goes on, until the test lets it go."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.let_go = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        while not self.let_go.is_set():
            with suppress(asyncio.CancelledError):
                await self.let_go.wait()


CLOSED = ("open of a writer", "close of a writer", "resource")
STUCK = [place for place in BUILDERS if place not in CLOSED]
"""Places where the functions of a task are called until the task ends.

What is closed has a time-out of its own.
"""


@pytest.mark.parametrize("place", STUCK)
async def test_code_that_swallows_its_cancellation_is_named_and_ended(place: str) -> None:
    misdeed, out = Swallows(), list[Any]()
    error = await run_and_cancel(BUILDERS[place](misdeed, out), misdeed)
    assert isinstance(error, af.CancellationTimeout)
    assert (
        "source 'numbers', subtask 1/1 did not end" if "source" in place else "operator '"
    ) in str(error)
    assert "Swallows.__call__ (api/test_user_code_cancels.py:" in str(error), "with its stack"
    assert "within 0.02 s" in str(error)


async def run_and_cancel(flow: af.Flow, misdeed: Swallows, **options: Any) -> BaseException | None:
    with pytest.raises(af.CancellationTimeout) as caught:
        async with flow.run(cancellation_timeout="20ms", **options) as job:
            await misdeed.reached.wait()
            async with asyncio.timeout(30):
                await job.cancel()
            assert job.status is af.JobStatus.FAILED
    return caught.value


@pytest.mark.parametrize("place", ["map", "process", "async source"])
async def test_code_that_cannot_even_be_closed_is_abandoned_and_the_loop_goes_on(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a helper of its task, and the task itself.

    Such code is an awaitable that an extension module made.
    """
    monkeypatch.setattr("aioflow.task.ending.close_user_code", lambda task: None)
    misdeed = Swallows()
    before = asyncio.all_tasks()
    error = await run_and_cancel(BUILDERS[place](misdeed, []), misdeed)
    assert isinstance(error, af.CancellationTimeout)
    left = asyncio.all_tasks() - before
    assert left, "it goes on"
    misdeed.let_go.set()
    await asyncio.wait(left, timeout=30)


async def test_a_call_in_a_thread_that_does_not_end_is_named_and_given_up() -> None:
    reached, let_go = threading.Event(), threading.Event()

    def function(value: int) -> int:
        reached.set()
        assert let_go.wait(60)
        return value

    flow = af.Flow("f")
    flow.source(VALUES).map(function, blocking=True).sink(print)
    with pytest.raises(af.CancellationTimeout) as caught:
        async with flow.run(cancellation_timeout="20ms") as job:
            assert await asyncio.to_thread(reached.wait, 60)
            cancelling = asyncio.create_task(job.cancel())
            async with asyncio.timeout(30):
                while job._cluster.job_master.status is not af.JobStatus.FAILED:
                    await asyncio.sleep(0.001)
            let_go.set()
            await cancelling
    told = str(caught.value)
    assert "operator 'map', subtask 1/1 did not end within 0.02 s" in told
    assert "a thread cannot be interrupted" in told
    assert "function (api/test_user_code_cancels.py:" in told, "with its stack"


async def test_no_attempt_runs_beside_a_call_of_the_last_one_in_a_thread() -> None:
    let_go, running, both = threading.Event(), list[int](), threading.Barrier(2)
    overlaps = tries = 0

    def function(value: int) -> int:
        nonlocal overlaps, tries
        tries += 1
        overlaps += value in running
        running.append(value)
        if tries <= 2:
            both.wait(60)
            if value == 2:
                running.remove(value)
                raise ValueError("once")
            assert let_go.wait(60)
        running.remove(value)
        return value

    got = list[int]()
    flow = af.Flow("f")
    flow.source([1, 2]).map(function, blocking=True, concurrency=2).sink(got.append)
    async with flow.run(restart=af.fixed_delay(1, "1ms")) as job:
        async with asyncio.timeout(30):
            while running != [1]:
                await asyncio.sleep(0.001)
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert tries == 2, "the next attempt waits"
            let_go.set()
            await job.wait()
    assert (got, overlaps) == ([1, 2], 0)


async def test_a_stop_does_not_fail_for_a_source_that_swallows_its_cancellation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stop has no error to report. The code is named and closed by force."""
    misdeed = Swallows()
    async with BUILDERS["async source"](misdeed, []).run(cancellation_timeout="20ms") as job:
        await misdeed.reached.wait()
        async with asyncio.timeout(30):
            await job.stop()
    assert job.status is af.JobStatus.FINISHED
    assert "source 'numbers', subtask 1/1 did not end within 0.02 s" in caplog.text


async def test_calls_that_wait_in_one_place_are_shown_once() -> None:
    let_go, reached = asyncio.Event(), asyncio.Barrier(6)

    async def function(value: int) -> int:
        await reached.wait()
        while not let_go.is_set():
            with suppress(asyncio.CancelledError):
                await let_go.wait()
        return value

    flow = af.Flow("f")
    flow.source(range(5)).map(function, concurrency=5).sink(print)
    with pytest.raises(af.CancellationTimeout) as caught:
        async with flow.run(cancellation_timeout="20ms") as job:
            await reached.wait()
            await asyncio.sleep(0)
            await job.cancel()
    assert str(caught.value).count("Event.wait") == 1
    assert str(caught.value).endswith("(5 calls wait there)")


async def test_a_failure_is_not_held_up_by_another_call_that_swallows_its_cancellation() -> None:
    misdeed = Swallows()

    async def function(value: int) -> int:
        if value == BAD:
            await misdeed()
        await misdeed.reached.wait()
        if value > BAD:
            raise ValueError("first")
        return value

    flow = af.Flow("f")
    flow.source(VALUES).map(function).sink(print)
    with pytest.raises(af.CancellationTimeout, match="map") as caught:
        await flow.execute(cancellation_timeout="20ms")
    assert isinstance(caught.value.__cause__, ValueError), "what failed first is not lost"


class Closes(af.MapFunction[int, int]):
    """Its `close` goes on until `end` returns."""

    def __init__(self, end: Misdeed) -> None:
        self.end = end

    def map(self, value: int) -> int:
        return value

    async def close(self) -> None:
        await self.end()


class Sleeps(Swallows):
    """Ends on its cancellation."""

    async def __call__(self) -> None:
        self.reached.set()
        await self.let_go.wait()


def with_a_close(misdeed: Misdeed, closed: list[str], source: Any) -> af.Flow:
    async def close() -> None:
        closed.append("ahead")

    async def hang() -> None:  # A copy of the function shares its closure.
        await misdeed()

    flow = af.Flow("f")
    stream = flow.source(source).map(Closes(close), name="ahead")
    stream.map(Closes(hang), name="hangs").sink(print)
    return flow


async def endless() -> AsyncIterator[int]:
    while True:
        yield 1
        await asyncio.sleep(0.01)


def test_several_closes_that_hang_are_over_before_their_process_counts_as_overdue() -> None:
    timeout_s, places = 30.0, 8

    async def main(host: Any) -> tuple[float, float]:
        unused: Any = None
        watch = EndWatch("task", timeout_s, unused, unused, unused, None, lambda: None)
        loop = asyncio.get_running_loop()
        begun_s, first_s = loop.time(), 0.0
        for number in range(places):
            hang = asyncio.sleep(1e9)
            error = await watch.close(hang, f"close() of {number}", is_cut_short=True)
            assert type(error) is TimeoutError
            first_s = first_s or loop.time() - begun_s
        return first_s, loop.time() - begun_s

    first_s, closing_s = simulate(main, 1, perturb=False).value
    assert first_s >= timeout_s, "the first one has the whole timeout"
    ended_s = 2 * (timeout_s + CANCEL_GRACE_S)  # The functions first, then that of the source.
    assert ended_s + closing_s < 3 * timeout_s + CLEANUP_TIMEOUT_S + GRACE_S


@pytest.mark.parametrize("end", [Swallows, Sleeps])
@pytest.mark.parametrize("how", ["cancelled", "failed", "finished"])
async def test_close_that_does_not_end_fails_the_job_by_name_and_closes_the_others(
    how: str, end: type[Swallows], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Also if the stream has ended: what `close` would have written may be missing."""
    monkeypatch.setattr("aioflow.task.ending.CLEANUP_TIMEOUT_S", 0.05)
    monkeypatch.setattr("aioflow.task.ending.CANCEL_GRACE_S", 0.2)
    misdeed, closed, error = end(), list[str](), None
    flow = with_a_close(misdeed, closed, VALUES if how == "finished" else endless)
    if how == "failed":
        flow.source(endless).map(lambda value: 1 // (value - 1)).sink(print)
    try:
        async with asyncio.timeout(60), flow.run(cancellation_timeout="50ms") as job:
            if how == "cancelled":
                await asyncio.sleep(0.05)
                await job.cancel()
            else:
                await job.wait()
    except (af.CancellationTimeout, TimeoutError, ZeroDivisionError) as caught:
        error = caught
    told = "close() of operator 'hangs', subtask 1/1 did not end within"
    said = f"{caplog.text}\n{error}"
    assert told in said
    assert f"{end.__name__}.__call__ (api/test_user_code_cancels.py:" in said, "its stack"
    assert closed == ["ahead"], "the operator ahead of it is closed all the same"
    if how == "cancelled" and end is Sleeps:
        assert job.status is af.JobStatus.CANCELED, "its cancellation has ended it"
        assert error is None
    elif how == "failed":
        assert isinstance(error, ZeroDivisionError), "what failed first"
        assert told in "".join(error.__notes__)
    else:
        assert job.status is af.JobStatus.FAILED
        assert type(error) is (TimeoutError if end is Sleeps else af.CancellationTimeout)
        assert told in str(error)


async def test_close_that_is_cut_off_at_the_end_of_a_stream_lets_the_job_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As any error of `close()`: no code of the first attempt goes on."""
    monkeypatch.setattr("aioflow.task.ending.CLEANUP_TIMEOUT_S", 0.05)
    misdeed, tries = Sleeps(), 0

    async def hang_once() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            await misdeed()

    flow = af.Flow("f")
    flow.source(VALUES).map(Closes(hang_once)).sink(print)
    async with asyncio.timeout(60):
        result = await flow.execute(cancellation_timeout="50ms", restart=af.fixed_delay(1, "1ms"))
    assert (result.restarts, tries) == (1, 2)


async def test_close_has_the_timeout_of_cancellation_once_the_job_is_cancelled() -> None:
    """Not the 30 s that it has at the end of a stream."""
    misdeed = Swallows()
    with pytest.raises(af.CancellationTimeout, match=r"close\(\) of operator 'hangs'.* within 1 s"):
        async with with_a_close(misdeed, [], endless).run(cancellation_timeout="20ms") as job:
            await asyncio.sleep(0.02)
            await job.cancel()


async def test_a_job_that_is_cancelled_while_it_closes_at_its_end_does_not_wait_for_that() -> None:
    misdeed = Swallows()
    before = asyncio.all_tasks()
    with pytest.raises(af.CancellationTimeout, match="operator 'hangs'"):
        async with with_a_close(misdeed, [], VALUES).run(cancellation_timeout="20ms") as job:
            await misdeed.reached.wait()
            async with asyncio.timeout(20):
                await job.cancel()
    misdeed.let_go.set()
    while asyncio.all_tasks() - before:
        await asyncio.sleep(0.01)


async def test_close_that_cannot_even_be_closed_is_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aioflow.task.ending.CLEANUP_TIMEOUT_S", 0.02)
    monkeypatch.setattr("aioflow.task.ending.close_user_code", lambda task: None)
    misdeed = Swallows()
    before = asyncio.all_tasks()
    async with asyncio.timeout(60):
        with pytest.raises(af.CancellationTimeout, match="sink"):
            await BUILDERS["close of a writer"](misdeed, []).execute(cancellation_timeout="20ms")
    left = asyncio.all_tasks() - before
    assert left, "it goes on"
    misdeed.let_go.set()
    await asyncio.wait(left, timeout=30)


@pytest.mark.parametrize("timeout", [None, "10s"])
async def test_a_call_whose_future_was_cancelled_by_another_party_is_tried_again(
    timeout: str | None,
) -> None:
    """Such a CancelledError is an error of user code, also for `retry=`."""
    calls = 0

    async def function(value: int) -> int:
        nonlocal calls
        calls += 1
        if calls < 3:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        return value

    retry = af.Retry(5, backoff="1ms")
    assert await af.Flow("f").source([1]).map(function, retry=retry, timeout=timeout).collect() == [
        1
    ]
    assert calls == 3


async def test_a_call_that_makes_another_error_of_its_cancellation_is_not_tried_again() -> None:
    calls = 0
    reached = asyncio.Event()

    async def function(value: int) -> int:
        nonlocal calls
        calls += 1
        reached.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError as cancel:
            raise ConnectionError("the client was closed") from cancel
        return value

    flow = af.Flow("f")
    flow.source([1]).map(function, retry=af.Retry(5, backoff="1ms")).sink(print)
    async with flow.run() as job:
        await reached.wait()
        await job.cancel()
        assert job.status is af.JobStatus.CANCELED
    assert calls == 1


@pytest.mark.parametrize("restart", [af.no_restart(), af.fixed_delay(3, "1ms")], ids=str)
async def test_a_task_that_swallows_its_cancellation_is_not_run_twice(restart: Any) -> None:
    """A restart beside it would have two of them at work."""
    misdeed, tries = Swallows(), 0

    async def numbers() -> AsyncIterator[int]:
        nonlocal tries
        tries += 1
        for value in VALUES:
            yield value

    async def function(value: int) -> int:
        if value == BAD:
            await misdeed()
        await misdeed.reached.wait()
        if value > BAD:
            raise ValueError("first")
        return value

    flow = af.Flow("f")
    flow.source(numbers).rebalance().map(function).sink(print)
    with pytest.raises(af.CancellationTimeout):
        await flow.execute(cancellation_timeout="20ms", restart=restart)
    assert tries == 1


class ClosesInError(af.MapFunction[int, int]):
    def map(self, value: int) -> int:
        return value

    async def close(self) -> None:
        raise KeyError("not closed")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_an_error_of_close_in_another_task_is_attached_to_the_one_that_failed(
    workers: int,
) -> None:
    async def endless() -> AsyncIterator[int]:
        while True:
            yield 1
            await asyncio.sleep(0.01)

    def fails(value: int) -> int:
        raise ValueError("first")

    flow = af.Flow("f", parallelism=2)
    numbers = flow.source(endless).rebalance().map(ClosesInError(), name="closes badly")
    numbers.rebalance().map(fails).sink(print)
    with pytest.raises(ValueError, match="first") as caught:
        await flow.execute(workers=workers)
    told = [note for note in caught.value.__notes__ if "failed while it was closed" in note]
    assert told
    assert "KeyError: 'not closed'; aioflow: in close() of operator 'closes badly'" in told[0]
